// SPDX-License-Identifier: Apache-2.0
// What it is: giving free slices back to the kernel, and deciding how much to keep.
// Called by: pages.c, span_release.c, span_purge.c, span_store.c, span_kept.c; hot (trim, ticks) and large (retention) through pages.h.
// Locks: hz3_pages.lock, never held across madvise or munmap: slices being purged are neither free nor used.
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/pages/pages_internal.h"

// Memory wanted again within this time after a purge counts as purged too early.
enum { REGRET_MS = 1000 };
// So often the maximum doubles, a second each, while a load goes on coming back: who does so once or twice and falls silent leaves no more than that.
enum { MAXIMUM_DOUBLES = 3 };
HZ3_STATIC_ASSERT(HZ3_RETAIN_MAX_BYTES <= SIZE_MAX >> MAXIMUM_DOUBLES, "retain_max_bytes must fit when doubled");
// The bound also holds where less is in use than the known low, by an eighth of the bound or by the minimum, whichever is more: lows
// differ a little from swing to swing.
enum { LOW_SHARE = 8 };
// What exceeds the bound may wait so long, if it is no more than that, less by half of what was purged within REGRET_MS.
enum { EXCESS_MS = 100, EXCESS_MOST_BYTES = (size_t)4 * HZ3_RETAIN_MIN_BYTES };
// A tick may keep its caller waiting for the purge of so much, 1 to 2 ms.
enum { IDLE_PURGE_MOST_BYTES = 32 * HZ3_MIB };
// A tick that finds less than this is no reason to purge within spans, too: of a small heap that mostly comes back at once.
enum { GIVING_BACK_MIN_BYTES = HZ3_RETAIN_MIN_BYTES / 8 };
// Of the spans that were purged within, more than one in so many used again too early is too many; a tick forgets one in so many of both.
enum { REGRET_SHARE = 4, TICKS_REMEMBERED = 8 };
// Among so many of the chunks that have been dirty longest, one with a free half is looked for, or by a tick one that is not in use: in so
// many ticks before this one no span came from there, nor came back.
enum { TRIES = 16, UNUSED_TICKS = 2 };

size_t hz3_retention_limit(const struct hz3_retention *retention, size_t used_bytes) {
  size_t tolerance = hz3_max(retention->limit_bytes / LOW_SHARE, HZ3_RETAIN_MIN_BYTES);
  return used_bytes + tolerance >= retention->known_low_bytes ? retention->limit_bytes : HZ3_RETAIN_MIN_BYTES;
}

size_t hz3_retention_keep(struct hz3_retention *retention, size_t dirty_bytes, size_t limit_bytes) {
  if (dirty_bytes <= limit_bytes) {
    retention->excess_since_ms = 0;
    return limit_bytes;
  }
  uint64_t now = hz3_os_now_ms();
  if (retention->excess_since_ms == 0) retention->excess_since_ms = now;
  if (now - retention->excess_since_ms >= EXCESS_MS) return limit_bytes;
  size_t recent_bytes = now - retention->last_purge_ms > REGRET_MS ? 0 : retention->recent_bytes;
  return limit_bytes + EXCESS_MOST_BYTES - hz3_min(recent_bytes / 2, EXCESS_MOST_BYTES);
}

void hz3_retention_note_purge(struct hz3_retention *retention, size_t bytes, size_t used_bytes) {
  uint64_t now = hz3_os_now_ms();
  if (now - retention->last_purge_ms > REGRET_MS) {
    retention->recent_bytes = 0;
    retention->recent_low_bytes = SIZE_MAX;
  }
  retention->recent_bytes += bytes;
  retention->recent_low_bytes = hz3_min(retention->recent_low_bytes, used_bytes);
  retention->last_purge_ms = now;
  if (now - retention->last_regret_ms > 5 * REGRET_MS && retention->limit_bytes > HZ3_RETAIN_MIN_BYTES) {
    retention->limit_bytes = hz3_max(retention->limit_bytes / 2, HZ3_RETAIN_MIN_BYTES);
    if (retention->limit_bytes == HZ3_RETAIN_MIN_BYTES) retention->known_low_bytes = SIZE_MAX;
    retention->last_regret_ms = retention->coming_back_since_ms = now;
  }
}

bool hz3_retention_note_regret(struct hz3_retention *retention, size_t bytes) {
  if (bytes == 0 || retention->recent_bytes == 0) return false;
  uint64_t now = hz3_os_now_ms();
  if (now - retention->last_purge_ms > REGRET_MS) {
    retention->recent_bytes = 0;
    return false;
  }
  bytes = hz3_min(bytes, retention->recent_bytes);
  retention->recent_bytes -= bytes;
  if (retention->limit_bytes == HZ3_RETAIN_MIN_BYTES) retention->coming_back_since_ms = now;
  uint64_t seconds = (now - retention->coming_back_since_ms) / REGRET_MS;
  size_t most = (size_t)HZ3_RETAIN_MAX_BYTES << hz3_min(seconds, MAXIMUM_DOUBLES);
  if (retention->limit_bytes < most) retention->limit_bytes = hz3_min(retention->limit_bytes + bytes, most);
  retention->known_low_bytes = hz3_min(retention->known_low_bytes, retention->recent_low_bytes);
  retention->last_regret_ms = now;
  return true;
}

size_t hz3_idle_keep(size_t dirty_bytes, size_t low_water_bytes) {
  return dirty_bytes - hz3_min(hz3_min(low_water_bytes / 2, IDLE_PURGE_MOST_BYTES), dirty_bytes);
}

static void link_dirty_locked(struct hz3_chunk *chunk) {
  chunk->dirty_next = NULL;
  chunk->dirty_prev = hz3_pages.dirty_last;
  if (chunk->dirty_prev != NULL) chunk->dirty_prev->dirty_next = chunk;
  else hz3_pages.dirty_first = chunk;
  hz3_pages.dirty_last = chunk;
}

static void unlink_dirty_locked(struct hz3_chunk *chunk) {
  if (chunk->dirty_prev != NULL) chunk->dirty_prev->dirty_next = chunk->dirty_next;
  else hz3_pages.dirty_first = chunk->dirty_next;
  if (chunk->dirty_next != NULL) chunk->dirty_next->dirty_prev = chunk->dirty_prev;
  else hz3_pages.dirty_last = chunk->dirty_prev;
}

// Keeps the chunk on the dirty list exactly while it has something to purge; new ones go to the end.
void hz3_chunk_note_dirty_locked(struct hz3_chunk *chunk) {
  bool has_dirty = hz3_chunk_purgeable(chunk) != 0;
  if (has_dirty == chunk->on_dirty_list) return;
  chunk->on_dirty_list = has_dirty;
  if (has_dirty) link_dirty_locked(chunk);
  else unlink_dirty_locked(chunk);
}

// Purges each run of slices in the mask, or where that is refused each slice; returns the slices that the kernel took.
static uint64_t purge_runs(struct hz3_chunk *chunk, uint64_t mask) {
  uint64_t purged = 0;
  for (unsigned most = HZ3_CHUNK_SLICES; mask != 0;) {
    unsigned first = (unsigned)__builtin_ctzll(mask);
    uint64_t rest = ~(mask >> first);
    unsigned count = rest == 0 ? HZ3_CHUNK_SLICES - first : (unsigned)__builtin_ctzll(rest);
    count = hz3_min(count, most);
    uint64_t run = hz3_slice_mask(first, count);
    bool done = hz3_os_purge(chunk->base + first * HZ3_SLICE_BYTES, count * HZ3_SLICE_BYTES);
    if (done) purged |= run;
    if (done || count == 1) mask &= ~run;
    else most = 1;
  }
  return purged;
}

// The halves of the chunk that are free, and can go, as a whole.
static uint64_t free_halves(const struct hz3_chunk *chunk) {
  uint64_t free = chunk->free & ~chunk->refused;
  return ((free & HZ3_LOW_HALF) == HZ3_LOW_HALF ? HZ3_LOW_HALF : 0) | ((free & HZ3_HIGH_HALF) == HZ3_HIGH_HALF ? HZ3_HIGH_HALF : 0);
}

static uint64_t halves_of(uint64_t slices) { return (slices & HZ3_LOW_HALF ? HZ3_LOW_HALF : 0) | (slices & HZ3_HIGH_HALF ? HZ3_HIGH_HALF : 0); }

static bool has_half_to_purge(const struct hz3_chunk *chunk) { return (free_halves(chunk) & chunk->dirty) != 0; }

// The chunk that has been dirty longest; rather one of which a half can go as a whole. NULL if there is none.
static struct hz3_chunk *oldest_locked(void) {
  struct hz3_chunk *chunk = hz3_pages.dirty_first;
  for (int tries = TRIES; chunk != NULL && tries > 0; chunk = chunk->dirty_next, tries--) {
    if (has_half_to_purge(chunk)) return chunk;
  }
  return hz3_pages.dirty_first;
}

// For a tick: of a chunk in use only halves go. What else is free there is soon wanted again, and the half that it is a part of would lose
// its huge page (docs/decisions/0014). NULL if there is nothing in those that were looked at.
static struct hz3_chunk *oldest_unused_locked(void) {
  for (int tries = TRIES; tries > 0 && hz3_pages.dirty_first != NULL; tries--) {
    struct hz3_chunk *chunk = hz3_pages.dirty_first;
    if (has_half_to_purge(chunk) || hz3_pages.ticks - chunk->used_tick > UNUSED_TICKS) return chunk;
    unlink_dirty_locked(chunk);
    link_dirty_locked(chunk);
  }
  return NULL;
}

// Gives free slices of the chunk back; of those in `advised` the advice changed to what the chunk says. Returns how many the kernel took of
// what was dirty. What it refused is not tried again until it was used, so that this ends. Lock held on entry and exit, not between.
static unsigned give_back_locked(struct hz3_chunk *chunk, uint64_t mask, uint64_t advised) {
  uint64_t dirty = mask & chunk->dirty;
  bool is_huge = (chunk->huge & advised) != 0;
  unsigned count = (unsigned)__builtin_popcountll(mask);
  chunk->free &= ~mask;
  hz3_pages.free_slices -= count;
  hz3_pages.dirty_slices -= (unsigned)__builtin_popcountll(dirty);
  hz3_chunk_note_dirty_locked(chunk);
  hz3_chunk_relist_locked(chunk);
  hz3_pages_take_away();
  hz3_lock_release(&hz3_pages.lock);
  if (advised != 0) {
    char *start = chunk->base + (size_t)__builtin_ctzll(advised) * HZ3_SLICE_BYTES;
    hz3_os_advise_huge(start, (size_t)__builtin_popcountll(advised) * HZ3_SLICE_BYTES, is_huge);
  }
  uint64_t purged = purge_runs(chunk, mask);
  hz3_lock_acquire(&hz3_pages.lock);
  hz3_pages_bring_back();
  chunk->purged |= purged & dirty;
  chunk->dirty &= ~purged;
  chunk->refused |= mask & ~purged;
  chunk->free |= mask;
  hz3_pages.free_slices += count;
  hz3_pages.purges++;
  hz3_chunk_note_dirty_locked(chunk);
  hz3_chunk_relist_locked(chunk);
  return (unsigned)__builtin_popcountll(purged & dirty);
}

// Purges the chunk; false for NULL. `slices`: what the kernel took of what was dirty. Lock as above.
static bool purge_chunk_locked(struct hz3_chunk *chunk, unsigned *slices) {
  if (chunk == NULL) return false;
  // Where huge pages are asked for, the kernel makes them afterwards, too, and would fill what is purged between blocks again.
  // So only halves go as long as there are any. When parts of halves have to go, those halves do without huge pages until they are
  // free as a whole; with the parts go the clean slices, which the huge pages made resident. So do halves of a heap that is small.
  // Of a half that goes as a whole all goes in one call: what went in parts may keep its page table, and with it small pages.
  uint64_t halves = free_halves(chunk), before = chunk->huge;
  bool in_halves = (halves & chunk->dirty) != 0, may_be_huge = in_halves && hz3_pages.chunks > HZ3_SMALL_PAGE_CHUNKS;
  uint64_t mask = in_halves ? halves : chunk->free & ~chunk->refused & ~halves & (chunk->dirty | before);
  uint64_t huge = !may_be_huge ? before & ~halves_of(mask) : hz3_huge_pages_pay() ? before | halves : before;
  *slices = give_back_locked(chunk, mask, hz3_chunk_set_huge_locked(chunk, huge) ? huge ^ before : 0);
  return true;
}

// The half, if some of it is dirty, but no more than half of it: the rest went in parts, or was never used. Else none.
static uint64_t if_mostly_clean(const struct hz3_chunk *chunk, uint64_t half) {
  unsigned dirty = (unsigned)__builtin_popcountll(chunk->dirty & half);
  return dirty > 0 && dirty <= HZ3_CHUNK_SLICES / 4 ? half : 0;
}

void hz3_chunk_renew_halves_locked(struct hz3_chunk *chunk) {
  uint64_t lost = free_halves(chunk) & ~chunk->huge & (if_mostly_clean(chunk, HZ3_LOW_HALF) | if_mostly_clean(chunk, HZ3_HIGH_HALF));
  if (lost == 0 || hz3_pages.chunks <= HZ3_SMALL_PAGE_CHUNKS || !hz3_huge_pages_are_cheap()) return;
  if (hz3_chunk_set_huge_locked(chunk, chunk->huge | lost)) give_back_locked(chunk, lost, lost);
}

// Both are looked at first, so that those who write them often do not take the line from all others.
void hz3_pages_note_coming_back(bool value) {
  if (__atomic_load_n(&hz3_pages.is_coming_back, __ATOMIC_RELAXED) != value) __atomic_store_n(&hz3_pages.is_coming_back, value, __ATOMIC_RELAXED);
}

void hz3_pages_note_wanted(uint32_t now_ms) {
  if (__atomic_load_n(&hz3_pages.wanted_ms, __ATOMIC_RELAXED) != now_ms) __atomic_store_n(&hz3_pages.wanted_ms, now_ms, __ATOMIC_RELAXED);
}

bool hz3_pages_are_hollow_due(uint32_t now_ms) {
  // Below zero if another thread noted it after now_ms was read (or 25 days before it: ticks are left then).
  int32_t not_wanted_ms = (int32_t)(now_ms - __atomic_load_n(&hz3_pages.wanted_ms, __ATOMIC_RELAXED));
  return not_wanted_ms >= HZ3_SOON_MS && !__atomic_load_n(&hz3_pages.is_coming_back, __ATOMIC_RELAXED) && hz3_pages_is_giving_back();
}

void hz3_pages_note_hollow_purge(void) { __atomic_fetch_add(&hz3_pages.hollow_purges, 1, __ATOMIC_RELAXED); }

void hz3_pages_note_hollow_use(uint32_t purged_ms) {
  if ((uint32_t)hz3_os_now_ms() - purged_ms <= REGRET_MS) __atomic_fetch_add(&hz3_pages.hollow_regrets, 1, __ATOMIC_RELAXED);
}

bool hz3_pages_are_hollow_purges_early(void) {
  uint32_t purges = __atomic_load_n(&hz3_pages.hollow_purges, __ATOMIC_RELAXED);
  return __atomic_load_n(&hz3_pages.hollow_regrets, __ATOMIC_RELAXED) > purges / REGRET_SHARE;
}

// Rounded up, so that nothing is remembered for ever.
static void forget_some(uint32_t *count) {
  uint32_t now = __atomic_load_n(count, __ATOMIC_RELAXED);
  __atomic_fetch_sub(count, (now + TICKS_REMEMBERED - 1) / TICKS_REMEMBERED, __ATOMIC_RELAXED);
}

bool hz3_pages_purge_to(size_t keep_bytes) {
  bool any = false;
  hz3_lock_acquire(&hz3_pages.lock);
  for (unsigned slices; hz3_pages.dirty_slices * HZ3_SLICE_BYTES > keep_bytes && purge_chunk_locked(oldest_locked(), &slices);) {
    if (slices == 0) continue;
    hz3_retention_note_purge(&hz3_pages.retention, slices * HZ3_SLICE_BYTES, hz3_pages_used_bytes_locked());
    any = true;
  }
  hz3_lock_release(&hz3_pages.lock);
  return any;
}

void hz3_pages_purge_idle(void) {
  hz3_span_stores_give_up_kept(HZ3_FOR_TICK);
  hz3_lock_acquire(&hz3_pages.lock);
  hz3_pages.ticks++;
  size_t keep_bytes = hz3_idle_keep(hz3_pages.dirty_slices * HZ3_SLICE_BYTES, hz3_pages.dirty_low_water * HZ3_SLICE_BYTES);
  size_t keep = hz3_round_up(keep_bytes, HZ3_SLICE_BYTES) / HZ3_SLICE_BYTES;
  bool is_early = hz3_pages_are_hollow_purges_early();
  forget_some(&hz3_pages.hollow_purges);
  forget_some(&hz3_pages.hollow_regrets);
  size_t left = hz3_pages.dirty_slices - keep;  // not also what others free meanwhile
  hz3_pages_set_giving_back(left * HZ3_SLICE_BYTES >= GIVING_BACK_MIN_BYTES && !is_early);
  for (unsigned slices; left > 0 && hz3_pages.dirty_slices > keep && purge_chunk_locked(oldest_unused_locked(), &slices);) left -= hz3_min(left, slices);
  hz3_pages.dirty_low_water = hz3_pages.dirty_slices;
  hz3_lock_release(&hz3_pages.lock);
}

// Takes one wholly free chunk out of the address space. False if there is none, or the kernel refuses.
static bool unmap_one_chunk(void) {
  hz3_lock_acquire(&hz3_pages.lock);
  struct hz3_chunk *chunk = hz3_pages.by_run[HZ3_CHUNK_SLICES];
  if (chunk != NULL) {
    unsigned dirty = (unsigned)__builtin_popcountll(hz3_chunk_purgeable(chunk));
    if (dirty > 0) hz3_retention_note_purge(&hz3_pages.retention, dirty * HZ3_SLICE_BYTES, hz3_pages_used_bytes_locked());
    hz3_pages.dirty_slices -= dirty;
    chunk->free = 0;
    hz3_pages.free_slices -= HZ3_CHUNK_SLICES;
    hz3_chunk_note_dirty_locked(chunk);
    hz3_chunk_relist_locked(chunk);
    hz3_chunk_leave_locked(chunk);  // before another chunk can be where it was
    hz3_pages_take_away();
  }
  hz3_lock_release(&hz3_pages.lock);
  if (chunk == NULL) return false;
  bool unmapped = hz3_os_unmap(chunk->base, HZ3_CHUNK_BYTES + chunk->guard_bytes);
  hz3_lock_acquire(&hz3_pages.lock);
  hz3_pages_bring_back();
  if (unmapped) {
    hz3_take_from_figure(&hz3_pages.chunks, 1);
    chunk->next = hz3_pages.spare_descriptors;
    hz3_pages.spare_descriptors = chunk;
  } else {  // too many maps: keep it
    hz3_chunk_join_locked(chunk);
    chunk->free = ~(uint64_t)0;
    hz3_pages.free_slices += HZ3_CHUNK_SLICES;
    hz3_pages.dirty_slices += (unsigned)__builtin_popcountll(hz3_chunk_purgeable(chunk));
    hz3_chunk_note_dirty_locked(chunk);
    hz3_chunk_relist_locked(chunk);
  }
  hz3_lock_release(&hz3_pages.lock);
  return unmapped;
}

// Of a half that asks for a huge page all is resident once one block lies in it. So of each of which nothing that is free is dirty the
// first free slice, with which the others go: of those in use, and of all if the heap is small.
static uint64_t unused_behind_huge_pages(const struct hz3_chunk *chunk) {
  uint64_t spared = hz3_pages.chunks <= HZ3_SMALL_PAGE_CHUNKS ? 0 : free_halves(chunk), slices = chunk->free & chunk->huge & ~spared;
  uint64_t low = slices & HZ3_LOW_HALF, high = slices & HZ3_HIGH_HALF;
  return ((low & chunk->dirty) == 0 ? low & -low : 0) | ((high & chunk->dirty) == 0 ? high & -high : 0);
}

// What was locked may be no more.
static void find_what_was_left(void) {
  hz3_lock_acquire(&hz3_pages.lock);
  for (unsigned run = 1; run <= HZ3_CHUNK_SLICES; run++) {
    for (struct hz3_chunk *chunk = hz3_pages.by_run[run]; chunk != NULL; chunk = chunk->next) {
      unsigned before = (unsigned)__builtin_popcountll(hz3_chunk_purgeable(chunk));
      chunk->refused = 0;
      chunk->dirty |= unused_behind_huge_pages(chunk);
      hz3_pages.dirty_slices += (unsigned)__builtin_popcountll(hz3_chunk_purgeable(chunk)) - before;
      hz3_chunk_note_dirty_locked(chunk);
    }
  }
  hz3_lock_release(&hz3_pages.lock);
}

bool hz3_pages_trim(bool unmap) {
  hz3_span_stores_give_up_kept(HZ3_FOR_TRIM);
  hz3_first_chunk_offer(HZ3_CHUNK_SLICES);  // or its chunk would not be free as a whole
  bool any = false;
  while (unmap && unmap_one_chunk()) any = true;
  find_what_was_left();
  any |= hz3_pages_purge_to(0);
  hz3_os_await(&hz3_pages.taken_away, hz3_pages.lost_by_fork, HZ3_TAKEN_AWAY_MS);
  return any;
}
