// SPDX-License-Identifier: Apache-2.0
// What it is: the small box, see small.h.
#include "hz3/small/small.h"

#include "hz3/base/metadata.h"
#include "hz3/pages/span_list.h"

#define STORE(class, below, bytes, slices, objects) [class] = {.lock = HZ3_LOCK_INIT(HZ3_RANK_CLASS)},
static struct hz3_span_store stores[HZ3_CLASS_COUNT] = {HZ3_SIZE_CLASSES(STORE)};

static size_t word_count(unsigned size_class) { return (hz3_size_classes[size_class].objects + 63u) / 64u; }
static size_t bitmap_bytes(unsigned size_class) { return hz3_ceil_power_of_two(word_count(size_class) * 8); }

// Takes up to `count` returned objects out of the bitmap.
static size_t take_returned(struct hz3_span *span, void **out, size_t count) {
  char *base = hz3_pages_span_base(span);
  size_t bytes = hz3_size_classes[span->size_class].bytes, words = word_count(span->size_class);
  size_t wanted = hz3_min(count, span->free_count), left = wanted;
  for (size_t w = 0; w < words && left > 0; w++) {
    uint64_t word = span->free_words[w];
    for (; word != 0 && left > 0; word &= word - 1) out[--left] = base + (w * 64 + (size_t)__builtin_ctzll(word)) * bytes;
    span->free_words[w] = word;
  }
  span->free_count -= (uint32_t)wanted;
  return wanted;
}

static size_t take_from(struct hz3_span *span, void **out, size_t count) {
  const struct hz3_size_class *class = &hz3_size_classes[span->size_class];
  size_t taken = span->free_count == 0 ? 0 : take_returned(span, out, count);
  size_t carve = hz3_min(count - taken, class->objects - span->carved);
  hz3_span_carve(span, class->bytes, out + taken, carve);
  return taken + carve;
}

static size_t fetch_locked(struct hz3_span_store *store, void **out, size_t count) {
  size_t got = 0;
  struct hz3_span *span;
  while (got < count && (span = hz3_span_store_first(store)) != NULL) {
    got += take_from(span, out + got, count - got);
    hz3_span_store_update(store, span);
  }
  hz3_add_to_figure(&store->live_objects, got);
  return got;
}

static struct hz3_span *new_span(unsigned size_class) {
  uint64_t *words = (uint64_t *)hz3_metadata_alloc_bitmap(bitmap_bytes(size_class));
  if (words == NULL) return NULL;
  struct hz3_span *span = hz3_pages_alloc_span(size_class);
  if (span == NULL) hz3_metadata_free_bitmap(words, bitmap_bytes(size_class));
  else span->free_words = words;
  return span;
}

size_t hz3_small_fetch(unsigned size_class, void **out, size_t count) {
  struct hz3_span_store *store = &stores[size_class];
  hz3_lock_acquire(&store->lock);
  size_t got = fetch_locked(store, out, count);
  hz3_lock_release(&store->lock);
  if (got > 0) return got;
  struct hz3_span *span = new_span(size_class);
  if (span == NULL) return 0;
  hz3_lock_acquire(&store->lock);
  hz3_add_to_figure(&store->spans, 1);
  hz3_span_store_update(store, span);
  got = fetch_locked(store, out, count);
  hz3_lock_release(&store->lock);
  return got;
}

static void retire(struct hz3_span *span) {
  unsigned size_class = span->size_class;
  __builtin_memset(span->free_words, 0, word_count(size_class) * 8);
  hz3_metadata_free_bitmap(span->free_words, bitmap_bytes(size_class));
  hz3_pages_free_span(span);
}

void hz3_small_release(unsigned size_class, void **objects, size_t count) {
  struct hz3_span_store *store = &stores[size_class];
  struct hz3_span *retired = NULL;
  hz3_lock_acquire(&store->lock);
  for (size_t i = 0; i < count; i++) {
    size_t index;
    struct hz3_span *span = hz3_span_store_resolve(size_class, objects[i], &index);
    uint64_t bit = (uint64_t)1 << (index % 64);
    if (HZ3_UNLIKELY(span->free_words[index / 64] & bit))
      hz3_fatal(HZ3_FATAL_DOUBLE_FREE, objects[i], hz3_size_classes[size_class].bytes);
    span->free_words[index / 64] |= bit;
    span->free_count++;
    hz3_span_store_settle(store, span, &retired);
  }
  hz3_take_from_figure(&store->live_objects, count);
  hz3_lock_release(&store->lock);
  while (retired != NULL) {
    struct hz3_span *next = retired->next;
    retire(retired);
    retired = next;
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
