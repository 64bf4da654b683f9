// SPDX-License-Identifier: Apache-2.0
// What it is: the large box, see large.h.
// Locks: hz3_ranges.lock; system calls are made without it, on ranges that are in no list. Before it one to map more, rank LARGE_GROWTH.
#include "hz3/large/large.h"

#include "hz3/base/fatal.h"
#include "hz3/base/growth.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/large/range.h"

// Moving pages costs a system call, page-table work, and the pages of the old place for whoever comes next: cheaper than
// copying from here on (docs/decisions/0013).
#define MOVE_MIN_BYTES ((size_t)16 * 1024 * 1024)
// Purged ranges of this size leave the address space too: the call costs the same, and limits and commit see it.
#define UNMAP_MIN_BYTES ((size_t)64 * 1024 * 1024)
// And so do purged ranges that are mappings of their own, while there is more address space than twice what lives and this.
#define ISLANDS_MAX_BYTES ((size_t)64 * 1024 * 1024)
// What a block loses that shrinks by as much is free at once, even if more than half of the block stays.
#define SHRINK_MIN_BYTES ((size_t)64 * 1024 * 1024)
// Kept memory of more than this makes way for a block that it could not hold even as a whole: what the retention of a program that
// does not swing may keep.
#define MAKE_WAY_MIN_BYTES ((size_t)64 * 1024 * 1024)
// As many bytes may be purged in any call that frees.
#define PURGE_MOST_BYTES ((size_t)64 * 1024 * 1024)
// A split at either end of a range.
enum { DESCRIPTORS_PER_ALLOC = 2 };
// For a block below HZ3_LARGE_WHOLE_MIN_BYTES as much is mapped at once as a quarter of what is there, so that such blocks lie side by side
// and share the huge pages at their ends. Not if they are to lie far apart.
#define MAP_AHEAD_MAX_BYTES ((size_t)64 * 1024 * 1024)

static struct hz3_growth growth = HZ3_GROWTH_INIT(HZ3_RANK_LARGE_GROWTH);

// Address space for a block: steps of a sixteenth of its power of two keep the pieces reusable, and so do whole huge pages, which can move;
// only memory that is touched costs anything.
static size_t placement_bytes(size_t bytes) {
  size_t step = hz3_max(HZ3_SLICE_BYTES, hz3_ceil_power_of_two(bytes / 32 + 1)), whole = hz3_round_up(bytes, HZ3_HUGE_PAGE_BYTES);
  if (bytes >= HZ3_LARGE_WHOLE_MIN_BYTES && whole - bytes <= bytes / 4) step = hz3_max(step, HZ3_HUGE_PAGE_BYTES);
  return hz3_max(hz3_round_up(bytes, step), HZ3_MIB);
}

static size_t page_round(size_t bytes) { return hz3_round_up(bytes, hz3_os_page_bytes()); }

// Cuts `range` (in no list) so that it starts aligned and has `bytes`; what is left over becomes free.
static struct hz3_range *carve_locked(struct hz3_range *range, size_t bytes, size_t align) {
  size_t head = hz3_round_up((uintptr_t)range->start, align) - (uintptr_t)range->start;
  if (head != 0) {
    struct hz3_range *rest = hz3_range_split_locked(range, head);
    rest->state = HZ3_RANGE_USED;  // so that freeing the head does not merge with it
    hz3_range_free_locked(range);
    range = rest;
  }
  if (range->bytes > bytes) {
    range->state = HZ3_RANGE_USED;
    hz3_range_free_locked(hz3_range_split_locked(range, bytes));
  }
  return range;
}

// What of a range that is taken was purged is wanted again.
static void note_regret_locked(const struct hz3_range *taken) {
  if (taken->was_purged) hz3_retention_note_regret(&hz3_ranges.retention, taken->bytes - taken->dirty_bytes);
}

static struct hz3_range *take_fit_locked(size_t place, size_t align) {
  struct hz3_range *range = hz3_range_take_fit_locked(place, align);
  if (range == NULL) return NULL;
  range = carve_locked(range, place, align);
  range->marked_bytes = range->dirty_bytes == place ? place : 0;
  note_regret_locked(range);
  return range;
}

struct request {
  size_t usable_bytes, place_bytes, align;
  bool may_fill;  // the block may be given pages of free ranges
};

static struct hz3_range *take_locked(const struct request *request) {
  struct hz3_range *range = hz3_range_take_shelved_locked(request->place_bytes, request->align);
  if (range == NULL) {
    hz3_ranges_clear_shelf_locked();
    range = take_fit_locked(request->place_bytes, request->align);
  }
  if (range == NULL) return NULL;
  range->state = HZ3_RANGE_USED;
  range->usable_bytes = range->touched_bytes = request->usable_bytes;
  range->note = (struct hz3_large_note){0};
  hz3_ranges.live_bytes += range->bytes;
  hz3_ranges.live_blocks++;
  hz3_page_map_set_large(range->start, range);
  hz3_ranges_note_low_water_locked();
  return range;
}

// No lock: these fields are the owner's while the block lives.
static void set_usable(struct hz3_range *range, size_t usable) {
  range->usable_bytes = usable;
  range->touched_bytes = hz3_max(range->touched_bytes, usable);
}

// What the user may have written is marked as dirty. No lock, as above.
static void mark_touched(struct hz3_range *range) {
  size_t touched = hz3_round_up(range->touched_bytes, HZ3_SLICE_BYTES);
  if (touched <= range->marked_bytes) return;
  hz3_dirty_mark(range->start, touched);
  range->dirty_bytes = touched == range->bytes ? touched : hz3_dirty_count_bytes(range->start, range->bytes);
  range->marked_bytes = touched;
}

static void end_use_locked(struct hz3_range *range) {
  hz3_page_map_set_large(range->start, NULL);
  mark_touched(range);
  hz3_ranges.live_bytes -= range->bytes;
  hz3_ranges.live_blocks--;
}

// Takes the address space of one range (in no list) away, called without the lock. It leaves the neighbours and the dirty
// marks before the kernel can give its addresses to another mapping. False if the kernel refused: it is then purged.
static bool unmap_range(struct hz3_range *range) {
  hz3_dirty_clear(range->start, range->bytes);
  range->dirty_bytes = 0;
  hz3_lock_acquire(&hz3_ranges.lock);
  hz3_range_detach_locked(range);
  hz3_take_from_figure(&hz3_ranges.mapped_bytes, range->bytes);
  hz3_ranges.purges++;
  hz3_lock_release(&hz3_ranges.lock);
  bool gone = hz3_os_unmap(range->start, range->bytes);
  if (!gone) {
    hz3_dirty_mark(range->start, range->bytes);
    hz3_dirty_purge(range->start, range->bytes);
  }
  hz3_lock_acquire(&hz3_ranges.lock);
  if (gone) {
    hz3_take_from_figure(&hz3_ranges.taken_away, 1);
    hz3_range_recycle_locked(range);
  } else {
    hz3_add_to_figure(&hz3_ranges.mapped_bytes, range->bytes);
    hz3_range_bring_back_locked(range);
  }
  hz3_lock_release(&hz3_ranges.lock);
  return gone;
}

// Purges one range (in no list), called without the lock; it is free afterwards.
static void purge_range(struct hz3_range *range) {
  hz3_dirty_purge(range->start, range->bytes);
  hz3_lock_acquire(&hz3_ranges.lock);
  range->dirty_bytes = 0;
  range->was_purged = true;
  hz3_ranges.purges++;
  range = hz3_range_bring_back_locked(range);
  // A mapping that is free and clean as a whole: blocks that grow elsewhere leave such, which have no neighbours to merge with ever again.
  bool is_island = range->left == NULL && range->right == NULL && range->dirty_bytes == 0 &&
                   hz3_ranges.mapped_bytes > 2 * hz3_ranges.live_bytes + ISLANDS_MAX_BYTES;
  if (is_island) hz3_range_take_away_locked(range);
  hz3_lock_release(&hz3_ranges.lock);
  if (is_island) unmap_range(range);
}

// The range that has been dirty longest, in no list any more, or the part of it that is to go; NULL if enough has gone.
// Its end goes: blocks are cut from the start, so the next one would want what was purged there, and purge again.
static struct hz3_range *take_oldest_locked(size_t keep_bytes, bool may_split) {
  hz3_ranges_clear_shelf_locked();
  struct hz3_range *range = hz3_ranges.dirty_bytes > keep_bytes ? hz3_ranges.oldest_dirty : NULL;
  if (range == NULL) return NULL;
  size_t part = hz3_dirty_suffix_bytes(range->start, range->bytes, hz3_ranges.dirty_bytes - keep_bytes);
  hz3_range_take_away_locked(range);
  if (!may_split || part == range->bytes) return range;
  struct hz3_range *end = hz3_range_split_locked(range, range->bytes - part);
  end->state = HZ3_RANGE_PURGING;
  hz3_range_free_locked(range);
  return end;
}

// Purges what has been free longest until at most `keep_bytes` of dirty free memory are left, or `most_bytes` went. True if anything was purged.
// `is_learning`: if that is wanted again within a second, it was purged too early, and the bound grows.
static bool purge_to(size_t keep_bytes, size_t most_bytes, bool is_learning) {
  for (bool any = false;; any = true) {
    bool may_split = hz3_ranges_lock_with_descriptors(1);
    if (!may_split) hz3_lock_acquire(&hz3_ranges.lock);
    size_t left = hz3_ranges.dirty_bytes - hz3_min(hz3_ranges.dirty_bytes, most_bytes);
    struct hz3_range *range = take_oldest_locked(hz3_max(keep_bytes, left), may_split);
    if (range != NULL) most_bytes -= hz3_min(most_bytes, range->dirty_bytes);
    if (range != NULL && is_learning) hz3_retention_note_purge(&hz3_ranges.retention, range->dirty_bytes, hz3_ranges.live_bytes);
    hz3_lock_release(&hz3_ranges.lock);
    if (range == NULL) return any;
    if (range->bytes >= UNMAP_MIN_BYTES) unmap_range(range);
    else purge_range(range);
  }
}

static char *map_below(size_t bytes, size_t align) {
  hz3_lock_acquire(&hz3_ranges.lock);
  char *above = hz3_ranges.lowest == NULL ? NULL : hz3_ranges.lowest->start;
  hz3_lock_release(&hz3_ranges.lock);
  void *hint = above == NULL ? NULL : (void *)((uintptr_t)above - bytes);  // wraps for an absurd size, which then fails
  return (char *)hz3_os_map_aligned(hint, bytes, align);
}

// Mappings are whole huge pages which are asked for: a 15 MiB block then takes 10 page faults instead of 3,840 (docs/decisions/0022).
static size_t mapping_bytes(size_t bytes, size_t align) {
  if (bytes < HZ3_LARGE_WHOLE_MIN_BYTES && align <= HZ3_HUGE_PAGE_BYTES)
    bytes = hz3_max(bytes, hz3_min(hz3_read_figure(&hz3_ranges.mapped_bytes) / 4, MAP_AHEAD_MAX_BYTES));
  return bytes < PTRDIFF_MAX / 2 ? hz3_round_up(bytes, HZ3_HUGE_PAGE_BYTES) : bytes;
}

// How much of a mapping is to ask for huge pages, if it is for a block of so many bytes. Of a big one the last huge page only if it fills a
// quarter of it: of what is left over nobody may ever use anything. That makes up to two mappings of the kernel's for each block.
static size_t huge_bytes(size_t bytes, size_t mapped_bytes) {
  if (bytes < HZ3_LARGE_WHOLE_MIN_BYTES || !hz3_ranges_may_split_mappings()) return mapped_bytes;
  return hz3_min(hz3_round_down(bytes + HZ3_HUGE_PAGE_BYTES / 4 * 3, HZ3_HUGE_PAGE_BYTES), mapped_bytes);
}

// Before more is mapped for a block.
static void make_way(const struct request *request) {
  size_t bytes = request->place_bytes;
  hz3_lock_acquire(&hz3_ranges.lock);
  // Of a size that comes again, what was unmapped a moment ago would have done; bigger ones it could not have held.
  if (hz3_ranges.size_hits > 0) hz3_retention_note_regret(&hz3_ranges.retention, bytes);
  size_t dirty = hz3_ranges.dirty_bytes;
  hz3_lock_release(&hz3_ranges.lock);
  bool keeps_too_little = dirty <= bytes && dirty > MAKE_WAY_MIN_BYTES;
  // What exceeds the lane's maximum stays for a load that comes back as it was, and goes for one that needs more.
  size_t keep = keeps_too_little ? HZ3_RETAIN_MIN_BYTES : hz3_max(dirty - hz3_min(bytes, dirty), HZ3_RETAIN_MAX_BYTES);
  if (dirty > keep && !(request->may_fill && hz3_range_fill_pays())) purge_to(keep, SIZE_MAX, false);
}

static bool map_range(const struct request *request) {
  size_t align = request->align, bytes = mapping_bytes(request->place_bytes, align);
  char *start = map_below(bytes, hz3_max(align, HZ3_HUGE_PAGE_BYTES));
  if (start == NULL) {
    bytes = request->place_bytes;
    start = map_below(bytes, align);
  }
  if (start == NULL) return false;
  hz3_huge_pages_ask(&hz3_ranges.huge_use, start, huge_bytes(request->usable_bytes, bytes));
  if (!hz3_page_map_reserve(start, bytes) || !hz3_ranges_lock_with_descriptors(1)) {
    hz3_os_unmap(start, bytes);
    return false;
  }
  hz3_dirty_clear(start, bytes);  // another mapping may have been here before
  hz3_range_add_locked(start, bytes);
  hz3_lock_release(&hz3_ranges.lock);
  return true;
}

// False if the kernel gives no more; `count` is that of growths when nothing was found.
static bool map_more(size_t count, const struct request *request) {
  make_way(request);
  if (!hz3_growth_begin(&growth, count)) return true;
  bool any = map_range(request);
  hz3_growth_end(&growth, any);
  return any;
}

static struct hz3_range *alloc_range(size_t bytes, size_t align, bool may_fill) {
  if ((bytes | align) >> HZ3_ADDRESS_BITS != 0) return NULL;
  size_t usable = page_round(hz3_max(bytes, 1)), place = placement_bytes(usable);
  size_t least_align = place % HZ3_HUGE_PAGE_BYTES == 0 ? HZ3_HUGE_PAGE_BYTES : HZ3_SLICE_BYTES;
  struct request request = {usable, place, hz3_max(align, least_align), may_fill};
  struct hz3_range *range = NULL;
  size_t growths;
  do {
    growths = hz3_growth_count(&growth);
    if (!hz3_ranges_lock_with_descriptors(DESCRIPTORS_PER_ALLOC)) return NULL;
    range = take_locked(&request);
    hz3_lock_release(&hz3_ranges.lock);
  } while (range == NULL && map_more(growths, &request));
  return range;
}

// Clears the slices that may be non-zero, runs of them at once.
static void clear_dirty(struct hz3_range *range) {
  size_t run = 0, at = 0;
  for (; at < range->usable_bytes; at += HZ3_SLICE_BYTES) {
    if (hz3_dirty_test(range->start + at)) continue;
    if (run < at) hz3_os_clear(range->start + run, at - run);
    run = at + HZ3_SLICE_BYTES;
  }
  if (run < range->usable_bytes) hz3_os_clear(range->start + run, range->usable_bytes - run);
}

// Takes a used range, which has left the page map, and a part of which is not its own any more, out of the tables and the
// address space. Lost at worst: some address space, if the kernel refuses.
static void give_up(struct hz3_range *range, char *gone, size_t gone_bytes) {
  hz3_lock_acquire(&hz3_ranges.lock);
  hz3_ranges.live_bytes -= range->bytes;
  hz3_ranges.live_blocks--;
  hz3_range_detach_locked(range);
  hz3_take_from_figure(&hz3_ranges.mapped_bytes, range->bytes);
  hz3_lock_release(&hz3_ranges.lock);
  char *end = range->start + range->bytes, *behind = gone + gone_bytes;
  if (gone != range->start) hz3_os_unmap(range->start, (size_t)(gone - range->start));
  if (behind != end) hz3_os_unmap(behind, (size_t)(end - behind));
  hz3_lock_acquire(&hz3_ranges.lock);
  hz3_range_recycle_locked(range);
  hz3_lock_release(&hz3_ranges.lock);
}

// Of a block to which pages were to move: it is back in the page map, or given up if the kernel lost a part of it. Before, it has to leave
// that: another thread may come to own its addresses while the kernel is at it, and then enters its own.
static bool keep_unless_lost(struct hz3_range *range, char *lost, size_t lost_bytes) {
  if (lost == NULL) hz3_page_map_set_large(range->start, range);
  else give_up(range, lost, lost_bytes);
  return lost == NULL;
}

static bool fill(struct hz3_range *range) {
  hz3_page_map_set_large(range->start, NULL);
  return keep_unless_lost(range, hz3_range_fill(range), HZ3_HUGE_PAGE_BYTES);
}

void *hz3_large_alloc(size_t bytes, size_t align, bool zero) {
  bool may_fill = !zero && bytes >= HZ3_LARGE_WHOLE_MIN_BYTES;
  struct hz3_range *range = alloc_range(bytes, align, may_fill);
  if (range == NULL) return NULL;
  if (zero) clear_dirty(range);
  if (may_fill && range->dirty_bytes < range->bytes && !fill(range)) return hz3_large_alloc(bytes, align, false);  // moves are over
  return range->start;
}

void *hz3_range_use_again(struct hz3_range *range, size_t bytes, bool zero) {
  if (zero) mark_touched(range);
  set_usable(range, page_round(bytes));
  if (zero) clear_dirty(range);
  return range->start;
}

// After memory became free: how much of it may stay. The bound is what was learned, or as much as lives, if that is more: a program that
// holds many big blocks will want others, and best fit keeps the sum of both low as long as nothing is purged (docs/decisions/0013).
static size_t keep_limit_locked(void) {
  if (!HZ3_LARGE_CACHE) return 0;
  size_t learned = hz3_retention_limit(&hz3_ranges.retention, hz3_ranges.live_bytes);
  size_t limit = hz3_max(learned, hz3_min(hz3_ranges.live_bytes, HZ3_RETAIN_MAX_BYTES));
  return hz3_retention_keep(&hz3_ranges.retention, hz3_ranges.dirty_bytes, limit);
}

// What to keep where the limit is exceeded. After a block of so many bytes was freed: whole ones of its size, since a part would
// lie idle beside the next; but always as much as the smallest limit allows.
static size_t kept_bytes(size_t limit, size_t bytes) {
  size_t keep = limit / 4 * 3;
  return bytes == 0 ? keep : hz3_max(keep / bytes * bytes, hz3_min(keep, HZ3_RETAIN_MIN_BYTES / 4 * 3));
}

// And how much goes at once, when a block of so many bytes was freed or shrunk: no more than its caller can expect to wait for, if the limit has
// become lower meanwhile. Those after it go on with it.
static size_t purge_most(size_t bytes) { return hz3_max(2 * bytes, PURGE_MOST_BYTES); }

size_t hz3_large_free(void *pointer) {
  hz3_lock_acquire(&hz3_ranges.lock);
  struct hz3_range *range = hz3_range_of(pointer);
  bool is_live = range != NULL && range->usable_bytes != 0;
  size_t bytes = is_live ? range->bytes : 0;
  if (is_live) {
    end_use_locked(range);
    hz3_range_shelve_locked(range);
  }
  size_t limit = keep_limit_locked();
  bool over = hz3_ranges.dirty_bytes > limit;
  hz3_lock_release(&hz3_ranges.lock);
  if (over) purge_to(kept_bytes(limit, bytes), purge_most(bytes), true);
  return bytes;
}

size_t hz3_large_usable_bytes(const void *pointer) {
  // No lock: the caller owns the block, so its descriptor does not change.
  struct hz3_range *range = hz3_range_of(pointer);
  return range == NULL ? 0 : range->usable_bytes;
}

size_t hz3_large_place_bytes(const void *pointer) {
  struct hz3_range *range = hz3_range_of(pointer);
  return range == NULL || range->usable_bytes == 0 ? 0 : range->bytes;
}

struct hz3_large_note *hz3_large_note(const void *pointer) {
  struct hz3_range *range = hz3_range_of(pointer);
  return range == NULL || range->usable_bytes == 0 ? NULL : &range->note;
}

// Lets the range reach into a free right neighbour. False if there is none or it is too small.
static bool extend_locked(struct hz3_range *range, size_t place) {
  hz3_ranges_clear_shelf_locked();
  struct hz3_range *right = range->right;
  if (right == NULL || right->state != HZ3_RANGE_FREE || range->bytes + right->bytes < place) return false;
  hz3_range_take_locked(right);
  right = carve_locked(right, place - range->bytes, HZ3_SLICE_BYTES);
  note_regret_locked(right);
  hz3_ranges.live_bytes += right->bytes;
  hz3_range_absorb_right_locked(range);
  hz3_ranges_note_low_water_locked();
  return true;
}

static void shrink_locked(struct hz3_range *range, size_t place) {
  struct hz3_range *rest = hz3_range_split_locked(range, place);
  hz3_ranges.live_bytes -= rest->bytes;
  if (range->touched_bytes > place) {
    hz3_dirty_mark(rest->start, hz3_round_up(range->touched_bytes, HZ3_SLICE_BYTES) - place);
    rest->dirty_bytes = hz3_dirty_count_bytes(rest->start, rest->bytes);
    range->touched_bytes = place;
  }
  range->marked_bytes = hz3_min(range->marked_bytes, place);
  hz3_range_free_locked(rest);
}

bool hz3_large_resize(void *pointer, size_t bytes, size_t *old_bytes) {
  struct hz3_range *range = hz3_range_of(pointer);
  *old_bytes = range == NULL ? 0 : range->usable_bytes;
  if (*old_bytes == 0 || bytes > PTRDIFF_MAX) return false;
  size_t usable = page_round(hz3_max(bytes, 1)), place = placement_bytes(usable);
  bool loses_much = usable + SHRINK_MIN_BYTES <= *old_bytes && place + SHRINK_MIN_BYTES <= range->bytes;
  if (bytes <= *old_bytes && bytes > *old_bytes / 2 && !loses_much) return true;
  bool fits = usable <= range->bytes;
  if (fits && !loses_much && (usable > range->bytes / 2 || place >= range->bytes / 2)) {
    set_usable(range, usable);
    return true;
  }
  if (!hz3_ranges_lock_with_descriptors(1)) return false;
  if (!fits) fits = extend_locked(range, place);
  else shrink_locked(range, place);
  size_t limit = keep_limit_locked();
  bool over = hz3_ranges.dirty_bytes > limit;
  hz3_lock_release(&hz3_ranges.lock);
  if (fits) set_usable(range, usable);
  if (over) purge_to(kept_bytes(limit, 0), purge_most(*old_bytes), true);
  return fits;
}

// Moves the pages of a block to a fresh one.
static enum hz3_os_moved move_pages(struct hz3_range *from, struct hz3_range *to, size_t bytes) {
  hz3_page_map_set_large(to->start, NULL);
  enum hz3_os_moved moved = hz3_os_move_pages(from->start, to->start, bytes);
  keep_unless_lost(to, moved == HZ3_OS_TARGET_LOST ? to->start : NULL, bytes);
  return moved;
}

// Takes address space of free ranges away, clean ones included.
static bool unmap_free_ranges(void) {
  bool any = false;
  for (unsigned bin = 0; bin < HZ3_RANGE_BINS; bin++) {
    hz3_lock_acquire(&hz3_ranges.lock);
    hz3_ranges_clear_shelf_locked();
    struct hz3_range *range = hz3_ranges.bins[bin];
    if (range != NULL) hz3_range_take_away_locked(range);
    hz3_lock_release(&hz3_ranges.lock);
    if (range == NULL) continue;
    if (!unmap_range(range)) return any;  // too many maps
    any = true;
    bin--;  // until the bin is empty
  }
  return any;
}

// Maps what the block lacks right behind it, if it ends its mapping and nothing else is there. False also if it lacks nothing: then
// bookkeeping memory is what there is none of.
static bool grow_behind(struct hz3_range *range, size_t bytes) {
  size_t place = placement_bytes(page_round(bytes));
  if (place <= range->bytes) return false;
  char *end = range->start + range->bytes;
  size_t lacking = place - range->bytes;
  hz3_lock_acquire(&hz3_ranges.lock);
  bool is_last = range->right == NULL;
  hz3_lock_release(&hz3_ranges.lock);
  char *more = is_last ? (char *)hz3_os_map(end, lacking) : NULL;
  if (more == NULL) return false;
  if (more != end || !hz3_page_map_reserve(end, lacking)) {
    hz3_os_unmap(more, lacking);
    return false;
  }
  hz3_huge_pages_ask(&hz3_ranges.huge_use, end, lacking);
  hz3_dirty_clear(end, lacking);  // another mapping may have been here before
  hz3_lock_acquire(&hz3_ranges.lock);
  range->bytes += lacking;
  hz3_ranges.live_bytes += lacking;
  hz3_add_to_figure(&hz3_ranges.mapped_bytes, lacking);
  hz3_lock_release(&hz3_ranges.lock);
  set_usable(range, page_round(bytes));
  return true;
}

void *hz3_large_grow(void *pointer, size_t bytes) {
  struct hz3_range *from = hz3_range_of(pointer);
  if (from == NULL || bytes > PTRDIFF_MAX / 2) return NULL;
  HZ3_CHECK(bytes > from->usable_bytes);
  // Half as much again of address space (untouched memory is free), so that a block growing in small steps seldom moves. Where that is
  // refused, what is lacking counts against a limit once, and a move needs address space for both places, a copy memory as well.
  struct hz3_range *to = alloc_range(bytes + bytes / 2, 1, false);
  if (to == NULL && grow_behind(from, bytes)) return pointer;
  if (to == NULL) to = alloc_range(bytes, 1, false);
  // What is free may lie right behind it, part of another mapping. For what there can never be, nothing is given up.
  if (to == NULL) return hz3_os_can_map(bytes) && unmap_free_ranges() && grow_behind(from, bytes) ? pointer : NULL;
  size_t used = from->usable_bytes, moved_bytes = hz3_round_up(used, HZ3_SLICE_BYTES);
  // Where the target has its pages already, copying keeps those of the source for their next user.
  bool may_move = used >= MOVE_MIN_BYTES && hz3_dirty_count_bytes(to->start, moved_bytes) <= moved_bytes / 2;
  enum hz3_os_moved moved = may_move ? move_pages(from, to, moved_bytes) : HZ3_OS_NOT_MOVED;
  if (moved == HZ3_OS_TARGET_LOST) return NULL;
  to->usable_bytes = to->touched_bytes = page_round(bytes);
  if (moved == HZ3_OS_NOT_MOVED) {
    __builtin_memcpy(to->start, from->start, used);
    hz3_large_free(pointer);
  } else {
    // The kernel never joins again what it had to split for the move, and some emulators cannot purge where pages moved away from.
    hz3_page_map_set_large(pointer, NULL);
    give_up(from, from->start, 0);
  }
  return to->start;
}

void hz3_large_purge_idle(void) {
  hz3_lock_acquire(&hz3_ranges.lock);
  size_t dirty = hz3_ranges.dirty_bytes, keep = hz3_idle_keep(dirty, hz3_ranges.dirty_low_water);
  hz3_lock_release(&hz3_ranges.lock);
  purge_to(keep, dirty - keep, true);  // not also what others free meanwhile
  hz3_lock_acquire(&hz3_ranges.lock);
  hz3_ranges.dirty_low_water = hz3_ranges.dirty_bytes;
  hz3_lock_release(&hz3_ranges.lock);
}

bool hz3_large_trim(bool unmap) {
  bool any = purge_to(0, SIZE_MAX, true);
  if (unmap) any |= unmap_free_ranges();
  hz3_os_await(&hz3_ranges.taken_away, hz3_ranges.lost_by_fork, HZ3_TAKEN_AWAY_MS);
  return any;
}

void hz3_large_get_stats(struct hz3_large_stats *stats) {
  hz3_lock_acquire(&hz3_ranges.lock);
  stats->mapped_bytes = hz3_ranges.mapped_bytes;
  stats->live_bytes = hz3_ranges.live_bytes;
  stats->live_blocks = hz3_ranges.live_blocks;
  stats->dirty_free_bytes = hz3_ranges.dirty_bytes;
  stats->purges = hz3_ranges.purges;
  hz3_lock_release(&hz3_ranges.lock);
}

void hz3_large_fork_prepare(void) {
  hz3_lock_acquire_for_fork(&growth.lock);
  hz3_lock_acquire_for_fork(&hz3_ranges.lock);
}

void hz3_large_fork_child(void) { hz3_ranges.lost_by_fork = hz3_read_figure(&hz3_ranges.taken_away); }

void hz3_large_fork_release(void) {
  hz3_lock_release_for_fork(&hz3_ranges.lock);
  hz3_lock_release_for_fork(&growth.lock);
}
