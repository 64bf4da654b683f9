// SPDX-License-Identifier: Apache-2.0
// What it is: a lock-free stack of magazines in one 64-bit word: top's index, its height, and a version that tells a word from the same one later (ABA).
// Called by: remote.c only.
// Needs: magazines are type-stable (never unmapped, never anything else), so reading `next` of one that another thread
//   has just popped is harmless: the version has changed and the compare-and-swap fails.
// Invariant: word = index (24 bits) | height (10 bits) | version (30 bits); every successful change adds 1 to the version, so a
//   stale word could only pass after exactly k * 2^30 changes between a thread's load and its compare-and-swap.
#ifndef HZ3_REMOTE_STACK_H_
#define HZ3_REMOTE_STACK_H_

#include "hz3/remote/remote.h"

HZ3_BEGIN_DECLS

enum { HZ3_STACK_INDEX_BITS = 24, HZ3_STACK_HEIGHT_BITS = 10, HZ3_STACK_MAX = (1 << HZ3_STACK_HEIGHT_BITS) - 1 };

struct hz3_stack {
  uint64_t word;
  uint32_t low_water;  // fewest magazines since the last tick; a hint, so racy stores are fine
};

HZ3_INLINE uint32_t hz3_stack_index(uint64_t word) { return (uint32_t)(word & (((uint64_t)1 << HZ3_STACK_INDEX_BITS) - 1)); }
HZ3_INLINE uint32_t hz3_stack_height(uint64_t word) { return (uint32_t)(word >> HZ3_STACK_INDEX_BITS) & HZ3_STACK_MAX; }

HZ3_INLINE uint64_t hz3_stack_next_word(uint64_t old, uint32_t index, uint32_t height) {
  uint64_t version = (old >> (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS)) + 1;
  return (uint64_t)index | (uint64_t)height << HZ3_STACK_INDEX_BITS | version << (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS);
}

// Pushes `count` magazines linked from first to last by `next`. At HZ3_STACK_MAX the height is either kept as a lower
// bound (may_saturate) or the push is refused.
HZ3_INLINE bool hz3_stack_push(struct hz3_stack *stack, struct hz3_magazine *first, struct hz3_magazine *last,
                               uint32_t count, bool may_saturate) {
  uint64_t old = __atomic_load_n(&stack->word, __ATOMIC_RELAXED), fresh;
  do {
    uint32_t height = hz3_stack_height(old) + count;
    if (height > HZ3_STACK_MAX) {
      if (!may_saturate) return false;
      height = HZ3_STACK_MAX;
    }
    __atomic_store_n(&last->next, hz3_stack_index(old), __ATOMIC_RELAXED);
    fresh = hz3_stack_next_word(old, first->index, height);
    // Release: pairs with the acquire in pop, so that the popper sees the slots.
  } while (!__atomic_compare_exchange_n(&stack->word, &old, fresh, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
  return true;
}

// Pops up to `wanted` magazines, linked by `next` (the last one's next is stale); *count says how many. NULL if empty.
HZ3_INLINE struct hz3_magazine *hz3_stack_pop(struct hz3_stack *stack, uint32_t wanted, uint32_t *count) {
  // Acquire: pairs with the release in push.
  uint64_t old = __atomic_load_n(&stack->word, __ATOMIC_ACQUIRE), fresh;
  uint32_t left;
  do {
    uint32_t rest = hz3_stack_index(old);
    if (rest == 0) return NULL;
    // `next` is always 0 or the index of some magazine, so a stale chain is safe to walk, up to one that is not seen yet; the swap below
    // then fails.
    for (*count = 0; *count < wanted && rest != 0; ++*count) {
      const struct hz3_magazine *magazine = hz3_magazine_seen_at(rest);
      rest = magazine == NULL ? 0 : __atomic_load_n(&magazine->next, __ATOMIC_RELAXED);
    }
    left = hz3_stack_height(old) > *count ? hz3_stack_height(old) - *count : 0;
    fresh = hz3_stack_next_word(old, rest, left);
  } while (!__atomic_compare_exchange_n(&stack->word, &old, fresh, true, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE));
  if (left < __atomic_load_n(&stack->low_water, __ATOMIC_RELAXED))
    __atomic_store_n(&stack->low_water, left, __ATOMIC_RELAXED);
  return hz3_magazine_at(hz3_stack_index(old));
}

// Takes all magazines, linked by `next` from the newest to the oldest (whose next is 0). NULL if empty.
HZ3_INLINE struct hz3_magazine *hz3_stack_take_all(struct hz3_stack *stack) {
  uint64_t old = __atomic_load_n(&stack->word, __ATOMIC_RELAXED);
  do {
    if (hz3_stack_index(old) == 0) return NULL;
    // Acquire: pairs with the release in push.
  } while (!__atomic_compare_exchange_n(&stack->word, &old, hz3_stack_next_word(old, 0, 0), true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED));
  __atomic_store_n(&stack->low_water, 0, __ATOMIC_RELAXED);
  return hz3_magazine_at(hz3_stack_index(old));
}

HZ3_END_DECLS

#endif  // HZ3_REMOTE_STACK_H_
