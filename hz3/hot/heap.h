// SPDX-License-Identifier: Apache-2.0
// What it is: the per-thread heap: a page of bins and what belongs to them, and one of drains; its life from thread start to exit and fork.
// Called by: caches.c, slow.c, tick.c, stats.c, checked.c of this box only.
// Owns: all heaps (never unmapped), the list of parked ones.
// Locks: one of the shared heap, rank SHARED_HEAP; one of the lists, rank HEAPS.
// Invariant: a heap is owned by one thread, or parked, or the shared one that threads without one use under its lock, or abandoned by a fork.
#ifndef HZ3_HOT_HEAP_H_
#define HZ3_HOT_HEAP_H_

#include "hz3/hot/bin.h"
#include "hz3/large/large.h"
#include "hz3/remote/remote.h"

HZ3_BEGIN_DECLS

// As many threads that allocated a little of everything once, and sleep, may keep 2 to 3 MB each; further ones less.
enum { HZ3_CROWD_HEAPS = 32 };

enum hz3_heap_state { HZ3_HEAP_PARKED, HZ3_HEAP_OWNED, HZ3_HEAP_SHARED, HZ3_HEAP_ABANDONED };

struct hz3_heap {
  struct hz3_bin bins[HZ3_CLASS_COUNT];
  struct hz3_last_freed last;           // not in its bin yet
  uint32_t spare[HZ3_CLASS_COUNT];      // index of the previous magazine, full or empty; 0 = none
  uint16_t refill[HZ3_CLASS_COUNT];     // objects to fetch next time; doubles up to the capacity
  uint8_t level[HZ3_CLASS_COUNT];       // size of magazines to use (remote.h); of big objects what a bin may hold
  uint8_t misses[HZ3_CLASS_COUNT];      // slow paths in the step of the coarse clock that began at misses_ms
  uint8_t home;                         // of the spans that it fetches from
  uint8_t state;                        // enum hz3_heap_state, lock HEAPS
  bool is_of_a_crowd;                   // there were HZ3_CROWD_HEAPS before it: bins of big objects hold fewer, until they grow; never changes
  bool is_busy;                         // in a slow path, or being emptied: what fork finds in a bin is not to be trusted
  uint16_t empty_count;
  uint32_t slow_calls, misses_ms;
  uint32_t empty;                       // chain of empty level-0 magazines
  uint32_t trim_epoch;
  size_t spare_bytes;                   // object bytes in spares
  size_t grown_bytes;                   // object bytes that bins may hold beyond their smallest magazines
  uint64_t last_tick_ms, used_bits[2];  // classes that took a slow path since the last tick
  uint64_t freed_bits[2];               // classes of which the last slow path was a free
  uint64_t refilled_bits[2];            // classes of which a bin ran dry since the last tick
  uint64_t drain_bits[2];               // classes of which the drain has a magazine; whoever has none need not touch that page
  struct hz3_heap *next_heap;           // registry, never changes
  struct hz3_heap *next_parked, *prev_parked;  // lock HEAPS
  size_t parked_bytes;                  // object bytes when it was parked, lock HEAPS
  uint32_t held_next, held_limit;       // checked lane: the next slot of the quarantine; equal: full, or none yet
  size_t held_charge;                   // checked lane: of the blocks in it, see checked.c
  struct hz3_quarantine *quarantine;    // checked lane: freed blocks held back, NULL until the first
  bool is_letting_go;                   // checked lane: a signal handler must keep out of it
  struct hz3_large_cache large;         // large blocks that this thread freed and asks for again
  void *deferred;                       // blocks freed by a signal handler inside a slow path, linked through themselves
  // Bins that nobody allocates from, for blocks of spans that drain: full, they go to their spans (docs/decisions/0034).
  struct hz3_bin drains[HZ3_TABLE_CLASS_LAST + 1] __attribute__((aligned(HZ3_TAG_DRAIN)));
};
HZ3_STATIC_ASSERT(offsetof(struct hz3_heap, drains) == HZ3_TAG_DRAIN, "tags say so, and most threads touch one page only");
HZ3_STATIC_ASSERT(offsetof(struct hz3_heap, last) == offsetof(struct hz3_heap_start, last), "the fast path knows where it is");

// This thread's heap, marked busy, created if need be. The shared heap, locked, for a thread past its destructors or
// when there is no memory for a heap. NULL if this thread is inside a slow path already (a signal handler).
struct hz3_heap *hz3_heap_enter(void);
// The same, to free: a thread that has no heap gets the shared one a few times before it gets its own. For libc frees what it keeps of
// other threads in one that is past its destructors; and if it never allocated, nobody would ever park its heap.
struct hz3_heap *hz3_heap_enter_to_free(void);
void hz3_heap_leave(struct hz3_heap *heap);  // what any enter gave: no longer busy, or unlocked
// The shared heap, locked; NULL if this thread has it already.
struct hz3_heap *hz3_heap_enter_shared(void);
// Where hz3_heap_enter gave NULL: the heap that this thread was in the slow path with.
struct hz3_heap *hz3_heap_entered(void);

// Takes a parked heap that has been parked since `before_ms` or earlier, for draining, marked busy; NULL if none.
struct hz3_heap *hz3_heap_take_parked(uint64_t before_ms);
// With the object bytes that it holds; no longer busy. False, and nothing has changed, if parked heaps hold too much then; never for 0.
bool hz3_heap_put_parked(struct hz3_heap *heap, size_t bytes);

struct hz3_heap *hz3_heap_first(void);  // of all heaps, by next_heap; for statistics
size_t hz3_heap_count(void);            // the most threads that have allocated at once so far; lock-free

// Where many more threads have allocated than can run at once, the heap's home is that of the CPU it is on: those who share one do not run at once then.
void hz3_heap_settle(struct hz3_heap *heap);

// Of the sets of classes above.
HZ3_INLINE bool hz3_has_class(const uint64_t *bits, unsigned size_class) { return bits[size_class / 64] >> (size_class % 64) & 1; }
HZ3_INLINE void hz3_add_class(uint64_t *bits, unsigned size_class) { bits[size_class / 64] |= (uint64_t)1 << (size_class % 64); }
HZ3_INLINE void hz3_remove_class(uint64_t *bits, unsigned size_class) { bits[size_class / 64] &= ~((uint64_t)1 << (size_class % 64)); }

HZ3_INLINE bool hz3_heap_has_drain(const struct hz3_heap *heap, unsigned size_class) { return hz3_has_class(heap->drain_bits, size_class); }
HZ3_INLINE size_t hz3_bin_objects(const struct hz3_bin *bin) { return (size_t)(bin->top - bin->lo); }

// caches.c: gives everything the heap holds back to the spans. The heap is the caller's.
void hz3_heap_flush(struct hz3_heap *heap);
// stats.c: objects of the class in the heap's bin, spare and drain, and the one that waits. Racy for other threads' heaps.
size_t hz3_heap_cached_objects(const struct hz3_heap *heap, unsigned size_class);

HZ3_END_DECLS

#endif  // HZ3_HOT_HEAP_H_
