// SPDX-License-Identifier: Apache-2.0
// What it is: the whole allocator as functions without libc's contract (no errno, no overflow rules).
// Called by: the API edge, hz3/malloc.c, hz3/new.cc and hz3/info.c; checked.c of this box.
// Needs: bin.h for the fast paths.
#ifndef HZ3_HOT_HOT_H_
#define HZ3_HOT_HOT_H_

#include "hz3/hot/bin.h"

HZ3_BEGIN_DECLS

// Zeroed block; memory known to be clean is not cleared. NULL with errno ENOMEM.
void *hz3_calloc(size_t bytes);
// Block of at least `bytes` at a multiple of `align` (a power of two). NULL with errno ENOMEM.
void *hz3_aligned_alloc(size_t align, size_t bytes);
// pointer != NULL, bytes > 0. In place where possible. NULL with errno ENOMEM; the old block is then untouched.
void *hz3_realloc(void *pointer, size_t bytes);
// Bytes the user may use; 0 for NULL. Constant for the block's life.
size_t hz3_usable_size(const void *pointer);
// Gives every whole page in which there is nothing but what is free, and what no other running thread caches, back to the kernel (`checked`:
// every free slice). True if anything was given back. Thread-safe.
bool hz3_trim(void);

// A consistent enough picture for humans and mallinfo2: counters are read without stopping other threads.
struct hz3_class_stats {  // object_bytes and span_bytes are bytes, the others counts
  size_t object_bytes, live_objects, cached_objects, spans, span_bytes;
};
struct hz3_stats {
  size_t mapped_bytes;     // address space from the kernel
  size_t live_bytes;       // in blocks the program holds, rounded to their classes
  size_t cached_bytes;     // free objects in bins, magazines and the depot
  size_t free_bytes;       // free in spans, slices and ranges
  size_t dirty_bytes;      // the part of free slices and ranges that still costs memory
  size_t metadata_bytes;   // the allocator's own records, without the tables that are indexed by address
  size_t large_blocks, large_bytes;
  size_t purges, heaps;
  struct hz3_class_stats classes[HZ3_CLASS_COUNT];  // of which the bytes above are sums; the first is none
};
// Fills the whole struct. Thread-safe.
void hz3_get_stats(struct hz3_stats *stats);

HZ3_END_DECLS

#endif  // HZ3_HOT_HOT_H_
