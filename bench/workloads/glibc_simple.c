// SPDX-License-Identifier: Apache-2.0
//
// glibc_simple: batches of equal blocks are allocated and then freed in the
// same order, for batches of 25 to 6400 and sizes of 8 to 4096 bytes.
//
// Invariant: with one thread the main thread works and no other was ever
//   created, since some allocators are faster in a process that is alone.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define MAX_BATCH 6400
#define SIZE_COUNT 10  // 8 << 0 to 8 << 9
#define MAX_BATCHES 5

static const uint64_t batch_blocks[MAX_BATCHES] = {25, 100, 400, 1600, 6400};

struct worker {
  void* blocks[MAX_BATCH];
  uint64_t ns[MAX_BATCHES][SIZE_COUNT];
};

struct run {
  uint64_t pairs;
  struct worker* workers;
};

// Rounded up to whole batches.
static uint64_t batches_for(uint64_t pairs, uint64_t blocks) {
  return (pairs + blocks - 1) / blocks;
}

static void work_batches(void** blocks, uint64_t count, size_t size,
                         uint64_t batches) {
  for (uint64_t batch = 0; batch < batches; batch++) {
    for (uint64_t i = 0; i < count; i++) {
      blocks[i] = malloc(size);
      if (__builtin_expect(blocks[i] == NULL, 0)) {
        wl_out_of_memory(size);
      }
    }
    for (uint64_t i = 0; i < count; i++) {
      free(blocks[i]);
    }
  }
}

static void work(unsigned index, void* context) {
  const struct run* run = context;
  struct worker* worker = &run->workers[index];
  for (unsigned batch = 0; batch < MAX_BATCHES; batch++) {
    for (unsigned size = 0; size < SIZE_COUNT; size++) {
      uint64_t start = wl_now_ns();
      work_batches(worker->blocks, batch_blocks[batch], (size_t)8 << size,
                   batches_for(run->pairs, batch_blocks[batch]));
      worker->ns[batch][size] = wl_now_ns() - start;
    }
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once", 1, 1, WL_MAX_THREADS},
      {"pairs", "mallocs per thread, batch and size", 400000, 1,
       UINT64_C(1) << 40},
  };
  struct wl_program program = {
      .name = "glibc_simple",
      .about = "Allocates and frees batches of 25 to 6400 blocks of 8 to 4096\n"
               "bytes. An op is one malloc with its free.",
      .example = "1 40000",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  struct run run = {.pairs = args[1].value,
                    .workers = wl_map(threads * sizeof(struct worker))};
  double time = wl_seconds(wl_run(threads, work, &run));
  uint64_t ops = 0;
  for (unsigned batch = 0; batch < MAX_BATCHES; batch++) {
    uint64_t pairs = threads * batch_blocks[batch] *
                     batches_for(run.pairs, batch_blocks[batch]);
    for (unsigned size = 0; size < SIZE_COUNT; size++) {
      uint64_t ns = 0;
      for (unsigned i = 0; i < threads; i++) {
        ns += run.workers[i].ns[batch][size];
      }
      printf("[BATCH] blocks=%" PRIu64 " size=%u ns_per_op=%.2f\n",
             batch_blocks[batch], 8u << size, (double)ns / (double)pairs);
      ops += pairs;
    }
  }
  printf("glibc_simple: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n",
         threads, ops, time, (double)ops / time);
  return wl_finish(&program);
}
