// SPDX-License-Identifier: Apache-2.0
// What it is: the central store of one class for one home: its spans with room, fullest first so that emptier ones can drain,
//   and the bitmaps of what came back. Each span has a home; callers with different homes do not share spans while there is
//   room in their own, so that their objects do not share cache lines (docs/decisions/0029). Free spans that the class is likely
//   to want again at once stay with it, so that threads do not meet at the lock of the pages (docs/decisions/0038).
// Called by: small, medium.
// Locks: one per store, rank CLASS; taken here, never two at once, nor while a span comes from or goes back to its chunk.
// Invariant: a span is on the list of its fullness, or of scraps, in the store of its home while 0 < room, except while it is off the lists: it
//   is purged, moves to another home, or is free and kept, and then counts as none of the store's spans. room = objects - out;
//   out = bits set, none at or above carved. No object memory is read or written.
#ifndef HZ3_PAGES_SPAN_STORE_H_
#define HZ3_PAGES_SPAN_STORE_H_

#include "hz3/base/lock.h"
#include "hz3/base/size_class.h"
#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

enum { HZ3_SPAN_LISTS = 7, HZ3_SPAN_OFF_LISTS = HZ3_SPAN_NO_LIST - 1 };

struct hz3_span_store {
  struct hz3_lock lock;
  struct hz3_span *lists[HZ3_SPAN_LISTS];  // scraps, less than 1/4 free, less than 1/2, less than 3/4, the rest: sparse, hollow, and those of both that were purged
  uint32_t listed[HZ3_SPAN_LISTS];         // how many spans are on each
  size_t live_objects;                     // handed out and not come back
  size_t spans;
  size_t objects;                          // that its spans have room for
  size_t exchanged, spans_then;            // objects fetched and come back since a moment, and the spans then
  size_t fetched_run, released_run;        // objects fetched in a row, and those that have come back in a row since
  uint32_t handed_out;                     // objects fetched ever, modulo 2^32
  uint32_t batch_ms;                       // when both runs were last a large part of the class
  uint32_t reuse_ms;                       // when that was so twice within HZ3_SWING_MS, or what comes back was too often young
  uint32_t left_ms, swung_ms;              // when a span last became free, and when one was wanted soon after that
  struct hz3_span *kept;                   // free spans that wait here until the class wants them again, see span_heap.h
  size_t kept_count, kept_slices;
  uint32_t kept_low;                       // fewest since the last tick
  uint32_t kept_most;                      // how many may be kept: so many were wanted again soon after they had left
  uint32_t left;                           // spans that left and were not wanted again yet
  uint32_t widest_slices;                  // of its spans, for a store that has ever learned to keep any, 0 otherwise; as is the next of those
  void (*free_span)(struct hz3_span *span);
  struct hz3_span_store *next_keeping;
  int8_t doubt;                            // that what comes back first is what has been out for longest: how often samples were young, against how often not
  uint8_t seen;                            // of samples, in this fetch
  bool drains_in_vain;                     // threads are to keep what they free even where spans are empty enough to drain
} __attribute__((aligned(HZ3_CACHE_LINE)));
#define HZ3_SPAN_STORE_INIT {.lock = HZ3_LOCK_INIT(HZ3_RANK_CLASS)}

HZ3_INLINE size_t hz3_span_objects_out(const struct hz3_span *span) { return span->settle_out + (uint32_t)span->until_settle; }

// Racy, for hints and statistics.
HZ3_INLINE struct hz3_class_use hz3_span_store_use(const struct hz3_span_store *store) {
  return (struct hz3_class_use){hz3_read_figure(&store->spans), hz3_read_figure(&store->objects), hz3_read_figure(&store->live_objects)};
}

// Takes up to `count` objects out of the spans with room, or that are kept; 0 if there is none. What is to be popped first, from the
// end, is of the fullest span, and of each span the lowest. Where the store is in order and has little room, no scraps, unless these are
// wanted. *is_clean is cleared if any of them may be non-zero, else left alone.
size_t hz3_span_store_fetch(struct hz3_span_store *store, void **out, size_t count, bool scraps, bool *is_clean);
// Takes a span with room away, for another home, into whose store it has to go; NULL if there is none. `live`: how many of its
// objects are out.
struct hz3_span *hz3_span_store_take_span(struct hz3_span_store *store, unsigned new_home, size_t *live);
// How many times as large as the class's smallest span the store's next one is to be. Racy.
unsigned hz3_span_store_next_times(const struct hz3_span_store *store, unsigned size_class);
// Adds such a span, or a fresh one, of which no object is out and the bitmap is in place, and fetches.
size_t hz3_span_store_fetch_from(struct hz3_span_store *store, struct hz3_span *span, size_t live, void **out, size_t count, bool *is_clean);
// Puts objects back into the stores of their spans' homes, of which the first is given; those in `objects` are in another order
// then. Each lies in a chunk that there is or was, which whoever freed it found out. A block that is already free, or no block of the
// class, ends the process. Spans that became free leave their store, unless it keeps them for now, and free_span gets each of them,
// under no lock.
void hz3_span_store_release(struct hz3_span_store *stores, unsigned size_class, void **objects, size_t count,
                            void (*free_span)(struct hz3_span *span));
// Gives back to the kernel the pages of spans with room in which no byte is out; whether it took any. Not again for a span to which
// nothing came back since. One span at a time is off the lists meanwhile. Spans that became free: as above. Does nothing in
// the checked lane, whose pattern in free blocks has to stay.
bool hz3_span_store_purge(struct hz3_span_store *store, void (*free_span)(struct hz3_span *span));
// The same, from time to time, for at most so many spans of which a quarter is out or less, and which were so, and not fetched from, a
// second ago; how many there were. Not again before half of that came back.
size_t hz3_span_store_purge_sparse(struct hz3_span_store *store, uint32_t now_ms, size_t most, void (*free_span)(struct hz3_span *span));

HZ3_END_DECLS

#endif  // HZ3_PAGES_SPAN_STORE_H_
