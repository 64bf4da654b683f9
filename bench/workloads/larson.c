// SPDX-License-Identifier: Apache-2.0
//
// larson: a server that passes its work on. Each thread replaces random blocks
// of an array; after its rounds it starts a successor that goes on with the
// same array and frees what others allocated.
//
// Owns: one lane per concurrent thread. A lane belongs to its newest thread
//   once that has joined the one before.
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

struct lane {
  _Alignas(WL_CACHE_LINE) unsigned char** blocks;
  uint64_t state;
  uint64_t ops;
  uint64_t threads;
  pthread_t predecessor;
  bool has_predecessor;
};

static struct {
  uint32_t min;
  uint32_t width;
  uint64_t block_count;
  uint64_t rounds;
  atomic_bool stop;
  sem_t finished;
} run;

static unsigned char* allocate(struct lane* lane, uint64_t random,
                               uint64_t slot) {
  size_t size = run.min + (uint32_t)(random >> 32) % run.width;
  unsigned char* block = malloc(size);
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(size);
  }
  block[0] = (unsigned char)slot;
  lane->ops++;
  return block;
}

static void release(unsigned char* block, uint64_t slot) {
  WL_CHECK(block[0] == (unsigned char)slot, "block of slot %" PRIu64 " changed",
           slot);
  free(block);
}

static void replace_blocks(struct lane* lane) {
  uint64_t replacements = run.rounds * run.block_count;
  for (uint64_t i = 0; i < replacements; i++) {
    if (atomic_load_explicit(&run.stop, memory_order_relaxed)) {
      return;
    }
    uint64_t random = wl_xorshift64(&lane->state);
    uint64_t slot = (uint32_t)random % run.block_count;
    release(lane->blocks[slot], slot);
    lane->blocks[slot] = allocate(lane, random, slot);
  }
}

static void* serve(void* argument);

static void start_thread(struct lane* lane) {
  pthread_t thread;
  int error = pthread_create(&thread, NULL, serve, lane);
  WL_CHECK(error == 0, "pthread_create: %s", strerror(error));
}

static void* serve(void* argument) {
  struct lane* lane = argument;
  if (lane->has_predecessor) {
    pthread_join(lane->predecessor, NULL);
  }
  lane->threads++;
  replace_blocks(lane);
  lane->predecessor = pthread_self();
  lane->has_predecessor = true;
  if (atomic_load_explicit(&run.stop, memory_order_relaxed)) {
    sem_post(&run.finished);
  } else {
    start_thread(lane);
  }
  return NULL;
}

// Lets all lanes run for `seconds`; returns the time from the first start to
// the end of the last thread.
static double serve_for(struct lane* lanes, unsigned count, uint64_t seconds) {
  sem_init(&run.finished, 0, 0);
  uint64_t start = wl_now_ns();
  for (unsigned i = 0; i < count; i++) {
    start_thread(&lanes[i]);
  }
  wl_sleep_ns(seconds * 1000000000u);
  atomic_store(&run.stop, true);
  for (unsigned i = 0; i < count; i++) {
    while (sem_wait(&run.finished) != 0) {
    }
  }
  double time = wl_seconds(wl_now_ns() - start);
  for (unsigned i = 0; i < count; i++) {
    pthread_join(lanes[i].predecessor, NULL);
  }
  return time;
}

static struct lane* fill_lanes(unsigned count, uint64_t seed) {
  struct lane* lanes = wl_map(count * sizeof(*lanes));
  for (unsigned i = 0; i < count; i++) {
    lanes[i].blocks = wl_map(run.block_count * sizeof(unsigned char*));
    lanes[i].state = wl_stream_seed(seed, i);
    for (uint64_t slot = 0; slot < run.block_count; slot++) {
      uint64_t random = wl_xorshift64(&lanes[i].state);
      lanes[i].blocks[slot] = allocate(&lanes[i], random, slot);
    }
    lanes[i].ops = 0;  // the fill is not part of the measured work
  }
  return lanes;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"seconds", "to run", 5, 1, 86400},
      {"min", "smallest size in bytes", 8, 1, UINT32_MAX - 1},
      {"max", "largest size in bytes", 1000, 1, UINT32_MAX - 1},
      {"blocks", "of each thread", 5000, 1, UINT32_MAX},
      {"rounds", "through the blocks until a new thread", 100, 1, 1000000},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
      {"threads", "at a time", 2, 1, WL_MAX_THREADS},
  };
  struct wl_program program = {
      .name = "larson",
      .about = "Replaces random blocks of arrays that are handed from thread\n"
               "to thread. An op is one free with the malloc that follows.",
      .example = "1 8 1000 5000 10 0x12345678 2",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  if (args[2].value < args[1].value) {
    wl_usage_error(&program, "max is smaller than min");
  }
  run.min = (uint32_t)args[1].value;
  run.width = (uint32_t)(args[2].value - args[1].value + 1);
  run.block_count = args[3].value;
  run.rounds = args[4].value;
  unsigned count = (unsigned)args[6].value;
  struct lane* lanes = fill_lanes(count, args[5].value);
  double time = serve_for(lanes, count, args[0].value);
  uint64_t ops = 0;
  uint64_t threads = 0;
  for (unsigned i = 0; i < count; i++) {
    WL_CHECK(lanes[i].ops > 0, "lane %u did nothing", i);
    ops += lanes[i].ops;
    threads += lanes[i].threads;
    for (uint64_t slot = 0; slot < run.block_count; slot++) {
      release(lanes[i].blocks[slot], slot);
    }
  }
  printf("larson: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f"
         " threads_started=%" PRIu64 "\n",
         count, ops, time, (double)ops / time, threads);
  return wl_finish(&program);
}
