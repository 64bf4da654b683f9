// SPDX-License-Identifier: Apache-2.0
// What it is: the small box, see small.h.
#include "hz3/small/small.h"

#include "hz3/base/metadata.h"
#include "hz3/pages/span_store.h"

#define STORE(class, below, bytes, slices, objects) [class] = HZ3_SPAN_STORE_INIT,
static struct hz3_span_store stores[HZ3_CLASS_COUNT] = {HZ3_SIZE_CLASSES(STORE)};

static size_t bitmap_bytes(unsigned size_class) {
  return hz3_ceil_power_of_two((hz3_size_classes[size_class].objects + 63u) / 64u * 8);
}

static struct hz3_span *new_span(unsigned size_class) {
  uint64_t *words = (uint64_t *)hz3_metadata_alloc_bitmap(bitmap_bytes(size_class));
  if (words == NULL) return NULL;
  struct hz3_span *span = hz3_pages_alloc_span(size_class);
  if (span == NULL) hz3_metadata_free_bitmap(words, bitmap_bytes(size_class));
  else span->free_words = words;
  return span;
}

static void free_span(struct hz3_span *span) {
  size_t bytes = bitmap_bytes(span->size_class);
  __builtin_memset(span->free_words, 0, bytes);
  hz3_metadata_free_bitmap(span->free_words, bytes);
  hz3_pages_free_span(span);
}

size_t hz3_small_fetch(unsigned home, unsigned size_class, void **out, size_t count) {
  bool is_clean;  // of no use: nobody asks for the zeroes of small blocks
  size_t got = hz3_span_store_fetch(&stores[size_class], home, out, count, &is_clean);
  if (got > 0) return got;
  struct hz3_span *span = new_span(size_class);
  if (span != NULL) return hz3_span_store_fetch_from(&stores[size_class], home, span, out, count, &is_clean);
  for (home = 0; got == 0 && home < HZ3_SPAN_HOMES; home++) got = hz3_span_store_fetch(&stores[size_class], home, out, count, &is_clean);
  return got;
}

void hz3_small_release(unsigned size_class, void **objects, size_t count) {
  struct hz3_span *span = hz3_span_store_release(&stores[size_class], size_class, objects, count), *next;
  for (; span != NULL; span = next) {
    next = span->next;
    free_span(span);
  }
}

size_t hz3_small_live_objects(unsigned size_class) { return hz3_read_figure(&stores[size_class].live_objects); }
size_t hz3_small_spans(unsigned size_class) { return hz3_read_figure(&stores[size_class].spans); }

void hz3_small_fork_prepare(void) {
  for (unsigned i = 1; i <= HZ3_SMALL_CLASS_LAST; i++) hz3_lock_acquire_for_fork(&stores[i].lock);
}

void hz3_small_fork_release(void) {
  for (unsigned i = 1; i <= HZ3_SMALL_CLASS_LAST; i++) hz3_lock_release_for_fork(&stores[i].lock);
}
