// SPDX-License-Identifier: Apache-2.0
// What it is: free spans that wait with their class until it wants one again, see span_store.h.
#include "hz3/pages/span_store_internal.h"

#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/pages/pages_internal.h"
#include "hz3/pages/span_heap.h"

// A store keeps as many free spans as were wanted again within HZ3_SOON_MS of leaving it; all stores together so much, and who finds no
// other memory that is resident gets what they keep, but not what another home is about to want (docs/decisions/0038).
enum { KEPT_MOST_SLICES = (size_t)4 * HZ3_RETAIN_MIN_BYTES / HZ3_SLICE_BYTES };

static struct hz3_span_store *keeping;  // that have ever learned to, linked by next_keeping; pushed by compare-and-swap, never taken off
static uint32_t kept_most_slices;       // that all stores together may keep; relaxed, written when what they have learned changes

void hz3_span_store_note_wanted_locked(struct hz3_span_store *store) {
  uint32_t now_ms = (uint32_t)hz3_os_now_ms();
  hz3_pages_note_wanted(now_ms);
  if (now_ms - store->left_ms < HZ3_SOON_MS) store->swung_ms = now_ms;
  else store->left = 0;
}

void hz3_span_store_learn_to_keep_locked(struct hz3_span_store *store, uint32_t widest_slices) {
  if (HZ3_CHECKED || store->left == 0 || __atomic_load_n(&kept_most_slices, __ATOMIC_RELAXED) + widest_slices > KEPT_MOST_SLICES) return;
  __atomic_fetch_add(&kept_most_slices, widest_slices, __ATOMIC_RELAXED);
  store->left--;
  store->kept_most++;
  if (store->widest_slices != 0) return;
  store->widest_slices = widest_slices;
  store->next_keeping = __atomic_load_n(&keeping, __ATOMIC_RELAXED);
  // Release: pairs with the acquire in first_keeping.
  while (!__atomic_compare_exchange_n(&keeping, &store->next_keeping, store, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) continue;
}

void hz3_span_store_unlearn_locked(struct hz3_span_store *store, uint32_t spans) {
  if (spans == 0) return;
  __atomic_fetch_sub(&kept_most_slices, spans * store->widest_slices, __ATOMIC_RELAXED);
  store->kept_most -= spans;
}

struct hz3_span *hz3_span_take_kept_locked(struct hz3_span_store *store) {
  struct hz3_span *span = hz3_span_heap_take(&store->kept);
  // Release: pairs with the acquire in hz3_span_stores_give_up_kept. Who finds nothing kept sees that what was is taken away.
  __atomic_store_n(&store->kept_count, store->kept_count - 1, __ATOMIC_RELEASE);
  hz3_take_from_figure(&store->kept_slices, span->slices);
  store->kept_low = hz3_min(store->kept_low, (uint32_t)store->kept_count);
  return span;
}

void hz3_span_keep_locked(struct hz3_span_store *store, struct hz3_span *span, void (*free_span)(struct hz3_span *span)) {
  hz3_span_settle_at(span, 0);
  hz3_span_heap_add(&store->kept, span);
  hz3_add_to_figure(&store->kept_count, 1);
  hz3_add_to_figure(&store->kept_slices, span->slices);
  store->free_span = free_span;
}

// Medium blocks are of everybody's home.
static bool is_at_home(const struct hz3_span *span, unsigned home) { return span->size_class > HZ3_SMALL_CLASS_LAST || span->home == home; }

// All that the store keeps. But while it swings a tick gets what it has not needed since the last one, and another home nothing, for who takes what
// a thread next to it is about to want gets memory in that one's cache, and then loses its own the same way (docs/decisions/0038).
// What is given up it has to learn to keep again. Who is out of memory meanwhile waits for it.
static void give_up_kept(struct hz3_span_store *store, unsigned whom) {
  struct hz3_span *gone = NULL;
  hz3_lock_acquire(&store->lock);
  void (*free_span)(struct hz3_span *span) = store->free_span;
  hz3_pages_take_away();
  bool is_meant = whom == HZ3_FOR_TRIM || (whom < HZ3_SPAN_HOMES && store->kept != NULL && is_at_home(store->kept, whom));
  bool all = is_meant || !hz3_span_store_swings(store, (uint32_t)hz3_os_now_ms());
  uint32_t low = whom == HZ3_FOR_TICK ? store->kept_low : 0;
  hz3_span_store_unlearn_locked(store, all ? store->kept_most : hz3_min(low, store->kept_most));
  for (size_t count = all ? store->kept_count : low; count > 0; count--) {
    struct hz3_span *span = hz3_span_take_kept_locked(store);
    span->next = gone;
    gone = span;
  }
  if (whom == HZ3_FOR_TICK) store->kept_low = (uint32_t)store->kept_count;
  hz3_lock_release(&store->lock);
  hz3_spans_free(gone, free_span);
  hz3_pages_bring_back();
}

// Acquire: pairs with the release in hz3_span_store_learn_to_keep_locked.
static struct hz3_span_store *first_keeping(void) { return __atomic_load_n(&keeping, __ATOMIC_ACQUIRE); }

// Who wants memory has no use for a store that keeps nothing; what that has learned may be out of date, for a tick to see.
void hz3_span_stores_give_up_kept(unsigned whom) {
  for (struct hz3_span_store *store = first_keeping(); store != NULL; store = store->next_keeping) {
    // Acquire: pairs with the release in hz3_span_take_kept_locked.
    if (whom == HZ3_FOR_TICK || __atomic_load_n(&store->kept_count, __ATOMIC_ACQUIRE) != 0) give_up_kept(store, whom);
  }
}

size_t hz3_span_stores_kept_bytes(void) {
  size_t bytes = 0;
  for (struct hz3_span_store *store = first_keeping(); store != NULL; store = store->next_keeping)
    bytes += hz3_read_figure(&store->kept_slices) * HZ3_SLICE_BYTES;
  return bytes;
}
