// SPDX-License-Identifier: Apache-2.0
// What it is: the central store of a class, see span_store.h.
#include "hz3/pages/span_store.h"

#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages_internal.h"
#include "hz3/pages/span_heap.h"
#include "hz3/pages/tag_map.h"

enum { SPREAD_MOST = 32 };  // up to so many objects at once are carved so that neighbours lie in different cache lines
// A span with this few objects out is hollow: if its class is shrinking and memory is being given back, the pages between
// the objects go, too, and once more when one is left. Those left mostly are in the caches of threads that may stay silent
// (docs/decisions/0023).
// Of what is released at once so many spans at most, no more than its caller can wait for; the others are due again later.
enum { HOLLOW_OBJECTS = 4, HOLLOW_MOST = 64 };
// Of a sparse span a quarter is out, or less. If it has been on that list, and not in use, for a second, and its class is shrinking, a
// tick gives the pages between the objects back, and again with each half of them that comes back until the span is hollow. Not
// sooner: with them goes the huge page that they are part of, and most of what a program drops is in use again, or free as a
// whole, a moment later (docs/decisions/0023). For each span that it may purge, a tick looks at so many, LOOKS_PER_PURGE.
enum { SPARSE_LIST = HZ3_SPAN_LISTS - 2, PURGED_LIST, SPARSE_MS = 1000, LOOKS_PER_PURGE = 4 };
enum { HELD_UP_MS = 60 * 1000 };  // a tick that has read the clock may take so long to come here
// A store drains while an eighth of the room in its spans is free, or more: what is freed then is not to be given out again before
// the spans had it, so that new blocks come from the fullest ones and the others empty. If while so many objects are exchanged no
// span has become free, this was in vain, and for as many threads keep what they free (docs/decisions/0034). So they do where spans
// leave and come by turns: it swings. Not for objects of which two do not fit a slice: the bins of these grow by what they spare, and
// may hold none.
enum { DRAIN_SHARE = 8, DRAIN_FEW_SPANS = 4, DRAIN_EXCHANGE = 512, DRAIN_MOST_BYTES = HZ3_SLICE_BYTES / 2 };
// A store keeps as many free spans as were wanted again within HZ3_SOON_MS of leaving it; all stores together so much, and who finds no
// other memory that is resident gets what they keep (docs/decisions/0038).
enum { KEPT_MOST_SLICES = (size_t)4 * HZ3_RETAIN_MIN_BYTES / HZ3_SLICE_BYTES };
// Most of what a span costs it costs as a whole: its lists, its locks, its way to the pages and back. So a span has room for as many
// objects as a word has bits, if WIDE_SLICES are enough for so many; but no span exceeds the smallest by more than a part of what its
// class has already, or programs that need a little of many classes would have more memory for it (docs/decisions/0039).
enum { WIDE_OBJECTS = 64, WIDE_SLICES = 4, WIDE_PART = 4 };
enum { MOST_WORDS = HZ3_SLICE_BYTES / 16 / 64 };  // of a bitmap: those of a slice of the smallest objects
#define FITS_WORDS(class, below, bytes, slices, objects) _Static_assert((objects) <= 64 * MOST_WORDS, "a copy of any span's bitmap fits");
HZ3_SIZE_CLASSES(FITS_WORDS)

static struct hz3_span_store *keeping;  // linked by next_keeping; pushed by compare-and-swap, never taken off
static uint32_t kept_most_slices;       // that all stores together may keep; relaxed, written when what they have learned changes

static size_t room_of(const struct hz3_span *span) { return span->objects - hz3_span_objects_out(span); }

// Of the classes that have a bitmap out of line if need be, those of small blocks, the objects may be more than WIDE_OBJECTS.
static unsigned most_times(unsigned size_class) {
  const struct hz3_size_class *class = &hz3_size_classes[size_class];
  unsigned more = size_class <= HZ3_SMALL_CLASS_LAST ? class->objects - 1u : 0;
  return hz3_max(1, hz3_min((WIDE_OBJECTS + more) / class->objects, WIDE_SLICES / class->slices));
}

static uint32_t widest_slices(unsigned size_class) { return most_times(size_class) * hz3_size_classes[size_class].slices; }

unsigned hz3_span_store_next_times(const struct hz3_span_store *store, unsigned size_class) {
  size_t now = hz3_read_figure(&store->objects) / hz3_size_classes[size_class].objects;
  return HZ3_CHECKED ? 1 : (unsigned)hz3_min(most_times(size_class), 1 + now / WIDE_PART);
}

static void add_span_locked(struct hz3_span_store *store, const struct hz3_span *span) {
  hz3_add_to_figure(&store->spans, 1);
  hz3_add_to_figure(&store->objects, span->objects);
}

static void remove_span_locked(struct hz3_span_store *store, const struct hz3_span *span) {
  hz3_take_from_figure(&store->spans, 1);
  hz3_take_from_figure(&store->objects, span->objects);
}

// The first of a list points back to the last, so that a walk can take from the end while others fetch from the front.
static void unlink_locked(struct hz3_span_store *store, struct hz3_span *span) {
  if (span->list == HZ3_SPAN_NO_LIST) return;
  struct hz3_span **first = &store->lists[span->list];
  if (span == *first) *first = span->next;
  else span->prev->next = span->next;
  struct hz3_span *behind = span->next != NULL ? span->next : *first;
  if (behind != NULL) behind->prev = span->prev;
  store->listed[span->list]--;
  span->list = HZ3_SPAN_NO_LIST;
}

static void link_locked(struct hz3_span_store *store, struct hz3_span *span, uint8_t list) {
  struct hz3_span *first = store->lists[list];
  span->next = first;
  span->prev = first != NULL ? first->prev : span;
  if (first != NULL) first->prev = span;
  store->lists[list] = span;
  store->listed[list]++;
  span->list = list;
}

// Of how many objects out a span on `list` is to be looked at again: when the next list is due, if it was purged when half of what is
// out came back, or when it is hollow, has one left, or none.
static size_t next_settle(const struct hz3_span *span, uint8_t list) {
  size_t objects = span->objects;
  const size_t of_list[HZ3_SPAN_LISTS] = {objects * 3 / 4, objects / 2, objects / 4, 0, 0};
  size_t out = hz3_span_objects_out(span), hollow = out > HOLLOW_OBJECTS ? HOLLOW_OBJECTS : out > 1 ? 1 : 0;
  if (list == HZ3_SPAN_NO_LIST) return out - 1;
  size_t next = hz3_max(of_list[list], hollow);
  if (list == PURGED_LIST) next = hz3_max(next, out / 2);
  return hz3_min(next, out - 1);
}

static void settle_at(struct hz3_span *span, size_t out) {
  span->until_settle += (int32_t)(span->settle_out - out);
  span->settle_out = (uint32_t)out;
}

// Puts the span where its room says, after the room changed.
static void relist_locked(struct hz3_span_store *store, struct hz3_span *span) {
  size_t room = room_of(span), objects = span->objects;
  uint8_t list = room == 0 ? HZ3_SPAN_NO_LIST : (uint8_t)((room * 4 >= objects) + (room * 2 >= objects) + (room * 4 >= objects * 3));
  if (list == SPARSE_LIST && span->was_purged) list = PURGED_LIST;
  settle_at(span, next_settle(span, list));
  if (list == span->list) return;
  unlink_locked(store, span);
  if (list == SPARSE_LIST) span->marked_ms = 0;
  if (list != HZ3_SPAN_NO_LIST) link_locked(store, span, list);
}

static struct hz3_span *fullest_locked(const struct hz3_span_store *store) {
  for (int i = 0; i < HZ3_SPAN_LISTS; i++) {
    if (store->lists[i] != NULL) return store->lists[i];
  }
  return NULL;
}

static bool is_carved(const struct hz3_span *span) { return span->carved == span->objects; }

// The emptiest span with room, for another home; one that was purged within if there is no other. None of which less than a quarter is
// free: with each refill one would change hands for a few objects, and take all the others to the home of a stranger. Rather not one that
// is still being carved, of which each home mostly has one, the first of its list: those who grow side by side would take it from each
// other, and share them all.
static struct hz3_span *emptiest_locked(const struct hz3_span_store *store) {
  static const uint8_t emptiest_first[] = {SPARSE_LIST, 2, 1, PURGED_LIST};
  for (size_t i = 0; i < sizeof emptiest_first; i++) {
    struct hz3_span *span = store->lists[emptiest_first[i]];
    if (span != NULL && !is_carved(span)) span = span->next;
    if (span != NULL) return span;
  }
  return NULL;
}

static void unlist_locked(struct hz3_span_store *store, struct hz3_span *span) {
  unlink_locked(store, span);
  span->list = HZ3_SPAN_OFF_LISTS;
}

// The home changes under the lock of the old one only, so under the lock of a span's home it does not. It is also in the page map, for
// those who ask which lock that is. Acquire and release there are a pair: who finds its own home, and holds that lock, goes on where
// whoever moved the span left it, with no other lock in common.
static void set_home(struct hz3_span *span, unsigned home) {
  span->home = (uint8_t)home;
  hz3_page_map_set_span(span);
}

struct hz3_span *hz3_span_store_take_span(struct hz3_span_store *store, unsigned new_home, size_t *live) {
  if (hz3_read_figure(&store->spans) == 0) return NULL;  // as in all homes of a program with one thread
  hz3_lock_acquire(&store->lock);
  struct hz3_span *span = emptiest_locked(store);
  if (span != NULL) {
    unlist_locked(store, span);
    *live = hz3_span_objects_out(span);
    remove_span_locked(store, span);
    hz3_take_from_figure(&store->live_objects, *live);
    set_home(span, new_home);  // from here on objects come back to it under the new home's lock
  }
  hz3_lock_release(&store->lock);
  return span;
}

// Takes up to `count` returned objects: the lowest ones whose bits are not set, for what is not carved lies above. Magazines are popped
// from the end, so this and all else that fetches writes downwards from there: a program then touches its memory in order of addresses,
// which the processor foresees.
static size_t take_returned(struct hz3_span *span, void **end, size_t count) {
  char *base = span->base;
  size_t bytes = hz3_size_classes[span->size_class].bytes;
  size_t taken = hz3_min(count, span->carved - hz3_span_objects_out(span)), left = taken;
  for (size_t w = 0; left > 0; w++) {
    uint64_t word = ~span->out_words[w];
    for (; word != 0 && left > 0; word &= word - 1, left--) *--end = base + (w * 64 + (size_t)__builtin_ctzll(word)) * bytes;
    span->out_words[w] = ~word;
  }
  return taken;
}

// The bits of `count` objects from `first` on, all in one word.
HZ3_INLINE uint64_t bits_of(size_t first, size_t count) { return UINT64_MAX >> (64 - count) << first % 64; }

static void mark_as_out(struct hz3_span *span, size_t first, size_t count) {
  for (size_t step; count > 0; first += step, count -= step) {
    step = hz3_min(count, 64 - first % 64);
    span->out_words[first / 64] |= bits_of(first, step);
  }
}

// Writes the addresses of `count` fresh objects. The few of a first refill, if smaller than a cache line, are taken from every line in
// turn, so that two that were asked for one after the other, and given to two threads, do not share one (docs/decisions/0012).
static void carve(struct hz3_span *span, void **end, size_t count) {
  size_t bytes = hz3_size_classes[span->size_class].bytes, per_line = count > SPREAD_MOST ? 1 : (HZ3_CACHE_LINE + bytes - 1) / bytes;
  char *at = span->base + span->carved * bytes;
  mark_as_out(span, span->carved, count);
  span->carved = (uint16_t)(span->carved + count);
  for (size_t first = 0; first < per_line; first++) {
    for (size_t i = first; i < count; i += per_line) *--end = at + i * bytes;
  }
}

// The span is in the store, so that it is not being freed.
static void set_draining_locked(struct hz3_span *span, bool value) {
  span->is_draining = value;
  hz3_tag_map_set(span->base, span->slices, span->size_class * HZ3_TAG_STEP + (value ? HZ3_TAG_DRAIN : 0));
}

static bool swings(const struct hz3_span_store *store, uint32_t now_ms) { return now_ms - store->swung_ms < HZ3_SWING_MS; }

// Once while a lock is held: *now_ms is 0 after the lock was taken, or what another holder did since would lie ahead.
static uint32_t look_at_clock(uint32_t *now_ms) {
  if (*now_ms == 0) *now_ms = (uint32_t)hz3_os_now_ms();
  return *now_ms;
}

static bool is_draining(const struct hz3_span_store *store, const struct hz3_size_class *class, uint32_t *now_ms) {
  if (HZ3_CHECKED || class->bytes > DRAIN_MOST_BYTES || store->drains_in_vain || store->objects <= (size_t)DRAIN_FEW_SPANS * class->objects) return false;
  if (store->live_objects * DRAIN_SHARE > store->objects * (DRAIN_SHARE - 1)) return false;
  return !swings(store, look_at_clock(now_ms));
}

static void note_exchange_locked(struct hz3_span_store *store, const struct hz3_size_class *class, uint32_t *now_ms) {
  if (store->exchanged < DRAIN_EXCHANGE) return;
  store->drains_in_vain = is_draining(store, class, now_ms) && store->spans >= store->spans_then;
  store->exchanged = 0;
  store->spans_then = store->spans;
}

static size_t take_from_locked(struct hz3_span_store *store, struct hz3_span *span, void **end, size_t count, bool *is_clean) {
  uint32_t now_ms = 0;
  if (span->is_draining && !is_draining(store, &hz3_size_classes[span->size_class], &now_ms)) set_draining_locked(span, false);
  if (HZ3_UNLIKELY(span->was_purged)) hz3_pages_note_hollow_use(span->marked_ms);
  span->was_purged = false;
  span->marked_ms = 0;
  size_t taken = take_returned(span, end, count);
  size_t fresh = hz3_min(count - taken, (size_t)span->objects - span->carved);
  carve(span, end - taken, fresh);
  span->until_settle += (int32_t)(taken + fresh);
  if (taken > 0 || !span->is_clean) *is_clean = false;
  return taken + fresh;
}

// A span of the class is wanted, and none that is in use has room.
static void note_wanted_locked(struct hz3_span_store *store) {
  uint32_t now_ms = (uint32_t)hz3_os_now_ms();
  if (now_ms - store->left_ms < HZ3_SOON_MS) store->swung_ms = now_ms;
  else store->left = 0;
}

// One more free span may be kept, if that would have spared the pages the one that is wanted now.
static void learn_to_keep_locked(struct hz3_span_store *store, uint32_t slices) {
  if (HZ3_CHECKED || store->left == 0 || __atomic_load_n(&kept_most_slices, __ATOMIC_RELAXED) + slices > KEPT_MOST_SLICES) return;
  __atomic_fetch_add(&kept_most_slices, slices, __ATOMIC_RELAXED);
  store->left--;
  store->kept_most++;
}

// So many less may be kept.
static void unlearn_locked(struct hz3_span_store *store, uint32_t slices, uint32_t spans) {
  if (spans == 0) return;
  __atomic_fetch_sub(&kept_most_slices, spans * slices, __ATOMIC_RELAXED);
  store->kept_most -= spans;
}

static struct hz3_span *take_kept_locked(struct hz3_span_store *store) {
  struct hz3_span *span = hz3_span_heap_take(&store->kept);
  hz3_take_from_figure(&store->kept_count, 1);
  hz3_take_from_figure(&store->kept_slices, span->slices);
  store->kept_low = hz3_min(store->kept_low, (uint32_t)store->kept_count);
  return span;
}

// The fullest span with room, or one that was kept; NULL if there is neither.
static struct hz3_span *next_locked(struct hz3_span_store *store) {
  struct hz3_span *span = fullest_locked(store);
  if (span != NULL || store->kept == NULL) return span;
  note_wanted_locked(store);
  span = take_kept_locked(store);
  add_span_locked(store, span);
  return span;
}

static size_t fetch_locked(struct hz3_span_store *store, void **end, size_t count, bool *is_clean) {
  size_t got = 0;
  for (struct hz3_span *span; got < count && (span = next_locked(store)) != NULL;) {
    got += take_from_locked(store, span, end - got, count - got, is_clean);
    relist_locked(store, span);
  }
  hz3_add_to_figure(&store->live_objects, got);
  store->exchanged += got;
  return got;
}

// What lies at the end of `out`, if that was not filled, moves to its start.
static size_t moved_to_start(void **out, size_t count, size_t got) {
  if (got < count) memmove(out, out + count - got, got * sizeof *out);
  return got;
}

size_t hz3_span_store_fetch(struct hz3_span_store *store, void **out, size_t count, bool *is_clean) {
  hz3_lock_acquire(&store->lock);
  size_t got = fetch_locked(store, out + count, count, is_clean);
  hz3_lock_release(&store->lock);
  return moved_to_start(out, count, got);
}

size_t hz3_span_store_fetch_from(struct hz3_span_store *store, struct hz3_span *span, size_t live, void **out, size_t count, bool *is_clean) {
  hz3_lock_acquire(&store->lock);
  note_wanted_locked(store);
  learn_to_keep_locked(store, widest_slices(span->size_class));
  add_span_locked(store, span);
  // From this one first, even if others have got room meanwhile: a span of which nothing is out would never come back as a whole.
  span->list = HZ3_SPAN_NO_LIST;
  size_t got = take_from_locked(store, span, out + count, count, is_clean);
  relist_locked(store, span);
  hz3_add_to_figure(&store->live_objects, live + got);
  got += fetch_locked(store, out + count - got, count - got, is_clean);
  hz3_lock_release(&store->lock);
  return moved_to_start(out, count, got);
}

// The page map's entry for what should be an object of the class. Whether it lies in the carved part is for the caller to see.
static uintptr_t owner_of(unsigned size_class, const void *object) {
  uintptr_t owner = hz3_page_map_owner(object);
  if ((owner & HZ3_PAGE_MAP_SPAN) == 0 || hz3_page_map_class(owner) != size_class) hz3_fatal(HZ3_FATAL_INVALID_FREE, object, 0);
  return owner;
}

// False if the object's span is not of this kind (HZ3_PAGE_MAP_KIND), which it stays while the caller holds the lock of that home. What is
// no object of the class is told from one of another home later, by owner_of, when it comes to be the first.
HZ3_INLINE bool is_in_span_of(uintptr_t kind, const void *object, struct hz3_span **span) {
  uintptr_t owner = hz3_page_map_owner_in_chunk(object) ^ kind;
  *span = (struct hz3_span *)owner;
  return (owner & HZ3_PAGE_MAP_KIND) == 0;
}

// Spans that a release took off the lists, linked by next.
struct off_list {
  struct hz3_span *retired;  // free, and out of the store
  struct hz3_span *hollow;   // to be purged: nobody fetches from them, objects still come back
  size_t hollow_count;
  uint32_t now_ms;  // see look_at_clock
  void (*free_span)(struct hz3_span *span);
};

// A span of which nothing is out waits for the class to want it again. It keeps its tag, its bitmap, and its place in the page map.
static void keep_locked(struct hz3_span_store *store, struct hz3_span *span, void (*free_span)(struct hz3_span *span)) {
  settle_at(span, 0);
  hz3_span_heap_add(&store->kept, span);
  hz3_add_to_figure(&store->kept_count, 1);
  hz3_add_to_figure(&store->kept_slices, span->slices);
  if (store->free_span != NULL) return;
  store->free_span = free_span;
  store->widest_slices = widest_slices(span->size_class);
  store->next_keeping = __atomic_load_n(&keeping, __ATOMIC_RELAXED);
  // Release: pairs with the acquire in first_keeping.
  while (!__atomic_compare_exchange_n(&keeping, &store->next_keeping, store, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) continue;
}

static bool is_half_empty(const struct hz3_span_store *store) { return store->live_objects * 2 <= store->objects; }

// Puts a span where its objects say after some came back: an entirely free one is kept, or leaves the store.
static void place_locked(struct hz3_span_store *store, struct hz3_span *span, struct off_list *off) {
  if (span->list == HZ3_SPAN_OFF_LISTS) return;
  if (hz3_span_objects_out(span) > 0) {
    if (!span->is_draining && is_draining(store, &hz3_size_classes[span->size_class], &off->now_ms)) set_draining_locked(span, true);
    relist_locked(store, span);
    return;
  }
  unlink_locked(store, span);
  remove_span_locked(store, span);
  store->left_ms = look_at_clock(&off->now_ms);
  if (!swings(store, store->left_ms)) unlearn_locked(store, widest_slices(span->size_class), store->kept_most);
  if (store->kept_count < store->kept_most) {
    keep_locked(store, span, off->free_span);
    return;
  }
  store->left++;
  span->next = off->retired;
  off->retired = span;
}

static void take_to_purge_locked(struct hz3_span_store *store, struct hz3_span *span) {
  unlist_locked(store, span);
  span->was_purged = true;
  span->marked_ms = (uint32_t)hz3_os_now_ms();
  hz3_pages_note_hollow_purge();
}

// After `count` objects of the span came back, no more than `settle_out` are out.
static HZ3_NOINLINE void settle_locked(struct hz3_span_store *store, struct hz3_span *span, size_t count, struct off_list *off) {
  size_t out = hz3_span_objects_out(span), out_before = out + count;
  bool has_crossed = (out <= HOLLOW_OBJECTS && out_before > HOLLOW_OBJECTS) || (out == 1 && out_before > 1);
  bool is_hollow = has_crossed && out > 0 && out * 4 <= span->objects;
  if (span->list == PURGED_LIST && out > HOLLOW_OBJECTS) span->was_purged = false;
  if (HZ3_CHECKED || !is_hollow || span->list == HZ3_SPAN_OFF_LISTS || off->hollow_count == HOLLOW_MOST || !hz3_pages_is_giving_back() ||
      !is_half_empty(store)) {
    place_locked(store, span, off);
    return;
  }
  take_to_purge_locked(store, span);
  span->next = off->hollow;
  off->hollow = span;
  off->hollow_count++;
}

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
static bool purge_inside(struct hz3_span_store *store, struct hz3_span *span, struct off_list *off) {
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
  place_locked(store, span, off);
  hz3_lock_release(&store->lock);
  return result.any;
}

static void purge_hollow(struct hz3_span_store *stores, struct off_list *off) {
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
    unlist_locked(store, last);
    *due = last;
  } else if (last != NULL) {
    unlink_locked(store, last);
    link_locked(store, last, (uint8_t)list);
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

static void free_all(struct hz3_span *span, void (*free_span)(struct hz3_span *span)) {
  for (struct hz3_span *next; span != NULL; span = next) {
    next = span->next;
    free_span(span);
  }
}

// All that the store keeps, or, while it swings, what it has not needed since the last tick. It has to learn to keep so much again.
static void give_up_kept(struct hz3_span_store *store, bool all) {
  struct hz3_span *gone = NULL;
  hz3_lock_acquire(&store->lock);
  bool is_over = all || !swings(store, (uint32_t)hz3_os_now_ms());
  unlearn_locked(store, store->widest_slices, is_over ? store->kept_most : hz3_min(store->kept_low, store->kept_most));
  for (size_t count = is_over ? store->kept_count : store->kept_low; count > 0; count--) {
    struct hz3_span *span = take_kept_locked(store);
    span->next = gone;
    gone = span;
  }
  store->kept_low = (uint32_t)store->kept_count;
  hz3_lock_release(&store->lock);
  free_all(gone, store->free_span);
}

// Acquire: pairs with the release in keep_locked.
static struct hz3_span_store *first_keeping(void) { return __atomic_load_n(&keeping, __ATOMIC_ACQUIRE); }

// Who wants memory has no use for a store that keeps nothing; what that has learned may be out of date, for a tick to see.
void hz3_span_stores_give_up_kept(bool all) {
  for (struct hz3_span_store *store = first_keeping(); store != NULL; store = store->next_keeping) {
    if (!all || hz3_read_figure(&store->kept_count) != 0) give_up_kept(store, all);
  }
}

size_t hz3_span_stores_kept_bytes(void) {
  size_t bytes = 0;
  for (struct hz3_span_store *store = first_keeping(); store != NULL; store = store->next_keeping)
    bytes += hz3_read_figure(&store->kept_slices) * HZ3_SLICE_BYTES;
  return bytes;
}

bool hz3_span_store_purge(struct hz3_span_store *store, void (*free_span)(struct hz3_span *span)) {
  struct off_list off = {.free_span = free_span};
  bool any = false;
  if (HZ3_CHECKED) return false;
  for (int list = 0; list < HZ3_SPAN_LISTS; list++) {
    struct hz3_span *due;
    for (size_t left = listed_on(store, list); left > 0 && take_turn(store, list, &due); left--) {
      if (due != NULL) any |= purge_inside(store, due, &off);
    }
  }
  free_all(off.retired, off.free_span);
  return any;
}

// Takes the one that has been sparse longest, for long enough, off the lists. One that no tick has seen is marked, and goes to the front.
static struct hz3_span *take_sparse(struct hz3_span_store *store, uint32_t now_ms, size_t *looks) {
  struct hz3_span *due = NULL;
  hz3_lock_acquire(&store->lock);
  for (; *looks > 0 && store->lists[SPARSE_LIST] != NULL; --*looks) {
    struct hz3_span *last = store->lists[SPARSE_LIST]->prev;
    if (last->marked_ms != 0) {
      uint32_t sparse_ms = now_ms - last->marked_ms;  // below zero, modulo 2^32, if another tick marked it after now_ms
      if (sparse_ms >= SPARSE_MS && sparse_ms <= UINT32_MAX - HELD_UP_MS) due = last;
      break;
    }
    unlink_locked(store, last);
    link_locked(store, last, SPARSE_LIST);
    last->marked_ms = hz3_max(now_ms, 1);
  }
  if (due != NULL) take_to_purge_locked(store, due);
  hz3_lock_release(&store->lock);
  return due;
}

size_t hz3_span_store_purge_sparse(struct hz3_span_store *store, uint32_t now_ms, size_t most, void (*free_span)(struct hz3_span *span)) {
  struct off_list off = {.free_span = free_span};
  size_t count = 0, looks = most * LOOKS_PER_PURGE;
  if (HZ3_CHECKED) return 0;
  for (struct hz3_span *span; count < most && (span = take_sparse(store, now_ms, &looks)) != NULL; count++) purge_inside(store, span, &off);
  free_all(off.retired, off.free_span);
  return count;
}

// Clears bit `index` % 64; whether it was set. In C, compilers make four instructions of it (docs/decisions/0032).
HZ3_INLINE bool take_bit(uint64_t *word, size_t index) {
#if defined(__x86_64__)
  bool was_set;
  __asm__("btr %2, %0" : "+r"(*word), "=@ccc"(was_set) : "r"(index));
#else
  bool was_set = *word >> index % 64 & 1;
  *word &= ~((uint64_t)1 << index % 64);
#endif
  return was_set;
}

// `count` objects of the span are no longer marked as out.
static void end_run_locked(struct hz3_span_store *store, struct hz3_span *span, size_t count, struct off_list *off) {
  span->is_purged = false;
  span->until_settle -= (int32_t)count;
  if (span->until_settle <= 0) settle_locked(store, span, count, off);
}

// Of an object of the class, counted from the one at `start`; a huge number for what is none from there on.
HZ3_INLINE size_t number_from(const char *start, const struct hz3_size_class *class, const void *object) {
  return hz3_object_number(class->odd_inverse, class->twos, (size_t)((const char *)object - start));
}

// Ends the process for a pointer into the span that is no object which is out.
__attribute__((noreturn)) static HZ3_COLD void refuse(const struct hz3_span *span, const void *object) {
  const struct hz3_size_class *class = &hz3_size_classes[span->size_class];
  bool is_object = number_from(span->base, class, object) < span->carved;
  hz3_fatal(is_object ? HZ3_FATAL_DOUBLE_FREE : HZ3_FATAL_MISALIGNED_FREE, object, class->bytes);
}

// The number of the object in its span.
HZ3_INLINE size_t index_in(const struct hz3_span *span, const struct hz3_size_class *class, const void *object) {
  size_t index = number_from(span->base, class, object);
  if (HZ3_UNLIKELY(index >= span->objects)) refuse(span, object);
  return index;
}

// Puts the objects of one home back, one by one; the others move to the front, and their end is returned.
static void **release_singly_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct off_list *off) {
  const struct hz3_size_class class = hz3_size_classes[size_class];
  uintptr_t kind = hz3_page_map_kind(size_class, home);
  void **others = objects;
  for (void **next = objects; next != end; next++) {
    void *object = *next;
    struct hz3_span *span;
    if (HZ3_UNLIKELY(!is_in_span_of(kind, object, &span))) {
      *others++ = object;
      continue;
    }
    size_t index = index_in(span, &class, object);
    uint64_t *at = &span->out_words[index / 64], out = *at;
    if (HZ3_UNLIKELY(!take_bit(&out, index))) refuse(span, object);
    *at = out;
    span->is_purged = false;
    if (--span->until_settle == 0) settle_locked(store, span, 1, off);  // below that only while it is off the lists
  }
  return others;
}

// How many objects from *next on follow each other in memory, up to `most` upwards, which is at least 1.
HZ3_INLINE size_t stretch_of(void **next, size_t most, size_t bytes) {
  size_t n = 1;
  for (const char *at = *next; n < most && next[n] == at + bytes; n++) at += bytes;
  return n;
}

// Marks the object, of number `index`, and those after it that lie in the same word of the span's bitmap; returns their end. The word
// stays in a register, because a load of it would wait for the store before.
HZ3_INLINE void **mark_word(struct hz3_span *span, const struct hz3_size_class *class, size_t index, void **next, void **end, bool in_stretches) {
  size_t bit = index % 64, first = index - bit, limit = hz3_min(span->objects - first, 64);
  const char *start = span->base + first * class->bytes;
  uint64_t *at = &span->out_words[index / 64], out = *at;
  do {
    size_t count = in_stretches ? stretch_of(next, hz3_min((size_t)(end - next), limit - bit), class->bytes) : 1;
    if (in_stretches) {
      uint64_t bits = bits_of(bit, count), twice = ~out & bits;
      if (HZ3_UNLIKELY(twice != 0)) refuse(span, start + (size_t)__builtin_ctzll(twice) * class->bytes);
      out &= ~bits;
    } else {
      if (HZ3_UNLIKELY(!take_bit(&out, bit))) refuse(span, *next);
    }
    next += count;
    if (next == end) break;
    bit = number_from(start, class, *next);
  } while (bit < limit);
  *at = out;
  return next;
}

// The same where objects of one word follow each other; `in_stretches`: and most are neighbours, too.
HZ3_INLINE void **release_words_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end,
                                       struct off_list *off, bool in_stretches) {
  const struct hz3_size_class class = hz3_size_classes[size_class];
  uintptr_t kind = hz3_page_map_kind(size_class, home);
  void **others = objects;
  for (void **next = objects; next != end;) {
    struct hz3_span *span;
    if (HZ3_UNLIKELY(!is_in_span_of(kind, *next, &span))) {
      *others++ = *next++;
      continue;
    }
    void **run = next;
    size_t index = index_in(span, &class, *next);
    do next = mark_word(span, &class, index, next, end, in_stretches);
    while (next != end && (index = number_from(span->base, &class, *next)) < span->objects);
    end_run_locked(store, span, (size_t)(next - run), off);
  }
  return others;
}

static void **release_near_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct off_list *off) {
  return release_words_locked(store, home, size_class, objects, end, off, false);
}

static void **release_stretches_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct off_list *off) {
  return release_words_locked(store, home, size_class, objects, end, off, true);
}

typedef void **release_function(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct off_list *off);

// What suits the order of the objects, from a few samples: whether nearly all of them follow each other in memory, or half lie near
// enough for one word of a bitmap.
static release_function *release_for(void **objects, size_t count, size_t bytes) {
  enum { SAMPLES = 8, REACH = 8 };
  if (count < 2 * SAMPLES) return release_singly_locked;
  size_t step = count / SAMPLES, reach = hz3_min(step - 1, REACH), near = 0, stretches = 0;
  for (size_t i = 0; i < SAMPLES; i++) {
    void **sample = &objects[i * step];
    near += ((uintptr_t)sample[0] ^ (uintptr_t)sample[1]) < 64 * bytes;
    stretches += (uintptr_t)sample[reach] - (uintptr_t)sample[0] == reach * bytes;
  }
  return stretches >= SAMPLES - 1 ? release_stretches_locked : near >= SAMPLES / 2 ? release_near_locked : release_singly_locked;
}

void hz3_span_store_release(struct hz3_span_store *stores, unsigned size_class, void **objects, size_t count,
                            void (*free_span)(struct hz3_span *span)) {
  struct off_list off = {.free_span = free_span};
  release_function *release_locked = release_for(objects, count, hz3_size_classes[size_class].bytes);
  while (count > 0) {
    unsigned home = hz3_page_map_home(owner_of(size_class, objects[0]));
    struct hz3_span_store *store = &stores[home];
    hz3_lock_acquire(&store->lock);
    off.now_ms = 0;
    void **others = release_locked(store, home, size_class, objects, objects + count, &off);
    size_t released = count - (size_t)(others - objects);
    hz3_take_from_figure(&store->live_objects, released);
    store->exchanged += released;
    note_exchange_locked(store, &hz3_size_classes[size_class], &off.now_ms);
    hz3_lock_release(&store->lock);
    count -= released;
  }
  purge_hollow(stores, &off);
  free_all(off.retired, off.free_span);
}
