// SPDX-License-Identifier: Apache-2.0
// What it is: a set of free spans from which the one with the lowest address can be taken: a pairing heap (Fredman, Sedgewick, Sleator
//   and Tarjan, 1986), which needs no memory beside the spans, one step to add, and log n on average to take.
// Called by: span_kept.c only.
// Needs: the spans are on no list; while they are in the set, `prev` is a span's first child and `next` that child's next sibling.
#ifndef HZ3_PAGES_SPAN_HEAP_H_
#define HZ3_PAGES_SPAN_HEAP_H_

#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

HZ3_INLINE struct hz3_span *hz3_span_heap_meld(struct hz3_span *a, struct hz3_span *b) {
  if (a == NULL || b == NULL) return a == NULL ? b : a;
  struct hz3_span *top = a->base < b->base ? a : b, *child = top == a ? b : a;
  child->next = top->prev;
  top->prev = child;
  return top;
}

// `top` is NULL while the set is empty.
HZ3_INLINE void hz3_span_heap_add(struct hz3_span **top, struct hz3_span *span) {
  span->prev = NULL;
  *top = hz3_span_heap_meld(*top, span);
}

// Takes the lowest of a set that is not empty: its children are melded in pairs, and the pairs then one by one.
HZ3_INLINE struct hz3_span *hz3_span_heap_take(struct hz3_span **top) {
  struct hz3_span *lowest = *top, *pairs = NULL, *rest = NULL;
  for (struct hz3_span *child = lowest->prev, *next; child != NULL; child = next) {
    struct hz3_span *other = child->next;
    next = other == NULL ? NULL : other->next;
    struct hz3_span *pair = hz3_span_heap_meld(child, other);
    pair->next = pairs;
    pairs = pair;
  }
  for (struct hz3_span *next; pairs != NULL; pairs = next) {
    next = pairs->next;
    rest = hz3_span_heap_meld(rest, pairs);
  }
  *top = rest;
  return lowest;
}

HZ3_END_DECLS

#endif  // HZ3_PAGES_SPAN_HEAP_H_
