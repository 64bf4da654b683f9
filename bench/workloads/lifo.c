// SPDX-License-Identifier: Apache-2.0
//
// lifo: stacks of blocks of one size are allocated and freed in reverse. Depth
// 1 frees at once what was allocated: the shortest path of an allocator.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

static void work_at_once(uint64_t pairs, size_t size) {
  for (uint64_t i = 0; i < pairs; i++) {
    void* block = wl_opaque(malloc(size));
    if (__builtin_expect(block == NULL, 0)) {
      wl_out_of_memory(size);
    }
    free(block);
  }
}

static void work_stacks(uint64_t stacks, size_t size, uint64_t depth,
                        void** blocks) {
  for (uint64_t i = 0; i < stacks; i++) {
    for (uint64_t k = 0; k < depth; k++) {
      blocks[k] = malloc(size);
      if (__builtin_expect(blocks[k] == NULL, 0)) {
        wl_out_of_memory(size);
      }
    }
    for (uint64_t k = depth; k > 0; k--) {
      free(blocks[k - 1]);
    }
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"pairs", "mallocs in all, rounded up to whole stacks", 20000000, 1,
       UINT64_C(1) << 40},
      {"size", "bytes of a block", 64, 1, UINT64_C(1) << 40},
      {"depth", "blocks of a stack", 1, 1, UINT64_C(1) << 32},
  };
  struct wl_program program = {
      .name = "lifo",
      .about = "Allocates stacks of equal blocks and frees them in reverse.\n"
               "An op is one malloc with its free.",
      .example = "1000000 64 1600",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  size_t size = args[1].value;
  uint64_t depth = args[2].value;
  uint64_t stacks = (args[0].value + depth - 1) / depth;
  void** blocks = wl_map(depth * sizeof(*blocks));
  uint64_t start = wl_now_ns();
  if (depth == 1) {
    work_at_once(stacks, size);
  } else {
    work_stacks(stacks, size, depth, blocks);
  }
  double time = wl_seconds(wl_now_ns() - start);
  printf("lifo: ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", stacks * depth, time,
         (double)(stacks * depth) / time);
  return wl_finish(&program);
}
