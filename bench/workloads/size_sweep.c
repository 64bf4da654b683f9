// SPDX-License-Identifier: Apache-2.0
//
// size_sweep: malloc and free of one size after the other, in steps of one per
// cent, so that every border between size classes, and between the ways in
// which an allocator serves small and large blocks, lies between two of them.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define MAX_DEPTH 4096
#define PAGE_BYTES 4096

struct point {
  uint64_t bytes;
  uint64_t batches;
  uint64_t least_ns;  // of all rounds
};

static void* blocks[MAX_DEPTH];

// Fewer batches where each one writes many pages, at least two.
static uint64_t batches_of(uint64_t bytes, uint64_t batches, bool touch) {
  uint64_t pages = bytes / PAGE_BYTES + 1;
  uint64_t fewer = touch ? batches / pages : batches;
  return fewer < 2 ? 2 : fewer;
}

static size_t fill_points(struct point* points, uint64_t min, uint64_t max,
                          uint64_t step_percent, uint64_t batches, bool touch) {
  size_t count = 0;
  for (uint64_t bytes = min;; count++) {
    if (points != NULL) {
      points[count] = (struct point){
          bytes, batches_of(bytes, batches, touch), UINT64_MAX};
    }
    if (bytes >= max) {
      return count + 1;
    }
    uint64_t step = bytes * step_percent / 100;
    bytes += step == 0 ? 1 : step;
    bytes = bytes > max ? max : bytes;
  }
}

static WL_ALWAYS_INLINE void one_batch(size_t bytes, uint64_t depth,
                                       bool touch) {
  for (uint64_t i = 0; i < depth; i++) {
    char* block = wl_opaque(malloc(bytes));
    if (__builtin_expect(block == NULL, 0)) {
      wl_out_of_memory(bytes);
    }
    if (touch) {
      for (size_t at = 0; at < bytes; at += PAGE_BYTES) {
        ((volatile char*)block)[at] = 1;
      }
      ((volatile char*)block)[bytes - 1] = 1;
    }
    blocks[i] = block;
  }
  for (uint64_t i = depth; i > 0; i--) {
    free(blocks[i - 1]);
  }
}

static uint64_t measure(struct point* point, uint64_t depth, bool touch) {
  // The first one brings the size's memory into the caches of the allocator.
  one_batch(point->bytes, depth, touch);
  uint64_t start = wl_now_ns();
  for (uint64_t i = 0; i < point->batches; i++) {
    one_batch(point->bytes, depth, touch);
  }
  uint64_t took = wl_now_ns() - start;
  point->least_ns = took < point->least_ns ? took : point->least_ns;
  return took;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"min", "smallest size in bytes", 8, 1, UINT64_C(1) << 40},
      {"max", "largest size in bytes", 67108864, 1, UINT64_C(1) << 40},
      {"step_percent", "from one size to the next, at least a byte", 1, 1, 100},
      {"batches", "timed per size and round; touched, fewer", 1000, 2, 1u << 30},
      {"rounds", "over all sizes; the least time counts", 5, 1, 1000},
      {"depth", "blocks of a batch, freed in reverse", 1, 1, MAX_DEPTH},
      {"touch", "1: write a byte of each page and the last", 0, 0, 1},
  };
  struct wl_program program = {
      .name = "size_sweep",
      .about = "Times malloc and free of one size after the other.\n"
               "An op is one malloc with its free.",
      .example = "8 4096 1 100 2",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  uint64_t min = args[0].value, max = args[1].value;
  if (max < min) {
    wl_usage_error(&program, "max is smaller than min");
  }
  uint64_t step_percent = args[2].value, batches = args[3].value;
  uint64_t depth = args[5].value;
  bool touch = args[6].value != 0;
  size_t count = fill_points(NULL, min, max, step_percent, batches, touch);
  struct point* points = wl_map(count * sizeof(*points));
  fill_points(points, min, max, step_percent, batches, touch);
  uint64_t took = 0, ops = 0;
  for (uint64_t round = 0; round < args[4].value; round++) {
    for (size_t i = 0; i < count; i++) {
      took += measure(&points[i], depth, touch);
      ops += points[i].batches * depth;
    }
  }
  for (size_t i = 0; i < count; i++) {
    printf("[SIZE] bytes=%" PRIu64 " ns=%.2f\n", points[i].bytes,
           (double)points[i].least_ns / (double)(points[i].batches * depth));
  }
  double time = wl_seconds(took);
  printf("size_sweep: ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", ops, time,
         (double)ops / time);
  return wl_finish(&program);
}
