// SPDX-License-Identifier: Apache-2.0
// What it is: the spans of one class that have room, fullest first, so that emptier ones can drain.
// Called by: small, medium.
// Locks: the caller's, rank CLASS.
// Invariant: a span is on the list of its fullness class while 0 < room; room = free_count + (objects - carved).
#ifndef HZ3_PAGES_SPAN_LIST_H_
#define HZ3_PAGES_SPAN_LIST_H_

#include "hz3/base/fatal.h"
#include "hz3/base/lock.h"
#include "hz3/base/size_class.h"
#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

enum { HZ3_SPAN_LISTS = 3, HZ3_SPAN_NO_LIST = 255 };

// The central store of one class.
struct hz3_span_store {
  struct hz3_lock lock;
  struct hz3_span *lists[HZ3_SPAN_LISTS];  // less than 1/4 free, less than 1/2, the rest
  size_t live_objects;                     // handed out and not come back
  size_t spans;
} __attribute__((aligned(HZ3_CACHE_LINE)));

HZ3_INLINE size_t hz3_span_room(const struct hz3_span *span) {
  return span->free_count + (hz3_size_classes[span->size_class].objects - span->carved);
}

HZ3_INLINE void hz3_span_store_unlink(struct hz3_span_store *store, struct hz3_span *span) {
  if (span->list == HZ3_SPAN_NO_LIST) return;
  if (span->prev != NULL) span->prev->next = span->next;
  else store->lists[span->list] = span->next;
  if (span->next != NULL) span->next->prev = span->prev;
  span->list = HZ3_SPAN_NO_LIST;
}

HZ3_INLINE void hz3_span_store_link(struct hz3_span_store *store, struct hz3_span *span, uint8_t list) {
  span->prev = NULL;
  span->next = store->lists[list];
  if (span->next != NULL) span->next->prev = span;
  store->lists[list] = span;
  span->list = list;
}

// Puts the span where its room says, after the room changed.
HZ3_INLINE void hz3_span_store_update(struct hz3_span_store *store, struct hz3_span *span) {
  size_t room = hz3_span_room(span), objects = hz3_size_classes[span->size_class].objects;
  uint8_t list = room == 0 ? HZ3_SPAN_NO_LIST : (uint8_t)((room * 4 >= objects) + (room * 2 >= objects));
  if (list == span->list) return;
  hz3_span_store_unlink(store, span);
  if (list != HZ3_SPAN_NO_LIST) hz3_span_store_link(store, span, list);
}

// The fullest span with room, NULL if none.
HZ3_INLINE struct hz3_span *hz3_span_store_first(const struct hz3_span_store *store) {
  for (int i = 0; i < HZ3_SPAN_LISTS; i++) {
    if (store->lists[i] != NULL) return store->lists[i];
  }
  return NULL;
}

// The span and index of an object that comes back; ends the process if it is not the start of a block of the class.
HZ3_INLINE struct hz3_span *hz3_span_store_resolve(unsigned size_class, const void *object, size_t *index) {
  struct hz3_span *span = hz3_pages_span_of(object);
  const struct hz3_size_class *class = &hz3_size_classes[size_class];
  if (HZ3_UNLIKELY(span == NULL || span->size_class != size_class)) hz3_fatal(HZ3_FATAL_INVALID_FREE, object, 0);
  size_t offset = (size_t)((const char *)object - hz3_pages_span_base(span));
  *index = hz3_size_class_index(size_class, offset);
  if (HZ3_UNLIKELY(*index * class->bytes != offset || *index >= span->carved))
    hz3_fatal(HZ3_FATAL_MISALIGNED_FREE, object, class->bytes);
  return span;
}

// Writes the addresses of `count` objects from `index` on so that the last one written is the lowest: magazines are
// popped from the end, and a program that gets rising addresses touches its pages in order.
HZ3_INLINE void hz3_span_carve(struct hz3_span *span, size_t bytes, void **out, size_t count) {
  char *at = hz3_pages_span_base(span) + span->carved * bytes;
  span->carved += (uint32_t)count;
  for (size_t i = count; i-- > 0; at += bytes) out[i] = at;
}

// After objects came back: relists the span; an entirely free one leaves the store and joins *retired.
HZ3_INLINE void hz3_span_store_settle(struct hz3_span_store *store, struct hz3_span *span, struct hz3_span **retired) {
  if (span->free_count < span->carved) {
    hz3_span_store_update(store, span);
    return;
  }
  hz3_span_store_unlink(store, span);
  hz3_take_from_figure(&store->spans, 1);
  span->next = *retired;
  *retired = span;
}

HZ3_END_DECLS

#endif  // HZ3_PAGES_SPAN_LIST_H_
