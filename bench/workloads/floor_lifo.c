// SPDX-License-Identifier: Apache-2.0
//
// libfloor_lifo: a single list of free blocks per size class and thread, last
// in, first out. The cheapest malloc that reuses memory at all.
//
// Called by: any program through LD_PRELOAD.
// Invariant: the 16 bytes before a block name the start of its memory and its
//   class. A block goes to the list of the thread that frees it and stays.
#include <errno.h>
#include <string.h>

#include "floor.h"

struct header {
  char* start;
  size_t class_index;
};

// Eight classes per doubling from 128 bytes on, steps of 16 below.
static inline size_t class_of(size_t rounded) {
  if (rounded <= 128) {
    return rounded / 16;
  }
  unsigned shift = 60u - (unsigned)__builtin_clzll(rounded - 1);
  return (size_t)(shift - 4) * 8 + ((rounded - 1) >> shift) + 1;
}

static inline size_t class_bytes(size_t class_index) {
  if (class_index <= 8) {
    return class_index * 16;
  }
  size_t shift = (class_index - 1) / 8 + 3;
  return ((class_index - 1) % 8 + 9) << shift;
}

static inline struct header* header_of(void* block) {
  return (struct header*)block - 1;
}

FLOOR_EXPORT void* malloc(size_t size) {
  if (__builtin_expect(size > (size_t)1 << 46, 0)) {
    errno = ENOMEM;
    return NULL;
  }
  size_t class_index = class_of(floor_round(size + (size == 0)));
  struct floor_heap* heap = floor_heap();
  void** block = heap->free_lists[class_index];
  if (__builtin_expect(block != NULL, 1)) {
    heap->free_lists[class_index] = *block;
    return block;
  }
  char* start = floor_carve(heap, class_bytes(class_index) +
                                      sizeof(struct header));
  if (start == NULL) {
    return NULL;
  }
  *(struct header*)start = (struct header){start, class_index};
  return start + sizeof(struct header);
}

FLOOR_EXPORT void free(void* block) {
  if (block == NULL) {
    return;
  }
  struct header* header = header_of(block);
  size_t class_index = header->class_index;
  void** first = (void**)(header->start + sizeof(struct header));
  struct floor_heap* heap = floor_heap();
  *first = heap->free_lists[class_index];
  heap->free_lists[class_index] = first;
}

FLOOR_EXPORT size_t malloc_usable_size(void* block) {
  if (block == NULL) {
    return 0;
  }
  const struct header* header = header_of(block);
  const char* end = header->start + sizeof(struct header) +
                    class_bytes(header->class_index);
  return (size_t)(end - (char*)block);
}

FLOOR_EXPORT void* memalign(size_t alignment, size_t size) {
  // Room for the alignment and for a second header in front of it.
  char* block = malloc(size + alignment);
  if (block == NULL || alignment <= FLOOR_ALIGNMENT) {
    return block;
  }
  char* aligned = block + (-(uintptr_t)block & (alignment - 1));
  if (aligned != block) {
    *header_of(aligned) = *header_of(block);
  }
  return aligned;
}

FLOOR_EXPORT void* realloc(void* block, size_t size) {
  size_t usable = malloc_usable_size(block);
  if (block != NULL && size <= usable && size >= usable / 2) {
    return block;
  }
  void* grown = malloc(size);
  if (block != NULL && grown != NULL) {
    memcpy(grown, block, size < usable ? size : usable);
    free(block);
  }
  return grown;
}
