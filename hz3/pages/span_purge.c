// SPDX-License-Identifier: Apache-2.0
// What it is: gives the pages between the objects of spans back to the kernel.
#include "hz3/pages/span_store_internal.h"

#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/pages/pages_internal.h"

// If a span has been sparse or hollow, and not in use, for a second, and its class is shrinking, a tick gives the pages between the
// objects back, and again with each half of them that comes back until the span is hollow. Not sooner: with them goes the huge page that
// they are part of, and most of what a program drops is in use again, or free as a whole, a moment later (docs/decisions/0023).
enum { SPARSE_MS = 1000 };
enum { HELD_UP_MS = 60 * 1000 };  // a tick that has read the clock may take so long to come here

enum { MOST_WORDS = HZ3_SLICE_BYTES / 16 / 64 };  // of a bitmap: those of a slice of the smallest objects
#define FITS_WORDS(class, below, bytes, slices, objects) _Static_assert((objects) <= 64 * MOST_WORDS, "a copy of any span's bitmap fits");
HZ3_SIZE_CLASSES(FITS_WORDS)

struct purge_result {
  bool any, is_refused;  // some of the memory was given back; some is locked by the user
};

static void purge_between(char *start, char *end, struct purge_result *result) {
  uintptr_t page = hz3_os_page_bytes(), first = hz3_round_up((uintptr_t)start, page), last = (uintptr_t)end & ~(page - 1);
  if (first >= last) return;
  if (hz3_os_purge((void *)first, last - first)) result->any = true;
  else result->is_refused = true;
}

// Where there is nothing to give back any more: clean memory was never touched, but a huge page may have made it resident.
static char *resident_end(const struct hz3_span *span, size_t carved) {
  size_t page = hz3_os_page_bytes();
  char *end = span->base + span->slices * HZ3_SLICE_BYTES;
  char *untouched = span->base + hz3_round_up(carved * hz3_size_classes[span->size_class].bytes, page);
  return span->is_clean && untouched < end && !hz3_os_is_resident(end - page) ? untouched : end;
}

// Gives back every whole page between the objects of a span that is off the lists, and puts it back where its objects say: nobody
// fetches from it meanwhile, objects still come back. No lock is held around the system calls. Whether the kernel took anything.
static bool purge_inside(struct hz3_span_store *store, struct hz3_span *span, struct hz3_off_list *off) {
  uint64_t out[MOST_WORDS];
  hz3_lock_acquire(&store->lock);
  size_t carved = span->carved, words = (carved + 63) / 64, bytes = hz3_size_classes[span->size_class].bytes;
  __builtin_memcpy(out, span->out_words, words * sizeof *out);  // those that come back later are not missed
  span->is_purged = true;  // before, so that whatever comes back from here on is noticed
  hz3_lock_release(&store->lock);
  struct purge_result result = {false, false};
  char *at = span->base;
  for (size_t w = 0; w < words; w++) {
    for (uint64_t word = out[w]; word != 0; word &= word - 1) {
      char *object = span->base + (w * 64 + (size_t)__builtin_ctzll(word)) * bytes;
      purge_between(at, object, &result);
      at = object + bytes;
    }
  }
  purge_between(at, resident_end(span, carved), &result);
  hz3_lock_acquire(&store->lock);
  off->now_ms = 0;
  if (result.is_refused) span->is_purged = false;  // what is locked may not be later
  span->list = HZ3_SPAN_NO_LIST;
  hz3_span_place_locked(store, span, off);
  hz3_lock_release(&store->lock);
  return result.any;
}

void hz3_spans_purge_hollow(struct hz3_span_store *stores, struct hz3_off_list *off) {
  while (off->hollow != NULL) {
    struct hz3_span *span = off->hollow;
    off->hollow = span->next;
    purge_inside(&stores[span->home], span, off);
  }
}

// Takes the last span of a list off if it is to be purged, else moves it to the front: so often as there are spans, and each had
// its turn, whatever others do meanwhile. False if the list is empty.
static bool take_turn(struct hz3_span_store *store, int list, struct hz3_span **due) {
  *due = NULL;
  hz3_lock_acquire(&store->lock);
  struct hz3_span *first = store->lists[list], *last = first == NULL ? NULL : first->prev;
  if (last != NULL && !last->is_purged) {
    hz3_span_unlist_locked(store, last);
    *due = last;
  } else if (last != NULL) {
    hz3_span_unlink_locked(store, last);
    hz3_span_link_locked(store, last, (uint8_t)list);
  }
  hz3_lock_release(&store->lock);
  return last != NULL;
}

static size_t listed_on(struct hz3_span_store *store, int list) {
  hz3_lock_acquire(&store->lock);
  size_t listed = store->listed[list];
  hz3_lock_release(&store->lock);
  return listed;
}

bool hz3_span_store_purge(struct hz3_span_store *store, void (*free_span)(struct hz3_span *span)) {
  struct hz3_off_list off = {.free_span = free_span};
  bool any = false;
  if (HZ3_CHECKED) return false;
  for (int list = 0; list < HZ3_SPAN_LISTS; list++) {
    struct hz3_span *due;
    for (size_t left = listed_on(store, list); left > 0 && take_turn(store, list, &due); left--) {
      if (due != NULL) any |= purge_inside(store, due, &off);
    }
  }
  hz3_spans_free(off.retired, off.free_span);
  return any;
}

struct hz3_span *hz3_span_take_due_locked(struct hz3_span_store *store, uint8_t list, uint32_t now_ms, uint32_t wait_ms, size_t *looks) {
  for (; *looks > 0 && store->lists[list] != NULL; --*looks) {
    struct hz3_span *last = store->lists[list]->prev;
    if (last->marked_ms != 0) {
      uint32_t seen_ms = now_ms - last->marked_ms;  // below zero, modulo 2^32, if another thread marked it after now_ms
      if (seen_ms < wait_ms || seen_ms > UINT32_MAX - HELD_UP_MS) return NULL;
      hz3_span_unlist_locked(store, last);
      last->was_purged = true;
      last->marked_ms = now_ms;
      hz3_pages_note_hollow_purge();
      return last;
    }
    hz3_span_unlink_locked(store, last);
    hz3_span_link_locked(store, last, list);
    last->marked_ms = hz3_max(now_ms, 1);
  }
  return NULL;
}

// Takes one off the lists, rather a hollow one.
static struct hz3_span *take_sparse(struct hz3_span_store *store, uint32_t now_ms, size_t *looks) {
  hz3_lock_acquire(&store->lock);
  struct hz3_span *span = hz3_span_take_due_locked(store, HZ3_HOLLOW_LIST, now_ms, SPARSE_MS, looks);
  if (span == NULL) span = hz3_span_take_due_locked(store, HZ3_SPARSE_LIST, now_ms, SPARSE_MS, looks);
  hz3_lock_release(&store->lock);
  return span;
}

size_t hz3_span_store_purge_sparse(struct hz3_span_store *store, uint32_t now_ms, size_t most, void (*free_span)(struct hz3_span *span)) {
  struct hz3_off_list off = {.free_span = free_span};
  size_t count = 0, looks = most * HZ3_LOOKS_PER_PURGE;
  if (HZ3_CHECKED) return 0;
  for (struct hz3_span *span; count < most && (span = take_sparse(store, now_ms, &looks)) != NULL; count++) purge_inside(store, span, &off);
  hz3_spans_free(off.retired, off.free_span);
  return count;
}
