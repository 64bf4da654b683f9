// SPDX-License-Identifier: Apache-2.0
// What it is: the small box, see small.h.
#include "hz3/small/small.h"

#include "hz3/base/metadata.h"
#include "hz3/pages/span_store.h"

static struct hz3_span_store stores[HZ3_SMALL_CLASS_LAST + 1][HZ3_SPAN_HOMES] = {
  [0 ... HZ3_SMALL_CLASS_LAST] = {[0 ... HZ3_SPAN_HOMES - 1] = HZ3_SPAN_STORE_INIT}};
static unsigned homes;  // from 0 to below this somebody has fetched for; only grows; atomic

static unsigned home_count(void) { return __atomic_load_n(&homes, __ATOMIC_RELAXED); }

static void note_home(unsigned home) {
  unsigned count = home_count();
  while (count <= home && !__atomic_compare_exchange_n(&homes, &count, home + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
}

// Whole cache lines: spans of different homes share none (docs/decisions/0029). 0: the span's own word is enough.
static size_t bitmap_bytes(const struct hz3_span *span) {
  return span->objects <= 64 ? 0 : hz3_max(hz3_ceil_power_of_two((span->objects + 63u) / 64 * 8), HZ3_CACHE_LINE);
}

// With its bitmap; NULL when out of memory. Takes NULL for a span.
static struct hz3_span *with_bitmap(struct hz3_span *span) {
  if (span == NULL) return NULL;
  size_t bytes = bitmap_bytes(span);
  span->out_words = bytes == 0 ? &span->out_word : (uint64_t *)hz3_metadata_alloc_bitmap(bytes);
  if (span->out_words != NULL) return span;
  hz3_pages_free_span(span);
  return NULL;
}

static void free_span(struct hz3_span *span) {
  size_t bytes = bitmap_bytes(span);
  if (bytes != 0) hz3_metadata_free_bitmap(span->out_words, bytes);
  hz3_pages_free_span(span);
}

// The emptiest of another home.
static struct hz3_span *take_over(unsigned size_class, unsigned home, size_t *live) {
  for (unsigned i = 1, count = home_count(); i < count; i++) {
    struct hz3_span *span = hz3_span_store_take_span(&stores[size_class][(home + i) % count], home, live);
    if (span != NULL) return span;
  }
  return NULL;
}

size_t hz3_small_fetch(unsigned home, unsigned size_class, void **out, size_t count) {
  bool is_clean;  // of no use: nobody asks for the zeroes of small blocks
  note_home(home);
  size_t got = hz3_span_store_fetch(&stores[size_class][home], out, count, false, &is_clean), live = 0;
  if (got > 0) return got;
  unsigned times = hz3_span_store_next_times(&stores[size_class][home], size_class);
  struct hz3_span *span = with_bitmap(hz3_pages_alloc_span_at_home(size_class, home, times));
  if (span == NULL) span = take_over(size_class, home, &live);
  if (span == NULL) span = with_bitmap(hz3_pages_alloc_span(size_class, home, times));
  if (span != NULL) return hz3_span_store_fetch_from(&stores[size_class][home], span, live, out, count, &is_clean);
  for (home = 0; got == 0 && home < home_count(); home++) got = hz3_span_store_fetch(&stores[size_class][home], out, count, true, &is_clean);
  return got;
}

void hz3_small_release(unsigned size_class, void **objects, size_t count) {
  hz3_span_store_release(stores[size_class], size_class, objects, count, free_span);
}

bool hz3_small_purge(unsigned size_class) {
  bool any = false;
  for (unsigned i = 0, count = home_count(); i < count; i++) any |= hz3_span_store_purge(&stores[size_class][i], free_span);
  return any;
}

size_t hz3_small_purge_sparse(unsigned size_class, uint32_t now_ms, size_t most) {
  size_t done = 0;
  for (unsigned i = 0, count = home_count(); i < count; i++)
    done += hz3_span_store_purge_sparse(&stores[size_class][i], now_ms, most - done, free_span);
  return done;
}

struct hz3_class_use hz3_small_use_at(unsigned size_class, unsigned home) { return hz3_span_store_use(&stores[size_class][home]); }

struct hz3_class_use hz3_small_use(unsigned size_class) {
  struct hz3_class_use sum = {0, 0, 0};
  for (unsigned i = 0, count = home_count(); i < count; i++) {
    struct hz3_class_use use = hz3_small_use_at(size_class, i);
    sum.spans += use.spans;
    sum.objects += use.objects;
    sum.out += use.out;
  }
  if (sum.out > PTRDIFF_MAX) sum.out = 0;  // the figures were read at different times
  return sum;
}

void hz3_small_fork_prepare(void) {
  for (unsigned c = 1; c <= HZ3_SMALL_CLASS_LAST; c++) {
    for (unsigned i = 0; i < HZ3_SPAN_HOMES; i++) hz3_lock_acquire_for_fork(&stores[c][i].lock);
  }
}

void hz3_small_fork_release(void) {
  for (unsigned c = 1; c <= HZ3_SMALL_CLASS_LAST; c++) {
    for (unsigned i = 0; i < HZ3_SPAN_HOMES; i++) hz3_lock_release_for_fork(&stores[c][i].lock);
  }
}
