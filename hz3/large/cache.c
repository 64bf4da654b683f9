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

// The range is entered and left in this order, so that what fork copies in between may miss a block, nothing worse.
static void set_cached(struct hz3_range *range, bool is_cached) {
  __atomic_store_n(&range->is_cached, is_cached, __ATOMIC_RELAXED);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static void set_slot(struct hz3_large_slot *slot, struct hz3_range *range) {
  __atomic_store_n(&slot->range, range, __ATOMIC_RELAXED);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

void *hz3_large_cache_take(struct hz3_large_cache *cache, size_t bytes, size_t align, bool zero) {
  cache->asked = HZ3_SHELF_HITS;
  for (struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    struct hz3_range *range = slot->range;
    // As much may be left over as in a range cut for the block.
    if (range == NULL || bytes > slot->bytes || bytes <= slot->bytes - slot->bytes / 16) continue;
    if (((uintptr_t)range->start & (align - 1)) != 0) continue;
    set_slot(slot, NULL);
    set_cached(range, false);
    hz3_range_use_again(range, bytes, zero);
    return range->start;
  }
  return NULL;
}

bool hz3_large_cache_put(struct hz3_large_cache *cache, void *pointer) {
  struct hz3_range *range = hz3_range_of(pointer);
  if (range == NULL) return false;
  for (struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    if (slot->bytes != range->bytes || slot->range != NULL) continue;
    set_cached(range, true);
    set_slot(slot, range);
    return true;
  }
  return false;
}

void hz3_large_cache_learn(struct hz3_large_cache *cache, size_t bytes) {
  bool is_hit = false;
  for (int i = 0; i < HZ3_LARGE_CACHE_SLOTS; i++) is_hit |= cache->freed_bytes[i] == bytes;
  cache->freed_bytes[cache->next_freed++ % HZ3_LARGE_CACHE_SLOTS] = bytes;
  if (!is_hit || cache->asked == 0) {  // other sizes, or a thread that frees what others allocate
    hz3_large_cache_flush(cache);
    return;
  }
  cache->asked--;
  if (cache->hits < HZ3_SHELF_HITS) cache->hits++;
  if (cache->hits < HZ3_SHELF_HITS) return;
  struct hz3_large_slot *slot = cache->slots, *end = slot + HZ3_LARGE_CACHE_SLOTS;
  while (slot != end && slot->bytes != 0) slot++;
  if (slot != end && reserve(bytes)) __atomic_store_n(&slot->bytes, bytes, __ATOMIC_RELAXED);
}

void hz3_large_cache_flush(struct hz3_large_cache *cache) {
  cache->hits = 0;
  for (struct hz3_large_slot *slot = cache->slots; slot != cache->slots + HZ3_LARGE_CACHE_SLOTS; slot++) {
    if (slot->bytes == 0) return;  // none behind it is in use
    struct hz3_range *range = slot->range;
    set_slot(slot, NULL);
    __atomic_fetch_sub(&reserved_bytes, slot->bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->bytes, 0, __ATOMIC_RELAXED);
    if (range == NULL) continue;
    set_cached(range, false);
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
