// SPDX-License-Identifier: Apache-2.0
//
// The loop of random_mixed and random_mixed_dist: one array of slots, one draw
// per iteration that picks a slot and, when it is empty, the size.
//
// Called by: random_mixed.c, random_mixed_dist.c. Everything is inlined with
//   constant arguments, so that each size draw gets a loop of its own without
//   any decision left inside.
// Invariant: every iteration is exactly one malloc or one free.
#ifndef BENCH_WORKLOADS_RANDOM_MIXED_H_
#define BENCH_WORKLOADS_RANDOM_MIXED_H_

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

// Up to three size ranges with weights; random_mixed uses the first only.
struct size_bucket {
  uint32_t min;
  uint32_t width;
  uint32_t weight;
};

struct random_mixed {
  uint64_t iters;
  uint64_t slot_count;
  uint64_t seed;
  uint32_t total_weight;
  struct size_bucket buckets[3];
  void** slots;
  uint64_t allocated;
  uint64_t freed;
  struct wl_histogram* malloc_latency;
  struct wl_histogram* free_latency;
};

typedef uint32_t draw_size(const struct random_mixed* run, uint32_t random);

static WL_ALWAYS_INLINE void random_mixed_loop(struct random_mixed* run,
                                               draw_size* size_of,
                                               const bool latency) {
  // A copy that does not escape stays in registers across malloc and free.
  const struct random_mixed fixed = *run;
  uint64_t state = fixed.seed;
  uint64_t allocated = 0;
  for (uint64_t i = 0; i < fixed.iters; i++) {
    uint64_t random = wl_xorshift64(&state);
    void** slot = &fixed.slots[random % fixed.slot_count];
    uint64_t start = latency ? wl_ticks() : 0;
    if (*slot != NULL) {
      free(*slot);
      if (latency) {
        wl_histogram_add(fixed.free_latency, wl_ticks() - start);
      }
      *slot = NULL;
    } else {
      uint32_t size = size_of(&fixed, (uint32_t)(random >> 32));
      if (latency) {
        start = wl_ticks();
      }
      void* block = malloc(size);
      if (latency) {
        wl_histogram_add(fixed.malloc_latency, wl_ticks() - start);
      }
      if (__builtin_expect(block == NULL, 0)) {
        wl_out_of_memory(size);
      }
      *slot = block;
      allocated++;
    }
  }
  run->allocated = allocated;
  run->freed = fixed.iters - allocated;
}

static uint64_t free_live_slots(struct random_mixed* run) {
  uint64_t live = 0;
  for (uint64_t i = 0; i < run->slot_count; i++) {
    if (run->slots[i] != NULL) {
      free(run->slots[i]);
      live++;
    }
  }
  return live;
}

// Runs `timed_loop` and the final frees under the clock and prints the result.
static int run_random_mixed(const struct wl_program* program,
                            struct random_mixed* run,
                            void (*timed_loop)(struct random_mixed*)) {
  run->slots = wl_map(run->slot_count * sizeof(*run->slots));
  run->malloc_latency = wl_map(sizeof(*run->malloc_latency));
  run->free_latency = wl_map(sizeof(*run->free_latency));
  uint64_t start = wl_now_ns();
  timed_loop(run);
  uint64_t live = free_live_slots(run);
  double time = wl_seconds(wl_now_ns() - start);
  uint64_t ops = run->iters + live;
  WL_CHECK(run->allocated == run->freed + live,
           "%" PRIu64 " allocated, %" PRIu64 " freed, %" PRIu64 " left",
           run->allocated, run->freed, live);
  printf("%s: ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", program->name, ops, time,
         (double)ops / time);
  if (program->latency) {
    wl_print_latency("malloc", run->malloc_latency);
    wl_print_latency("free", run->free_latency);
  }
  return wl_finish(program);
}

#endif  // BENCH_WORKLOADS_RANDOM_MIXED_H_
