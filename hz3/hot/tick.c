// SPDX-License-Identifier: Apache-2.0
// What it is: what is given back with time, or on demand, see tick.h.
#include "hz3/hot/tick.h"

#include "hz3/base/os.h"
#include "hz3/hot/caches.h"
#include "hz3/hot/checked.h"

enum {
  OBJECTS_PER_TICK = 64 * 1024,  // that a tick takes out of the depot, and
  HEAPS_PER_TICK = 16,           // parked heaps that it drains, and
  SPANS_PER_TICK = 64            // spans that it purges within: no more than a caller can wait for, 1 to 3 ms
};

// Atomic, all relaxed: nothing is published by them, and a bound that is a moment old is as good.
static uint64_t last_tick_ms;
static uint32_t trim_epoch;
uint32_t hz3_coarse_now_ms;

// A thread that was held up may set it back, until the next one looks at the clock.
static void advance_coarse_clock(uint32_t now_ms) {
  if (now_ms - __atomic_load_n(&hz3_coarse_now_ms, __ATOMIC_RELAXED) >= HZ3_COARSE_STEP_MS) __atomic_store_n(&hz3_coarse_now_ms, now_ms, __ATOMIC_RELAXED);
}

static void lower_level(struct hz3_heap *heap, unsigned c) {
  unsigned level = heap->level[c] - 1u;
  if (hz3_cache_capacity_at(heap, c, level) == 0) hz3_cache_flush_class(heap, c);  // nobody looks into the bin of such a class
  else hz3_cache_set_level(heap, c, level);
}

// Gives up to `count` magazines back, and not much more than so many objects; returns how many these were.
static size_t release_from_depot(struct hz3_heap *heap, unsigned c, uint32_t count, size_t most_objects) {
  size_t objects = 0;
  for (; count > 0 && objects < most_objects; count--) {
    struct hz3_magazine *magazine = hz3_depot_take_any(c);
    if (magazine == NULL) break;
    objects += magazine->count;
    hz3_cache_release_magazine(heap, c, magazine);
  }
  return objects;
}

static void flush_parked(uint64_t before_ms, uint32_t most) {
  for (struct hz3_heap *heap; most > 0 && (heap = hz3_heap_take_parked(before_ms)) != NULL; most--) {
    hz3_heap_flush(heap);
    hz3_heap_put_parked(heap, 0);
  }
}

// What threads without a heap do is little: nobody counts on finding this one warm.
static void flush_shared(void) {
  struct hz3_heap *heap = hz3_heap_enter_shared();
  if (heap == NULL) return;
  hz3_heap_flush(heap);
  hz3_heap_leave(heap);
}

// Of a class that is shrinking, spans of which little is out: what is left may live long.
static void purge_sparse_spans(uint32_t now_ms) {
  size_t left = SPANS_PER_TICK;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT && left > 0; c++) {
    struct hz3_class_use use = hz3_class_use(c);
    if (hz3_class_is_shrinking(c, &use)) left -= hz3_class_purge_sparse(c, now_ms, left);
  }
}

static void tick_own(struct hz3_heap *heap, uint64_t now) {
  heap->last_tick_ms = now;
  uint32_t epoch = __atomic_load_n(&trim_epoch, __ATOMIC_RELAXED);
  bool everything = heap->trim_epoch != epoch;
  heap->trim_epoch = epoch;
  hz3_cache_release_last(heap);  // it may be all that is left of its class
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    bool idle = !hz3_has_class(heap->used_bits, c);
    if (heap->bins[c].lo != NULL && (idle || everything)) hz3_cache_flush_class(heap, c);
    hz3_cache_flush_drain(heap, c);  // the class may drain no more, and what was left in there would stay
    if (heap->misses[c] < 2 && heap->level[c] > 0) lower_level(heap, c);
    heap->misses[c] = 0;
  }
  hz3_large_cache_flush(&heap->large);
  heap->used_bits[0] = heap->used_bits[1] = 0;
  heap->refilled_bits[0] = heap->refilled_bits[1] = 0;
}

void hz3_tick(struct hz3_heap *heap) {
  // The clock is read after the time of the last tick, so that their difference is not negative.
  uint64_t last = __atomic_load_n(&last_tick_ms, __ATOMIC_RELAXED), now = hz3_os_now_ms();
  advance_coarse_clock((uint32_t)now);
  if (now - heap->last_tick_ms >= HZ3_TICK_MS) tick_own(heap, now);
  // One thread does the common part.
  if (now - last < HZ3_TICK_MS || !__atomic_compare_exchange_n(&last_tick_ms, &last, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    return;
  uint32_t unused[HZ3_CLASS_COUNT];
  hz3_depot_take_low_water(unused);
  size_t left = OBJECTS_PER_TICK;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) left -= hz3_min(left, release_from_depot(heap, c, (unused[c] + 1) / 2, left));
  flush_parked(now - HZ3_TICK_MS, HEAPS_PER_TICK);
  flush_shared();
  if (!hz3_pages_are_hollow_purges_early()) purge_sparse_spans((uint32_t)now);
  hz3_pages_purge_idle();
  hz3_large_purge_idle();
}

bool hz3_reclaim(struct hz3_heap *heap) {
  bool held = HZ3_CHECKED && hz3_checked_empty_large_quarantine();
  hz3_heap_flush(heap);
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) release_from_depot(heap, c, UINT32_MAX, SIZE_MAX);
  flush_parked(UINT64_MAX, UINT32_MAX);
  flush_shared();
  __atomic_fetch_add(&trim_epoch, 1, __ATOMIC_RELAXED);
  bool pages = hz3_pages_trim(true);
  return hz3_large_trim(true) || pages || held;
}
