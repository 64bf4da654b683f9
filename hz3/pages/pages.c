// SPDX-License-Identifier: Apache-2.0
// What it is: chunks and spans: finding, splitting and merging runs of slices.
// Called by: small, medium, hot through pages.h.
// Owns: hz3_pages.
// Locks: hz3_pages.lock, rank PAGES; before it one to map more, rank PAGES_GROWTH.
#include "hz3/pages/pages.h"

#include "hz3/base/fatal.h"
#include "hz3/base/growth.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/pages/object_map.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages_internal.h"
#include "hz3/pages/tag_map.h"

enum { MAX_CHUNKS_PER_MAP = 16, FIT_TRIES = 4 };
// The checked lane puts a page without access behind each mapping of chunks. Each guard takes two of the process's
// mappings (65,530 by default), so only the first chunks are mapped one by one, and far out there are no guards.
enum { SINGLE_CHUNKS = 64, GUARDED_CHUNKS = 256 * 1024 };

// A purge of 8 MiB takes 0.1 to 0.5 ms.
enum { PURGE_AHEAD_BYTES = HZ3_RETAIN_MIN_BYTES / 4, PURGE_MOST_BYTES = 8 * HZ3_MIB };

// In the checked lane the slices of the first chunk get access when they are first used, and nothing is accessible for a MiB
// before it: in a small program a pointer that is far off then meets a fault, not another block or our records. Not the later
// chunks, whose huge pages need access to all of them.
enum { ROOM_BEFORE_FIRST = 1024 * 1024 };

static struct hz3_growth growth = HZ3_GROWTH_INIT(HZ3_RANK_PAGES_GROWTH);
struct hz3_pages hz3_pages = {.lock = HZ3_LOCK_INIT(HZ3_RANK_PAGES), .retention = HZ3_RETENTION_INIT};

// Start positions of free runs of at least `count` slices: bit i set when bits i .. i+count-1 are set in `mask`.
static uint64_t run_starts(uint64_t mask, unsigned count) {
  for (unsigned have = 1; have < count;) {
    unsigned step = have <= count - have ? have : count - have;
    mask &= mask >> step;
    have += step;
  }
  return mask;
}

static struct hz3_chunk *chunk_of(struct hz3_span *span) {
  return (struct hz3_chunk *)((char *)(span - span->first_slice) - offsetof(struct hz3_chunk, spans));
}

// By halves: where runs of 2^k start is found by doubling, and the longest run from those of 32, 16 and so on that it is made up of.
static unsigned longest_run(uint64_t mask) {
  if (mask == 0 || ~mask == 0) return mask == 0 ? 0 : 64;
  uint64_t starts[6] = {mask};  // bit i of starts[k] is set when bits i .. i+2^k-1 are set in `mask`
  unsigned k = 0;
  for (; k < 5 && (starts[k] & starts[k] >> (1u << k)) != 0; k++) starts[k + 1] = starts[k] & starts[k] >> (1u << k);
  unsigned length = 1u << k;
  uint64_t longest = starts[k];
  while (k-- > 0) {
    uint64_t longer = longest & starts[k] >> length;
    if (longer == 0) continue;
    longest = longer;
    length += 1u << k;
  }
  return length;
}

static void unlink_by_run_locked(struct hz3_chunk *chunk) {
  unsigned run = chunk->longest_run;
  if (run == 0) return;
  if (chunk->prev != NULL) chunk->prev->next = chunk->next;
  else hz3_pages.by_run[run] = chunk->next;
  if (chunk->next != NULL) chunk->next->prev = chunk->prev;
  if (hz3_pages.by_run[run] == NULL) hz3_pages.run_bits &= ~((uint64_t)1 << (run - 1));
  chunk->longest_run = 0;
}

// Puts the chunk on the list of its longest free run after `free` changed.
void hz3_chunk_relist_locked(struct hz3_chunk *chunk) {
  unsigned run = longest_run(chunk->free);
  if (run == chunk->longest_run) return;
  unlink_by_run_locked(chunk);
  if (run == 0) return;
  chunk->longest_run = (uint8_t)run;
  chunk->prev = NULL;
  chunk->next = hz3_pages.by_run[run];
  if (chunk->next != NULL) chunk->next->prev = chunk;
  hz3_pages.by_run[run] = chunk;
  hz3_pages.run_bits |= (uint64_t)1 << (run - 1);
}

// Which slices will do.
enum wanted { ANY, DIRTY, DIRTY_AT_HOME };

// First slice of an aligned run in the chunk, -1 if none.
static int find_run(const struct hz3_chunk *chunk, unsigned count, unsigned align, enum wanted wanted, unsigned home) {
  uint64_t aligned = ~(uint64_t)0, mask = chunk->free;
  if (align > 1) aligned /= ((uint64_t)1 << align) - 1;  // bits 0, align, 2*align, ...
  if (wanted != ANY) mask &= chunk->dirty;
  if (wanted == DIRTY_AT_HOME) mask &= chunk->used_by[home];
  uint64_t starts = run_starts(mask, count) & aligned;
  return starts == 0 ? -1 : __builtin_ctzll(starts);
}

// Tightest fit: the chunk with the shortest sufficient longest run, so that big runs stay whole.
static struct hz3_chunk *find_chunk_locked(unsigned count, unsigned align, enum wanted wanted, unsigned home, int *first) {
  for (uint64_t bits = hz3_pages.run_bits & ~(((uint64_t)1 << (count - 1)) - 1); bits != 0; bits &= bits - 1) {
    struct hz3_chunk *chunk = hz3_pages.by_run[__builtin_ctzll(bits) + 1];
    for (int tries = FIT_TRIES; chunk != NULL && tries > 0; chunk = chunk->next, tries--) {
      *first = find_run(chunk, count, align, wanted, home);
      if (*first >= 0) return chunk;
    }
  }
  return NULL;
}

void hz3_pages_set_giving_back(bool value) { __atomic_store_n(&hz3_pages.is_giving_back, value, __ATOMIC_RELAXED); }
bool hz3_pages_is_giving_back(void) { return __atomic_load_n(&hz3_pages.is_giving_back, __ATOMIC_RELAXED); }

// A span of the class, tagged; its list fields are for the caller. If possible of memory that costs no page fault, nor a
// transfer from another CPU.
static struct hz3_span *take_span_locked(unsigned size_class, unsigned home, unsigned times, enum wanted last) {
  unsigned least = hz3_size_classes[size_class].slices, align = hz3_size_classes[size_class].align_slices, count = least;
  int first = -1;
  struct hz3_chunk *chunk = NULL;
  int wanted = hz3_pages.dirty_slices < least ? ANY : DIRTY_AT_HOME;
  for (; wanted >= (int)last && chunk == NULL; wanted--) {
    chunk = find_chunk_locked(count = least * times, align, (enum wanted)wanted, home, &first);
    if (chunk == NULL && times > 1) chunk = find_chunk_locked(count = least, align, (enum wanted)wanted, home, &first);
  }
  if (chunk == NULL) return NULL;
  uint64_t mask = hz3_slice_mask((unsigned)first, count);
  uint64_t dirty = chunk->dirty & mask;
  uint64_t closed = chunk->closed & mask;
  hz3_pages.dirty_slices -= (unsigned)__builtin_popcountll(hz3_chunk_purgeable(chunk) & mask);
  chunk->free &= ~mask;
  chunk->closed &= ~mask;
  chunk->refused &= ~mask;
  hz3_pages.free_slices -= count;
  hz3_pages.dirty_low_water = hz3_min(hz3_pages.dirty_low_water, hz3_pages.dirty_slices);
  size_t purged_bytes = (size_t)__builtin_popcountll(chunk->purged & mask) * HZ3_SLICE_BYTES;
  if (hz3_retention_note_regret(&hz3_pages.retention, purged_bytes)) hz3_pages_set_giving_back(false);
  chunk->purged &= ~mask;
  chunk->used_tick = hz3_pages.ticks;
  hz3_chunk_note_dirty_locked(chunk);
  hz3_chunk_relist_locked(chunk);
  struct hz3_span *span = &chunk->spans[first];
  span->base = chunk->base + (size_t)first * HZ3_SLICE_BYTES;
  span->first_slice = (uint8_t)first;
  span->slices = (uint8_t)count;
  span->objects = (uint16_t)(hz3_size_classes[size_class].objects * (count / least));
  span->home = (uint8_t)home;
  span->is_clean = dirty == 0;
  span->is_closed = closed != 0;
  int tag = (int)size_class * HZ3_TAG_STEP;
  hz3_tag_map_set(span->base, count, size_class <= HZ3_TABLE_CLASS_LAST ? tag : -tag);
  return span;
}

// The slices of a span are free again; which of them are dirty, or closed, is for the caller to say before.
static void put_span_back_locked(struct hz3_span *span) {
  struct hz3_chunk *chunk = chunk_of(span);
  uint64_t mask = hz3_slice_mask(span->first_slice, span->slices);
  HZ3_CHECK((chunk->free & mask) == 0);
  hz3_tag_map_set(span->base, span->slices, 0);  // a stale pointer is foreign from here on
  chunk->free |= mask;
  for (unsigned home = 0; home < HZ3_SPAN_HOMES; home++) chunk->used_by[home] &= ~mask;
  chunk->used_by[span->home] |= mask;
  chunk->used_tick = hz3_pages.ticks;
  hz3_pages.free_slices += span->slices;
  hz3_pages.dirty_slices += (unsigned)__builtin_popcountll(chunk->dirty & mask);
  hz3_chunk_note_dirty_locked(chunk);
  hz3_chunk_relist_locked(chunk);
}

static struct hz3_span *take_span(unsigned size_class, unsigned home, unsigned times, enum wanted last) {
  hz3_lock_acquire(&hz3_pages.lock);
  struct hz3_span *span = take_span_locked(size_class, home, times, last);
  hz3_lock_release(&hz3_pages.lock);
  return span;
}

// What classes keep for themselves comes before memory that is not resident, unless another home soon wants it.
static struct hz3_span *find_span(unsigned size_class, unsigned home, unsigned times, bool only_there) {
  struct hz3_span *span = take_span(size_class, home, times, only_there ? DIRTY_AT_HOME : DIRTY);
  if (span != NULL || only_there) return span;
  hz3_span_stores_give_up_kept(home);
  return take_span(size_class, home, times, ANY);
}

// False if the kernel refuses; the span is free again then.
static bool open_span(struct hz3_span *span) {
  if (hz3_os_make_writable(span->base, (size_t)span->slices * HZ3_SLICE_BYTES)) return true;
  hz3_lock_acquire(&hz3_pages.lock);
  chunk_of(span)->closed |= hz3_slice_mask(span->first_slice, span->slices);  // asks for access once more than needed
  put_span_back_locked(span);
  hz3_lock_release(&hz3_pages.lock);
  return false;
}

// Of the slices those that were touched already are dirty.
static bool add_chunk(char *base, size_t guard_bytes, uint64_t huge, uint64_t dirty, bool is_closed) {
  if (!hz3_page_map_reserve(base, HZ3_CHUNK_BYTES)) return false;
  if (HZ3_CHECKED && !hz3_object_map_reserve(base, HZ3_CHUNK_BYTES)) return false;
  hz3_tag_map_cover(base, HZ3_CHUNK_BYTES);
  hz3_lock_acquire(&hz3_pages.lock);
  struct hz3_chunk *chunk = hz3_pages.spare_descriptors;
  if (chunk != NULL) hz3_pages.spare_descriptors = chunk->next;
  hz3_lock_release(&hz3_pages.lock);
  if (chunk == NULL) chunk = (struct hz3_chunk *)hz3_metadata_alloc(sizeof *chunk);
  if (chunk == NULL) return false;
  chunk->base = base;
  chunk->guard_bytes = (uint32_t)guard_bytes;
  hz3_lock_acquire(&hz3_pages.lock);
  chunk->free = ~(uint64_t)0;
  if (hz3_pages.chunks == 0) {
    hz3_pages.first = chunk;
    chunk->free = hz3_slice_mask(0, HZ3_OFFERED_SLICES);
    hz3_pages.held = ~chunk->free;
  }
  chunk->dirty = dirty;
  chunk->purged = chunk->refused = 0;
  __builtin_memset(chunk->used_by, 0, sizeof chunk->used_by);  // the descriptor may have been another's
  chunk->huge = huge;
  chunk->closed = is_closed ? ~(uint64_t)0 : 0;
  hz3_chunk_join_locked(chunk);
  hz3_add_to_figure(&hz3_pages.chunks, 1);
  hz3_pages.free_slices += HZ3_CHUNK_SLICES;
  hz3_pages.dirty_slices += (unsigned)__builtin_popcountll(hz3_chunk_purgeable(chunk));
  hz3_chunk_note_dirty_locked(chunk);
  hz3_chunk_relist_locked(chunk);
  hz3_lock_release(&hz3_pages.lock);
  return true;
}

// Room without access, and one chunk above it whose slices are closed. False when out of memory.
static bool map_first(void) {
  size_t guard = hz3_os_page_bytes();
  char *room = (char *)hz3_os_map_aligned(NULL, 2 * HZ3_CHUNK_BYTES + guard, HZ3_CHUNK_BYTES), *base = room + HZ3_CHUNK_BYTES;
  if (room == NULL) return false;
  hz3_os_unmap(room, HZ3_CHUNK_BYTES - ROOM_BEFORE_FIRST);
  bool is_closed = hz3_os_protect(base - ROOM_BEFORE_FIRST, ROOM_BEFORE_FIRST + HZ3_CHUNK_BYTES + guard);
  if (!add_chunk(base, guard, 0, 0, is_closed)) {
    hz3_os_unmap(base - ROOM_BEFORE_FIRST, ROOM_BEFORE_FIRST + HZ3_CHUNK_BYTES + guard);
    return false;
  }
  hz3_pages.last_base = base;
  return true;
}

// Maps more chunks: an eighth of what is there, so that big heaps make few system calls and little is over-reserved; one where huge pages
// are no good, for others may want them of the next ones.
static bool map_chunks(bool may_be_huge, bool is_fast) {
  if (HZ3_CHECKED && !hz3_pages.has_had_first) {
    hz3_pages.has_had_first = true;
    if (map_first()) return true;
  }
  size_t chunks = hz3_read_figure(&hz3_pages.chunks), wanted = hz3_max(1, hz3_min(chunks / 8, MAX_CHUNKS_PER_MAP));
  if (!may_be_huge || (HZ3_CHECKED && chunks < SINGLE_CHUNKS)) wanted = 1;
  size_t guard = HZ3_CHECKED && chunks < GUARDED_CHUNKS ? hz3_os_page_bytes() : 0;
  char *last = hz3_pages.last_base;
  for (; wanted > 0; wanted /= 2) {
    size_t bytes = wanted * HZ3_CHUNK_BYTES;
    // What lies between the guard and the next chunk is not mapped: it costs no limit anything.
    char *hint = last == NULL ? NULL : last - bytes - (guard == 0 ? 0 : HZ3_CHUNK_BYTES);
    char *base = (char *)hz3_os_map_aligned(hint, bytes + guard, HZ3_CHUNK_BYTES);
    if (base == NULL) continue;
    if (guard != 0) hz3_os_protect(base + bytes, guard);  // refused (too many maps): a page that nobody uses
    hz3_pages.last_base = base;
    bool is_growing = chunks >= HZ3_SMALL_PAGE_CHUNKS || (chunks > 0 && is_fast);
    enum hz3_huge_answer answer = may_be_huge && is_growing ? hz3_huge_pages_ask(&hz3_pages.huge_use, base, bytes) : HZ3_HUGE_NONE;
    bool is_upwards = last != NULL && base > last;
    size_t added = 0;  // beginning with the one that meets the neighbour
    for (bool more = true; more && added < wanted; added += more) {
      size_t at = is_upwards ? added : wanted - 1 - added;
      uint64_t first = at == 0 ? HZ3_LOW_HALF : 0;
      uint64_t huge = answer == HZ3_HUGE_ALL ? ~(uint64_t)0 : answer == HZ3_HUGE_BUT_FIRST ? ~first : 0;
      uint64_t dirty = answer == HZ3_HUGE_ONLY_FIRST ? first : 0;
      more = add_chunk(base + at * HZ3_CHUNK_BYTES, at == wanted - 1 ? guard : 0, huge, dirty, false);
    }
    size_t kept = is_upwards ? added * HZ3_CHUNK_BYTES : 0, rest = (wanted - added) * HZ3_CHUNK_BYTES;
    if (rest > 0) hz3_os_unmap(base + kept, rest + (is_upwards || added == 0 ? guard : 0));
    return added > 0;
  }
  return false;
}

// False if the kernel gives no more; `count` is that of growths when nothing was found.
static bool grow(size_t count, bool may_be_huge) {
  if (!hz3_growth_begin(&growth, count)) return true;
  uint64_t now = hz3_os_now_ms();
  bool is_fast = now - hz3_pages.grown_ms <= HZ3_FAST_GROWTH_MS;
  hz3_pages.grown_ms = now;
  // In the checked lane what the first chunk has not given away stays without access as long as possible.
  bool is_filling = !HZ3_CHECKED && is_fast && may_be_huge && hz3_huge_pages_pay() && hz3_first_chunk_is_filled();
  bool any = (is_filling ? hz3_first_chunk_offer_huge() : hz3_first_chunk_offer(HZ3_OFFERED_SLICES)) || map_chunks(may_be_huge, is_fast) ||
             hz3_first_chunk_offer(HZ3_OFFERED_SLICES);
  hz3_growth_end(&growth, any);
  return any;
}

static void note_opened(unsigned size_class, unsigned home) {
  __atomic_store_n(&hz3_pages.has_opened[size_class][home], true, __ATOMIC_RELAXED);
  if (home > 0) __atomic_store_n(&hz3_pages.has_homes, true, __ATOMIC_RELAXED);
}

// Whether this will be the first span that one of several homes has of a class of small blocks.
static bool is_one_of_many(unsigned size_class, unsigned home) {
  bool has_homes = home > 0 || __atomic_load_n(&hz3_pages.has_homes, __ATOMIC_RELAXED);
  return size_class <= HZ3_SMALL_CLASS_LAST && has_homes && !__atomic_load_n(&hz3_pages.has_opened[size_class][home], __ATOMIC_RELAXED);
}

static struct hz3_span *alloc_span(unsigned size_class, unsigned home, unsigned times, bool only_there) {
  uint32_t *words = HZ3_CHECKED ? hz3_object_words_alloc(size_class) : NULL;
  if (HZ3_CHECKED && words == NULL) return NULL;
  struct hz3_span *span;
  size_t growths;
  do {
    growths = hz3_growth_count(&growth);
    span = find_span(size_class, home, times, only_there);
  } while (span == NULL && !only_there && grow(growths, !is_one_of_many(size_class, home)));
  if (span == NULL || (HZ3_CHECKED && span->is_closed && !open_span(span))) {
    if (HZ3_CHECKED) hz3_object_words_free(size_class, words);
    return NULL;
  }
  if (HZ3_CHECKED) hz3_object_map_set(span->base, size_class, span->is_clean, words);
  note_opened(size_class, home);
  span->next = span->prev = NULL;
  span->out_words = NULL;
  span->out_word = 0;
  span->settle_out = span->marked_ms = 0;
  span->carved = 0;
  span->until_settle = 0;
  span->was_purged = span->is_draining = false;
  span->list = HZ3_SPAN_NO_LIST;
  span->is_purged = false;
  span->size_class = (uint16_t)size_class;
  hz3_page_map_set_span(span);
  return span;
}

struct hz3_span *hz3_pages_alloc_span(unsigned size_class, unsigned home, unsigned times) {
  return alloc_span(size_class, home, times, false);
}

struct hz3_span *hz3_pages_alloc_span_at_home(unsigned size_class, unsigned home, unsigned times) {
  return alloc_span(size_class, home, times, true);
}

void hz3_pages_free_span(struct hz3_span *span) {
  unsigned size_class = span->size_class;
  HZ3_CHECK(size_class != 0);
  hz3_page_map_clear_span(span);
  span->size_class = 0;
  if (HZ3_CHECKED) hz3_object_words_free(size_class, hz3_object_map_clear(span->base, size_class));
  hz3_lock_acquire(&hz3_pages.lock);
  struct hz3_chunk *chunk = chunk_of(span);
  chunk->dirty |= hz3_slice_mask(span->first_slice, span->slices);
  put_span_back_locked(span);
  hz3_chunk_renew_halves_locked(chunk);
  size_t limit = hz3_retention_limit(&hz3_pages.retention, hz3_pages_used_bytes_locked());
  size_t dirty = hz3_pages.dirty_slices * HZ3_SLICE_BYTES, keep = hz3_retention_keep(&hz3_pages.retention, dirty, limit);
  // As long as some of what is free may wait, what lies between objects waits, too.
  if (dirty > keep && keep == limit) hz3_pages_set_giving_back(true);
  hz3_pages_note_coming_back(limit > HZ3_RETAIN_MIN_BYTES);
  hz3_lock_release(&hz3_pages.lock);
  // Some more than the excess goes, so that the next spans to go do not call the kernel one by one; but no more at a time than
  // the caller can wait for.
  if (dirty > keep) hz3_pages_purge_to(hz3_max(keep - PURGE_AHEAD_BYTES, dirty - hz3_min(dirty, PURGE_MOST_BYTES)));
}

void hz3_pages_get_stats(struct hz3_pages_stats *stats) {
  hz3_lock_acquire(&hz3_pages.lock);
  stats->chunks = hz3_pages.chunks;
  stats->mapped_bytes = hz3_pages.chunks * HZ3_CHUNK_BYTES;
  stats->free_bytes = hz3_pages.free_slices * HZ3_SLICE_BYTES;
  stats->dirty_bytes = hz3_pages.dirty_slices * HZ3_SLICE_BYTES;
  stats->purges = hz3_pages.purges;
  hz3_lock_release(&hz3_pages.lock);
  stats->kept_bytes = hz3_span_stores_kept_bytes();
}

void hz3_pages_fork_prepare(void) {
  hz3_lock_acquire_for_fork(&growth.lock);
  hz3_lock_acquire_for_fork(&hz3_pages.lock);
}

void hz3_pages_fork_child(void) { hz3_pages.lost_by_fork = hz3_read_figure(&hz3_pages.taken_away); }

void hz3_pages_fork_release(void) {
  hz3_lock_release_for_fork(&hz3_pages.lock);
  hz3_lock_release_for_fork(&growth.lock);
}
