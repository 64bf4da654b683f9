// SPDX-License-Identifier: Apache-2.0
//
// lru_cache: a cache of bounded size whose values drift from small to large
// and back. What is used least goes first, so that blocks which were allocated
// side by side die at different times; the resident size per live byte shows
// what that leaves behind.
//
// Owns: a list of all entries, the one used last first.
// Invariant: the live bytes never exceed the bound.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

#define CHECK_EVERY 256u
#define MIN_BYTES 16u   // of a value, times the scale of the moment
#define MAX_BYTES 128u
#define MAX_SCALE 128u
#define NONE 0u         // entry 0 closes the list at both ends

// The start of every value.
struct value {
  uint64_t bytes;
};

struct entry {
  struct value* value;  // NULL: unused
  uint32_t newer;
  uint32_t older;
};

static struct {
  struct entry* entries;
  uint32_t used;    // entries below this were in use at some time
  uint32_t unused;  // the first of those that no longer are
  uint64_t live_bytes;
  uint64_t live_limit;
  uint64_t allocated;
  uint64_t freed;
  uint64_t looked_up;
  struct wl_trace trace;
} run;

static void unlink_entry(uint32_t i) {
  run.entries[run.entries[i].newer].older = run.entries[i].older;
  run.entries[run.entries[i].older].newer = run.entries[i].newer;
}

static void put_first(uint32_t i) {
  uint32_t first = run.entries[NONE].older;
  run.entries[i].newer = NONE;
  run.entries[i].older = first;
  run.entries[first].newer = i;
  run.entries[NONE].older = i;
}

static void evict(void) {
  uint32_t last = run.entries[NONE].newer;
  struct entry* entry = &run.entries[last];
  WL_CHECK(last != NONE && entry->value->bytes <= run.live_bytes,
           "a value changed");
  unlink_entry(last);
  run.live_bytes -= entry->value->bytes;
  free(entry->value);
  entry->value = NULL;
  entry->older = run.unused;
  run.unused = last;
  run.freed++;
}

static uint32_t unused_entry(void) {
  uint32_t i = run.unused;
  if (i == NONE) {
    return run.used++;
  }
  run.unused = run.entries[i].older;
  return i;
}

static void insert(uint64_t bytes) {
  while (run.live_bytes + bytes > run.live_limit) {
    evict();
  }
  struct value* value = malloc(bytes);
  if (__builtin_expect(value == NULL, 0)) {
    wl_out_of_memory(bytes);
  }
  memset(value, 1, bytes);
  value->bytes = bytes;
  uint32_t i = unused_entry();
  run.entries[i].value = value;
  put_first(i);
  run.live_bytes += bytes;
  run.allocated++;
}

static void look_up(uint64_t random) {
  uint32_t i = 1 + (uint32_t)(random % run.used);
  if (i < run.used && run.entries[i].value != NULL) {
    unlink_entry(i);
    put_first(i);
  }
  run.looked_up++;
}

// From 1 to MAX_SCALE and back, in each of `cycles` equal parts of the run.
static double scale_at(uint64_t ns, uint64_t total_ns, uint64_t cycles) {
  double part = (double)ns / (double)total_ns * (double)cycles;
  double in_part = part - (double)(uint64_t)part;
  return 1 + (MAX_SCALE - 1) * 2 * (in_part < 0.5 ? in_part : 1 - in_part);
}

static void run_until(uint64_t total_ns, uint64_t cycles,
                      uint64_t lookup_percent, uint64_t seed) {
  uint64_t state = wl_stream_seed(seed, 0);
  uint64_t start = wl_now_ns();
  for (;;) {
    uint64_t ns = wl_now_ns() - start;
    wl_trace_add(&run.trace, ns, total_ns, run.live_bytes);
    if (ns >= total_ns) {
      return;
    }
    double scale = scale_at(ns, total_ns, cycles);
    for (unsigned i = 0; i < CHECK_EVERY; i++) {
      uint64_t random = wl_xorshift64(&state) >> 16;
      if (random % 100 < lookup_percent) {
        look_up(random / 100);
      } else {
        uint64_t least = MIN_BYTES + random / 100 % (MAX_BYTES - MIN_BYTES + 1);
        insert((uint64_t)((double)least * scale));
      }
    }
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"seconds", "to run", 20, 1, 86400},
      {"live_mib", "that the cache may hold", 100, 1, 1 << 14},
      {"cycles", "from small values to large ones and back", 4, 1, 1 << 20},
      {"lookup_percent", "of the operations, the others insert", 50, 0, 99},
      {"seed", "of the generator", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "lru_cache",
      .about = "Fills a cache with values of 16 to 128 bytes at first, 128\n"
               "times as much later, and back; what was used least recently\n"
               "goes. An op is one malloc, free or look-up. rss_per_live is\n"
               "taken over the second half of the run.",
      .example = "5 64",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  run.live_limit = args[1].value << 20;
  size_t entry_bytes = (run.live_limit / MIN_BYTES + 2) * sizeof(struct entry);
  run.used = 1;
  run.entries = wl_map(entry_bytes);
  memset(run.entries, 0, entry_bytes);  // resident from here on
  run.trace.own_bytes = wl_rss_bytes();
  uint64_t start = wl_now_ns();
  run_until(args[0].value * 1000000000u, args[2].value, args[3].value,
            args[4].value);
  double time = wl_seconds(wl_now_ns() - start);
  wl_print_trace("lru_cache", &run.trace,
                 run.allocated + run.freed + run.looked_up, time);
  while (run.entries[NONE].newer != NONE) {
    evict();
  }
  WL_CHECK(run.live_bytes == 0 && run.allocated == run.freed,
           "%" PRIu64 " blocks allocated, %" PRIu64 " freed", run.allocated,
           run.freed);
  return wl_finish(&program);
}
