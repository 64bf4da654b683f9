// SPDX-License-Identifier: Apache-2.0
//
// false_sharing: threads allocate small blocks at the same time and each then
// updates its own. Blocks of two threads in one cache line slow both down; the
// lines in which that happened are counted as well.
//
// Invariant: between the two meetings of a round all blocks of all threads are
//   live and their addresses recorded.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

#define BLOCKS 64  // of each thread and round: 8, 16, … 64 bytes, repeated

struct worker {
  _Alignas(WL_CACHE_LINE) uint64_t* blocks[BLOCKS];
  uintptr_t lines[BLOCKS];
};

static struct {
  unsigned threads;
  uint64_t rounds;
  uint64_t reps;
  struct worker* workers;
  pthread_barrier_t meeting;
} run;

static size_t words_of(unsigned block) { return block % 8 + 1; }

static void update(struct worker* self) {
  for (uint64_t rep = 0; rep < run.reps; rep++) {
    for (unsigned i = 0; i < BLOCKS; i++) {
      volatile uint64_t* block = self->blocks[i];
      for (size_t word = 0; word < words_of(i); word++) {
        block[word]++;
      }
    }
  }
}

static void allocate(struct worker* self) {
  for (unsigned i = 0; i < BLOCKS; i++) {
    size_t bytes = words_of(i) * sizeof(uint64_t);
    self->blocks[i] = malloc(bytes);
    if (self->blocks[i] == NULL) {
      wl_out_of_memory(bytes);
    }
    memset(self->blocks[i], 0, bytes);
    self->lines[i] = (uintptr_t)self->blocks[i] / WL_CACHE_LINE;
  }
}

static void check_and_free(struct worker* self) {
  for (unsigned i = 0; i < BLOCKS; i++) {
    for (size_t word = 0; word < words_of(i); word++) {
      WL_CHECK(self->blocks[i][word] == run.reps,
               "a block of %zu words changed", words_of(i));
    }
    free(self->blocks[i]);
  }
}

static bool is_line_of(const struct worker* worker, uintptr_t line) {
  for (unsigned i = 0; i < BLOCKS; i++) {
    if (worker->lines[i] == line) {
      return true;
    }
  }
  return false;
}

// Counts the blocks of the last round that begin in a line where a block of
// another thread begins too.
static uint64_t count_shared_blocks(void) {
  uint64_t shared = 0;
  for (unsigned a = 0; a < run.threads; a++) {
    for (unsigned i = 0; i < BLOCKS; i++) {
      bool found = false;
      for (unsigned b = 0; b < run.threads && !found; b++) {
        found = b != a && is_line_of(&run.workers[b], run.workers[a].lines[i]);
      }
      shared += found;
    }
  }
  return shared;
}

static void work(unsigned index, void* context) {
  (void)context;
  struct worker* self = &run.workers[index];
  for (uint64_t round = 0; round < run.rounds; round++) {
    allocate(self);
    pthread_barrier_wait(&run.meeting);
    update(self);
    pthread_barrier_wait(&run.meeting);
    check_and_free(self);
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once", 2, 1, WL_MAX_THREADS},
      {"rounds", "of allocating and freeing 64 blocks", 100, 1, 1000000000},
      {"reps", "updates of each block in a round", 10000, 1,
       UINT64_C(1) << 40},
  };
  struct wl_program program = {
      .name = "false_sharing",
      .about = "Threads update own blocks of 8 to 64 bytes. An op is one\n"
               "update of a block. shared_blocks counts blocks of the last\n"
               "round in a cache line with a block of another thread.",
      .example = "2 10 10000",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  run.threads = (unsigned)args[0].value;
  run.rounds = args[1].value;
  run.reps = args[2].value;
  run.workers = wl_map(run.threads * sizeof(*run.workers));
  pthread_barrier_init(&run.meeting, NULL, run.threads);
  double time = wl_seconds(wl_run_threads(run.threads, work, NULL));
  uint64_t ops = run.threads * run.rounds * run.reps * BLOCKS;
  printf("false_sharing: threads=%u ops=%" PRIu64
         " time=%.6f ops/s=%.2f shared_blocks=%" PRIu64 "\n",
         run.threads, ops, time, (double)ops / time, count_shared_blocks());
  return wl_finish(&program);
}
