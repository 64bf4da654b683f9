// SPDX-License-Identifier: Apache-2.0
//
// burst_idle: threads fill a lot of memory with blocks of mixed sizes, free
// all of it and stay idle. Shows whether and when memory is given back without
// anybody calling into the allocator.
//
// Owns: no memory besides the blocks: they are linked through their first
//   words into many lists, which are then freed one after the other, so that
//   neighbours are freed far apart in time.
// Invariant: the main thread does nothing but look at the resident size.
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define LISTS 64
#define SAMPLE_NS 50000000u
#define MAX_SAMPLES 100000

struct block {
  struct block* next;
  uint64_t size;
};

struct sample {
  uint64_t ns;
  uint64_t rss_bytes;
};

static struct {
  unsigned threads;
  uint64_t bytes_per_thread;
  pthread_barrier_t start;
  atomic_uint finished;  // threads that have freed everything
  _Atomic uint64_t last_free;  // when the last of them had; 0 before
  _Atomic uint64_t blocks;
  pthread_barrier_t idle_over;
  struct sample* samples;
  size_t sample_count;
} run;

// Half of the blocks are of 16 to 255 bytes, the others of up to 64 KiB, and
// every doubling is as likely as the others.
static uint64_t pick_size(uint64_t* state) {
  uint64_t random = wl_xorshift64(state) >> 16;
  uint64_t doublings = random % 2 == 0 ? 4 : 12;
  uint64_t base = UINT64_C(16) << (random >> 1) % doublings;
  return base + (random >> 16) % base;
}

// Writes one byte of every page, as a program that uses the memory would.
static struct block* allocate(uint64_t size) {
  struct block* block = malloc(size);
  if (block == NULL) {
    wl_out_of_memory(size);
  }
  for (uint64_t offset = 4096; offset < size; offset += 4096) {
    ((char*)block)[offset] = 1;
  }
  block->size = size;
  return block;
}

static void burst(uint64_t* state) {
  struct block* lists[LISTS] = {NULL};
  uint64_t asked = 0;
  uint64_t allocated = 0;
  while (asked < run.bytes_per_thread) {
    struct block* block = allocate(pick_size(state));
    struct block** list = &lists[wl_xorshift64(state) % LISTS];
    block->next = *list;
    *list = block;
    asked += block->size;
    allocated++;
  }
  uint64_t returned = 0;
  for (unsigned i = 0; i < LISTS; i++) {
    while (lists[i] != NULL) {
      struct block* block = lists[i];
      lists[i] = block->next;
      returned += block->size;
      free(block);
    }
  }
  WL_CHECK(returned == asked, "%" PRIu64 " bytes asked for, %" PRIu64 " freed",
           asked, returned);
  atomic_fetch_add(&run.blocks, allocated);
}

static void* thread_main(void* argument) {
  uint64_t state = wl_stream_seed(WL_DEFAULT_SEED, (uintptr_t)argument);
  pthread_barrier_wait(&run.start);
  burst(&state);
  if (atomic_fetch_add(&run.finished, 1) + 1 == run.threads) {
    atomic_store(&run.last_free, wl_now_ns());
  }
  pthread_barrier_wait(&run.idle_over);
  return NULL;
}

static void take_sample(uint64_t start) {
  WL_CHECK(run.sample_count < MAX_SAMPLES, "too long to sample");
  run.samples[run.sample_count++] =
      (struct sample){wl_now_ns() - start, wl_rss_bytes()};
}

// The resident size in KiB at the first sample from `ns` on.
static uint64_t rss_kib_at(uint64_t ns) {
  for (size_t i = 0; i < run.sample_count; i++) {
    if (run.samples[i].ns >= ns) {
      return run.samples[i].rss_bytes / 1024;
    }
  }
  return run.samples[run.sample_count - 1].rss_bytes / 1024;
}

// Seconds from `freed_ns` until the resident size stays below 110 % of the
// first sample; the whole idle time, and *fell false, when it never does.
static double fall_seconds(uint64_t freed_ns, bool* fell) {
  uint64_t limit = run.samples[0].rss_bytes + run.samples[0].rss_bytes / 10;
  size_t i = run.sample_count;
  while (i > 0 && run.samples[i - 1].rss_bytes < limit &&
         run.samples[i - 1].ns >= freed_ns) {
    i--;
  }
  *fell = i < run.sample_count;
  uint64_t ns = run.samples[*fell ? i : i - 1].ns;
  return wl_seconds(ns > freed_ns ? ns - freed_ns : 0);
}

static void print_result(uint64_t freed_ns) {
  uint64_t ops = atomic_load(&run.blocks);
  double time = wl_seconds(freed_ns);
  bool fell;
  double fall = fall_seconds(freed_ns, &fell);
  printf("[RSS_TRACE]");
  for (size_t i = 0; i < run.sample_count; i++) {
    printf(" %.3f:%" PRIu64, wl_seconds(run.samples[i].ns),
           run.samples[i].rss_bytes / 1024);
  }
  printf("\n[RSS_AFTER] start_kib=%" PRIu64 " kib_0.1s=%" PRIu64
         " kib_1s=%" PRIu64 " kib_5s=%" PRIu64 " kib_10s=%" PRIu64 "\n",
         run.samples[0].rss_bytes / 1024, rss_kib_at(freed_ns + 100000000u),
         rss_kib_at(freed_ns + 1000000000u),
         rss_kib_at(freed_ns + UINT64_C(5000000000)),
         rss_kib_at(freed_ns + UINT64_C(10000000000)));
  printf("burst_idle: threads=%u ops=%" PRIu64
         " time=%.6f ops/s=%.2f peak_kib=%" PRIu64 " idle_kib=%" PRIu64
         " fall_s=%.3f fell=%d\n",
         run.threads, ops, time, (double)ops / time,
         wl_read_memory_status().peak_rss_kib,
         run.samples[run.sample_count - 1].rss_bytes / 1024, fall, fell);
}

// Samples until all threads have freed and `idle_ns` more have passed; returns
// when the last free was done, counted from the start.
static uint64_t watch(uint64_t idle_ns) {
  uint64_t start = wl_now_ns();
  take_sample(start);
  pthread_barrier_wait(&run.start);
  for (;;) {
    wl_sleep_ns(SAMPLE_NS);
    take_sample(start);
    uint64_t last_free = atomic_load(&run.last_free);
    if (last_free != 0 && wl_now_ns() >= last_free + idle_ns) {
      return last_free - start;
    }
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "that allocate", 4, 1, WL_MAX_THREADS},
      {"mib", "allocated by all together", 1024, 1, 1 << 20},
      {"idle", "seconds to wait after the last free", 10, 1, 3600},
  };
  struct wl_program program = {
      .name = "burst_idle",
      .about = "Fills memory, frees it and waits, watching the resident size\n"
               "every 50 ms. An op is one malloc with its free, the time is\n"
               "that of the burst. fall_s is the time from the last free\n"
               "until less than 110 % of the start is resident; with fell=0\n"
               "that never happened.",
      .example = "2 128 2",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  run.threads = (unsigned)args[0].value;
  run.bytes_per_thread = (args[1].value << 20) / run.threads;
  run.samples = wl_map(MAX_SAMPLES * sizeof(*run.samples));
  pthread_barrier_init(&run.start, NULL, run.threads + 1);
  pthread_barrier_init(&run.idle_over, NULL, run.threads + 1);
  pthread_t* threads = wl_map(run.threads * sizeof(*threads));
  for (unsigned i = 0; i < run.threads; i++) {
    int error = pthread_create(&threads[i], NULL, thread_main,
                               (void*)(uintptr_t)i);
    WL_CHECK(error == 0, "pthread_create failed with %d", error);
  }
  uint64_t freed_ns = watch(args[2].value * 1000000000u);
  pthread_barrier_wait(&run.idle_over);
  for (unsigned i = 0; i < run.threads; i++) {
    pthread_join(threads[i], NULL);
  }
  print_result(freed_ns);
  return wl_finish(&program);
}
