// SPDX-License-Identifier: Apache-2.0
//
// The body of cache_thrash and cache_scratch: every thread allocates a small
// object, writes it many times and frees it. When objects of two threads share
// a cache line, the writes slow each other down.
//
// Called by: cache_thrash.c, cache_scratch.c.
#ifndef BENCH_WORKLOADS_CACHE_SHARING_H_
#define BENCH_WORKLOADS_CACHE_SHARING_H_

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

#define CACHE_TOTAL_REPS 2000000

struct cache_run {
  uint64_t iters;
  size_t size;
  uint64_t reps;
  char** gifts;  // NULL: the threads start with nothing of the main thread's
};

static char* cache_object(size_t size) {
  char* object = wl_opaque(malloc(size));
  if (object == NULL) {
    wl_out_of_memory(size);
  }
  memset(object, 0, size);
  return object;
}

static void write_and_free(const struct cache_run* run, char* object) {
  for (uint64_t i = 0; i < run->reps; i++) {
    for (size_t k = 0; k < run->size; k++) {
      ((volatile char*)object)[k]++;
    }
  }
  for (size_t k = 0; k < run->size; k++) {
    WL_CHECK(object[k] == (char)run->reps, "byte %zu of an object changed", k);
  }
  free(object);
}

static void cache_worker(unsigned index, void* context) {
  const struct cache_run* run = context;
  if (run->gifts != NULL) {
    write_and_free(run, run->gifts[index]);
  }
  for (uint64_t i = 0; i < run->iters; i++) {
    write_and_free(run, cache_object(run->size));
  }
}

// Parses, runs and reports; `with_gifts` makes it the passive form.
static int run_cache_sharing(const char* name, const char* about,
                             bool with_gifts, int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once", 2, 1, WL_MAX_THREADS},
      {"iters", "objects of each thread", 1000, 1, UINT64_C(1) << 40},
      {"size", "bytes of an object", 8, 1, 1 << 20},
      {"reps", "writes of an object; 0: 2000000 / threads", 0, 0,
       UINT64_C(1) << 40},
  };
  struct wl_program program = {
      .name = name,
      .about = about,
      .example = "2 100 8 10000",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  struct cache_run run = {.iters = args[1].value, .size = args[2].value};
  run.reps = args[3].value != 0 ? args[3].value : CACHE_TOTAL_REPS / threads;
  if (with_gifts) {
    run.gifts = wl_map(threads * sizeof(*run.gifts));
    for (unsigned i = 0; i < threads; i++) {
      run.gifts[i] = cache_object(run.size);
    }
  }
  double time = wl_seconds(wl_run_threads(threads, cache_worker, &run));
  uint64_t objects = threads * (run.iters + (with_gifts ? 1 : 0));
  uint64_t ops = objects * run.reps;
  printf("%s: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f objects=%" PRIu64
         "\n",
         name, threads, ops, time, (double)ops / time, objects);
  return wl_finish(&program);
}

#endif  // BENCH_WORKLOADS_CACHE_SHARING_H_
