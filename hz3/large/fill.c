// SPDX-License-Identifier: Apache-2.0
// What it is: pages for new blocks, out of free ranges that are too small for them (docs/decisions/0037).
// Called by: large.c.
// Owns: hz3_ranges.witness.
// Locks: hz3_ranges.lock; pages move without it, from ranges that are in no list to a block that nobody else has yet.
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/large/range.h"

// So many of the ranges that have been dirty longest are looked at; one block in so many has a witness; and after so many blocks that
// got nothing since a witness had nothing, another one is asked.
enum { SOURCE_TRIES = 16, FILLS_PER_WITNESS = 16, REFUSALS_PER_WITNESS = 64 };

// Huge pages move as a whole, which costs the kernel as little as a small one, and leaves them huge. Each may be a mapping of its own then.
enum { UNIT = HZ3_HUGE_PAGE_BYTES };

static bool witness_says_yes(void) {
  struct hz3_witness *witness = &hz3_ranges.witness;
  char *page = __atomic_load_n(&witness->page, __ATOMIC_RELAXED);
  if (page == NULL) return true;
  if (!hz3_os_is_resident(page)) {
    if (__atomic_add_fetch(&witness->refusals, 1, __ATOMIC_RELAXED) % REFUSALS_PER_WITNESS != 0) return false;
    __atomic_store_n(&witness->fills, 0, __ATOMIC_RELAXED);  // the next block has another
  }
  __atomic_store_n(&witness->page, NULL, __ATOMIC_RELAXED);
  return true;
}

bool hz3_range_fill_pays(void) {
  return hz3_ranges_may_split_mappings() && witness_says_yes() && hz3_os_can_reuse_what_moved();
}

// The first whole unit in [at, end) that has dirty memory, or has none; NULL if there is no such.
static char *next_unit(char *at, char *end, bool dirty) {
  at = (char *)hz3_round_up((uintptr_t)at, UNIT);
  while (at + UNIT <= end && (hz3_dirty_count_bytes(at, UNIT) != 0) != dirty) at += UNIT;
  return at + UNIT <= end ? at : NULL;
}

static char *next_dirty(const struct hz3_range *source, char *at) { return next_unit(at, source->start + source->bytes, true); }

static struct hz3_range *take_source(void) {
  hz3_lock_acquire(&hz3_ranges.lock);
  struct hz3_range *range = hz3_ranges.oldest_dirty;
  for (int tries = SOURCE_TRIES; range != NULL && next_dirty(range, range->start) == NULL; range = tries > 0 ? range->age_next : NULL) tries--;
  if (range != NULL) hz3_range_take_away_locked(range);
  hz3_lock_release(&hz3_ranges.lock);
  return range;
}

static void put_back(struct hz3_range *source) {
  hz3_lock_acquire(&hz3_ranges.lock);
  source->dirty_bytes = hz3_dirty_count_bytes(source->start, source->bytes);
  hz3_range_bring_back_locked(source);
  hz3_ranges_note_low_water_locked();
  hz3_lock_release(&hz3_ranges.lock);
}

struct filling {
  char *to, *end;  // the next unit without dirty memory, NULL if there is none; of the block
  char *witness;   // the unit that is to be left without
  enum hz3_os_moved moved;
};

static void choose_witness(struct filling *filling) {
  filling->witness = NULL;
  if (__atomic_fetch_add(&hz3_ranges.witness.fills, 1, __ATOMIC_RELAXED) % FILLS_PER_WITNESS != 0) return;
  char *middle = filling->to + (filling->end - filling->to) / 2, *chosen = next_unit(middle, filling->end, false);
  filling->witness = chosen == NULL ? filling->to : chosen;
  __atomic_store_n(&hz3_ranges.witness.page, filling->witness, __ATOMIC_RELAXED);
}

static void move_unit(struct filling *filling, char *from) {
  filling->moved = hz3_os_move_pages(from, filling->to, UNIT);
  if (filling->moved != HZ3_OS_MOVED) return;
  for (size_t at = 0; at < UNIT; at += HZ3_SLICE_BYTES) {
    if (hz3_dirty_test(from + at)) hz3_dirty_mark(filling->to + at, HZ3_SLICE_BYTES);
  }
  hz3_dirty_clear(from, UNIT);
}

static bool is_done(const struct filling *filling) { return filling->to == NULL || filling->moved != HZ3_OS_MOVED; }

static void fill_from(struct filling *filling, struct hz3_range *source) {
  for (char *from = source->start; !is_done(filling) && (from = next_dirty(source, from)) != NULL;) {
    // What the witness would have got goes back to the kernel, or it would be memory that the process did not have before.
    if (filling->to == filling->witness) hz3_dirty_purge(from, UNIT);
    else move_unit(filling, from);
    if (filling->moved == HZ3_OS_MOVED) filling->to = next_unit(filling->to + UNIT, filling->end, false);
  }
}

char *hz3_range_fill(struct hz3_range *block) {
  char *end = block->start + hz3_min(hz3_round_up(block->usable_bytes, UNIT), block->bytes);
  struct filling filling = {.to = next_unit(block->start, end, false), .end = end, .moved = HZ3_OS_MOVED};
  struct hz3_range *source = is_done(&filling) || !hz3_range_fill_pays() ? NULL : take_source();
  if (source == NULL) return NULL;
  choose_witness(&filling);
  for (; source != NULL; source = is_done(&filling) ? NULL : take_source()) {
    fill_from(&filling, source);
    put_back(source);
  }
  block->dirty_bytes = hz3_dirty_count_bytes(block->start, block->bytes);
  return filling.moved == HZ3_OS_TARGET_LOST ? filling.to : NULL;
}
