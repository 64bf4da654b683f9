// SPDX-License-Identifier: Apache-2.0
// What it is: the allocator's only lock, a futex mutex with a rank and an owner.
// Called by: every box.
// Invariant: a thread takes locks in strictly rising rank. The owner lets a fork from a signal handler see that it interrupted
//   its own critical section; it is taken and left in one step with the lock.
#ifndef HZ3_BASE_LOCK_H_
#define HZ3_BASE_LOCK_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

// Lock order, lowest first. At most one lock of each rank is held, except at fork.
enum hz3_lock_rank {
  HZ3_RANK_SHARED_HEAP = 1,  // the heap of threads without one, for a whole slow path
  HZ3_RANK_HEAPS,      // registry of heaps, parked heaps
  HZ3_RANK_CLASS,      // one size class of small or medium
  HZ3_RANK_LARGE_GROWTH,  // mapping more large ranges
  HZ3_RANK_LARGE,      // large ranges
  HZ3_RANK_PAGES_GROWTH,  // mapping more chunks
  HZ3_RANK_PAGES,      // chunks and slices
  HZ3_RANK_MAGAZINES,  // carving of new magazines
  HZ3_RANK_METADATA,   // the allocator's own bookkeeping memory
  HZ3_RANK_QUARANTINE,  // checked lane: large blocks held back; blocks of no bytes
};

struct hz3_lock {
  uintptr_t holder;  // an address unique to the holding thread, or that of the lock itself while it is held for a fork;
                     // the lowest bit: others wait. 0: free
  uint32_t rank;
};

#define HZ3_LOCK_INIT(r) {0, (r)}

// Waits for the lock, which must be of a higher rank than all that this thread holds. Not recursive; keeps errno.
void hz3_lock_acquire(struct hz3_lock *lock);
void hz3_lock_release(struct hz3_lock *lock);  // by the thread that acquired it
// Whether this thread acquired it; false for a lock that is held for a fork.
bool hz3_lock_is_mine(const struct hz3_lock *lock);

// For fork only, by each box's *_fork_prepare. Acquires unless this thread holds it already (a handler forks inside our critical section).
void hz3_lock_acquire_for_fork(struct hz3_lock *lock);
// By *_fork_release, in parent and child: releases what acquire_for_fork took; the interrupted section's own lock stays held.
void hz3_lock_release_for_fork(struct hz3_lock *lock);
// To be set once this thread has taken every lock for a fork, and cleared before it releases the first: it may allocate in between.
void hz3_lock_set_forking(bool forking);

HZ3_END_DECLS

#endif  // HZ3_BASE_LOCK_H_
