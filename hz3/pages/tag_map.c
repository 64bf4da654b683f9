// SPDX-License-Identifier: Apache-2.0
// What it is: filling and widening the tag table, see tag_map.h.
// Owns: hz3_tag_map.
// Locks: hz3_pages.lock, held by the caller of functions ending in _locked.
#include "hz3/pages/tag_map.h"

#include "hz3/base/os.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages_internal.h"

// 256 KiB of table, of which only touched pages cost memory: one window serves all but huge heaps.
#define FIRST_WINDOW_BYTES ((uintptr_t)1 << 33)
// 1 GiB of table. Chunks further apart than this are found through the page map.
#define LAST_WINDOW_BYTES ((uintptr_t)1 << 45)

static const struct hz3_tag_map no_tags;
const struct hz3_tag_map *hz3_tag_map = &no_tags;

static size_t table_bytes(uintptr_t window_bytes) {
  return sizeof(struct hz3_tag_map) + window_bytes / HZ3_SLICE_BYTES * sizeof(int16_t);
}

static bool covers(const struct hz3_tag_map *map, uintptr_t start, uintptr_t end) {
  return map->slices != 0 && start >= map->base && end <= map->base + map->slices * HZ3_SLICE_BYTES;
}

// A window around the old one and the new range, with most of its room on the side to which the heap grows (downwards
// at first, as the kernel maps). 0 bytes if that would be too wide.
static uintptr_t place_window(const struct hz3_tag_map *old, uintptr_t start, uintptr_t end, uintptr_t *base) {
  bool is_first = old->slices == 0, grows_down = is_first || start < old->base;
  uintptr_t low = is_first ? start : hz3_min(start, old->base);
  uintptr_t high = is_first ? end : hz3_max(end, old->base + old->slices * HZ3_SLICE_BYTES);
  uintptr_t bytes = hz3_max(FIRST_WINDOW_BYTES, hz3_ceil_power_of_two(2 * (high - low)));
  if (bytes > LAST_WINDOW_BYTES) return 0;
  uintptr_t slack = bytes - (high - low), below = grows_down ? slack / 4 * 3 : slack / 4;
  *base = hz3_round_down(low > below ? low - below : 0, HZ3_SLICE_BYTES);
  return bytes;
}

// Where no chunk was ever, there are only zeroes; reading them takes long in a window that a program's reservations have made wide.
static void copy_tags_locked(struct hz3_tag_map *to, const struct hz3_tag_map *from) {
  uintptr_t end = from->base + from->slices * HZ3_SLICE_BYTES, next;
  for (uintptr_t at = from->base; at < end && at >> HZ3_ADDRESS_BITS == 0; at = next) {
    next = hz3_min(hz3_round_down(at, HZ3_PAGE_MAP_LEAF_BYTES) + HZ3_PAGE_MAP_LEAF_BYTES, end);
    if (hz3_page_map_leaf_of((const void *)at) == NULL) continue;
    const int16_t *tags = &from->tags[(at - from->base) / HZ3_SLICE_BYTES];
    int16_t *copy = &to->tags[(at - to->base) / HZ3_SLICE_BYTES];
    for (size_t i = 0; i < (next - at) / HZ3_SLICE_BYTES; i++) {
      int16_t tag = __atomic_load_n(&tags[i], __ATOMIC_RELAXED);  // of a span in use it may change
      if (tag != 0) copy[i] = tag;  // zeroes are there already, and cost no memory
    }
  }
}

void hz3_tag_map_cover(const char *start, size_t bytes) {
  uintptr_t first = (uintptr_t)start, end = first + bytes, base = 0;
  const struct hz3_tag_map *old = hz3_tag_map;
  if (covers(old, first, end)) return;
  uintptr_t window = place_window(old, first, end, &base);
  struct hz3_tag_map *map = window == 0 ? NULL : (struct hz3_tag_map *)hz3_os_map(NULL, table_bytes(window));
  if (map == NULL) return;
  map->base = base;
  map->slices = window / HZ3_SLICE_BYTES;
  hz3_lock_acquire(&hz3_pages.lock);
  copy_tags_locked(map, old);
  // Release: pairs with the dependent loads in hz3_tag_of.
  __atomic_store_n(&hz3_tag_map, map, __ATOMIC_RELEASE);
  hz3_lock_release(&hz3_pages.lock);
}

void hz3_tag_map_set(const char *start, size_t slices, int tag) {
  struct hz3_tag_map *map = (struct hz3_tag_map *)(uintptr_t)__atomic_load_n(&hz3_tag_map, __ATOMIC_ACQUIRE);
  uintptr_t first = (uintptr_t)start;
  if (!covers(map, first, first + slices * HZ3_SLICE_BYTES)) return;
  int16_t *tags = map->tags + (first - map->base) / HZ3_SLICE_BYTES;
  for (size_t i = 0; i < slices; i++) __atomic_store_n(&tags[i], (int16_t)tag, __ATOMIC_RELAXED);
}
