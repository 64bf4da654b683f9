// SPDX-License-Identifier: Apache-2.0
//
// fragment: blocks of random lifetimes, with sizes that drift from small to
// large and back. Memory that was cut up for one mix must serve the next; the
// resident size per live byte shows how well.
//
// Owns: a timing wheel. Blocks are linked through their first words into the
//   turn in which they die.
// Invariant: time is counted in bytes allocated and lifetimes are too, so that
//   the live bytes stay level whatever the sizes are.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define TURN_BITS 15
#define TURNS (1u << TURN_BITS)  // of the wheel: the longest lifetime
#define MEAN_TURNS 3152u  // of a lifetime log-uniform in [1, TURNS)
#define MIN_DOUBLING 6    // 64 bytes
#define MAX_DOUBLING 12   // 4 KiB
#define CHECK_EVERY 1024u

struct block {
  struct block* next;
  uint64_t size;
};

// Sizes start a doubling and a half below the smallest centre.
_Static_assert(sizeof(struct block) <= 1u << (MIN_DOUBLING - 2),
               "the smallest block must hold its link");

static struct {
  struct block* wheel[TURNS];
  uint64_t turn_bytes;
  uint64_t turn;
  uint64_t clock;  // bytes allocated
  uint64_t live_bytes;
  uint64_t allocated;
  uint64_t freed;
  struct wl_trace trace;
} run;

// The centre of the sizes in 1/256 doublings: up for half of the run, then
// down again.
static uint64_t centre_at(uint64_t ns, uint64_t total_ns) {
  uint64_t half = total_ns / 2;
  uint64_t distance = ns < half ? ns : total_ns - ns;
  return MIN_DOUBLING * 256 +
         distance * ((MAX_DOUBLING - MIN_DOUBLING) * 256) / half;
}

// Within a doubling and a half of the centre, uniform inside a doubling.
static uint64_t pick_size(uint64_t centre, uint64_t random) {
  uint64_t doubling = (centre + random % 768 - 384) / 256;
  uint64_t base = UINT64_C(1) << doubling;
  return base + (random >> 16) % base;
}

// A lifetime of 1 to TURNS - 1 turns, every doubling as likely as the others.
static uint64_t pick_turns(uint64_t random) {
  uint64_t base = UINT64_C(1) << (random % TURN_BITS);
  return base + (random >> 16) % base;
}

static void allocate(uint64_t size, uint64_t turns) {
  struct block* block = malloc(size);
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(size);
  }
  for (uint64_t offset = 4096; offset < size; offset += 4096) {
    ((char*)block)[offset] = 1;
  }
  struct block** list = &run.wheel[(run.turn + turns) % TURNS];
  block->size = size;
  block->next = *list;
  *list = block;
  run.allocated++;
  run.live_bytes += size;
  run.clock += size;
}

static void free_turn(struct block** list) {
  while (*list != NULL) {
    struct block* block = *list;
    *list = block->next;
    run.live_bytes -= block->size;
    run.freed++;
    free(block);
  }
}

static void run_until(uint64_t total_ns, uint64_t seed) {
  uint64_t state = wl_stream_seed(seed, 0);
  uint64_t start = wl_now_ns();
  for (;;) {
    uint64_t ns = wl_now_ns() - start;
    wl_trace_add(&run.trace, ns, total_ns, run.live_bytes);
    if (ns >= total_ns) {
      return;
    }
    uint64_t centre = centre_at(ns, total_ns);
    for (unsigned i = 0; i < CHECK_EVERY; i++) {
      uint64_t size = pick_size(centre, wl_xorshift64(&state) >> 16);
      allocate(size, pick_turns(wl_xorshift64(&state) >> 16));
      while (run.turn < run.clock / run.turn_bytes) {
        run.turn++;
        free_turn(&run.wheel[run.turn % TURNS]);
      }
    }
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"seconds", "to run; 600 for the long form", 60, 1, 86400},
      {"live_mib", "live bytes to level out at", 200, 1, 1 << 20},
      {"seed", "of the generator", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "fragment",
      .about = "Random lifetimes and a mix of sizes that drifts from 64 bytes\n"
               "to 4 KiB and back. An op is one malloc or free. rss_per_live\n"
               "is taken over the second half of the run.",
      .example = "5 64",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  run.turn_bytes = (args[1].value << 20) / MEAN_TURNS;
  uint64_t start = wl_now_ns();
  run_until(args[0].value * 1000000000u, args[2].value);
  double time = wl_seconds(wl_now_ns() - start);
  wl_print_trace("fragment", &run.trace, run.allocated + run.freed, time);
  for (unsigned i = 0; i < TURNS; i++) {
    free_turn(&run.wheel[i]);
  }
  WL_CHECK(run.live_bytes == 0 && run.allocated == run.freed,
           "%" PRIu64 " blocks allocated, %" PRIu64 " freed", run.allocated,
           run.freed);
  return wl_finish(&program);
}
