// SPDX-License-Identifier: Apache-2.0
// What it is: the medium box, see medium.h.
#include "hz3/medium/medium.h"

#include "hz3/pages/span_store.h"

// One home: spans of big objects that each home had for itself would cost too much (docs/decisions/0029).
static struct hz3_span_store stores[HZ3_CLASS_COUNT] = {[HZ3_SMALL_CLASS_LAST + 1 ... HZ3_CLASS_COUNT - 1] = HZ3_SPAN_STORE_INIT};

#define FITS_ONE_WORD(class, below, bytes, slices, objects) \
  _Static_assert((class) <= HZ3_SMALL_CLASS_LAST || (objects) <= 64, "a medium span's objects fit one word");
HZ3_SIZE_CLASSES(FITS_ONE_WORD)

size_t hz3_medium_fetch(unsigned size_class, void **out, size_t count, bool *is_clean) {
  *is_clean = true;
  size_t got = hz3_span_store_fetch(&stores[size_class], out, count, true, is_clean);
  if (got > 0) return got;
  struct hz3_span *span = hz3_pages_alloc_span(size_class, 0, hz3_span_store_next_times(&stores[size_class], size_class));
  if (span == NULL) return 0;
  span->out_words = &span->out_word;
  return hz3_span_store_fetch_from(&stores[size_class], span, 0, out, count, is_clean);
}

void hz3_medium_release(unsigned size_class, void **objects, size_t count) {
  hz3_span_store_release(&stores[size_class], size_class, objects, count, hz3_pages_free_span);
}

bool hz3_medium_purge(unsigned size_class) {
  return hz3_span_store_purge(&stores[size_class], hz3_pages_free_span);
}

size_t hz3_medium_purge_sparse(unsigned size_class, uint32_t now_ms, size_t most) {
  return hz3_span_store_purge_sparse(&stores[size_class], now_ms, most, hz3_pages_free_span);
}

struct hz3_class_use hz3_medium_use(unsigned size_class) { return hz3_span_store_use(&stores[size_class]); }

void hz3_medium_fork_prepare(void) {
  for (unsigned i = HZ3_SMALL_CLASS_LAST + 1; i < HZ3_CLASS_COUNT; i++) hz3_lock_acquire_for_fork(&stores[i].lock);
}

void hz3_medium_fork_release(void) {
  for (unsigned i = HZ3_SMALL_CLASS_LAST + 1; i < HZ3_CLASS_COUNT; i++) hz3_lock_release_for_fork(&stores[i].lock);
}
