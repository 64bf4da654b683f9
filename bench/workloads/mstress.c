// SPDX-License-Identifier: Apache-2.0
//
// mstress: threads allocate patterned blocks of very different sizes, free
// earlier ones at random, swap some with each other through a shared table,
// and are all re-created every round. Every free verifies the pattern.
//
// Owns: the transfer table; a pointer in it belongs to nobody until an atomic
//   exchange takes it out, which also orders the contents of the block.
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define TRANSFER_SLOTS 1000
#define COOKIE UINT64_C(0x6d737472657373a5)

struct stack {
  uint64_t** blocks;
  size_t top;
};

struct worker {
  struct stack working;
  struct stack retained;
  uint64_t allocated;
  uint64_t freed;
};

static struct {
  unsigned threads;
  uint64_t scale;
  uint64_t rounds;
  uint64_t round;
  struct worker* workers;
  _Atomic(uint64_t*) transfer[TRANSFER_SLOTS];
} run;

// ---- Patterned blocks ----------------------------------------------------

// 1 to 16 words; one block in 100 is 100 times larger, and so on.
static size_t pick_words(uint64_t* state) {
  size_t words = (size_t)1 << wl_below(state, 5);
  size_t rarity = wl_below(state, 10000);
  if (rarity < 1) {
    return words * 10000;
  }
  if (rarity < 1 + 10) {
    return words * 1000;
  }
  return rarity < 1 + 10 + 100 ? words * 100 : words;
}

static uint64_t* allocate(struct worker* worker, uint64_t* state) {
  size_t words = pick_words(state);
  uint64_t* block = malloc(words * sizeof(*block));
  if (block == NULL) {
    wl_out_of_memory(words * sizeof(*block));
  }
  for (size_t i = 0; i < words; i++) {
    block[i] = (words - i) ^ COOKIE;
  }
  worker->allocated++;
  return block;
}

static void release(struct worker* worker, uint64_t* block) {
  if (block == NULL) {
    return;
  }
  uint64_t words = block[0] ^ COOKIE;
  WL_CHECK(words > 0 && words <= 160000, "block %p lost its length",
           (void*)block);
  for (size_t i = 1; i < words; i++) {
    WL_CHECK((block[i] ^ COOKIE) == words - i,
             "block %p of %" PRIu64 " words changed at word %zu", (void*)block,
             words, i);
  }
  free(block);
  worker->freed++;
}

// ---- Rounds --------------------------------------------------------------

static uint64_t working_allocations(unsigned index) {
  return 100 * run.scale * (index % 8 + 1);
}

static void swap_with_transfer(struct stack* working, uint64_t* state) {
  uint64_t** mine = &working->blocks[wl_below(state, working->top)];
  uint64_t slot = wl_below(state, TRANSFER_SLOTS);
  *mine = atomic_exchange(&run.transfer[slot], *mine);
}

static void release_all(struct worker* worker, struct stack* stack) {
  for (size_t i = 0; i < stack->top; i++) {
    release(worker, stack->blocks[i]);
  }
  stack->top = 0;
}

static void stress(unsigned index, void* context) {
  (void)context;
  struct worker* worker = &run.workers[index];
  struct stack* working = &worker->working;
  struct stack* retained = &worker->retained;
  uint64_t state =
      wl_stream_seed(WL_DEFAULT_SEED, run.round * run.threads + index);
  uint64_t to_work = working_allocations(index);
  uint64_t to_retain = to_work / 2;
  while (to_work > 0 || to_retain > 0) {
    if (to_retain == 0 || (to_work > 0 && wl_is_chance(&state, 50))) {
      working->blocks[working->top++] = allocate(worker, &state);
      to_work--;
    } else {
      retained->blocks[retained->top++] = allocate(worker, &state);
      to_retain--;
    }
    if (working->top > 0 && wl_is_chance(&state, 66)) {
      uint64_t** earlier = &working->blocks[wl_below(&state, working->top)];
      release(worker, *earlier);
      *earlier = NULL;
    }
    if (working->top > 0 && wl_is_chance(&state, 25)) {
      swap_with_transfer(working, &state);
    }
  }
  release_all(worker, retained);
  release_all(worker, working);
}

// Frees each block of the transfer table with a chance of `percent`.
static void thin_out_transfer(unsigned percent, uint64_t* state) {
  for (size_t i = 0; i < TRANSFER_SLOTS; i++) {
    if (wl_is_chance(state, percent)) {
      release(&run.workers[0], atomic_exchange(&run.transfer[i], NULL));
    }
  }
}

static uint64_t prepare(void) {
  uint64_t expected = 0;
  run.workers = wl_map(run.threads * sizeof(*run.workers));
  for (unsigned i = 0; i < run.threads; i++) {
    uint64_t count = working_allocations(i);
    struct worker* worker = &run.workers[i];
    worker->working.blocks = wl_map(count * sizeof(uint64_t*));
    worker->retained.blocks = wl_map(count / 2 * sizeof(uint64_t*));
    expected += (count + count / 2) * run.rounds;
  }
  return expected;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "re-created every round", 32, 1, WL_MAX_THREADS},
      {"scale", "hundreds of blocks per thread", 50, 1, 1000000},
      {"rounds", "to run", 25, 1, 1000000},
  };
  struct wl_program program = {
      .name = "mstress",
      .about = "Stress with patterned blocks of 8 bytes to 1.3 MB that move\n"
               "between threads. An op is one malloc or free; the time\n"
               "includes the creation of threads.",
      .example = "4 10 5",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  run.threads = (unsigned)args[0].value;
  run.scale = args[1].value;
  run.rounds = args[2].value;
  uint64_t expected = prepare();
  uint64_t state = WL_DEFAULT_SEED;
  uint64_t start = wl_now_ns();
  for (run.round = 0; run.round < run.rounds; run.round++) {
    wl_run_threads(run.threads, stress, NULL);
    thin_out_transfer(run.round + 1 < run.rounds ? 50 : 100, &state);
  }
  double time = wl_seconds(wl_now_ns() - start);
  uint64_t allocated = 0;
  uint64_t freed = 0;
  for (unsigned i = 0; i < run.threads; i++) {
    allocated += run.workers[i].allocated;
    freed += run.workers[i].freed;
  }
  WL_CHECK(allocated == expected && freed == expected,
           "%" PRIu64 " allocated and %" PRIu64 " freed instead of %" PRIu64,
           allocated, freed, expected);
  printf("mstress: threads=%u scale=%" PRIu64 " rounds=%" PRIu64
         " ops=%" PRIu64 " time=%.6f ops/s=%.2f\n",
         run.threads, run.scale, run.rounds, allocated + freed, time,
         (double)(allocated + freed) / time);
  return wl_finish(&program);
}
