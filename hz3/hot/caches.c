// SPDX-License-Identifier: Apache-2.0
// What it is: what a heap caches of a class, see caches.h.
#include "hz3/hot/caches.h"

#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/hot/checked.h"

enum {
  FEWEST_OBJECTS = 16,        // a full bin of any class up to this size, but for heaps of a crowd:
  FEWEST_OBJECTS_BYTES = 32 * 1024,
  BIG_LEVEL_MAX = 4,          // a bin of big objects may grow to this level, 16 times the bytes of one magazine;
  ABOVE_TABLE_LEVEL_MAX = 6,  // or to this one if they are above HZ3_TABLE_MAX, since eight of those are more than that
  OWN_SHARE_BYTES = HZ3_HEAP_BYTES / 2,  // by which the bins of each heap may grow, whatever those of others do
  EMPTIES_KEPT = 8            // empty magazines a heap keeps; half of them go back in one operation
};

static size_t grown_process_bytes;  // what all heaps have grown beyond what each may; atomic, relaxed: nothing is published by it

size_t hz3_cache_fetch(struct hz3_heap *heap, unsigned c, void **out, size_t count, bool *is_clean) {
  bool is_small = c <= HZ3_SMALL_CLASS_LAST;
  if (is_small) {
    *is_clean = false;
    hz3_heap_settle(heap);
  }
  size_t got = is_small ? hz3_small_fetch(heap->home, c, out, count) : hz3_medium_fetch(c, out, count, is_clean);
  if (HZ3_CHECKED) hz3_checked_shuffle(out, got);
  return got;
}

void hz3_cache_release(unsigned c, void **objects, size_t count) {
  if (count == 0) return;
  if (HZ3_CHECKED) hz3_checked_inspect(objects, count);
  hz3_class_release(c, objects, count);
}

struct hz3_magazine *hz3_cache_take_empty(struct hz3_heap *heap, unsigned level) {
  uint32_t count;
  if (level != 0) return hz3_magazine_alloc(level, 1, &count);
  if (heap->empty_count == 0) {
    struct hz3_magazine *chain = hz3_magazine_alloc(0, EMPTIES_KEPT / 2, &count);
    if (chain == NULL) return NULL;
    heap->empty = chain->index;
    heap->empty_count = (uint16_t)count;
  }
  struct hz3_magazine *magazine = hz3_magazine_at(heap->empty);
  heap->empty = magazine->next;
  heap->empty_count--;
  return magazine;
}

static void return_empties(struct hz3_heap *heap, unsigned count) {
  if (count == 0) return;
  struct hz3_magazine *first = hz3_magazine_at(heap->empty), *last = first;
  for (unsigned i = 1; i < count; i++) last = hz3_magazine_at(last->next);
  heap->empty = last->next;
  heap->empty_count = (uint16_t)(heap->empty_count - count);
  hz3_magazine_free(first, last, count);
}

void hz3_cache_put_empty(struct hz3_heap *heap, struct hz3_magazine *magazine) {
  magazine->count = 0;
  if (magazine->level != 0) {
    hz3_magazine_free(magazine, magazine, 1);
    return;
  }
  // Atomic: a thread that lost the race for this magazine, while it was on a stack, may still be reading the field.
  __atomic_store_n(&magazine->next, heap->empty, __ATOMIC_RELAXED);
  heap->empty = magazine->index;
  if (++heap->empty_count >= EMPTIES_KEPT) return_empties(heap, EMPTIES_KEPT / 2);
}

void hz3_cache_set_spare(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  struct hz3_magazine *old = hz3_cache_spare(heap, c);
  if (old != NULL) heap->spare_bytes -= old->count * hz3_class_bytes(c);
  if (magazine != NULL) heap->spare_bytes += magazine->count * hz3_class_bytes(c);
  heap->spare[c] = magazine == NULL ? 0 : magazine->index;
}

size_t hz3_cache_capacity_at(const struct hz3_heap *heap, unsigned c, unsigned level) {
  size_t bytes = hz3_class_bytes(c);
  if (!hz3_class_is_big(c)) return level == 0 ? HZ3_MAGAZINE_CAPACITY : hz3_min(hz3_magazine_capacity(level), (size_t)2 * HZ3_MAGAZINE_BYTES / bytes);
  size_t least = bytes <= FEWEST_OBJECTS_BYTES && !heap->is_of_a_crowd ? FEWEST_OBJECTS : 0;
  return hz3_min(HZ3_MAGAZINE_CAPACITY, hz3_max(((size_t)HZ3_MAGAZINE_BYTES << level) / bytes, least));
}

static unsigned level_max(unsigned c) {
  if (!hz3_class_is_big(c)) return HZ3_MAGAZINE_LEVELS - 1;
  return c <= HZ3_TABLE_CLASS_LAST ? BIG_LEVEL_MAX : ABOVE_TABLE_LEVEL_MAX;
}

size_t hz3_cache_capacity(const struct hz3_heap *heap, unsigned c, const struct hz3_magazine *magazine) {
  return hz3_max(hz3_cache_capacity_at(heap, c, hz3_class_is_big(c) ? heap->level[c] : magazine->level), magazine->count);
}

void hz3_cache_load(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  struct hz3_bin *bin = &heap->bins[c];
  void **slots = magazine->slots;
  bin->lo = slots;
  bin->hi = slots + hz3_cache_capacity(heap, c, magazine);
  bin->top = slots + magazine->count;
}

struct hz3_magazine *hz3_cache_unload(struct hz3_bin *bin) {
  if (bin->lo == NULL) return NULL;
  struct hz3_magazine *magazine = hz3_magazine_of_slots(bin->lo);
  magazine->count = (uint16_t)hz3_bin_objects(bin);
  *bin = (struct hz3_bin){0};
  return magazine;
}

static bool fits_spare(const struct hz3_heap *heap, unsigned c, const struct hz3_magazine *spare, size_t objects) {
  return objects > 0 && spare->count + objects <= hz3_cache_capacity(heap, c, spare) && heap->spare_bytes + objects * hz3_class_bytes(c) <= HZ3_HEAP_BYTES;
}

// The older half moves. Halves, not whole magazines, where the spare has room: the next
// slow path of the class is then at least half a magazine away in either direction, and a class whose population
// wanders around a magazine's border does not pay at every crossing. An empty spare takes the bin's place: nothing is copied, and
// who allocates again gets half of it back (docs/decisions/0003).
bool hz3_cache_spill_to_spare(struct hz3_heap *heap, unsigned c, struct hz3_magazine *spare) {
  struct hz3_bin *bin = &heap->bins[c];
  size_t objects = (size_t)(bin->top - bin->lo), half = objects / 2;
  if (spare->count == 0 && fits_spare(heap, c, spare, objects)) {
    hz3_cache_set_spare(heap, c, NULL);
    hz3_cache_set_spare(heap, c, hz3_cache_unload(&heap->bins[c]));
    hz3_cache_load(heap, c, spare);
    return true;
  }
  if (!fits_spare(heap, c, spare, half)) return false;
  memcpy(spare->slots + spare->count, bin->lo, half * sizeof(void *));
  spare->count = (uint16_t)(spare->count + half);
  heap->spare_bytes += half * hz3_class_bytes(c);
  memmove(bin->lo, bin->lo + half, (objects - half) * sizeof(void *));
  bin->top -= half;
  return true;
}

// The newer half of the spare.
void hz3_cache_draw_from_spare(struct hz3_heap *heap, unsigned c, struct hz3_magazine *spare) {
  struct hz3_bin *bin = &heap->bins[c];
  size_t half = hz3_min((spare->count + 1u) / 2, (size_t)(bin->hi - bin->lo));
  spare->count = (uint16_t)(spare->count - half);
  heap->spare_bytes -= half * hz3_class_bytes(c);
  memcpy(bin->lo, spare->slots + spare->count, half * sizeof(void *));
  bin->top = bin->lo + half;
}

static size_t beyond_own_share(size_t grown_bytes) { return grown_bytes - hz3_min(grown_bytes, OWN_SHARE_BYTES); }

void hz3_cache_set_level(struct hz3_heap *heap, unsigned c, unsigned level) {
  size_t bytes = (hz3_cache_capacity_at(heap, c, level) - hz3_cache_capacity_at(heap, c, heap->level[c])) * hz3_class_bytes(c);  // modulo 2^64: may be less
  size_t before = beyond_own_share(heap->grown_bytes), now = beyond_own_share(heap->grown_bytes += bytes);
  if (now != before) __atomic_fetch_add(&grown_process_bytes, now - before, __ATOMIC_RELAXED);
  heap->level[c] = (uint8_t)level;
  struct hz3_bin *bin = &heap->bins[c];
  if (bin->lo != NULL && hz3_class_is_big(c)) bin->hi = bin->lo + hz3_max(hz3_cache_capacity_at(heap, c, level), (size_t)(bin->top - bin->lo));
}

bool hz3_cache_may_grow(const struct hz3_heap *heap, unsigned c) {
  unsigned level = heap->level[c];
  size_t now = hz3_cache_capacity_at(heap, c, level), bytes = hz3_class_bytes(c);
  if (level == level_max(c)) return false;
  if (!hz3_class_is_big(c) && (now * bytes > HZ3_MAGAZINE_BYTES || HZ3_MAGAZINE_CAPACITY != hz3_magazine_capacity(0))) return false;
  size_t more = (hz3_cache_capacity_at(heap, c, level + 1) - now) * bytes, grown = heap->grown_bytes + more;
  return grown <= OWN_SHARE_BYTES || (hz3_class_is_big(c) && grown <= HZ3_GROWN_HEAP_BYTES &&
         __atomic_load_n(&grown_process_bytes, __ATOMIC_RELAXED) + more <= HZ3_GROWN_PROCESS_BYTES);
}

void hz3_cache_release_magazine(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  hz3_cache_release(c, magazine->slots, magazine->count);
  hz3_cache_put_empty(heap, magazine);
}

// The class is looked up, for if a fork cut its thread off, the tag beside it may
// be another block's. One that has none was freed before, and its span went meanwhile.
void *hz3_cache_take_last(struct hz3_heap *heap, unsigned *c) {
  void *object = heap->last.object;
  heap->last = (struct hz3_last_freed){0};
  *c = hz3_class_of(object);
  if (object != NULL && *c == 0) hz3_fatal(HZ3_FATAL_INVALID_FREE, object, 0);
  return object;
}

void hz3_cache_check_is_not_newest(const struct hz3_bin *bin, unsigned c, const void *object) {
  if (bin->lo != NULL && hz3_bin_is_newest(bin, object)) hz3_fatal(HZ3_FATAL_DOUBLE_FREE, object, hz3_class_bytes(c));
}

void hz3_cache_check_is_not_freed(const struct hz3_heap *heap, unsigned c, const void *object) {
  if (heap->last.object == object) hz3_fatal(HZ3_FATAL_DOUBLE_FREE, object, hz3_class_bytes(c));
  hz3_cache_check_is_not_newest(&heap->bins[c], c, object);
  if (hz3_heap_has_drain(heap, c)) hz3_cache_check_is_not_newest(&heap->drains[c], c, object);
}

void hz3_cache_release_last(struct hz3_heap *heap) {
  unsigned c;
  void *object = hz3_cache_take_last(heap, &c);
  if (object == NULL) return;
  hz3_cache_check_is_not_freed(heap, c, object);  // the span could not know
  hz3_cache_release(c, &object, 1);
}

void hz3_cache_flush_drain(struct hz3_heap *heap, unsigned c) {
  if (!hz3_heap_has_drain(heap, c)) return;
  hz3_remove_class(heap->drain_bits, c);
  hz3_cache_release_magazine(heap, c, hz3_cache_unload(&heap->drains[c]));
}

void hz3_cache_flush_class(struct hz3_heap *heap, unsigned c) {
  hz3_cache_flush_drain(heap, c);
  struct hz3_magazine *both[2] = {hz3_cache_unload(&heap->bins[c]), hz3_cache_spare(heap, c)};
  hz3_cache_set_spare(heap, c, NULL);
  for (int i = 0; i < 2; i++) {
    if (both[i] != NULL) hz3_cache_release_magazine(heap, c, both[i]);
  }
  hz3_cache_set_level(heap, c, 0);
  heap->refill[c] = heap->misses[c] = 0;
}

void hz3_heap_flush(struct hz3_heap *heap) {
  if (HZ3_CHECKED) hz3_checked_empty_quarantine(heap);
  hz3_cache_release_last(heap);
  hz3_large_cache_flush(&heap->large);
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) hz3_cache_flush_class(heap, c);
  return_empties(heap, heap->empty_count);
}
