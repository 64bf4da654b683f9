// SPDX-License-Identifier: Apache-2.0
// What it is: the medium box, see medium.h.
#include "hz3/medium/medium.h"

#include "hz3/pages/span_list.h"

#define STORE(class, below, bytes, slices, objects) [class] = {.lock = HZ3_LOCK_INIT(HZ3_RANK_CLASS)},
static struct hz3_span_store stores[HZ3_CLASS_COUNT] = {HZ3_SIZE_CLASSES(STORE)};

#define FITS_ONE_WORD(class, below, bytes, slices, objects) \
  _Static_assert((class) <= HZ3_SMALL_CLASS_LAST || (objects) <= 64, "a medium span's free objects fit one word");
HZ3_SIZE_CLASSES(FITS_ONE_WORD)

static size_t take_from(struct hz3_span *span, void **out, size_t count, bool *is_clean) {
  const struct hz3_size_class *class = &hz3_size_classes[span->size_class];
  char *base = hz3_pages_span_base(span);
  size_t wanted = hz3_min(count, span->free_count), left = wanted;
  for (; left > 0; span->free_word &= span->free_word - 1)
    out[--left] = base + (size_t)__builtin_ctzll(span->free_word) * class->bytes;
  span->free_count -= (uint32_t)wanted;
  size_t carve = hz3_min(count - wanted, class->objects - span->carved);
  hz3_span_carve(span, class->bytes, out + wanted, carve);
  if (wanted > 0 || !span->is_clean) *is_clean = false;
  return wanted + carve;
}

static size_t fetch_locked(struct hz3_span_store *store, void **out, size_t count, bool *is_clean) {
  size_t got = 0;
  struct hz3_span *span;
  while (got < count && (span = hz3_span_store_first(store)) != NULL) {
    got += take_from(span, out + got, count - got, is_clean);
    hz3_span_store_update(store, span);
  }
  hz3_add_to_figure(&store->live_objects, got);
  return got;
}

size_t hz3_medium_fetch(unsigned size_class, void **out, size_t count, bool *is_clean) {
  struct hz3_span_store *store = &stores[size_class];
  *is_clean = true;
  hz3_lock_acquire(&store->lock);
  size_t got = fetch_locked(store, out, count, is_clean);
  hz3_lock_release(&store->lock);
  if (got > 0) return got;
  struct hz3_span *span = hz3_pages_alloc_span(size_class);
  if (span == NULL) return 0;
  hz3_lock_acquire(&store->lock);
  hz3_add_to_figure(&store->spans, 1);
  hz3_span_store_update(store, span);
  got = fetch_locked(store, out, count, is_clean);
  hz3_lock_release(&store->lock);
  return got;
}

void hz3_medium_release(unsigned size_class, void **objects, size_t count) {
  struct hz3_span_store *store = &stores[size_class];
  struct hz3_span *retired = NULL;
  hz3_lock_acquire(&store->lock);
  for (size_t i = 0; i < count; i++) {
    size_t index;
    struct hz3_span *span = hz3_span_store_resolve(size_class, objects[i], &index);
    uint64_t bit = (uint64_t)1 << index;
    if (HZ3_UNLIKELY(span->free_word & bit)) hz3_fatal(HZ3_FATAL_DOUBLE_FREE, objects[i], hz3_size_classes[size_class].bytes);
    span->free_word |= bit;
    span->free_count++;
    hz3_span_store_settle(store, span, &retired);
  }
  hz3_take_from_figure(&store->live_objects, count);
  hz3_lock_release(&store->lock);
  while (retired != NULL) {
    struct hz3_span *next = retired->next;
    hz3_pages_free_span(retired);
    retired = next;
  }
}

size_t hz3_medium_live_objects(unsigned size_class) { return hz3_read_figure(&stores[size_class].live_objects); }
size_t hz3_medium_spans(unsigned size_class) { return hz3_read_figure(&stores[size_class].spans); }

void hz3_medium_fork_prepare(void) {
  for (unsigned i = HZ3_SMALL_CLASS_LAST + 1; i < HZ3_CLASS_COUNT; i++) hz3_lock_acquire_for_fork(&stores[i].lock);
}

void hz3_medium_fork_release(void) {
  for (unsigned i = HZ3_SMALL_CLASS_LAST + 1; i < HZ3_CLASS_COUNT; i++) hz3_lock_release_for_fork(&stores[i].lock);
}
