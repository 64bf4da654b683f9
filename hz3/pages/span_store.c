// SPDX-License-Identifier: Apache-2.0
// What it is: the central store of a class, see span_store.h: its spans, and what is fetched from them.
#include "hz3/pages/span_store_internal.h"

#include <string.h>

#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages_internal.h"
#include "hz3/pages/tag_map.h"

enum { SPREAD_MOST = 32 };  // up to so many objects at once are carved so that neighbours lie in different cache lines

// A store drains while an eighth of the room in its spans is free, or more: what is freed then is not to be given out again before
// the spans had it, so that new blocks come from the fullest ones and the others empty. If while so many objects are exchanged no
// span has become free, this was in vain, and for as many threads keep what they free (docs/decisions/0034). So they do where spans
// leave and come by turns: it swings. A queue drains always: who gets what is oldest for what is newest loses the order of addresses, and walks
// from one to the next take several times as long then; and what is left of it at low tide lies in every page it ever had (docs/decisions/0040, 0042).
// Not medium blocks, of which each is a few pages, and whose spans threads share. None of this for objects of which two do not fit a slice: the
// bins of these grow by what they spare, and may hold none.
enum { DRAIN_EXCHANGE = 512, DRAIN_MOST_BYTES = HZ3_SLICE_BYTES / 2 };

// What is no queue is known by samples. Of each span that drains one object is watched: it is young if it comes back before a quarter of all that
// is out was handed out after it, as of a queue none does, and in no order a fifth. So one that is young is as much doubt as YOUNG_DOUBT that are
// not take away. With more than the most, threads keep what they free for HZ3_SWING_MS, then one more young one is enough; with as little as
// IN_ORDER, what comes back is in order. A class starts between these, where it drains while there is little room in it.
enum { YOUNG_SHARE = 4, YOUNG_DOUBT = 16, DOUBT_MOST = 16, IN_ORDER = -8, DOUBT_LEAST = -64 };
enum { NO_SAMPLE_SEEN, OLD_SEEN, YOUNG_SEEN };

// A batch is a quarter of a class, fetched in a row, of which half or more comes back in a row. What is smaller comes back young. Less than an
// eighth that comes back in between is no break.
enum { BATCH_SHARE = YOUNG_SHARE, BACK_SHARE = 2, BREAK_SHARE = 8 };

// Most of what a span costs it costs as a whole: its lists, its locks, its way to the pages and back. So a span has room for as many
// objects as a word has bits, if WIDE_SLICES are enough for so many; but no span exceeds the smallest by more than a part of what its
// class has already, or programs that need a little of many classes would have more memory for it (docs/decisions/0039).
enum { WIDE_OBJECTS = 64, WIDE_SLICES = 4, WIDE_PART = 4 };

static bool has_room(const struct hz3_span_store *store) {
  struct hz3_class_use use = hz3_span_store_use(store);
  return hz3_class_has_room(&use);
}

static bool is_in_order(const struct hz3_span_store *store) { return store->doubt <= IN_ORDER; }

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
void hz3_span_unlink_locked(struct hz3_span_store *store, struct hz3_span *span) {
  if (span->list == HZ3_SPAN_NO_LIST) return;
  struct hz3_span **first = &store->lists[span->list];
  if (span == *first) *first = span->next;
  else span->prev->next = span->next;
  struct hz3_span *behind = span->next != NULL ? span->next : *first;
  if (behind != NULL) behind->prev = span->prev;
  store->listed[span->list]--;
  span->list = HZ3_SPAN_NO_LIST;
}

void hz3_span_link_locked(struct hz3_span_store *store, struct hz3_span *span, uint8_t list) {
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
  const size_t of_list[HZ3_SPAN_LISTS] = {objects * 3 / 4, objects * 3 / 4, objects / 2, objects / 4, 0, 0, 0};
  size_t out = hz3_span_objects_out(span), hollow = out > HZ3_HOLLOW_OBJECTS ? HZ3_HOLLOW_OBJECTS : out > 1 ? 1 : 0;
  if (list == HZ3_SPAN_NO_LIST) return out - 1;
  size_t next = hz3_max(of_list[list], hollow);
  if (list == HZ3_PURGED_LIST) next = hz3_max(next, out / 2);
  return hz3_min(next, out - 1);
}

static bool waits_for_purge(uint8_t list) { return list == HZ3_SPARSE_LIST || list == HZ3_HOLLOW_LIST; }

static bool is_sparse(const struct hz3_span *span) { return waits_for_purge(span->list) || span->list == HZ3_PURGED_LIST; }

// Puts the span where its room says, after objects came back or were taken.
static void relist_locked(struct hz3_span_store *store, struct hz3_span *span, bool came_back) {
  size_t room = room_of(span), objects = span->objects;
  uint8_t list = room == 0 ? HZ3_SPAN_NO_LIST : (uint8_t)(HZ3_FULLEST_LIST + (room * 4 >= objects) + (room * 2 >= objects) + (room * 4 >= objects * 3));
  if (list == HZ3_FULLEST_LIST && (span->list == HZ3_SCRAP_LIST || (came_back && span->list == HZ3_SPAN_NO_LIST))) list = HZ3_SCRAP_LIST;
  if (list == HZ3_SPARSE_LIST) list = span->was_purged ? HZ3_PURGED_LIST : objects - room > HZ3_HOLLOW_OBJECTS ? HZ3_SPARSE_LIST : HZ3_HOLLOW_LIST;
  hz3_span_settle_at(span, next_settle(span, list));
  if (list == span->list) return;
  if (waits_for_purge(list) && !waits_for_purge(span->list)) span->marked_ms = 0;
  hz3_span_unlink_locked(store, span);
  if (list != HZ3_SPAN_NO_LIST) hz3_span_link_locked(store, span, list);
  if (is_sparse(span)) span->sample = HZ3_SPAN_NO_SAMPLE;
}

// The fullest span with room, so that emptier ones drain. But while a store is in order, scraps wait until their neighbours have come back, too: what is
// wanted together lies together then. They are an eighth of all at most, from there on they are taken first; and so they are where nothing else can
// be had (docs/decisions/0044).
static struct hz3_span *fullest_locked(const struct hz3_span_store *store, bool scraps) {
  for (int i = scraps || !is_in_order(store) || has_room(store) ? HZ3_SCRAP_LIST : HZ3_FULLEST_LIST; i < HZ3_SPAN_LISTS; i++) {
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
  static const uint8_t emptiest_first[] = {HZ3_HOLLOW_LIST, HZ3_SPARSE_LIST, HZ3_FULLEST_LIST + 2, HZ3_FULLEST_LIST + 1, HZ3_PURGED_LIST};
  for (size_t i = 0; i < sizeof emptiest_first; i++) {
    struct hz3_span *span = store->lists[emptiest_first[i]];
    if (span != NULL && !is_carved(span)) span = span->next;
    if (span != NULL) return span;
  }
  return NULL;
}

void hz3_span_unlist_locked(struct hz3_span_store *store, struct hz3_span *span) {
  hz3_span_unlink_locked(store, span);
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
  // Who has little to spare, or swings, soon wants it himself (docs/decisions/0040, 0029).
  bool spares = has_room(store) && !hz3_span_store_swings(store, (uint32_t)hz3_os_now_ms());
  struct hz3_span *span = spares ? emptiest_locked(store) : NULL;
  if (span != NULL) {
    hz3_span_unlist_locked(store, span);
    *live = hz3_span_objects_out(span);
    remove_span_locked(store, span);
    hz3_take_from_figure(&store->live_objects, *live);
    set_home(span, new_home);  // from here on objects come back to it under the new home's lock
  }
  hz3_lock_release(&store->lock);
  return span;
}

// Whether bits are set, and follow each other.
HZ3_INLINE bool is_one_stretch(uint64_t word) { return word != 0 && (word & (word + (word & -word))) == 0; }

// Takes up to `count` returned objects: the lowest ones whose bits are not set, for what is not carved lies above. Magazines are popped
// from the end, so this and all else that fetches writes downwards from there: a program then touches its memory in order of addresses,
// which the processor foresees.
static size_t take_returned(struct hz3_span *span, void **end, size_t count) {
  char *base = span->base;
  size_t bytes = hz3_size_classes[span->size_class].bytes;
  size_t taken = hz3_min(count, span->carved - hz3_span_objects_out(span)), left = taken;
  for (size_t w = 0; left > 0; w++) {
    uint64_t word = ~span->out_words[w];
    if (is_one_stretch(word)) {
      size_t first = (size_t)__builtin_ctzll(word), stretch = hz3_min(left, 64 - first - (size_t)__builtin_clzll(word));
      char *at = base + (w * 64 + first) * bytes;
      for (void **last = end - stretch; end != last; at += bytes) *--end = at;
      word &= ~hz3_span_bits_of(first, stretch);
      left -= stretch;
    } else {
      for (; word != 0 && left > 0; word &= word - 1, left--) *--end = base + (w * 64 + (size_t)__builtin_ctzll(word)) * bytes;
    }
    span->out_words[w] = ~word;
  }
  return taken;
}

static void mark_as_out(struct hz3_span *span, size_t first, size_t count) {
  for (size_t step; count > 0; first += step, count -= step) {
    step = hz3_min(count, 64 - first % 64);
    span->out_words[first / 64] |= hz3_span_bits_of(first, step);
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
  if (span->is_draining == value) return;
  span->is_draining = value;
  hz3_tag_map_set(span->base, span->slices, span->size_class * HZ3_TAG_STEP + (value ? HZ3_TAG_DRAIN : 0));
}

static bool is_draining(const struct hz3_span_store *store, unsigned size_class, uint32_t *now_ms) {
  struct hz3_class_use use = hz3_span_store_use(store);
  if (HZ3_CHECKED || hz3_size_classes[size_class].bytes > DRAIN_MOST_BYTES || hz3_class_has_few_spans(size_class, &use)) return false;
  bool room = hz3_class_has_room(&use);
  if (room && !store->drains_in_vain && !hz3_span_store_swings(store, hz3_span_look_at_clock(now_ms))) return true;
  if (size_class > HZ3_SMALL_CLASS_LAST || (room && !is_in_order(store))) return false;
  return hz3_span_look_at_clock(now_ms) - store->reuse_ms >= HZ3_SWING_MS;
}

// Two batches in a row are seen, for one may be what a program ends with before it does something else. Their objects are as old as those of a
// queue, but soon wanted again; of a queue some are fetched while others come back.
static void note_batch_locked(struct hz3_span_store *store, unsigned size_class, size_t count, struct hz3_off_list *off) {
  struct hz3_class_use use = hz3_span_store_use(store);
  size_t part = use.objects / BATCH_SHARE, back = hz3_max(part, store->fetched_run / BACK_SHARE), before = store->released_run;
  store->released_run += count;
  if (store->fetched_run < part || before >= back || store->released_run < back || hz3_class_has_few_spans(size_class, &use)) return;
  uint32_t last_ms = store->batch_ms;
  store->batch_ms = hz3_span_look_at_clock(&off->now_ms);
  if (store->batch_ms - last_ms < HZ3_SWING_MS) store->reuse_ms = store->batch_ms;
}

void hz3_span_store_note_released_locked(struct hz3_span_store *store, unsigned size_class, size_t count, struct hz3_off_list *off) {
  hz3_take_from_figure(&store->live_objects, count);
  note_batch_locked(store, size_class, count, off);
  store->exchanged += count;
  if (store->exchanged < DRAIN_EXCHANGE) return;
  store->drains_in_vain = has_room(store) && is_draining(store, size_class, &off->now_ms) && store->spans >= store->spans_then;
  store->exchanged = 0;
  store->spans_then = store->spans;
}

static void note_handed_out_locked(struct hz3_span_store *store, size_t count) {
  hz3_add_to_figure(&store->live_objects, count);
  store->exchanged += count;
  store->handed_out += (uint32_t)count;
  if (store->released_run * BREAK_SHARE > store->fetched_run) store->fetched_run = 0;
  store->fetched_run = hz3_min(store->fetched_run + count, store->live_objects);
  store->released_run = 0;
}

// Before more is fetched from the span, so that a sample that came back is not out again.
static void look_at_sample_locked(struct hz3_span_store *store, struct hz3_span *span) {
  if (span->sample == HZ3_SPAN_NO_SAMPLE) return;
  bool is_out = span->out_words[span->sample / 64] >> span->sample % 64 & 1;
  bool is_old = store->handed_out - span->sampled_at >= store->live_objects / YOUNG_SHARE;
  if (is_out && !is_old) return;
  store->seen = (uint8_t)hz3_max(store->seen, is_old ? OLD_SEEN : YOUNG_SEEN);
  span->sample = HZ3_SPAN_NO_SAMPLE;
}

// The one that is to be popped first: what a bin was filled with and did not need is flushed, too.
static void take_sample_locked(const struct hz3_span_store *store, struct hz3_span *span, const void *first) {
  span->sample = (uint16_t)hz3_number_from(span->base, &hz3_size_classes[span->size_class], first);
  span->sampled_at = store->handed_out;
}

// Once for all that is fetched together: if it was flushed together, all of it is young.
static void judge_samples_locked(struct hz3_span_store *store) {
  if (store->seen == OLD_SEEN && store->doubt > DOUBT_LEAST) store->doubt--;
  if (store->seen == YOUNG_SEEN) store->doubt = (int8_t)(store->doubt + YOUNG_DOUBT);
  store->seen = NO_SAMPLE_SEEN;
  if (store->doubt <= DOUBT_MOST) return;
  store->doubt = DOUBT_MOST;
  store->reuse_ms = (uint32_t)hz3_os_now_ms();
}

// And puts the span where it belongs then.
static size_t take_from_locked(struct hz3_span_store *store, struct hz3_span *span, void **end, size_t count, bool *is_clean) {
  uint32_t now_ms = 0;
  if (span->is_draining && !is_draining(store, span->size_class, &now_ms)) set_draining_locked(span, false);
  if (!span->is_draining) span->sample = HZ3_SPAN_NO_SAMPLE;  // it may have come and gone without its span
  look_at_sample_locked(store, span);
  if (HZ3_UNLIKELY(span->was_purged)) hz3_pages_note_hollow_use(span->marked_ms);
  span->was_purged = false;
  if (is_sparse(span)) span->marked_ms = 0;
  size_t taken = take_returned(span, end, count);
  size_t fresh = hz3_min(count - taken, (size_t)span->objects - span->carved);
  carve(span, end - taken, fresh);
  span->until_settle += (int32_t)(taken + fresh);
  note_handed_out_locked(store, taken + fresh);
  relist_locked(store, span, false);
  if (span->list == HZ3_SPAN_NO_LIST) {
    set_draining_locked(span, is_draining(store, span->size_class, &now_ms));
    if (span->is_draining && span->sample == HZ3_SPAN_NO_SAMPLE) take_sample_locked(store, span, end[-1]);
  }
  if (taken > 0 || !span->is_clean) *is_clean = false;
  return taken + fresh;
}

// A span with room, or one that was kept; NULL if there is neither.
static struct hz3_span *next_locked(struct hz3_span_store *store, bool scraps) {
  struct hz3_span *span = fullest_locked(store, scraps);
  if (span != NULL || store->kept == NULL) return span;
  hz3_span_store_note_wanted_locked(store);
  span = hz3_span_take_kept_locked(store);
  add_span_locked(store, span);
  span->sample = HZ3_SPAN_NO_SAMPLE;
  return span;
}

static size_t fetch_locked(struct hz3_span_store *store, void **end, size_t count, bool scraps, bool *is_clean) {
  size_t got = 0;
  for (struct hz3_span *span; got < count && (span = next_locked(store, scraps)) != NULL;)
    got += take_from_locked(store, span, end - got, count - got, is_clean);
  judge_samples_locked(store);
  return got;
}

// What lies at the end of `out`, if that was not filled, moves to its start.
static size_t moved_to_start(void **out, size_t count, size_t got) {
  if (got < count) memmove(out, out + count - got, got * sizeof *out);
  return got;
}

size_t hz3_span_store_fetch(struct hz3_span_store *store, void **out, size_t count, bool scraps, bool *is_clean) {
  hz3_lock_acquire(&store->lock);
  size_t got = fetch_locked(store, out + count, count, scraps, is_clean);
  hz3_lock_release(&store->lock);
  return moved_to_start(out, count, got);
}

size_t hz3_span_store_fetch_from(struct hz3_span_store *store, struct hz3_span *span, size_t live, void **out, size_t count, bool *is_clean) {
  hz3_lock_acquire(&store->lock);
  hz3_span_store_note_wanted_locked(store);
  hz3_span_store_learn_to_keep_locked(store, widest_slices(span->size_class));
  add_span_locked(store, span);
  // From this one first, even if others have got room meanwhile: a span of which nothing is out would never come back as a whole.
  span->list = HZ3_SPAN_NO_LIST;
  span->sample = HZ3_SPAN_NO_SAMPLE;
  hz3_add_to_figure(&store->live_objects, live);
  size_t got = take_from_locked(store, span, out + count, count, is_clean);
  got += fetch_locked(store, out + count - got, count - got, false, is_clean);
  hz3_lock_release(&store->lock);
  return moved_to_start(out, count, got);
}

void hz3_span_place_locked(struct hz3_span_store *store, struct hz3_span *span, struct hz3_off_list *off) {
  if (span->list == HZ3_SPAN_OFF_LISTS) return;
  if (hz3_span_objects_out(span) > 0) {
    bool was_full = span->settle_out + 1u == span->objects;  // no more than objects - 2 otherwise
    bool drains = is_draining(store, span->size_class, &off->now_ms);
    if (drains || was_full) set_draining_locked(span, drains);
    relist_locked(store, span, true);
    return;
  }
  hz3_span_unlink_locked(store, span);
  remove_span_locked(store, span);
  store->left_ms = hz3_span_look_at_clock(&off->now_ms);
  if (!hz3_span_store_swings(store, store->left_ms)) hz3_span_store_unlearn_locked(store, store->kept_most);
  if (store->kept_count < store->kept_most) {
    hz3_span_keep_locked(store, span, off->free_span);
    return;
  }
  store->left++;
  span->next = off->retired;
  off->retired = span;
}
