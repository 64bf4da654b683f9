// SPDX-License-Identifier: Apache-2.0
// What it is: what a heap caches of a class, in magazines: its bin, its spare and its drain, and how much each may hold.
// Called by: slow.c, tick.c of this box only.
// Locks: none of its own; the heap is the caller's.
#ifndef HZ3_HOT_CACHES_H_
#define HZ3_HOT_CACHES_H_

#include "hz3/config.h"
#include "hz3/hot/class_spans.h"
#include "hz3/hot/heap.h"

HZ3_BEGIN_DECLS

enum {
  HZ3_GROWN_HEAP_BYTES = (size_t)8 * HZ3_HEAP_BYTES,     // by which all bins of a heap may grow, while those of all heaps together grow
  HZ3_GROWN_PROCESS_BYTES = (size_t)32 * HZ3_HEAP_BYTES  // by no more than this, beyond the half of HZ3_HEAP_BYTES that every heap may have
};

// Objects straight from and to their spans.
size_t hz3_cache_fetch(struct hz3_heap *heap, unsigned size_class, void **out, size_t count, bool *is_clean);
void hz3_cache_release(unsigned size_class, void **objects, size_t count);
void hz3_cache_release_magazine(struct hz3_heap *heap, unsigned size_class, struct hz3_magazine *magazine);  // which is empty then, and the heap's

// An empty magazine, NULL when out of memory; and back.
struct hz3_magazine *hz3_cache_take_empty(struct hz3_heap *heap, unsigned level);
void hz3_cache_put_empty(struct hz3_heap *heap, struct hz3_magazine *magazine);

// Big objects are those of which the smallest magazine may not be full. Their bins grow by what they may hold, those of
// the others by the size of their magazines.
HZ3_INLINE bool hz3_class_is_big(unsigned size_class) { return hz3_class_bytes(size_class) > HZ3_MAGAZINE_BYTES / HZ3_MAGAZINE_CAPACITY; }
// Of the magazine for a bin.
HZ3_INLINE unsigned hz3_cache_magazine_level(const struct hz3_heap *heap, unsigned size_class) {
  return hz3_class_is_big(size_class) ? 0 : heap->level[size_class];
}
// Objects that a bin may hold at a level. 0: blocks of this class go to and from their spans one by one.
size_t hz3_cache_capacity_at(const struct hz3_heap *heap, unsigned size_class, unsigned level);
size_t hz3_cache_capacity(const struct hz3_heap *heap, unsigned size_class, const struct hz3_magazine *magazine);  // of a bin with this magazine
bool hz3_cache_may_grow(const struct hz3_heap *heap, unsigned size_class);  // to the next level
void hz3_cache_set_level(struct hz3_heap *heap, unsigned size_class, unsigned level);

// The bin gets the magazine.
void hz3_cache_load(struct hz3_heap *heap, unsigned size_class, struct hz3_magazine *magazine);
// The bin's or drain's magazine with all its objects; there are none then. NULL if there was none.
struct hz3_magazine *hz3_cache_unload(struct hz3_bin *bin);

HZ3_INLINE struct hz3_magazine *hz3_cache_spare(const struct hz3_heap *heap, unsigned size_class) {
  return heap->spare[size_class] == 0 ? NULL : hz3_magazine_at(heap->spare[size_class]);
}
void hz3_cache_set_spare(struct hz3_heap *heap, unsigned size_class, struct hz3_magazine *magazine);
// Half of a full bin moves to its spare; false if there is no room. The reverse, for an empty bin.
bool hz3_cache_spill_to_spare(struct hz3_heap *heap, unsigned size_class, struct hz3_magazine *spare);
void hz3_cache_draw_from_spare(struct hz3_heap *heap, unsigned size_class, struct hz3_magazine *spare);

// The block that waits, which is none then; NULL if none did. A pointer that cannot be a block ends the process.
void *hz3_cache_take_last(struct hz3_heap *heap, unsigned *size_class);
void hz3_cache_release_last(struct hz3_heap *heap);
void hz3_cache_check_is_not_newest(const struct hz3_bin *bin, unsigned size_class, const void *object);  // a double free ends the process
// The same for the block that waits, and for bin and drain of the class.
void hz3_cache_check_is_not_freed(const struct hz3_heap *heap, unsigned size_class, const void *object);
void hz3_cache_flush_drain(struct hz3_heap *heap, unsigned size_class);
// Everything of the class but the block that waits.
void hz3_cache_flush_class(struct hz3_heap *heap, unsigned size_class);

HZ3_END_DECLS

#endif  // HZ3_HOT_CACHES_H_
