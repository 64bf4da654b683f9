// SPDX-License-Identifier: Apache-2.0
//
// drawn: a program drawn by lot, so that a gain can be told from one that was
// fitted to the other programs. A seed decides which sizes are asked for, in
// which order blocks come and go, how many live, how much of them is written,
// and how many come from calloc, grow by realloc or are freed by others.
//
// Invariant: what a seed draws does not depend on the number of threads.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define SIZES 4096u  // of which each block has one, by chance
#define LEAST_SHIFT 3u
#define MOST_SHIFT 21u  // sizes are below 4 MiB
#define LEAST_LIVE_SHIFT 17u
#define MOST_LIVE_SHIFT 26u  // fewer than 128 MiB live
#define MOST_PLACES (UINT64_C(1) << 20)
#define ROUND 256u
#define MOST_SHELF 4096u

enum { ONE_SIZE, TWO_SIZES, EVEN, EVEN_IN_LOG, DOUBLING, SIZE_KINDS };
enum { AT_RANDOM, QUEUE, BATCHES, STACK, MOST_DIE_YOUNG, DROPS, ORDERS };
enum { NOTHING, FIRST_BYTE, BOTH_ENDS, EVERY_LINE, WRITTEN_KINDS };
enum { AS_ALLOCATED, SHUFFLED, REVERSED, FREE_ORDERS };

static const char* const size_names[] = {"one", "two", "even", "log",
                                         "doubling"};
static const char* const order_names[] = {"random", "queue", "batches",
                                          "stack", "young", "drops"};
static const char* const written_names[] = {"nothing", "first_byte",
                                            "both_ends", "every_line"};
static const char* const free_order_names[] = {"as_allocated", "shuffled",
                                               "reversed"};

struct worker {
  _Alignas(WL_CACHE_LINE) unsigned char** places;
  uint64_t count;  // of places
  uint64_t next;   // queue: the oldest; stack: the lowest that is free
  uint64_t allocated;
  uint64_t state;
};

static struct {
  unsigned sizes;
  unsigned order;
  unsigned written;
  unsigned free_order;  // of batches
  unsigned cleared_percent;
  unsigned grown_percent;
  unsigned passed_percent;
  uint64_t live_bytes;
  uint64_t size_of[SIZES];
} draw;

static struct {
  uint64_t deadline_ns;
  struct worker* workers;
  uint64_t shelf_places;  // for blocks on their way from thread to thread
  unsigned char* shelf[MOST_SHELF];
} run;

// ---- The draw ------------------------------------------------------------

// Of [0, most]; small ones more often.
static unsigned small_of(uint64_t* state, unsigned most) {
  uint64_t one = wl_below(state, most + 1u);
  uint64_t other = wl_below(state, most + 1u);
  return (unsigned)(one < other ? one : other);
}

// Mostly none.
static unsigned percent_of(uint64_t* state, unsigned most) {
  unsigned percent = 1 + (unsigned)wl_below(state, most);
  return wl_is_chance_if_any(state, 30) ? percent : 0;
}

// Below the power of two that follows.
static uint64_t from_shift(uint64_t* state, unsigned shift) {
  return (UINT64_C(1) << shift) + wl_below(state, UINT64_C(1) << shift);
}

static uint64_t even_in_log(uint64_t* state, unsigned low_shift,
                            unsigned shifts) {
  return from_shift(state, low_shift + (unsigned)wl_below(state, shifts + 1u));
}

static uint64_t size_between(uint64_t* state, uint64_t low, uint64_t high) {
  uint64_t size = low;
  switch (draw.sizes) {
    case TWO_SIZES:
      return wl_below(state, 2) == 0 ? low : high;
    case EVEN:
      return low + wl_below(state, high - low + 1);
    case DOUBLING:
      while (size * 2 <= high && wl_below(state, 2) == 0) {
        size *= 2;
      }
      return size;
    default:
      return low;
  }
}

static void draw_program(uint64_t seed) {
  uint64_t state = wl_stream_seed(seed, 0);
  draw.sizes = (unsigned)wl_below(&state, SIZE_KINDS);
  draw.order = (unsigned)wl_below(&state, ORDERS);
  draw.written = (unsigned)wl_below(&state, WRITTEN_KINDS);
  draw.free_order = (unsigned)wl_below(&state, FREE_ORDERS);
  draw.cleared_percent = percent_of(&state, 30);
  draw.grown_percent = percent_of(&state, 30);
  draw.passed_percent = percent_of(&state, 50);
  unsigned live_shifts = MOST_LIVE_SHIFT - LEAST_LIVE_SHIFT;
  draw.live_bytes = from_shift(
      &state, LEAST_LIVE_SHIFT + (unsigned)wl_below(&state, live_shifts + 1u));
  unsigned low_shift = LEAST_SHIFT + small_of(&state, MOST_SHIFT - LEAST_SHIFT);
  unsigned shifts = small_of(&state, MOST_SHIFT - low_shift);
  uint64_t one = from_shift(&state, low_shift);
  uint64_t other = from_shift(&state, low_shift + shifts);
  uint64_t low = one < other ? one : other;
  uint64_t high = one < other ? other : one;
  for (unsigned i = 0; i < SIZES; i++) {
    draw.size_of[i] = draw.sizes == EVEN_IN_LOG
                          ? even_in_log(&state, low_shift, shifts)
                          : size_between(&state, low, high);
  }
}

static uint64_t mean_size(void) {
  uint64_t sum = 0;
  for (unsigned i = 0; i < SIZES; i++) {
    sum += draw.size_of[i];
  }
  return sum / SIZES;
}

// ---- Blocks --------------------------------------------------------------

// The first byte of a block, if any of it is written.
static unsigned char mark_of(const unsigned char* block) {
  return (unsigned char)((uintptr_t)block / 16 | 1);
}

static void check(const unsigned char* block, unsigned char mark) {
  WL_CHECK(draw.written == NOTHING || block[0] == mark,
           "a block at %p changed", (const void*)block);
}

static void write_block(unsigned char* block, uint64_t size) {
  if (draw.written == EVERY_LINE) {
    for (uint64_t at = 0; at < size; at += WL_CACHE_LINE) {
      block[at] = 1;
    }
  }
  if (draw.written == BOTH_ENDS) {
    block[size - 1] = 1;
  }
  if (draw.written != NOTHING) {
    block[0] = mark_of(block);
  }
}

static unsigned char* not_null(void* memory, uint64_t size) {
  if (__builtin_expect(memory == NULL, 0)) {
    wl_out_of_memory(size);
  }
  return memory;
}

// Half of it first, then all.
static unsigned char* allocate_and_grow(uint64_t size) {
  uint64_t half = (size + 1) / 2;
  unsigned char* block = not_null(malloc(half), half);
  write_block(block, half);
  unsigned char mark = mark_of(wl_opaque(block));  // realloc ends the block
  block = not_null(realloc(block, size), size);
  check(block, mark);
  return block;
}

static unsigned char* allocate(struct worker* worker) {
  uint64_t size = draw.size_of[wl_below(&worker->state, SIZES)];
  unsigned char* block;
  if (wl_is_chance_if_any(&worker->state, draw.cleared_percent)) {
    block = not_null(calloc(1, size), size);
    WL_CHECK(draw.written == NOTHING || (block[0] | block[size - 1]) == 0,
             "calloc gave %" PRIu64 " bytes that are not zero", size);
  } else if (wl_is_chance_if_any(&worker->state, draw.grown_percent)) {
    block = allocate_and_grow(size);
  } else {
    block = not_null(malloc(size), size);
  }
  write_block(block, size);
  worker->allocated++;
  return block;
}

static void release(unsigned char* block) {
  if (block != NULL) {
    check(block, mark_of(block));
  }
  free(block);
}

// Some are put on the shelf, and what lay there is freed instead.
static void release_or_pass(struct worker* worker, unsigned char** place) {
  unsigned char* block = *place;
  *place = NULL;
  if (block != NULL &&
      wl_is_chance_if_any(&worker->state, draw.passed_percent)) {
    uint64_t at = wl_below(&worker->state, run.shelf_places);
    block = __atomic_exchange_n(&run.shelf[at], block, __ATOMIC_ACQ_REL);
  }
  release(block);
}

// ---- Orders in which blocks come and go ----------------------------------

static void replace(struct worker* worker, uint64_t place) {
  release_or_pass(worker, &worker->places[place]);
  worker->places[place] = allocate(worker);
}

static void shuffle(struct worker* worker, uint64_t count) {
  for (uint64_t i = count - 1; i > 0; i--) {
    uint64_t j = wl_below(&worker->state, i + 1);
    unsigned char* block = worker->places[i];
    worker->places[i] = worker->places[j];
    worker->places[j] = block;
  }
}

static void do_batch(struct worker* worker) {
  uint64_t least = (worker->count + 1) / 2;
  uint64_t count = least + wl_below(&worker->state, worker->count - least + 1);
  for (uint64_t i = 0; i < count; i++) {
    worker->places[i] = allocate(worker);
  }
  if (draw.free_order == SHUFFLED) {
    shuffle(worker, count);
  }
  for (uint64_t i = 0; i < count; i++) {
    uint64_t place = draw.free_order == REVERSED ? count - 1 - i : i;
    release_or_pass(worker, &worker->places[place]);
  }
}

// Up or down, by up to an eighth of its places.
static void move_stack(struct worker* worker) {
  uint64_t steps = 1 + wl_below(&worker->state, worker->count / 8 + 1);
  if (worker->next == 0 || wl_below(&worker->state, 2) == 0) {
    for (; steps > 0 && worker->next < worker->count; steps--) {
      worker->places[worker->next++] = allocate(worker);
    }
  } else {
    for (; steps > 0 && worker->next > 0; steps--) {
      release_or_pass(worker, &worker->places[--worker->next]);
    }
  }
}

// Fills all places, then frees nine in ten.
static void fill_and_drop(struct worker* worker) {
  for (uint64_t i = 0; i < worker->count; i++) {
    if (worker->places[i] == NULL) {
      worker->places[i] = allocate(worker);
    }
  }
  for (uint64_t i = 0; i < worker->count; i++) {
    if (wl_is_chance_if_any(&worker->state, 90)) {
      release_or_pass(worker, &worker->places[i]);
    }
  }
}

// Where the next block is replaced.
static uint64_t next_place(struct worker* worker) {
  uint64_t end = worker->count;
  if (draw.order == QUEUE) {
    uint64_t oldest = worker->next;
    worker->next = (oldest + 1) % worker->count;
    return oldest;
  }
  if (draw.order == MOST_DIE_YOUNG && wl_is_chance_if_any(&worker->state, 95)) {
    end = worker->count / 50 + 1;
  }
  return wl_below(&worker->state, end);
}

static void do_round(struct worker* worker) {
  switch (draw.order) {
    case STACK:
      move_stack(worker);
      break;
    case BATCHES:
      do_batch(worker);
      break;
    case DROPS:
      fill_and_drop(worker);
      break;
    default:
      for (unsigned i = 0; i < ROUND; i++) {
        replace(worker, next_place(worker));
      }
  }
}

static void work(unsigned index, void* context) {
  (void)context;
  struct worker* worker = &run.workers[index];
  while (wl_now_ns() < run.deadline_ns) {
    do_round(worker);
  }
  for (uint64_t i = 0; i < worker->count; i++) {
    release(worker->places[i]);
  }
}

static void prepare(unsigned threads, uint64_t seed, uint64_t milliseconds) {
  draw_program(seed);
  uint64_t places = draw.live_bytes / mean_size();
  places = (places < MOST_PLACES ? places : MOST_PLACES) / threads + 2;
  run.shelf_places = places < MOST_SHELF ? places : MOST_SHELF;
  run.workers = wl_map(threads * sizeof(*run.workers));
  for (unsigned i = 0; i < threads; i++) {
    run.workers[i].places = wl_map(places * sizeof(*run.workers[i].places));
    run.workers[i].count = places;
    run.workers[i].state = wl_stream_seed(seed, i + 1);
  }
  printf("[BENCH_ARGS] threads=%u seed=%" PRIu64 " sizes=%s mean=%" PRIu64
         " order=%s free_order=%s places=%" PRIu64
         " written=%s cleared=%u%% grown=%u%% passed=%u%%\n",
         threads, seed, size_names[draw.sizes], mean_size(),
         order_names[draw.order], free_order_names[draw.free_order], places,
         written_names[draw.written], draw.cleared_percent, draw.grown_percent,
         draw.passed_percent);
  run.deadline_ns = wl_now_ns() + milliseconds * 1000000;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once, each with blocks of its own", 1, 1, WL_MAX_THREADS},
      {"milliseconds", "after which no thread starts another round", 300, 1,
       UINT64_C(1) << 32},
      {"seed", "of the draw", 1, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "drawn",
      .about = "Does what its seed draws: blocks of up to 4 MiB, replaced at\n"
               "random or as a queue, in batches, stacks, or heaps that are\n"
               "dropped and built up. An op is one block with its free.",
      .example = "2 100 7",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  prepare(threads, args[2].value, args[1].value);
  double time = wl_seconds(wl_run(threads, work, NULL));
  for (uint64_t i = 0; i < run.shelf_places; i++) {
    release(run.shelf[i]);
  }
  uint64_t ops = 0;
  for (unsigned i = 0; i < threads; i++) {
    ops += run.workers[i].allocated;
  }
  printf("drawn: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", threads,
         ops, time, (double)ops / time);
  return wl_finish(&program);
}
