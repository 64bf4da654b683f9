// SPDX-License-Identifier: Apache-2.0
//
// libfloor_bump: the cheapest malloc there can be. A pointer is advanced,
// nothing is ever freed, no block has a header and none is touched. Running a
// benchmark with it measures the benchmark.
//
// Called by: any program through LD_PRELOAD, for work that leaves its memory
//   untouched; touched memory only ever grows (use libfloor_lifo there).
#include <errno.h>
#include <string.h>

#include "floor.h"

FLOOR_EXPORT void* malloc(size_t size) {
  struct floor_heap* heap = floor_heap();
  size_t rounded = floor_round(size + (size == 0));
  if (__builtin_expect(rounded < size, 0)) {
    errno = ENOMEM;
    return NULL;
  }
  return heap->last = floor_carve(heap, rounded);
}

FLOOR_EXPORT void free(void* block) { (void)block; }

FLOOR_EXPORT void* memalign(size_t alignment, size_t size) {
  char* block = malloc(size + alignment);
  if (block == NULL) {
    return NULL;
  }
  return block + (-(uintptr_t)block & (alignment - 1));
}

// Grows the newest block where it is. Others do not know their size: a copy
// takes as much as the new block holds and the chunk has. What lies behind the
// old block is of no consequence.
FLOOR_EXPORT void* realloc(void* block, size_t size) {
  struct floor_heap* heap = floor_heap();
  if (block != NULL && block == heap->last &&
      size < (size_t)(heap->end - heap->last)) {
    heap->next = heap->last + floor_round(size);
    return block;
  }
  void* grown = malloc(size);
  if (block != NULL && grown != NULL) {
    uintptr_t chunk = (uintptr_t)block & ~(FLOOR_CHUNK - 1);
    size_t rest = (size_t)(((struct floor_chunk*)chunk)->end - (char*)block);
    memmove(grown, block, size < rest ? size : rest);
  }
  return grown;
}

// Zero is the honest answer: nothing beyond what was asked for may be used.
FLOOR_EXPORT size_t malloc_usable_size(void* block) {
  (void)block;
  return 0;
}
