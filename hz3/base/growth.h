// SPDX-License-Identifier: Apache-2.0
// What it is: mapping more memory, by one thread for all that find none. Each by itself, sixty-four threads mapped up to three
//   times what they used, and under a limit refused what others had mapped and not yet entered (docs/decisions/0033).
// Called by: pages, large.
// Locks: one for each box, held across the system calls that map; nobody waits for it who finds free memory.
#ifndef HZ3_BASE_GROWTH_H_
#define HZ3_BASE_GROWTH_H_

#include "hz3/base/lock.h"

HZ3_BEGIN_DECLS

struct hz3_growth {
  struct hz3_lock lock;
  size_t count;  // how often something was mapped; lock, read without
};
#define HZ3_GROWTH_INIT(rank) {HZ3_LOCK_INIT(rank), 0}

// To be read before free memory is looked for. Relaxed: one that is out of date costs another look, or a mapping too many.
HZ3_INLINE size_t hz3_growth_count(const struct hz3_growth *growth) { return hz3_read_figure(&growth->count); }

// Takes the lock; false, and without it, if something was mapped since `count` was read: then it is to be looked for again.
HZ3_INLINE bool hz3_growth_begin(struct hz3_growth *growth, size_t count) {
  hz3_lock_acquire(&growth->lock);
  if (growth->count == count) return true;
  hz3_lock_release(&growth->lock);
  return false;
}

// Releases the lock. `has_grown`: something was mapped, so those who wait are to look again.
HZ3_INLINE void hz3_growth_end(struct hz3_growth *growth, bool has_grown) {
  hz3_add_to_figure(&growth->count, has_grown);
  hz3_lock_release(&growth->lock);
}

HZ3_END_DECLS

#endif  // HZ3_BASE_GROWTH_H_
