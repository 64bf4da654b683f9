// SPDX-License-Identifier: Apache-2.0
// What it is: the chunk, shared by the files of this box only.
// Called by: the files of this box.
// Invariant: purging slices are in neither free nor any span.
#ifndef HZ3_PAGES_PAGES_INTERNAL_H_
#define HZ3_PAGES_PAGES_INTERNAL_H_

#include "hz3/base/lock.h"
#include "hz3/base/size_class.h"
#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

#define HZ3_CHUNK_SLICES 64
#define HZ3_CHUNK_BYTES (HZ3_CHUNK_SLICES * HZ3_SLICE_BYTES)
// The slices of each half of a chunk, which is a huge page.
#define HZ3_LOW_HALF ((uint64_t)UINT32_MAX)
#define HZ3_HIGH_HALF (~HZ3_LOW_HALF)

// Chunks after these ask for huge pages, and then these do, too, each half the next time that it is free and given back. A huge page
// costs about as much as 110 page faults, and by then 2,048 were taken: a heap that stops right there pays a twentieth more, one
// that grows on takes a fourth of the time for its pages. Not before, or a small program would grow by 2 MiB at once; unless the
// last slices were used up within HZ3_FAST_GROWTH_MS: such a heap is likely to grow on. And not for the first span that one of
// several homes has of a class of small blocks: of many such spans little is used (docs/decisions/0022).
enum { HZ3_SMALL_PAGE_CHUNKS = 2, HZ3_FAST_GROWTH_MS = 12 };

// The first chunk offers so many slices at first, and as many more when there is no room for a span. But if those were used up so
// fast, and a third of their pages is resident by then, HZ3_FILLED_SHARE, it offers its upper half with a huge page, or, if that was
// offered, the next chunk is mapped. What it holds back waits until growth is slower, or there is no other memory. Programs that
// need a little of many classes touch less than an eighth (docs/decisions/0022).
enum { HZ3_OFFERED_SLICES = HZ3_CHUNK_SLICES / 4, HZ3_FILLED_SHARE = 3 };

// Where the advice of neighbouring halves differs, a mapping ends, and the kernel allows a process 65,530. Purges change advice as
// long as that makes no more than so many ends, and one more per so many chunks; then halves keep what they have, and what was
// purged may become resident again, as slowly as the kernel makes huge pages on its own. Halves that are free as a whole may ask for
// huge pages again as long as there is no more than one end for each chunk besides, or HZ3_RENEWED_ENDS (docs/decisions/0022).
enum { HZ3_ADVICE_ENDS = 24, HZ3_CHUNKS_PER_ADVICE_END = 64, HZ3_RENEWED_ENDS = 4096 };

struct hz3_chunk {
  char *base;
  uint64_t free, dirty, purged;        // one bit per slice, lock: pages; purged: given back and not used since
  uint64_t refused;                    // one bit per slice: free, and locked by the user when it was to be purged; lock: pages
  uint64_t used_by[HZ3_SPAN_HOMES];    // one bit per slice: spans of that home were the last to use it; lock: pages
  uint64_t huge;                       // one bit per slice, both halves for themselves: asks for a huge page; lock: pages
  struct hz3_chunk *below, *above;     // the chunk that ends where this one starts, and the other way round; lock: pages
  uint64_t closed;                     // checked lane: free slices without access, never used; lock: pages
  struct hz3_chunk *next, *prev;       // list of chunks with the same longest free run
  struct hz3_chunk *dirty_next, *dirty_prev;  // chunks with dirty free slices, oldest first, but behind them what a tick found in use
  uint32_t used_tick;    // hz3_pages.ticks when a span last came from here or came back; lock: pages
  uint32_t guard_bytes;  // checked lane: behind the chunk, without access; 0 for all but the last of a mapping
  uint8_t longest_run;
  bool on_dirty_list;
  struct hz3_span spans[HZ3_CHUNK_SLICES] __attribute__((aligned(HZ3_CACHE_LINE)));  // by first slice
};

// All state of the box, under one lock.
struct hz3_pages {
  struct hz3_lock lock;
  struct hz3_chunk *by_run[HZ3_CHUNK_SLICES + 1];  // chunks by longest free run
  uint64_t run_bits;                               // bit r - 1: by_run[r] is not empty, r >= 1
  struct hz3_chunk *dirty_first, *dirty_last;
  struct hz3_chunk *spare_descriptors;  // of unmapped chunks, linked by next
  struct hz3_retention retention;
  size_t chunks, free_slices, purges;
  uint32_t ticks;          // so far
  size_t taken_away;       // how many calls hold slices that are neither free nor used: to purge or unmap them, or that stores kept; atomic
  size_t lost_by_fork;     // how many of those there were at the last fork, which cut their threads off
  struct hz3_chunk *first;  // of which slices are held back, if any are:
  uint64_t held;            // one bit per slice: not in its `free`, but counted in free_slices
  size_t dirty_slices;     // free, dirty, and not refused
  size_t advice_ends;      // halves whose advice differs from that of the half above
  struct hz3_chunk *newest;  // the next one mostly lies right beside it; NULL if it was unmapped and had no neighbour
  bool has_had_first;      // checked lane: a chunk was mapped, whatever became of it; lock: growth
  uint64_t grown_ms;  // when a span last found no room; lock: growth
  bool has_opened[HZ3_CLASS_COUNT][HZ3_SPAN_HOMES];  // a span of the class was allocated for the home; atomic
  bool has_homes;  // and for more than one home; atomic
  uint64_t huge_dear_until_ms, huge_pause_ms;  // no huge pages until then; for so long the last time, 0 if one was cheap since; atomic
  struct hz3_huge_use huge_use;  // of chunks
  size_t dirty_low_water;  // fewest dirty free slices when a span was taken, since the last tick
  char *last_base;  // hint for the next mapping, so that chunks are neighbours and the kernel merges their maps; lock: growth
  // Read without the lock, so apart from what is written under it; all atomic:
  bool is_giving_back __attribute__((aligned(HZ3_CACHE_LINE)));  // see hz3_pages_is_giving_back
  bool is_coming_back;                                           // the bound was above its minimum when a span was last freed
  uint32_t wanted_ms;                                            // when a store last wanted a span
  uint32_t hollow_purges, hollow_regrets;                        // see hz3_pages_are_hollow_purges_early
};
extern struct hz3_pages hz3_pages;

HZ3_INLINE size_t hz3_pages_used_bytes_locked(void) {
  return hz3_pages.chunks * HZ3_CHUNK_BYTES - hz3_pages.free_slices * HZ3_SLICE_BYTES;
}

HZ3_INLINE void hz3_pages_take_away(void) { __atomic_fetch_add(&hz3_pages.taken_away, 1, __ATOMIC_RELAXED); }
HZ3_INLINE void hz3_pages_bring_back(void) { __atomic_fetch_sub(&hz3_pages.taken_away, 1, __ATOMIC_RELAXED); }

// The free slices that may be non-zero, and that the kernel would take.
HZ3_INLINE uint64_t hz3_chunk_purgeable(const struct hz3_chunk *chunk) { return chunk->free & chunk->dirty & ~chunk->refused; }

// The bits of `count` slices from `first` on.
HZ3_INLINE uint64_t hz3_slice_mask(unsigned first, unsigned count) {
  return (count == HZ3_CHUNK_SLICES ? ~(uint64_t)0 : ((uint64_t)1 << count) - 1) << first;
}

// page_map.c
void hz3_page_map_set_span(struct hz3_span *span);  // whose slices must be reserved
void hz3_page_map_clear_span(struct hz3_span *span);

// tag_map.c
void hz3_tag_map_cover(const char *start, size_t bytes);  // widens the window if possible; lock: growth, takes that of the box itself
void hz3_tag_map_set(const char *start, size_t slices, int tag);  // locks: see tag_map.h

// pages.c
void hz3_chunk_relist_locked(struct hz3_chunk *chunk);

void hz3_pages_set_giving_back(bool value);

// huge_pages.c
// Whether huge pages are worth asking for, for chunks as they are used now.
bool hz3_huge_pages_pay(void);
// And none was dear since one was found cheap: where nobody looks what those cost that are asked for now.
bool hz3_huge_pages_are_cheap(void);
void hz3_chunk_join_locked(struct hz3_chunk *chunk);   // beside its neighbour, if that is the newest
void hz3_chunk_leave_locked(struct hz3_chunk *chunk);
// From now on these slices, whole halves, are to ask for huge pages. False, and nothing changed, if mappings do not allow for it.
bool hz3_chunk_set_huge_locked(struct hz3_chunk *chunk, uint64_t huge);
// Offers the lowest slices that the first chunk holds back, so many at most. False if there are none.
bool hz3_first_chunk_offer(unsigned count);
// Offers its upper half, with a huge page. False if it is not held back as a whole. Lock: growth; not in the checked lane,
// where nobody has access to it.
bool hz3_first_chunk_offer_huge(void);
// Whether the slices below those that are held back were filled, see HZ3_OFFERED_SLICES; false if none are held back.
bool hz3_first_chunk_is_filled(void);

// span_kept.c
// Frees the spans that stores keep: for a home that needs memory its own, those of medium blocks, and those of other homes that do not
// swing; for a tick those that were not wanted for a while; for a trim all of them.
enum { HZ3_FOR_TICK = HZ3_SPAN_HOMES, HZ3_FOR_TRIM };
void hz3_span_stores_give_up_kept(unsigned whom);
size_t hz3_span_stores_kept_bytes(void);  // racy

// purge.c
void hz3_chunk_note_dirty_locked(struct hz3_chunk *chunk);
// Gives halves of the chunk that lost their huge pages, and are free as a whole, back with advice for new ones, if those are cheap. May
// release the lock meanwhile.
void hz3_chunk_renew_halves_locked(struct hz3_chunk *chunk);
bool hz3_pages_purge_to(size_t keep_bytes);  // whether anything was purged
void hz3_pages_note_coming_back(bool value);

HZ3_END_DECLS

#endif  // HZ3_PAGES_PAGES_INTERNAL_H_
