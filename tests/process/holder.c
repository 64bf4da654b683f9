// SPDX-License-Identifier: Apache-2.0
//
// A user's library that holds blocks: made in its constructor, on request and per thread, freed when it is unloaded.
// Called by: dlopen_test.cc, which loads and unloads it.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { kBlocks = 200 };

static void *blocks[kBlocks];
static __thread char thread_area[2000];

__attribute__((constructor)) static void fill(void) {
  for (size_t i = 0; i < kBlocks; i++) blocks[i] = calloc(1, i * 97);
}

__attribute__((destructor)) static void drop(void) {
  for (int i = 0; i < kBlocks; i++) free(blocks[i]);
}

void *holder_give(size_t size);
void holder_take(void *block);
size_t holder_touch_thread_area(void);

void *holder_give(size_t size) { return malloc(size); }
void holder_take(void *block) { free(block); }

// Dynamic TLS: libc allocates the area at the first touch in each thread.
size_t holder_touch_thread_area(void) {
  memset(thread_area, 1, sizeof thread_area);
  return sizeof thread_area;
}
