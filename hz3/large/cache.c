// SPDX-License-Identifier: Apache-2.0
// What it is: what a thread keeps of its freed large blocks, see large.h.
// Owns: nothing; a kept range counts as in use for the rest of the box.
// Locks: none; giving back takes that of the ranges.
#include "hz3/config.h"
#include "hz3/large/range.h"

// Of all threads together: none can be made to give back what it keeps.
#define CACHED_MAX_BYTES (64 * HZ3_MIB)

static size_t reserved_bytes;  // sum of all slots' bytes, atomic

static bool reserve(size_t bytes) {
  if (!HZ3_LARGE_CACHE || HZ3_CHECKED) return false;
  if (__atomic_add_fetch(&reserved_bytes, bytes, __ATOMIC_RELAXED) <= CACHED_MAX_BYTES) return true;
  __atomic_fetch_sub(&reserved_bytes, bytes, __ATOMIC_RELAXED);
  return false;
}

// A range is no block before it is in a slot, and one again after it has left it: what fork copies in between may miss a block,
// nothing worse.
static void fill_slot(struct hz3_large_slot *slot, struct hz3_range *range) {
  range->usable_bytes = 0;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  __atomic_store_n(&slot->range, range, __ATOMIC_RELAXED);
}

static void empty_slot(struct hz3_large_slot *slot) {
  __atomic_store_n(&slot->range, NULL, __ATOMIC_RELAXED);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// The hits say whether sizes come again: two for a request that a block freed just before would have served, none after one
// for which none would; one less for each free, so that a thread runs out of them that frees what others allocate.
void *hz3_large_cache_take(struct hz3_large_cache *cache, size_t bytes, size_t align, bool zero) {
  for (struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    struct hz3_range *range = slot->range;
    if (range == NULL || !hz3_large_fits(bytes, slot->bytes) || ((uintptr_t)range->start & (align - 1)) != 0) continue;
    empty_slot(slot);
    if (zero || bytes > range->touched_bytes) return hz3_range_use_again(range, bytes, zero);
    range->usable_bytes = range->touched_bytes;
    return range->start;
  }
  bool comes_again = false;
  for (int i = 0; i < HZ3_LARGE_CACHE_SLOTS; i++) comes_again |= hz3_large_fits(bytes, cache->freed_bytes[i]);
  cache->hits = comes_again ? (uint8_t)hz3_min(cache->hits + 2, 2 * HZ3_SHELF_HITS) : 0;
  return NULL;
}

bool hz3_large_cache_put(struct hz3_large_cache *cache, void *pointer) {
  struct hz3_range *range = hz3_range_of(pointer);
  if (range == NULL || range->usable_bytes == 0) return false;
  for (struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    if (slot->bytes != range->bytes || slot->range != NULL) continue;
    fill_slot(slot, range);
    return true;
  }
  return false;
}

void hz3_large_cache_learn(struct hz3_large_cache *cache, size_t bytes) {
  cache->freed_bytes[cache->next_freed++ % HZ3_LARGE_CACHE_SLOTS] = bytes;
  if (cache->hits == 0) {
    hz3_large_cache_flush(cache);
    return;
  }
  if (--cache->hits < HZ3_SHELF_HITS) return;
  struct hz3_large_slot *slot = cache->slots, *end = slot + HZ3_LARGE_CACHE_SLOTS;
  while (slot != end && slot->bytes != 0) slot++;
  if (slot != end && reserve(bytes)) __atomic_store_n(&slot->bytes, bytes, __ATOMIC_RELAXED);
}

void hz3_large_cache_flush(struct hz3_large_cache *cache) {
  cache->hits = 0;
  for (struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    if (slot->bytes == 0) return;  // none behind it is in use
    struct hz3_range *range = slot->range;
    empty_slot(slot);
    __atomic_fetch_sub(&reserved_bytes, slot->bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->bytes, 0, __ATOMIC_RELAXED);
    if (range == NULL) continue;
    range->usable_bytes = range->touched_bytes;
    hz3_large_free(range->start);
  }
}

size_t hz3_large_cache_held(const struct hz3_large_cache *cache, size_t *blocks) {
  size_t bytes = 0;
  for (const struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    if (__atomic_load_n(&slot->range, __ATOMIC_RELAXED) == NULL) continue;
    bytes += __atomic_load_n(&slot->bytes, __ATOMIC_RELAXED);
    ++*blocks;
  }
  return bytes;
}
