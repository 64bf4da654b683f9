// SPDX-License-Identifier: Apache-2.0
//
// phases: a heap that is dropped and built up again a moment later, as by a
// compiler between functions or a parser between documents. Each phase
// allocates blocks twice as large as the one before, then most of all blocks
// are freed; what stays lies scattered among what the next phase reuses.
//
// Invariant: blocks are freed in the order of their allocation; chance decides
//   which of them stay.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define FIRST_BASE 24u  // the smallest size of the first phase

// The start of every block.
struct block {
  uint64_t size;
  uint64_t check;
};
_Static_assert(sizeof(struct block) < FIRST_BASE,
               "the last byte of the smallest block must not be of its start");

struct worker {
  _Alignas(WL_CACHE_LINE) struct block** live;
  uint64_t live_count;
  uint64_t allocated;
  uint64_t freed;
};

static struct {
  uint64_t rounds;
  unsigned phases;
  uint64_t phase_bytes;
  uint64_t keep_percent;
  uint64_t seed;
  struct worker* workers;
} run;

// Writes to every cache line of the block.
static struct block* allocate(uint64_t size) {
  struct block* block = malloc(size);
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(size);
  }
  char* bytes = (char*)block;
  block->size = size;
  block->check = ~size;
  for (uint64_t i = WL_CACHE_LINE; i < size; i += WL_CACHE_LINE) {
    bytes[i] = 1;
  }
  bytes[size - 1] = 1;
  return block;
}

static void release(struct block* block) {
  WL_CHECK(block->check == ~block->size,
           "a block of %" PRIu64 " bytes changed", block->size);
  free(block);
}

// Sizes are uniform in [base, base + base / 2).
static void build_up(struct worker* worker, uint64_t base, uint64_t* state) {
  uint64_t bytes = 0;
  while (bytes < run.phase_bytes) {
    uint64_t size = base + wl_below(state, base / 2);
    worker->live[worker->live_count++] = allocate(size);
    worker->allocated++;
    bytes += size;
  }
}

static void drop(struct worker* worker, uint64_t keep_percent,
                 uint64_t* state) {
  uint64_t kept = 0;
  for (uint64_t i = 0; i < worker->live_count; i++) {
    struct block* block = worker->live[i];
    if (wl_is_chance(state, keep_percent)) {
      worker->live[kept++] = block;
    } else {
      release(block);
      worker->freed++;
    }
  }
  worker->live_count = kept;
}

static void work(unsigned index, void* context) {
  (void)context;
  struct worker* worker = &run.workers[index];
  uint64_t state = wl_stream_seed(run.seed, index);
  for (uint64_t round = 0; round < run.rounds; round++) {
    for (unsigned phase = 0; phase < run.phases; phase++) {
      build_up(worker, (uint64_t)FIRST_BASE << phase, &state);
      drop(worker, run.keep_percent, &state);
    }
    drop(worker, 0, &state);
  }
}

// Room for all blocks of a round, should none be freed before its end.
static uint64_t most_live_blocks(void) {
  uint64_t blocks = 0;
  for (unsigned phase = 0; phase < run.phases; phase++) {
    blocks += run.phase_bytes / ((uint64_t)FIRST_BASE << phase) + 1;
  }
  return blocks;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once, each with a heap of its own", 1, 1,
       WL_MAX_THREADS},
      {"rounds", "of all phases, with nothing left between them", 4, 1,
       UINT64_C(1) << 32},
      {"phases", "of a round; the first has blocks of 24 to 35 bytes", 6, 1,
       24},
      {"phase_kib", "KiB to allocate in a phase, per thread", 10240, 1,
       UINT64_C(1) << 30},
      {"keep_percent", "of the live blocks stay after a phase", 10, 0, 100},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "phases",
      .about = "Builds a heap up and drops most of it, again and again, with\n"
               "blocks that double in size from phase to phase. An op is one\n"
               "malloc or free.",
      .example = "1 2 6 4096",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  run.rounds = args[1].value;
  run.phases = (unsigned)args[2].value;
  run.phase_bytes = args[3].value << 10;
  run.keep_percent = args[4].value;
  run.seed = args[5].value;
  run.workers = wl_map(threads * sizeof(*run.workers));
  for (unsigned i = 0; i < threads; i++) {
    run.workers[i].live =
        wl_map(most_live_blocks() * sizeof(*run.workers[i].live));
  }
  printf("[BENCH_ARGS] threads=%u rounds=%" PRIu64 " phases=%u"
         " phase_kib=%" PRIu64 " keep_percent=%" PRIu64 " seed=%#" PRIx64 "\n",
         threads, run.rounds, run.phases, args[3].value, run.keep_percent,
         run.seed);
  double time = wl_seconds(wl_run(threads, work, NULL));
  uint64_t allocated = 0;
  uint64_t freed = 0;
  for (unsigned i = 0; i < threads; i++) {
    allocated += run.workers[i].allocated;
    freed += run.workers[i].freed;
  }
  WL_CHECK(allocated == freed,
           "%" PRIu64 " blocks allocated, %" PRIu64 " freed", allocated, freed);
  printf("phases: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", threads,
         allocated + freed, time, (double)(allocated + freed) / time);
  return wl_finish(&program);
}
