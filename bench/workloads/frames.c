// SPDX-License-Identifier: Apache-2.0
//
// frames: a program that works in batches, as games do between pictures and
// servers between requests. Each frame allocates some blocks of one size,
// uses them, and frees all of them.
//
// Invariant: every frame frees what it allocated; chance decides how many
//   blocks those are, between half of the most and all of them.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

enum { IN_ORDER, AT_RANDOM, IN_REVERSE, ORDERS };

// The start of every block.
struct block {
  uint64_t number;
};

struct worker {
  _Alignas(WL_CACHE_LINE) struct block** blocks;
  uint64_t pairs;
};

static struct {
  uint64_t frames;
  uint64_t most;
  uint64_t size;
  unsigned order;
  unsigned walks;
  uint64_t seed;
  struct worker* workers;
} run;

static uint64_t sum_below(uint64_t count) {
  return count * (count - 1) / 2;
}

// Writes the start of the block, or all of it if the blocks will be walked.
static struct block* allocate(uint64_t number) {
  struct block* block = malloc(run.size);
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(run.size);
  }
  if (run.walks > 0) {
    memset(block, 1, run.size);
  }
  block->number = number;
  return block;
}

// Reads a byte of every cache line of every block, in the order in which they
// were asked for: the lowest one of its number, then ones.
static void walk(struct block* const* blocks, uint64_t count) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < count; i++) {
    sum += wl_sum_of_lines((const unsigned char*)blocks[i], run.size);
  }
  uint64_t ones = count * ((run.size - 1) / WL_CACHE_LINE);
  uint64_t numbers = count / 256 * sum_below(256) + sum_below(count % 256);
  WL_CHECK(sum == ones + numbers, "a block that was walked through changed");
}

static void shuffle(struct block** blocks, uint64_t count, uint64_t* state) {
  for (uint64_t i = count - 1; i > 0; i--) {
    uint64_t j = wl_below(state, i + 1);
    struct block* block = blocks[i];
    blocks[i] = blocks[j];
    blocks[j] = block;
  }
}

static uint64_t release(struct block* block) {
  uint64_t number = block->number;
  free(block);
  return number;
}

static void work(unsigned index, void* context) {
  (void)context;
  struct worker* worker = &run.workers[index];
  struct block** blocks = worker->blocks;
  uint64_t state = wl_stream_seed(run.seed, index);
  for (uint64_t frame = 0; frame < run.frames; frame++) {
    uint64_t least = (run.most + 1) / 2;
    uint64_t count = least + wl_below(&state, run.most - least + 1);
    for (uint64_t i = 0; i < count; i++) {
      blocks[i] = allocate(i);
    }
    for (unsigned i = 0; i < run.walks; i++) {
      walk(blocks, count);
    }
    if (run.order == AT_RANDOM) {
      shuffle(blocks, count, &state);
    }
    uint64_t numbers = 0;
    for (uint64_t i = 0; i < count; i++) {
      numbers += release(blocks[run.order == IN_REVERSE ? count - 1 - i : i]);
    }
    WL_CHECK(numbers == sum_below(count),
             "a block of frame %" PRIu64 " changed", frame);
    worker->pairs += count;
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once, each with frames of its own", 1, 1,
       WL_MAX_THREADS},
      {"frames", "per thread", 1000, 1, UINT64_C(1) << 40},
      {"blocks", "of a frame, at most; half of them at least", 3000, 1,
       UINT64_C(1) << 31},
      {"size", "of each block, in bytes", 512, sizeof(struct block),
       UINT64_C(1) << 40},
      {"order", "in which they are freed: 0 as allocated, 1 random, 2 reverse",
       AT_RANDOM, 0, ORDERS - 1},
      {"walks", "through the blocks, written whole, before they are freed", 0,
       0, 1000},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "frames",
      .about = "Allocates a batch of blocks of one size, uses them, and frees\n"
               "them all, again and again. An op is one malloc with its free.",
      .example = "1 100 3000 512 1",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  run.frames = args[1].value;
  run.most = args[2].value;
  run.size = args[3].value;
  run.order = (unsigned)args[4].value;
  run.walks = (unsigned)args[5].value;
  run.seed = args[6].value;
  run.workers = wl_map(threads * sizeof(*run.workers));
  for (unsigned i = 0; i < threads; i++) {
    run.workers[i].blocks = wl_map(run.most * sizeof(*run.workers[i].blocks));
  }
  double time = wl_seconds(wl_run(threads, work, NULL));
  uint64_t pairs = 0;
  for (unsigned i = 0; i < threads; i++) {
    pairs += run.workers[i].pairs;
  }
  printf("frames: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", threads,
         pairs, time, (double)pairs / time);
  return wl_finish(&program);
}
