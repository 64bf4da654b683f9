// SPDX-License-Identifier: Apache-2.0
// What it is: what threads share: magazines (arrays of pointers to free objects) and the depot, lock-free stacks of them
//   per class. A whole magazine changes hands by one compare-and-swap, whoever allocated its objects.
// Called by: hot.
// Owns: all magazines (type-stable, never unmapped), the depot, the pools of empty magazines.
// Locks: one for carving new magazines, rank MAGAZINES; the depot and the pools take none.
// Invariant: a magazine is at any time in exactly one place: a bin, a heap's spare or chain of empty ones, a depot stack or a pool.
#ifndef HZ3_REMOTE_REMOTE_H_
#define HZ3_REMOTE_REMOTE_H_

#include "hz3/base/base.h"
#include "hz3/base/size_class.h"

HZ3_BEGIN_DECLS

// Objects are in slots[0 .. count - 1].
struct hz3_magazine {
  uint32_t next;   // index of the magazine below on a stack, atomic there
  uint32_t index;  // its own
  uint16_t count;
  uint8_t level;
  bool is_own;  // on a warm stack: whoever put it down is likely to want it back
  void *slots[];
};

enum { HZ3_MAGAZINE_UNIT_BYTES = 512, HZ3_MAGAZINE_SLAB_UNITS = 128 };
enum { HZ3_MAGAZINE_LEVELS = 6 };  // 1, 2, 4 .. 32 units: 62, 126, 254, 510, 1022, 2046 objects
HZ3_INLINE size_t hz3_magazine_capacity(unsigned level) {
  return (((size_t)HZ3_MAGAZINE_UNIT_BYTES << level) - sizeof(struct hz3_magazine)) / sizeof(void *);
}

extern char *hz3_magazine_slabs[];  // atomic, each entry set once
// Any index that was ever given out. NULL if the slab is not seen yet, by who did not get the index by an acquire.
HZ3_INLINE struct hz3_magazine *hz3_magazine_seen_at(uint32_t index) {
  char *slab = __atomic_load_n(&hz3_magazine_slabs[index / HZ3_MAGAZINE_SLAB_UNITS], __ATOMIC_RELAXED);
  return slab == NULL ? NULL : (struct hz3_magazine *)(slab + (size_t)(index % HZ3_MAGAZINE_SLAB_UNITS) * HZ3_MAGAZINE_UNIT_BYTES);
}
// The index of a magazine that the caller owns, or got by an acquire.
HZ3_INLINE struct hz3_magazine *hz3_magazine_at(uint32_t index) {
  struct hz3_magazine *magazine = hz3_magazine_seen_at(index);
  if (magazine == NULL) __builtin_unreachable();
  return magazine;
}
HZ3_INLINE struct hz3_magazine *hz3_magazine_of_slots(void **slots) {
  return (struct hz3_magazine *)((char *)slots - offsetof(struct hz3_magazine, slots));
}

void hz3_remote_init(unsigned cpus);  // sizes the depot for the CPUs that were counted last; idempotent

// A chain of up to `wanted` empty magazines of the level, linked by `next` (the last one's is meaningless); *count says
// how many. NULL when out of memory. Thread-safe, lock-free unless new ones must be carved.
struct hz3_magazine *hz3_magazine_alloc(unsigned level, uint32_t wanted, uint32_t *count);
// Takes back a chain of empty magazines of one level.
void hz3_magazine_free(struct hz3_magazine *first, struct hz3_magazine *last, uint32_t count);

// Lock-free. Push gives up ownership of the magazine and its objects; false, and nothing has changed, unless one of these holds:
// - this shard has fewer magazines of the class than its share of `limit`;
// - fewer than `always_below_bytes` of all classes are warm in this shard: put down by its CPUs in this way, and not cool yet, see below;
// - the objects are of up to 256 bytes, and this CPU has less than HZ3_MAGAZINE_BYTES of the class.
bool hz3_depot_push(unsigned size_class, struct hz3_magazine *magazine, size_t limit, size_t always_below_bytes);
// The same for objects that the thread allocated itself, as far as that can be known: false unless this CPU has put down fewer than `limit`
// magazines of the class that are still there. These let nothing cool, for the thread is likely to want them back (docs/decisions/0038).
bool hz3_depot_push_own(unsigned size_class, struct hz3_magazine *magazine, size_t limit);
// For a refill: the newest magazine that this CPU pushed, for its objects are in this CPU's cache. Otherwise the oldest of
// another one, once HZ3_COOL_BYTES have been pushed after it: memory that another CPU has just used costs more than memory
// that has left that CPU's cache (docs/decisions/0021). NULL if there is neither in this CPU's shard, nor in one other, which is
// another one next time (docs/decisions/0015).
struct hz3_magazine *hz3_depot_pop(unsigned size_class);
struct hz3_magazine *hz3_depot_take_any(unsigned size_class);  // any magazine: the oldest, or one of the CPU with most; NULL if empty
// One to go along with what is released: the newest of this CPU, else a cool one of its shard, or of one other, as for a refill. What
// another CPU has just put down is left to that one, and to ticks: most of it would go back to spans that this CPU has nothing to do with
// (docs/decisions/0038).
struct hz3_magazine *hz3_depot_take_own(unsigned size_class);
// For the tick: how many magazines of each class nobody needed since the last call; resets the marks.
void hz3_depot_take_low_water(uint32_t unused[HZ3_CLASS_COUNT]);

// Objects of the class in the depot. Walks the stacks: statistics, racy.
size_t hz3_depot_objects(unsigned size_class);

void hz3_remote_fork_prepare(void);
void hz3_remote_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_REMOTE_REMOTE_H_
