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

enum { HAS_WAITERS = 1 };  // of a holder: addresses are even

// What the kernel compares.
static uint32_t *lower_half(struct hz3_lock *lock) { return (uint32_t *)&lock->holder + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__); }

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Takes the lock in one step, owner and all: a signal handler that forks finds it either free or held by somebody.
static void acquire_for(struct hz3_lock *lock, uintptr_t owner) {
  for (int i = 0; i < SPIN_ROUNDS; i++) {
    uintptr_t expected = 0;
    // Acquire: pairs with the release exchange in let_go.
    if (__atomic_load_n(&lock->holder, __ATOMIC_RELAXED) == 0 &&
        __atomic_compare_exchange_n(&lock->holder, &expected, owner, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
      return;
    relax();
  }
  for (;;) {
    uintptr_t seen = 0;
    // Others may be asleep: whoever has slept leaves the bit set.
    if (__atomic_compare_exchange_n(&lock->holder, &seen, owner | HAS_WAITERS, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    if ((seen & HAS_WAITERS) == 0 &&
        !__atomic_compare_exchange_n(&lock->holder, &seen, seen | HAS_WAITERS, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      continue;
    // Half of the word is enough: it is not 0, and an owner with the same half that has taken the lock meanwhile lets go, too.
    hz3_os_futex_wait(lower_half(lock), (uint32_t)(seen | HAS_WAITERS));
  }
}

static void let_go(struct hz3_lock *lock) {
  // Release: pairs with the acquire in acquire_for.
  if (__atomic_exchange_n(&lock->holder, 0, __ATOMIC_RELEASE) & HAS_WAITERS) hz3_os_futex_wake_one(lower_half(lock));
}

static uintptr_t owner_of(const struct hz3_lock *lock) { return __atomic_load_n(&lock->holder, __ATOMIC_RELAXED) & ~(uintptr_t)HAS_WAITERS; }

void hz3_lock_acquire(struct hz3_lock *lock) {
  if (HZ3_UNLIKELY(held_ranks & FORKING)) return;
  HZ3_ASSERT((held_ranks >> lock->rank) == 0);
  acquire_for(lock, (uintptr_t)&held_ranks);
  held_ranks |= 1u << lock->rank;
}

void hz3_lock_release(struct hz3_lock *lock) {
  if (HZ3_UNLIKELY(held_ranks & FORKING)) return;
  held_ranks &= ~(1u << lock->rank);
  let_go(lock);
}

bool hz3_lock_is_mine(const struct hz3_lock *lock) {
  // Only this thread ever stores its own address, so a relaxed load cannot be wrong about equality.
  return owner_of(lock) == (uintptr_t)&held_ranks;
}

// Fork takes every lock, several of one rank: no rank bookkeeping, and an owner that is not this thread's word, so that
// release_for_fork can tell its own locks from those of an interrupted section.
void hz3_lock_acquire_for_fork(struct hz3_lock *lock) {
  if (!hz3_lock_is_mine(lock)) acquire_for(lock, (uintptr_t)lock);
}

void hz3_lock_release_for_fork(struct hz3_lock *lock) {
  if (owner_of(lock) == (uintptr_t)lock) let_go(lock);
}

void hz3_lock_set_forking(bool forking) {
  if (forking) held_ranks |= FORKING;
  else held_ranks &= ~FORKING;
}
