// SPDX-License-Identifier: Apache-2.0
// What it is: what the files of the span store share.
// Called by: span_release.c, span_purge.c, span_store.c, span_kept.c only; each calls those after it.
// Locks: what ends in _locked is called under the store's.
#ifndef HZ3_PAGES_SPAN_STORE_INTERNAL_H_
#define HZ3_PAGES_SPAN_STORE_INTERNAL_H_

#include "hz3/base/os.h"
#include "hz3/pages/span_store.h"

HZ3_BEGIN_DECLS

// Scraps are spans that were full, and of which less than a quarter came back. Of a sparse span a quarter is out, or less; of a hollow one so
// few objects, mostly in caches of threads that may stay silent. What may then become of their pages: span_purge.c.
enum { HZ3_SCRAP_LIST, HZ3_FULLEST_LIST, HZ3_SPARSE_LIST = HZ3_SPAN_LISTS - 3, HZ3_HOLLOW_LIST, HZ3_PURGED_LIST, HZ3_HOLLOW_OBJECTS = 4 };
enum { HZ3_LOOKS_PER_PURGE = 4 };  // for each span that may be purged, so many are looked at

// Spans that a release or a purge took off the lists, linked by next.
struct hz3_off_list {
  struct hz3_span *retired;  // free, and out of the store
  struct hz3_span *hollow;   // to be purged: nobody fetches from them, objects still come back
  size_t hollow_count;
  uint32_t now_ms;  // the clock, read once while a lock is held: 0 after it was taken, or what another holder did since would lie ahead
  void (*free_span)(struct hz3_span *span);
};

// Once while a lock is held, see hz3_off_list.
HZ3_INLINE uint32_t hz3_span_look_at_clock(uint32_t *now_ms) {
  if (*now_ms == 0) *now_ms = (uint32_t)hz3_os_now_ms();
  return *now_ms;
}

// The bits of `count` objects from `first` on, all in one word.
HZ3_INLINE uint64_t hz3_span_bits_of(size_t first, size_t count) { return UINT64_MAX >> (64 - count) << first % 64; }

// Of an object of the class, counted from the one at `start`; a huge number for what is none from there on.
HZ3_INLINE size_t hz3_number_from(const char *start, const struct hz3_size_class *class, const void *object) {
  return hz3_object_number(class->odd_inverse, class->twos, (size_t)((const char *)object - start));
}

// The span is looked at again when no more than `out` are out.
HZ3_INLINE void hz3_span_settle_at(struct hz3_span *span, size_t out) {
  span->until_settle += (int32_t)(span->settle_out - out);
  span->settle_out = (uint16_t)out;
}

HZ3_INLINE bool hz3_span_store_swings(const struct hz3_span_store *store, uint32_t now_ms) { return now_ms - store->swung_ms < HZ3_SWING_MS; }

// Spans linked by next.
HZ3_INLINE void hz3_spans_free(struct hz3_span *span, void (*free_span)(struct hz3_span *span)) {
  for (struct hz3_span *next; span != NULL; span = next) {
    next = span->next;
    free_span(span);
  }
}

// span_store.c
void hz3_span_link_locked(struct hz3_span_store *store, struct hz3_span *span, uint8_t list);
void hz3_span_unlink_locked(struct hz3_span_store *store, struct hz3_span *span);
void hz3_span_unlist_locked(struct hz3_span_store *store, struct hz3_span *span);  // and HZ3_SPAN_OFF_LISTS until it is placed
// Puts a span where its objects say after some came back, unless it is off the lists: an entirely free one is kept, or leaves the store.
void hz3_span_place_locked(struct hz3_span_store *store, struct hz3_span *span, struct hz3_off_list *off);
// `count` objects came back.
void hz3_span_store_note_released_locked(struct hz3_span_store *store, unsigned size_class, size_t count, struct hz3_off_list *off);

// span_purge.c
// Takes the last span of a list off, to be purged within, if it was seen there at least `wait_ms` ago. One that nobody has seen is marked,
// and goes to the front.
struct hz3_span *hz3_span_take_due_locked(struct hz3_span_store *store, uint8_t list, uint32_t now_ms, uint32_t wait_ms, size_t *looks);
void hz3_spans_purge_hollow(struct hz3_span_store *stores, struct hz3_off_list *off);

// span_kept.c
// A span of the class is wanted, and none that is in use has room.
void hz3_span_store_note_wanted_locked(struct hz3_span_store *store);
// One more free span, of up to so many slices, may be kept, if that would have spared the pages the one that is wanted now.
void hz3_span_store_learn_to_keep_locked(struct hz3_span_store *store, uint32_t widest_slices);
// So many less may be kept.
void hz3_span_store_unlearn_locked(struct hz3_span_store *store, uint32_t spans);
// A span of which nothing is out waits for the class to want it again. It keeps its tag, its bitmap, and its place in the page map.
void hz3_span_keep_locked(struct hz3_span_store *store, struct hz3_span *span, void (*free_span)(struct hz3_span *span));
struct hz3_span *hz3_span_take_kept_locked(struct hz3_span_store *store);  // the lowest of those that there are

HZ3_END_DECLS

#endif  // HZ3_PAGES_SPAN_STORE_INTERNAL_H_
