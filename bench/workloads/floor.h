// SPDX-License-Identifier: Apache-2.0
//
// What the two null allocators share: chunks of address space and one heap per
// thread that a later thread takes over.
//
// Called by: floor_bump.c, floor_lifo.c, floor_api.c.
// Needs: mmap and pthread keys.
// Invariant: a heap belongs to one running thread or to the list of heaps that
//   wait for one, so their number is that of the most threads at a time.
#ifndef BENCH_WORKLOADS_FLOOR_H_
#define BENCH_WORKLOADS_FLOOR_H_

#include <stddef.h>
#include <stdint.h>

// Chunks start at multiples of their usual size, so that the end of the chunk
// of any block can be found. Pages that nobody touches cost nothing.
#define FLOOR_CHUNK ((size_t)1 << 30)
#define FLOOR_ALIGNMENT ((size_t)16)
#define FLOOR_CLASSES 512

#define FLOOR_EXPORT __attribute__((visibility("default")))

struct floor_chunk {
  char* end;
};

struct floor_heap {
  char* next;  // first free byte of the chunk
  char* end;
  struct floor_heap* waiting;
  char* last;                       // floor_bump only: the newest block
  void* free_lists[FLOOR_CLASSES];  // floor_lifo only
};

extern __thread struct floor_heap* floor_own_heap;

// Gives the calling thread its heap.
struct floor_heap* floor_adopt_heap(void);

// Starts a chunk with room for `size` bytes; NULL when there is none.
void* floor_refill(struct floor_heap* heap, size_t size);

static inline struct floor_heap* floor_heap(void) {
  struct floor_heap* heap = floor_own_heap;
  return __builtin_expect(heap != NULL, 1) ? heap : floor_adopt_heap();
}

static inline size_t floor_round(size_t size) {
  return (size + FLOOR_ALIGNMENT - 1) & ~(FLOOR_ALIGNMENT - 1);
}

// Takes `size` bytes, a multiple of the alignment, from the chunk.
static inline void* floor_carve(struct floor_heap* heap, size_t size) {
  char* block = heap->next;
  if (__builtin_expect((size_t)(heap->end - block) < size, 0)) {
    return floor_refill(heap, size);
  }
  heap->next = block + size;
  return block;
}

#endif  // BENCH_WORKLOADS_FLOOR_H_
