// SPDX-License-Identifier: Apache-2.0
//
// thread_churn: thousands of short-lived threads. Each goes on with the slots
// that an ended thread left, frees what it finds there, allocates anew and
// leaves live blocks behind. What an allocator loses per thread shows as a
// resident size that rises for ever.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define SLOTS 64
#define MIN_SIZE 16
#define MAX_SIZE 2048

struct slot {
  unsigned char* block;
  unsigned char tag;
};

struct estate {
  _Alignas(WL_CACHE_LINE) struct slot slots[SLOTS];
};

struct counts {
  _Alignas(WL_CACHE_LINE) uint64_t allocated;
  uint64_t freed;
};

static struct {
  unsigned concurrency;
  uint64_t lifetime_ops;
  uint64_t generation;
  struct estate* estates;
  struct counts* counts;
} run;

static void release(struct slot* slot) {
  WL_CHECK(slot->block[0] == slot->tag, "a block changed while in use");
  free(slot->block);
  slot->block = NULL;
}

// The estate of another thread of the generation before.
static void live_and_leave(unsigned index, void* context) {
  (void)context;
  struct estate* estate =
      &run.estates[(index + run.generation) % run.concurrency];
  struct counts* counts = &run.counts[index];
  uint64_t state = wl_stream_seed(WL_DEFAULT_SEED,
                                  run.generation * run.concurrency + index);
  for (uint64_t i = 0; i < run.lifetime_ops; i++) {
    uint64_t random = wl_xorshift64(&state);
    struct slot* slot = &estate->slots[random % SLOTS];
    if (slot->block != NULL) {
      release(slot);
      counts->freed++;
      continue;
    }
    size_t size = MIN_SIZE + (random >> 32) % (MAX_SIZE - MIN_SIZE + 1);
    slot->block = malloc(size);
    if (slot->block == NULL) {
      wl_out_of_memory(size);
    }
    slot->tag = (unsigned char)(random >> 24);
    slot->block[0] = slot->tag;
    counts->allocated++;
  }
}

// Running sums of a least-squares line through (thread count, resident size).
struct line_fit {
  double n, x, y, xx, xy;
};

static void add_point(struct line_fit* fit, double x, double y) {
  fit->n++;
  fit->x += x;
  fit->y += y;
  fit->xx += x * x;
  fit->xy += x * y;
}

static double slope(const struct line_fit* fit) {
  double spread = fit->n * fit->xx - fit->x * fit->x;
  return spread > 0 ? (fit->n * fit->xy - fit->x * fit->y) / spread : 0;
}

static void free_estates(void) {
  uint64_t allocated = 0;
  uint64_t freed = 0;
  for (unsigned i = 0; i < run.concurrency; i++) {
    allocated += run.counts[i].allocated;
    freed += run.counts[i].freed;
    for (unsigned k = 0; k < SLOTS; k++) {
      if (run.estates[i].slots[k].block != NULL) {
        release(&run.estates[i].slots[k]);
        freed++;
      }
    }
  }
  WL_CHECK(allocated == freed,
           "%" PRIu64 " blocks allocated, %" PRIu64 " freed", allocated, freed);
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "to create in all", 10000, 1, 100000000},
      {"lifetime_ops", "mallocs and frees of each", 1000, 1, UINT32_MAX},
      {"concurrency", "threads at a time", 8, 1, WL_MAX_THREADS},
  };
  struct wl_program program = {
      .name = "thread_churn",
      .about = "Short-lived threads that leave live blocks to their\n"
               "successors. An op is one malloc or free. drift_kib is the\n"
               "growth of the resident size per 1000 threads, fitted to the\n"
               "second half of the run.",
      .example = "2000 1000",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  run.concurrency = (unsigned)args[2].value;
  run.lifetime_ops = args[1].value;
  run.estates = wl_map(run.concurrency * sizeof(*run.estates));
  run.counts = wl_map(run.concurrency * sizeof(*run.counts));
  uint64_t generations =
      (args[0].value + run.concurrency - 1) / run.concurrency;
  struct line_fit fit = {0};
  uint64_t start = wl_now_ns();
  for (; run.generation < generations; run.generation++) {
    wl_run_threads(run.concurrency, live_and_leave, NULL);
    if (run.generation >= generations / 2) {
      add_point(&fit, (double)(run.generation * run.concurrency),
                (double)wl_rss_bytes());
    }
  }
  double time = wl_seconds(wl_now_ns() - start);
  uint64_t threads = generations * run.concurrency;
  uint64_t ops = threads * run.lifetime_ops;
  printf("thread_churn: threads=%" PRIu64 " ops=%" PRIu64
         " time=%.6f ops/s=%.2f threads/s=%.2f drift_kib=%.2f\n",
         threads, ops, time, (double)ops / time, (double)threads / time,
         slope(&fit) * 1000 / 1024);
  free_estates();
  return wl_finish(&program);
}
