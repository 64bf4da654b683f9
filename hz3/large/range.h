// SPDX-License-Identifier: Apache-2.0
// What it is: the address ranges below the large box: descriptors, neighbours, free lists.
// Called by: large.c and cache.c of this box.
// Locks: the caller's, rank LARGE, for every function ending in _locked.
#ifndef HZ3_LARGE_RANGE_H_
#define HZ3_LARGE_RANGE_H_

#include "hz3/base/lock.h"
#include "hz3/base/size_class.h"
#include "hz3/large/large.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

// Shelved: free, not merged with its neighbours yet, for a block of the same size.
enum hz3_range_state { HZ3_RANGE_SPARE, HZ3_RANGE_FREE, HZ3_RANGE_USED, HZ3_RANGE_PURGING, HZ3_RANGE_SHELVED };

struct hz3_range {
  char *start;
  size_t bytes;          // address space, a multiple of the slice
  size_t usable_bytes;   // in use: what the user may write; 0: a thread keeps it, see struct hz3_large_cache
  size_t touched_bytes;  // in use: the most that usable_bytes ever was
  struct hz3_range *left, *right;          // neighbours in address order, NULL at the end of a mapping
  struct hz3_range *bin_next, *bin_prev;   // free list of its size; spare descriptors use bin_next
  struct hz3_range *age_next, *age_prev;   // free ranges with dirty memory, oldest first
  size_t dirty_bytes;   // what counts as dirty, kept by merging and splitting; in use: without what the user has touched since
  size_t marked_bytes;  // in use or shelved: so much from the start is known to be marked
  enum hz3_range_state state;
  bool was_purged;  // some of it was given back since it was mapped
  struct hz3_large_note note;  // in use: the caller's
};

// The range in use that starts at this address, NULL if none. No lock: the caller owns the block.
HZ3_INLINE struct hz3_range *hz3_range_of(const void *pointer) {
  struct hz3_range *range = (struct hz3_range *)hz3_page_map_large_of(pointer);
  return range != NULL && range->start == pointer ? range : NULL;
}
// large.c: the range becomes a block of its owner again, which never left its hands. Returns its start.
void *hz3_range_use_again(struct hz3_range *range, size_t bytes, bool zero);

// 8 bins per doubling of slices; 2^31 slices cover the address space, 2^32 on aarch64.
enum { HZ3_RANGE_BINS = 8 * 30, HZ3_RANGE_WORDS = (HZ3_RANGE_BINS + 63) / 64, HZ3_SHELF_RANGES = 4, HZ3_SHELF_HITS = 8 };

// What a block is given stays with it, written or not, so blocks are given pages only by programs that write what they ask for. The witness
// is a huge page amid a block that was left without memory: while it has none, no block is given any. Relaxed atomics: hints.
struct hz3_witness {
  char *page;  // NULL: the last one got memory
  unsigned fills, refusals;
};

struct hz3_ranges {
  struct hz3_lock lock;
  struct hz3_range *bins[HZ3_RANGE_BINS];
  uint64_t bin_bits[HZ3_RANGE_WORDS];
  struct hz3_range *oldest_dirty, *newest_dirty;
  struct hz3_range *shelf[HZ3_SHELF_RANGES];  // NULL: empty
  size_t shelf_sizes[HZ3_SHELF_RANGES];       // bytes of the ranges freed last, shelved or not
  unsigned shelf_next;                        // where the next one goes, the oldest
  unsigned size_hits;                         // allocations in a row for which one of the sizes was right, up to HZ3_SHELF_HITS
  struct hz3_range *spare;
  // First and last range of the newest mappings that touch: the next mapping usually ends where the first starts, or starts where the last
  // ends if the kernel maps upwards, as without a limit on the stack. NULL: gone.
  struct hz3_range *lowest, *highest;
  struct hz3_retention retention;
  size_t mapped_bytes, live_bytes, live_blocks, dirty_bytes, purges;
  size_t taken_away;       // how many ranges are being purged or unmapped, or lose pages to blocks; lock, read without
  size_t lost_by_fork;     // how many of those there were at the last fork, which cut their threads off
  size_t dirty_low_water;  // fewest dirty free bytes since the last tick
  struct hz3_witness witness;
  struct hz3_huge_use huge_use;
};
extern struct hz3_ranges hz3_ranges;

// Whether blocks may make mappings of the kernel's of their own, of which a process has 65,530 by default: not any more when so much is
// mapped. Racy.
HZ3_INLINE bool hz3_ranges_may_split_mappings(void) { return hz3_read_figure(&hz3_ranges.mapped_bytes) <= (size_t)16 * 1024 * 1024 * 1024; }

// Takes the lock, with `count` spare descriptors, so that as many splits under it cannot fail. False, without the lock, when out
// of memory.
bool hz3_ranges_lock_with_descriptors(unsigned count);

// The tightest free range with `bytes` from a multiple of `align` on, taken off the free lists; NULL if none.
struct hz3_range *hz3_range_take_fit_locked(size_t bytes, size_t align);
void hz3_range_take_locked(struct hz3_range *range);  // this free range, off the free lists
// For system calls on a free range, or what is moved from it, without the lock: off the free lists, and back, merged.
void hz3_range_take_away_locked(struct hz3_range *range);
struct hz3_range *hz3_range_bring_back_locked(struct hz3_range *range);
void hz3_ranges_note_low_water_locked(void);  // after free memory came into use
// Cuts the range after `bytes`; the new right part has no state yet. A spare descriptor must exist.
struct hz3_range *hz3_range_split_locked(struct hz3_range *range, size_t bytes);
// Makes the range free, merged with free neighbours. Returns the merged range.
struct hz3_range *hz3_range_free_locked(struct hz3_range *range);
// Many programs ask for the sizes that they have just given back. While one does, the last few ranges wait for that as they are,
// which saves a merge and a split; any other allocation merges them first, and where sizes are mixed, so that best fit has
// bigger ranges to choose from, none is shelved.
void hz3_range_shelve_locked(struct hz3_range *range);  // or frees it
struct hz3_range *hz3_range_take_shelved_locked(size_t bytes, size_t align);  // exactly so many bytes; NULL if there is none
void hz3_ranges_clear_shelf_locked(void);
// Adds fresh address space as one free range.
void hz3_range_add_locked(char *start, size_t bytes);
// Joins the right neighbour (in no list) to the range.
void hz3_range_absorb_right_locked(struct hz3_range *range);
// For a range (in no list) that leaves the address space: first cut off from its neighbours, which must never merge over
// the hole; then, once it is gone, its descriptor is spare.
void hz3_range_detach_locked(struct hz3_range *range);
void hz3_range_recycle_locked(struct hz3_range *range);

// fill.c: gives a block, which its owner does not have yet and the page map does not know, pages of free ranges where it has none. NULL, or
// the huge page of the block that was lost on the way: what is there now may be others'. All else is as before.
char *hz3_range_fill(struct hz3_range *block);
bool hz3_range_fill_pays(void);  // whether it may do so at all

// Dirty memory in [start, start + bytes), both multiples of the slice. What the kernel refused to take back, because the user had
// locked it, does not count until it was in use again: it is not to be tried for ever, nor to keep other memory.
size_t hz3_dirty_count_bytes(const char *start, size_t bytes);
// The shortest part at the end, in whole granules, that has at least so many dirty bytes; all of it if there are fewer.
size_t hz3_dirty_suffix_bytes(const char *start, size_t bytes, size_t dirty_bytes);
void hz3_dirty_mark(const char *start, size_t bytes);
void hz3_dirty_clear(const char *start, size_t bytes);
bool hz3_dirty_test(const char *slice);  // whether it may be non-zero, refused or not
// Gives the memory back, granule by granule (1 MiB) if the kernel refuses the whole. Called without the lock; nothing counts as dirty afterwards.
void hz3_dirty_purge(char *start, size_t bytes);

HZ3_END_DECLS

#endif  // HZ3_LARGE_RANGE_H_
