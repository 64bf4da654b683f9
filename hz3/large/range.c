// SPDX-License-Identifier: Apache-2.0
// What it is: ranges, see range.h.
// Owns: hz3_ranges.
#include "hz3/large/range.h"

#include "hz3/base/fatal.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/config.h"

enum { FIT_TRIES = 16, DESCRIPTORS_PER_BATCH = 32 };

struct hz3_ranges hz3_ranges = {.lock = HZ3_LOCK_INIT(HZ3_RANK_LARGE), .retention = HZ3_RETENTION_INIT};

static unsigned bin_of(size_t bytes) {
  size_t slices = bytes / HZ3_SLICE_BYTES;
  if (slices < 8) return (unsigned)slices;
  unsigned log2 = hz3_log2(slices);
  return (log2 - 2) * 8 + (unsigned)((slices >> (log2 - 3)) & 7);
}

static bool has_descriptors_locked(unsigned count) {
  struct hz3_range *at = hz3_ranges.spare;
  for (; at != NULL && count > 0; count--) at = at->bin_next;
  return count == 0;
}

bool hz3_ranges_lock_with_descriptors(unsigned count) {
  hz3_lock_acquire(&hz3_ranges.lock);
  while (!has_descriptors_locked(count)) {
    hz3_lock_release(&hz3_ranges.lock);
    struct hz3_range *batch = (struct hz3_range *)hz3_metadata_alloc(DESCRIPTORS_PER_BATCH * sizeof *batch);
    if (batch == NULL) return false;
    hz3_lock_acquire(&hz3_ranges.lock);
    for (int i = 0; i < DESCRIPTORS_PER_BATCH; i++) {
      batch[i].bin_next = hz3_ranges.spare;
      hz3_ranges.spare = &batch[i];
    }
  }
  return true;
}

static struct hz3_range *new_descriptor_locked(void) {
  struct hz3_range *range = hz3_ranges.spare;
  HZ3_CHECK(range != NULL);
  hz3_ranges.spare = range->bin_next;
  *range = (struct hz3_range){0};
  return range;
}

void hz3_range_recycle_locked(struct hz3_range *range) {
  range->state = HZ3_RANGE_SPARE;
  range->bin_next = hz3_ranges.spare;
  hz3_ranges.spare = range;
}

void hz3_range_detach_locked(struct hz3_range *range) {
  if (range->left != NULL) range->left->right = NULL;
  if (range->right != NULL) range->right->left = NULL;
  range->left = range->right = NULL;
  if (hz3_ranges.lowest == range) hz3_ranges.lowest = NULL;
  if (hz3_ranges.highest == range) hz3_ranges.highest = NULL;
}

void hz3_range_absorb_right_locked(struct hz3_range *range) {
  struct hz3_range *right = range->right;
  range->bytes += right->bytes;
  range->dirty_bytes += right->dirty_bytes;
  range->was_purged |= right->was_purged;
  range->right = right->right;
  if (range->right != NULL) range->right->left = range;
  if (hz3_ranges.highest == right) hz3_ranges.highest = range;
  hz3_range_recycle_locked(right);
}

static void list_locked(struct hz3_range *range) {
  unsigned bin = bin_of(range->bytes);
  range->bin_prev = NULL;
  range->bin_next = hz3_ranges.bins[bin];
  if (range->bin_next != NULL) range->bin_next->bin_prev = range;
  hz3_ranges.bins[bin] = range;
  hz3_ranges.bin_bits[bin / 64] |= (uint64_t)1 << (bin % 64);
  if (range->dirty_bytes == 0) return;
  hz3_ranges.dirty_bytes += range->dirty_bytes;
  range->age_next = NULL;
  range->age_prev = hz3_ranges.newest_dirty;
  if (range->age_prev != NULL) range->age_prev->age_next = range;
  else hz3_ranges.oldest_dirty = range;
  hz3_ranges.newest_dirty = range;
}

void hz3_range_take_locked(struct hz3_range *range) {
  unsigned bin = bin_of(range->bytes);
  if (range->bin_prev != NULL) range->bin_prev->bin_next = range->bin_next;
  else hz3_ranges.bins[bin] = range->bin_next;
  if (range->bin_next != NULL) range->bin_next->bin_prev = range->bin_prev;
  if (hz3_ranges.bins[bin] == NULL) hz3_ranges.bin_bits[bin / 64] &= ~((uint64_t)1 << (bin % 64));
  if (range->dirty_bytes == 0) return;
  hz3_ranges.dirty_bytes -= range->dirty_bytes;
  if (range->age_prev != NULL) range->age_prev->age_next = range->age_next;
  else hz3_ranges.oldest_dirty = range->age_next;
  if (range->age_next != NULL) range->age_next->age_prev = range->age_prev;
  else hz3_ranges.newest_dirty = range->age_prev;
}

void hz3_range_take_away_locked(struct hz3_range *range) {
  hz3_range_take_locked(range);
  range->state = HZ3_RANGE_PURGING;
  hz3_add_to_figure(&hz3_ranges.taken_away, 1);
}

struct hz3_range *hz3_range_bring_back_locked(struct hz3_range *range) {
  hz3_take_from_figure(&hz3_ranges.taken_away, 1);
  return hz3_range_free_locked(range);
}

void hz3_ranges_note_low_water_locked(void) { hz3_ranges.dirty_low_water = hz3_min(hz3_ranges.dirty_low_water, hz3_ranges.dirty_bytes); }

// The smallest of the first few ranges of the bin that fit, the lowest address among equals.
static struct hz3_range *best_in_bin(unsigned bin, size_t bytes, size_t align) {
  struct hz3_range *best = NULL, *range = hz3_ranges.bins[bin];
  for (int tries = FIT_TRIES; range != NULL && tries > 0; range = range->bin_next, tries--) {
    if (hz3_round_up((uintptr_t)range->start, align) + bytes > (uintptr_t)range->start + range->bytes) continue;
    if (best == NULL || range->bytes < best->bytes || (range->bytes == best->bytes && range->start < best->start)) best = range;
  }
  return best;
}

struct hz3_range *hz3_range_take_fit_locked(size_t bytes, size_t align) {
  unsigned bin = bin_of(bytes);
  struct hz3_range *found = NULL;
  for (unsigned word = bin / 64; found == NULL && word < HZ3_RANGE_WORDS; word++) {
    uint64_t bits = hz3_ranges.bin_bits[word];
    if (word == bin / 64) bits &= ~(uint64_t)0 << (bin % 64);
    for (; found == NULL && bits != 0; bits &= bits - 1) found = best_in_bin(word * 64 + (unsigned)__builtin_ctzll(bits), bytes, align);
  }
  if (found != NULL) hz3_range_take_locked(found);
  return found;
}

// Dirty bytes of the range behind `bytes`. Only a range that has both kinds is counted, and the shorter part of it.
static size_t dirty_behind(const struct hz3_range *range, size_t bytes) {
  size_t rest = range->bytes - bytes;
  if (range->dirty_bytes == 0 || range->dirty_bytes == range->bytes) return range->dirty_bytes == 0 ? 0 : rest;
  return rest <= bytes ? hz3_dirty_count_bytes(range->start + bytes, rest) : range->dirty_bytes - hz3_dirty_count_bytes(range->start, bytes);
}

struct hz3_range *hz3_range_split_locked(struct hz3_range *range, size_t bytes) {
  struct hz3_range *rest = new_descriptor_locked();
  rest->dirty_bytes = dirty_behind(range, bytes);
  range->dirty_bytes -= rest->dirty_bytes;
  rest->start = range->start + bytes;
  rest->bytes = range->bytes - bytes;
  rest->was_purged = range->was_purged;
  rest->left = range;
  rest->right = range->right;
  if (rest->right != NULL) rest->right->left = rest;
  if (hz3_ranges.highest == range) hz3_ranges.highest = rest;
  range->right = rest;
  range->bytes = bytes;
  return rest;
}

struct hz3_range *hz3_range_free_locked(struct hz3_range *range) {
  if (range->right != NULL && range->right->state == HZ3_RANGE_FREE) {
    hz3_range_take_locked(range->right);
    hz3_range_absorb_right_locked(range);
  }
  if (range->left != NULL && range->left->state == HZ3_RANGE_FREE) {
    range = range->left;
    hz3_range_take_locked(range);
    hz3_range_absorb_right_locked(range);
  }
  range->state = HZ3_RANGE_FREE;
  list_locked(range);
  return range;
}

static struct hz3_range *take_from_shelf_locked(struct hz3_range **slot) {
  struct hz3_range *range = *slot;
  hz3_ranges.dirty_bytes -= range->dirty_bytes;
  *slot = NULL;
  return range;
}

static void clear_slot_locked(struct hz3_range **slot) {
  if (*slot != NULL) hz3_range_free_locked(take_from_shelf_locked(slot));
}

void hz3_range_shelve_locked(struct hz3_range *range) {
  unsigned next = hz3_ranges.shelf_next++ % HZ3_SHELF_RANGES;
  clear_slot_locked(&hz3_ranges.shelf[next]);
  hz3_ranges.shelf_sizes[next] = range->bytes;
  if (hz3_ranges.size_hits < HZ3_SHELF_HITS) {
    hz3_range_free_locked(range);
    return;
  }
  range->state = HZ3_RANGE_SHELVED;
  hz3_ranges.dirty_bytes += range->dirty_bytes;
  hz3_ranges.shelf[next] = range;
}

struct hz3_range *hz3_range_take_shelved_locked(size_t bytes, size_t align) {
  bool is_hit = false;
  for (unsigned i = 0; i < HZ3_SHELF_RANGES; i++) is_hit |= hz3_ranges.shelf_sizes[i] == bytes;
  hz3_ranges.size_hits = is_hit ? hz3_min(hz3_ranges.size_hits + 1, HZ3_SHELF_HITS) : 0;
  for (unsigned i = 1; i <= HZ3_SHELF_RANGES; i++) {
    struct hz3_range **slot = &hz3_ranges.shelf[(hz3_ranges.shelf_next - i) % HZ3_SHELF_RANGES], *range = *slot;
    if (range != NULL && range->bytes == bytes && (uintptr_t)range->start % align == 0) return take_from_shelf_locked(slot);
  }
  return NULL;
}

void hz3_ranges_clear_shelf_locked(void) {
  for (unsigned i = 0; i < HZ3_SHELF_RANGES; i++) clear_slot_locked(&hz3_ranges.shelf[i]);
}

void hz3_range_add_locked(char *start, size_t bytes) {
  struct hz3_range *range = new_descriptor_locked(), *lowest = hz3_ranges.lowest, *highest = hz3_ranges.highest;
  range->start = start;
  range->bytes = bytes;
  hz3_add_to_figure(&hz3_ranges.mapped_bytes, bytes);
  if (lowest != NULL && start + bytes == lowest->start) {
    range->right = lowest;
    hz3_ranges.lowest = lowest->left = range;
  } else if (highest != NULL && highest->start + highest->bytes == start) {
    range->left = highest;
    hz3_ranges.highest = highest->right = range;
  } else {
    hz3_ranges.lowest = hz3_ranges.highest = range;
  }
  hz3_range_free_locked(range);
}

// A walk over the marks of a range, one granule (1 MiB, 16 slices) a step.
struct dirty_walk {
  uintptr_t at, end;
  struct hz3_slice_marks *marks;  // the granule's
  uint16_t bits;                  // the part of it that the range covers
};

static struct dirty_walk walk_of(const char *start, size_t bytes) {
  return (struct dirty_walk){.at = (uintptr_t)start, .end = (uintptr_t)start + bytes};
}

static bool walk_next(struct dirty_walk *walk) {
  if (walk->at >= walk->end) return false;
  uintptr_t next = hz3_min((walk->at | (HZ3_MIB - 1)) + 1, walk->end);
  unsigned count = (unsigned)((next - walk->at) / HZ3_SLICE_BYTES);
  walk->marks = hz3_page_map_marks((const void *)walk->at);
  walk->bits = (uint16_t)(((1u << count) - 1) << (walk->at / HZ3_SLICE_BYTES % 16));
  walk->at = next;
  return true;
}

static unsigned purgeable(const struct hz3_slice_marks *marks) {
  return __atomic_load_n(&marks->dirty, __ATOMIC_RELAXED) & ~(unsigned)__atomic_load_n(&marks->refused, __ATOMIC_RELAXED);
}

size_t hz3_dirty_count_bytes(const char *start, size_t bytes) {
  size_t slices = 0;
  for (struct dirty_walk walk = walk_of(start, bytes); walk_next(&walk);)
    slices += (size_t)__builtin_popcount(purgeable(walk.marks) & (unsigned)walk.bits);
  return slices * HZ3_SLICE_BYTES;
}

size_t hz3_dirty_suffix_bytes(const char *start, size_t bytes, size_t dirty_bytes) {
  uintptr_t first = (uintptr_t)start, at = first + bytes;
  for (size_t found = 0; found < dirty_bytes && at > first;) {
    uintptr_t below = hz3_max((at - 1) & ~(uintptr_t)(HZ3_MIB - 1), first);
    found += hz3_dirty_count_bytes((const char *)below, at - below);
    at = below;
  }
  return first + bytes - at;
}

// Atomic: the other slices of the granule may belong to a block that another thread is growing or clearing.
static void set_bits(uint16_t *mask, uint16_t bits) {
  if ((__atomic_load_n(mask, __ATOMIC_RELAXED) & bits) != bits) __atomic_fetch_or(mask, bits, __ATOMIC_RELAXED);
}
static void clear_bits(uint16_t *mask, uint16_t bits) {
  if ((__atomic_load_n(mask, __ATOMIC_RELAXED) & bits) != 0) __atomic_fetch_and(mask, (uint16_t)~bits, __ATOMIC_RELAXED);
}

void hz3_dirty_mark(const char *start, size_t bytes) {
  for (struct dirty_walk walk = walk_of(start, bytes); walk_next(&walk);) {
    set_bits(&walk.marks->dirty, walk.bits);
    clear_bits(&walk.marks->refused, walk.bits);
  }
}

void hz3_dirty_clear(const char *start, size_t bytes) {
  for (struct dirty_walk walk = walk_of(start, bytes); walk_next(&walk);) {
    clear_bits(&walk.marks->dirty, walk.bits);
    clear_bits(&walk.marks->refused, walk.bits);
  }
}

bool hz3_dirty_test(const char *slice) {
  uint16_t mask = __atomic_load_n(&hz3_page_map_marks(slice)->dirty, __ATOMIC_RELAXED);
  return (mask >> ((uintptr_t)slice / HZ3_SLICE_BYTES % 16)) & 1;
}

void hz3_dirty_purge(char *start, size_t bytes) {
  if (hz3_os_purge(start, bytes)) {
    hz3_dirty_clear(start, bytes);
    return;
  }
  struct dirty_walk walk = walk_of(start, bytes);
  for (uintptr_t at = walk.at; walk_next(&walk); at = walk.at) {
    if ((purgeable(walk.marks) & walk.bits) == 0) continue;
    if (hz3_os_purge((void *)at, walk.at - at)) clear_bits(&walk.marks->dirty, walk.bits);
    else set_bits(&walk.marks->refused, walk.bits);
  }
}

bool hz3_large_holds(const void *pointer) {
  uintptr_t address = (uintptr_t)pointer, at = address;
  for (int slices = 0; slices < 65536 && at >= HZ3_SLICE_BYTES; slices++, at -= HZ3_SLICE_BYTES) {
    struct hz3_range *range = (struct hz3_range *)hz3_page_map_large_of((const void *)at);
    if (range != NULL) return address < (uintptr_t)range->start + range->usable_bytes;
  }
  return false;
}
