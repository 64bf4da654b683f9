// SPDX-License-Identifier: Apache-2.0
// What it is: the futex mutex, see lock.h.
#include "hz3/base/lock.h"

#include "hz3/base/fatal.h"
#include "hz3/base/os.h"

// Rounds of spinning before sleeping: a section lasts well under a microsecond, a sleep and wake about ten.
enum { SPIN_ROUNDS = 100 };

// One word per thread: its address names the thread, its bits are the ranks it holds (asserted in debug builds).
// FORKING: the thread holds every lock for a fork. Fork handlers of others that run meanwhile may allocate, so taking
// and releasing single locks is a no-op for it.
#define FORKING (1u << 31)
static __thread uint32_t held_ranks __attribute__((tls_model("initial-exec")));

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static void acquire_state(struct hz3_lock *lock) {
  for (int i = 0; i < SPIN_ROUNDS; i++) {
    uint32_t expected = 0;
    // Acquire: pairs with the release exchange in hz3_lock_release.
    if (__atomic_load_n(&lock->state, __ATOMIC_RELAXED) == 0 &&
        __atomic_compare_exchange_n(&lock->state, &expected, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return;
    relax();
  }
  while (__atomic_exchange_n(&lock->state, 2, __ATOMIC_ACQUIRE) != 0) hz3_os_futex_wait(&lock->state, 2);
}

void hz3_lock_acquire(struct hz3_lock *lock) {
  if (HZ3_UNLIKELY(held_ranks & FORKING)) return;
  HZ3_ASSERT((held_ranks >> lock->rank) == 0);
  acquire_state(lock);
  __atomic_store_n(&lock->owner, &held_ranks, __ATOMIC_RELAXED);
  held_ranks |= 1u << lock->rank;
}

void hz3_lock_release(struct hz3_lock *lock) {
  if (HZ3_UNLIKELY(held_ranks & FORKING)) return;
  held_ranks &= ~(1u << lock->rank);
  __atomic_store_n(&lock->owner, NULL, __ATOMIC_RELAXED);
  // Release: pairs with the acquire in acquire_state.
  if (__atomic_exchange_n(&lock->state, 0, __ATOMIC_RELEASE) == 2) hz3_os_futex_wake_one(&lock->state);
}

bool hz3_lock_is_mine(const struct hz3_lock *lock) {
  // Only this thread ever stores its own address, so a relaxed load cannot be wrong about equality.
  return __atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == &held_ranks;
}

void hz3_lock_acquire_for_fork(struct hz3_lock *lock) {
  if (hz3_lock_is_mine(lock)) return;
  acquire_state(lock);
  // Fork takes every lock, several of one rank: no rank bookkeeping, and an owner that is not this thread's word,
  // so that release_for_fork can tell its own locks from those of an interrupted section.
  __atomic_store_n(&lock->owner, lock, __ATOMIC_RELAXED);
}

void hz3_lock_release_for_fork(struct hz3_lock *lock) {
  if (__atomic_load_n(&lock->owner, __ATOMIC_RELAXED) != lock) return;
  __atomic_store_n(&lock->owner, NULL, __ATOMIC_RELAXED);
  if (__atomic_exchange_n(&lock->state, 0, __ATOMIC_RELEASE) == 2) hz3_os_futex_wake_one(&lock->state);
}

void hz3_lock_set_forking(bool forking) {
  if (forking) held_ranks |= FORKING;
  else held_ranks &= ~FORKING;
}
