// SPDX-License-Identifier: Apache-2.0
//
// sparse: buffers that are allocated for the longest input and hold a short
// one, as stacks of coroutines, arenas and network buffers do. Of each block
// only the start is written.
//
// Invariant: a block keeps the number that was written at both ends of its
// start, until it is replaced.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

struct table {
  _Alignas(WL_CACHE_LINE) char** blocks;
  uint64_t* numbers;
};

static struct {
  uint64_t rounds;
  uint64_t live;
  uint64_t size;
  uint64_t written;
  uint64_t seed;
} run;

static void check(const struct table* table, uint64_t slot) {
  uint64_t first, last;
  memcpy(&first, table->blocks[slot], sizeof(first));
  memcpy(&last, table->blocks[slot] + run.written - sizeof(last), sizeof(last));
  WL_CHECK(first == table->numbers[slot] && last == first,
           "the block in slot %" PRIu64 " changed", slot);
}

// Sizes are spread over an eighth, as lengths of inputs are.
static void fill(const struct table* table, uint64_t slot, uint64_t number,
                 uint64_t* state) {
  uint64_t size = run.size + wl_xorshift64(state) % (run.size / 8 + 1);
  char* block = malloc(size);
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(size);
  }
  memset(block, (int)number, run.written);
  memcpy(block, &number, sizeof(number));
  memcpy(block + run.written - sizeof(number), &number, sizeof(number));
  table->blocks[slot] = block;
  table->numbers[slot] = number;
}

static void work(unsigned index, void* context) {
  struct table* table = (struct table*)context + index;
  uint64_t state = wl_stream_seed(run.seed, index);
  for (uint64_t slot = 0; slot < run.live; slot++) {
    fill(table, slot, slot, &state);
  }
  for (uint64_t round = 0; round < run.rounds; round++) {
    uint64_t slot = wl_xorshift64(&state) % run.live;
    check(table, slot);
    free(table->blocks[slot]);
    fill(table, slot, run.live + round, &state);
  }
  for (uint64_t slot = 0; slot < run.live; slot++) {
    check(table, slot);
    free(table->blocks[slot]);
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once, each with blocks of its own", 1, 1,
       WL_MAX_THREADS},
      {"rounds", "blocks that each replaces, at random", 5000, 1,
       UINT64_C(1) << 40},
      {"live", "blocks of each", 500, 1, UINT64_C(1) << 31},
      {"size", "of a block in bytes, or up to an eighth more", 1500000, 16,
       UINT64_C(1) << 40},
      {"written", "bytes at the start of each block", 4096, 16,
       UINT64_C(1) << 40},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "sparse",
      .about = "Replaces blocks of which only the start is written. An op is\n"
               "one malloc with its free.",
      .example = "1 1000 100 1500000 4096",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  run.rounds = args[1].value;
  run.live = args[2].value;
  run.size = args[3].value;
  run.written = args[4].value;
  run.seed = args[5].value;
  if (run.written > run.size) {
    wl_usage_error(&program, "written may be size at most");
  }
  size_t table_bytes = run.live * (sizeof(char*) + sizeof(uint64_t));
  struct table* tables = wl_map(threads * sizeof(struct table));
  for (unsigned i = 0; i < threads; i++) {
    tables[i].blocks = wl_map(table_bytes);
    tables[i].numbers = (uint64_t*)(tables[i].blocks + run.live);
  }
  double time = wl_seconds(wl_run(threads, work, tables));
  for (unsigned i = 0; i < threads; i++) {
    wl_unmap(tables[i].blocks, table_bytes);
  }
  wl_unmap(tables, threads * sizeof(struct table));
  uint64_t ops = threads * (run.live + run.rounds);
  printf("sparse: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", threads,
         ops, time, (double)ops / time);
  return wl_finish(&program);
}
