// SPDX-License-Identifier: Apache-2.0
//
// buffers: blocks of many sizes that are written whole and read once, as of
// images, messages or columns of a table: what counts is not how soon a block
// is found, but whether its memory is still in the processor's caches, lies in
// huge pages, and is there at all.
//
// Invariant: every place holds a block, from the first round on; a size is as
//   often between `least` and twice that as between that and twice as much.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

enum { AT_RANDOM, QUEUE, STACK, ORDERS };

struct buffer {
  unsigned char* bytes;
  uint64_t size;
};

static struct {
  uint64_t ops;
  uint64_t places;
  uint64_t least;
  uint64_t most;
  unsigned doublings;  // so often `least` doubles and stays below `most`
  unsigned order;
  uint64_t seed;
} run;

// From `least` times a power of two, and evenly from there to the next one.
static uint64_t draw_size(uint64_t* state) {
  uint64_t from = run.least << wl_below(state, run.doublings + 1);
  uint64_t to = 2 * from < run.most ? 2 * from : run.most;
  return from + wl_below(state, to - from + 1);
}

static unsigned char mark_of(uint64_t size) {
  return (unsigned char)(1 + size % 255);
}

static void fill(struct buffer* buffer, uint64_t size) {
  buffer->bytes = malloc(size);
  if (__builtin_expect(buffer->bytes == NULL, 0)) {
    wl_out_of_memory(size);
  }
  buffer->size = size;
  memset(buffer->bytes, mark_of(size), size);
}

static void release(struct buffer* buffer) {
  uint64_t sum = wl_sum_of_lines(buffer->bytes, buffer->size);
  uint64_t lines = (buffer->size + WL_CACHE_LINE - 1) / WL_CACHE_LINE;
  WL_CHECK(sum == lines * mark_of(buffer->size),
           "a block of %" PRIu64 " bytes changed", buffer->size);
  free(buffer->bytes);
}

// Up to a quarter of the places and one more, from the last on, and filled
// again.
static uint64_t move_stack(struct buffer* buffers, uint64_t most,
                           uint64_t* state) {
  uint64_t count = 1 + wl_below(state, run.places / 4 + 1);
  count = count < most ? count : most;
  for (uint64_t i = 0; i < count; i++) {
    release(&buffers[run.places - 1 - i]);
  }
  for (uint64_t i = count; i > 0; i--) {
    fill(&buffers[run.places - i], draw_size(state));
  }
  return count;
}

static void work(unsigned index, void* context) {
  struct buffer* buffers = ((struct buffer**)context)[index];
  uint64_t state = wl_stream_seed(run.seed, index);
  for (uint64_t i = 0; i < run.places; i++) {
    fill(&buffers[i], draw_size(&state));
  }
  for (uint64_t done = 0; done < run.ops;) {
    if (run.order == STACK) {
      done += move_stack(buffers, run.ops - done, &state);
    } else {
      uint64_t place = run.order == QUEUE ? done % run.places
                                          : wl_below(&state, run.places);
      release(&buffers[place]);
      fill(&buffers[place], draw_size(&state));
      done++;
    }
  }
  for (uint64_t i = 0; i < run.places; i++) {
    release(&buffers[i]);
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once, each with blocks of its own", 1, 1,
       WL_MAX_THREADS},
      {"ops", "blocks that each thread replaces", 40000, 1,
       UINT64_C(1) << 32},
      {"places", "blocks of each thread at any time", 64, 1,
       UINT64_C(1) << 24},
      {"least", "bytes of a block", 65536, 1, UINT64_C(1) << 40},
      {"most", "bytes of a block, no less than the least", 1126400, 1,
       UINT64_C(1) << 40},
      {"order", "in which they are replaced: 0 random, 1 oldest first, 2 "
                "newest first",
       AT_RANDOM, 0, ORDERS - 1},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "buffers",
      .about = "Replaces blocks of many sizes, each of which is written whole\n"
               "and read once. An op is one block with its free.",
      .example = "2 10000 64 16384 262144",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  run.ops = args[1].value;
  run.places = args[2].value;
  run.least = args[3].value;
  run.most = args[4].value;
  run.order = (unsigned)args[5].value;
  run.seed = args[6].value;
  if (run.most < run.least) {
    wl_usage_error(&program, "most may not be less than least");
  }
  while (run.least << (run.doublings + 1) < run.most) {
    run.doublings++;
  }
  size_t bytes = run.places * sizeof(struct buffer);
  struct buffer** buffers = wl_map(threads * sizeof(struct buffer*));
  for (unsigned i = 0; i < threads; i++) {
    buffers[i] = wl_map(bytes);
  }
  double time = wl_seconds(wl_run(threads, work, buffers));
  for (unsigned i = 0; i < threads; i++) {
    wl_unmap(buffers[i], bytes);
  }
  wl_unmap(buffers, threads * sizeof(struct buffer*));
  uint64_t ops = threads * (run.ops + run.places);
  printf("buffers: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n",
         threads, ops, time, (double)ops / time);
  return wl_finish(&program);
}
