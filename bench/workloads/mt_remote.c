// SPDX-License-Identifier: Apache-2.0
//
// mt_remote: threads in a circle; each frees part of its objects itself and
// sends the rest through a ring to its neighbour, which frees them.
//
// Owns: one single-producer single-consumer ring per thread. Its `tail` is
//   released by the producer and acquired by the consumer, `head` the other
//   way round; they count objects and are never reduced.
// Invariant: the draws of a thread depend on its index alone, so the counts
//   are the same under every allocator and every schedule.
#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

struct object {
  void* block;
  uint32_t size;  // kept in the touched form only
};

struct ring {
  _Alignas(WL_CACHE_LINE) _Atomic uint64_t tail;
  uint64_t head_seen;  // the producer's last view of head
  _Alignas(WL_CACHE_LINE) _Atomic uint64_t head;
  _Alignas(WL_CACHE_LINE) void** blocks;
  uint32_t* sizes;
  uint64_t mask;
  _Alignas(WL_CACHE_LINE) atomic_bool closed;  // the producer will not push
};

struct counts {
  uint64_t allocated;
  uint64_t bytes;
  uint64_t local_freed;
  uint64_t sent;
  uint64_t received;
  uint64_t fallback;
  uint64_t waits;
  uint64_t spoiled;
};

struct worker {
  struct ring ring;
  void** slots;
  uint32_t* sizes;
  struct counts counts;
  struct wl_histogram* malloc_latency;
  struct wl_histogram* free_latency;
};

static struct {
  unsigned threads;
  uint64_t iters;
  uint32_t slot_count;
  uint32_t min;
  uint32_t max;
  uint32_t remote_percent;
  uint64_t ring_slots;
  bool touch;
  bool bounded;
  bool latency;
  struct worker* workers;
} run;

// ---- Objects -------------------------------------------------------------

static inline unsigned char tag_of(uint32_t size) {
  return (unsigned char)(size ^ (size >> 8) ^ 0x5a);
}

static WL_ALWAYS_INLINE struct object allocate(uint32_t size,
                                               struct worker* self,
                                               const bool touch,
                                               const bool latency) {
  uint64_t start = latency ? wl_ticks() : 0;
  unsigned char* block = malloc(size);
  if (latency) {
    wl_histogram_add(self->malloc_latency, wl_ticks() - start);
  }
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(size);
  }
  if (touch) {
    block[0] = tag_of(size);
    block[size - 1] = tag_of(size);
  }
  return (struct object){block, size};
}

static WL_ALWAYS_INLINE void release(struct object object, struct worker* self,
                                     struct counts* counts, const bool touch,
                                     const bool latency) {
  if (touch) {
    const unsigned char* block = object.block;
    unsigned char tag = tag_of(object.size);
    counts->spoiled += (block[0] != tag) | (block[object.size - 1] != tag);
  }
  uint64_t start = latency ? wl_ticks() : 0;
  free(object.block);
  if (latency) {
    wl_histogram_add(self->free_latency, wl_ticks() - start);
  }
}

// ---- Ring ----------------------------------------------------------------

static WL_ALWAYS_INLINE bool push(struct ring* ring, struct object object,
                                  const bool touch) {
  uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
  if (tail - ring->head_seen > ring->mask) {
    ring->head_seen = atomic_load_explicit(&ring->head, memory_order_acquire);
    if (tail - ring->head_seen > ring->mask) {
      return false;
    }
  }
  ring->blocks[tail & ring->mask] = object.block;
  if (touch) {
    ring->sizes[tail & ring->mask] = object.size;
  }
  atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
  return true;
}

static WL_ALWAYS_INLINE void drain(struct ring* ring, struct worker* self,
                                   struct counts* counts, const bool touch,
                                   const bool latency) {
  uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
  uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
  if (head == tail) {
    return;
  }
  counts->received += tail - head;
  for (; head != tail; head++) {
    struct object object = {ring->blocks[head & ring->mask],
                            touch ? ring->sizes[head & ring->mask] : 0};
    release(object, self, counts, touch, latency);
  }
  atomic_store_explicit(&ring->head, head, memory_order_release);
}

// ---- Workers -------------------------------------------------------------

// Sends `object`. When the ring is full the bounded form waits, and frees what
// arrives meanwhile lest a circle of full rings blocks for ever; the other
// form frees the object here.
static WL_ALWAYS_INLINE void send(struct object object, struct worker* self,
                                  struct ring* inbox, struct counts* counts,
                                  const bool touch, const bool latency) {
  if (__builtin_expect(!push(&self->ring, object, touch), 0)) {
    if (!run.bounded) {
      release(object, self, counts, touch, latency);
      counts->fallback++;
      return;
    }
    counts->waits++;
    do {
      drain(inbox, self, counts, touch, latency);
      sched_yield();
    } while (!push(&self->ring, object, touch));
  }
  counts->sent++;
}

static WL_ALWAYS_INLINE void worker_loop(unsigned index, const bool touch,
                                         const bool latency) {
  struct worker* self = &run.workers[index];
  struct ring* inbox =
      &run.workers[(index + run.threads - 1) % run.threads].ring;
  struct counts counts = {0};
  void** const slots = self->slots;
  uint32_t* const sizes = self->sizes;
  const uint64_t iters = run.iters;
  const uint32_t slot_count = run.slot_count;
  const uint32_t min = run.min;
  const uint32_t width = run.max - run.min + 1;
  const uint32_t remote_percent = run.remote_percent;
  uint32_t state = WL_DEFAULT_SEED + 101 * index;
  for (uint64_t i = 0; i < iters; i++) {
    drain(inbox, self, &counts, touch, latency);
    uint32_t random = wl_xorshift32(&state);
    uint32_t slot = random % slot_count;
    uint32_t size = min + random % width;
    if (slots[slot] != NULL) {
      struct object object = {slots[slot], touch ? sizes[slot] : 0};
      if (wl_xorshift32(&state) % 100 < remote_percent) {
        send(object, self, inbox, &counts, touch, latency);
      } else {
        release(object, self, &counts, touch, latency);
        counts.local_freed++;
      }
      slots[slot] = NULL;
    } else {
      slots[slot] = allocate(size, self, touch, latency).block;
      if (touch) {
        sizes[slot] = size;
      }
      counts.allocated++;
      counts.bytes += size;
    }
  }
  atomic_store_explicit(&self->ring.closed, true, memory_order_release);
  // In the bounded form the neighbour may still wait for room.
  while (run.bounded &&
         !atomic_load_explicit(&inbox->closed, memory_order_acquire)) {
    drain(inbox, self, &counts, touch, latency);
    sched_yield();
  }
  drain(inbox, self, &counts, touch, latency);
  self->counts = counts;
}

static void work(unsigned index, void* context) {
  (void)context;
  worker_loop(index, false, false);
}

static void work_touching(unsigned index, void* context) {
  (void)context;
  worker_loop(index, true, false);
}

static void work_measured(unsigned index, void* context) {
  (void)context;
  worker_loop(index, false, true);
}

static void work_touching_measured(unsigned index, void* context) {
  (void)context;
  worker_loop(index, true, true);
}

// ---- Set-up and result ---------------------------------------------------

static void prepare(void) {
  run.workers = wl_map(run.threads * sizeof(*run.workers));
  for (unsigned i = 0; i < run.threads; i++) {
    struct worker* worker = &run.workers[i];
    worker->slots = wl_map(run.slot_count * sizeof(*worker->slots));
    worker->sizes = wl_map(run.slot_count * sizeof(*worker->sizes));
    worker->ring.blocks = wl_map(run.ring_slots * sizeof(void*));
    worker->ring.sizes = wl_map(run.ring_slots * sizeof(uint32_t));
    worker->ring.mask = run.ring_slots - 1;
    worker->malloc_latency = wl_map(sizeof(struct wl_histogram));
    worker->free_latency = wl_map(sizeof(struct wl_histogram));
  }
}

static struct counts total_counts(void) {
  struct counts total = {0};
  for (unsigned i = 0; i < run.threads; i++) {
    const struct counts* counts = &run.workers[i].counts;
    total.allocated += counts->allocated;
    total.bytes += counts->bytes;
    total.local_freed += counts->local_freed;
    total.sent += counts->sent;
    total.received += counts->received;
    total.fallback += counts->fallback;
    total.waits += counts->waits;
    total.spoiled += counts->spoiled;
  }
  return total;
}

// Frees what the threads left in slots and rings and checks that nothing was
// lost or spoiled on the way.
static void free_rest_and_check(struct counts total) {
  uint64_t in_slots = 0;
  uint64_t in_rings = 0;
  for (unsigned i = 0; i < run.threads; i++) {
    struct worker* worker = &run.workers[i];
    for (uint32_t slot = 0; slot < run.slot_count; slot++) {
      if (worker->slots[slot] != NULL) {
        struct object object = {worker->slots[slot], worker->sizes[slot]};
        release(object, worker, &total, run.touch, false);
        in_slots++;
      }
    }
    uint64_t received = total.received;
    drain(&worker->ring, worker, &total, run.touch, false);
    in_rings += total.received - received;
  }
  WL_CHECK(total.sent == total.received,
           "%" PRIu64 " objects sent, %" PRIu64 " received", total.sent,
           total.received);
  uint64_t gone = total.local_freed + total.sent + total.fallback + in_slots;
  WL_CHECK(total.allocated == gone,
           "%" PRIu64 " objects allocated, %" PRIu64 " accounted for",
           total.allocated, gone);
  WL_CHECK(total.spoiled == 0, "%" PRIu64 " objects changed while in use",
           total.spoiled);
  WL_CHECK(!run.bounded || (in_rings == 0 && total.fallback == 0),
           "the bounded form left %" PRIu64 " objects in rings", in_rings);
}

static void print_result(const struct counts* total, double time) {
  uint64_t ops = run.threads * run.iters;
  uint64_t remote = total->sent + total->fallback;
  uint64_t frees = remote + total->local_freed;
  printf("[BENCH_ARGS] threads=%u iters=%" PRIu64
         " ws=%u min=%u max=%u remote_pct=%u ring_slots=%" PRIu64 "\n",
         run.threads, run.iters, run.slot_count, run.min, run.max,
         run.remote_percent, run.ring_slots);
  printf("mt_remote: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n",
         run.threads, ops, time, (double)ops / time);
  printf(
      "[EFFECTIVE_REMOTE] target=%.1f%% actual=%.1f%% fallback_rate=%.2f%%\n",
      (double)run.remote_percent,
      frees == 0 ? 0.0 : 100.0 * (double)total->sent / (double)frees,
      remote == 0 ? 0.0 : 100.0 * (double)total->fallback / (double)remote);
  printf("[STATS] allocated=%" PRIu64 " local_freed=%" PRIu64
         " remote_sent=%" PRIu64 " remote_received=%" PRIu64
         " ring_full_fallback=%" PRIu64 "\n",
         total->allocated, total->local_freed, total->sent, total->received,
         total->fallback);
  printf("[FORM] touch=%d bounded=%d bytes_requested=%" PRIu64
         " ring_full_waits=%" PRIu64 "\n",
         run.touch, run.bounded, total->bytes, total->waits);
}

static void print_latency(void) {
  struct wl_histogram* mallocs = wl_map(sizeof(*mallocs));
  struct wl_histogram* frees = wl_map(sizeof(*frees));
  for (unsigned i = 0; i < run.threads; i++) {
    wl_histogram_merge(mallocs, run.workers[i].malloc_latency);
    wl_histogram_merge(frees, run.workers[i].free_latency);
  }
  wl_print_latency("malloc", mallocs);
  wl_print_latency("free", frees);
}

static void parse(struct wl_program* program, int argc, char** argv) {
  struct wl_arg* args = program->args;
  wl_parse(program, argc, argv);
  run.threads = (unsigned)args[0].value;
  run.iters = args[1].value;
  run.slot_count = (uint32_t)args[2].value;
  run.min = (uint32_t)args[3].value;
  run.max = (uint32_t)args[4].value;
  run.remote_percent = (uint32_t)args[5].value;
  run.ring_slots = args[6].value;
  run.touch = args[7].value != 0;
  run.bounded = args[8].value != 0;
  run.latency = program->latency;
  if (run.max < run.min) {
    wl_usage_error(program, "max %u is smaller than min %u", run.max, run.min);
  }
  if ((run.ring_slots & (run.ring_slots - 1)) != 0) {
    wl_usage_error(program, "ring_slots %" PRIu64 " is not a power of two",
                   run.ring_slots);
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "in the circle", 8, 1, WL_MAX_THREADS},
      {"iters", "iterations of each thread", 250000, 1, UINT64_C(1) << 40},
      {"ws", "slots of each thread", 400, 1, UINT64_C(1) << 31},
      {"min", "smallest size in bytes", 16, 1, UINT32_MAX - 1},
      {"max", "largest size in bytes", 2048, 1, UINT32_MAX - 1},
      {"remote_pct", "percentage of frees sent on", 50, 0, 100},
      {"ring_slots", "a power of two", 65536, 2, UINT64_C(1) << 30},
      {"touch", "1: write and read the ends of each object", 0, 0, 1},
      {"bounded", "1: wait when the ring is full", 0, 0, 1},
  };
  struct wl_program program = {
      .name = "mt_remote",
      .about = "Threads in a circle allocate and free random slots and send a\n"
               "percentage of their frees to the next thread. Only the loop\n"
               "is timed: all threads start together.",
      .example = "8 250000 400 16 2048 50 65536 touch=1",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
      .offers_latency = true,
  };
  parse(&program, argc, argv);
  prepare();
  void (*body)(unsigned, void*) =
      run.touch ? (run.latency ? work_touching_measured : work_touching)
                : (run.latency ? work_measured : work);
  double time = wl_seconds(wl_run_threads(run.threads, body, NULL));
  struct counts total = total_counts();
  print_result(&total, time);
  if (run.latency) {
    print_latency();
  }
  free_rest_and_check(total);
  return wl_finish(&program);
}
