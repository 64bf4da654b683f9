// SPDX-License-Identifier: Apache-2.0
//
// lifo: stacks of blocks of one size are allocated and freed in reverse. Depth
// 1 frees at once what was allocated: the shortest path of an allocator.
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

// Programs write what they allocate; without that the pages of the blocks may
// not even exist.
static WL_ALWAYS_INLINE void use(void* block, const bool touch) {
  if (touch) {
    *(volatile char*)block = 1;
  }
}

static WL_ALWAYS_INLINE void work_at_once(uint64_t pairs, size_t size,
                                          const bool touch) {
  for (uint64_t i = 0; i < pairs; i++) {
    void* block = wl_opaque(malloc(size));
    if (__builtin_expect(block == NULL, 0)) {
      wl_out_of_memory(size);
    }
    use(block, touch);
    free(block);
  }
}

static WL_ALWAYS_INLINE void work_stacks(uint64_t stacks, size_t size,
                                         uint64_t depth, void** blocks,
                                         const bool touch) {
  for (uint64_t i = 0; i < stacks; i++) {
    for (uint64_t k = 0; k < depth; k++) {
      blocks[k] = malloc(size);
      if (__builtin_expect(blocks[k] == NULL, 0)) {
        wl_out_of_memory(size);
      }
      use(blocks[k], touch);
    }
    for (uint64_t k = depth; k > 0; k--) {
      free(blocks[k - 1]);
    }
  }
}

// A loop of its own for each value of touch.
static WL_ALWAYS_INLINE void work(uint64_t stacks, size_t size, uint64_t depth,
                                  void** blocks, const bool touch) {
  if (depth == 1) {
    work_at_once(stacks, size, touch);
  } else {
    work_stacks(stacks, size, depth, blocks, touch);
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"pairs", "mallocs in all, rounded up to whole stacks", 20000000, 1,
       UINT64_C(1) << 40},
      {"size", "bytes of a block", 64, 1, UINT64_C(1) << 40},
      {"depth", "blocks of a stack", 1, 1, UINT64_C(1) << 32},
      {"touch", "1: write the first byte of each block", 0, 0, 1},
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
  if (args[3].value != 0) {
    work(stacks, size, depth, blocks, true);
  } else {
    work(stacks, size, depth, blocks, false);
  }
  double time = wl_seconds(wl_now_ns() - start);
  printf("lifo: ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", stacks * depth, time,
         (double)(stacks * depth) / time);
  return wl_finish(&program);
}
