// SPDX-License-Identifier: Apache-2.0
// What it is: puts objects back into their spans, in the way that suits their order.
#include "hz3/pages/span_store_internal.h"

#include "hz3/base/fatal.h"
#include "hz3/config.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages_internal.h"

// If a span has been hollow for HZ3_SOON_MS, need not wait, and its class is half empty, the pages between the objects go, too, and once
// more when one is left (docs/decisions/0023). With each release so many spans at most: a free makes up to three, a tick one and more for
// each class.
enum { HOLLOW_MOST = 16 };

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

static bool is_half_empty(const struct hz3_span_store *store) { return store->live_objects * 2 <= store->objects; }

// No more than `settle_out` objects of the span are out.
static HZ3_NOINLINE void settle_locked(struct hz3_span_store *store, struct hz3_span *span, struct hz3_off_list *off) {
  size_t out = hz3_span_objects_out(span);
  // What came back since it was purged is to go, too, but if it was hollow then, only when one is left.
  if (span->list == HZ3_PURGED_LIST && (span->settle_out >= HZ3_HOLLOW_OBJECTS || out == 1)) span->was_purged = false;
  hz3_span_place_locked(store, span, off);
}

static void take_hollow_locked(struct hz3_span_store *store, struct hz3_off_list *off) {
  if (HZ3_CHECKED || store->lists[HZ3_HOLLOW_LIST] == NULL || !is_half_empty(store)) return;
  uint32_t now_ms = hz3_span_look_at_clock(&off->now_ms);
  if (!hz3_pages_are_hollow_due(now_ms)) return;
  size_t looks = HOLLOW_MOST * HZ3_LOOKS_PER_PURGE;
  for (struct hz3_span *span; off->hollow_count < HOLLOW_MOST; off->hollow_count++) {
    span = hz3_span_take_due_locked(store, HZ3_HOLLOW_LIST, now_ms, HZ3_SOON_MS, &looks);
    if (span == NULL) return;
    span->next = off->hollow;
    off->hollow = span;
  }
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
static void end_run_locked(struct hz3_span_store *store, struct hz3_span *span, size_t count, struct hz3_off_list *off) {
  span->is_purged = false;
  span->until_settle -= (int32_t)count;
  if (span->until_settle <= 0) settle_locked(store, span, off);
}

// Ends the process for a pointer into the span that is no object which is out.
__attribute__((noreturn)) static HZ3_COLD void refuse(const struct hz3_span *span, const void *object) {
  const struct hz3_size_class *class = &hz3_size_classes[span->size_class];
  bool is_object = hz3_number_from(span->base, class, object) < span->carved;
  hz3_fatal(is_object ? HZ3_FATAL_DOUBLE_FREE : HZ3_FATAL_MISALIGNED_FREE, object, class->bytes);
}

// The number of the object in its span.
HZ3_INLINE size_t index_in(const struct hz3_span *span, const struct hz3_size_class *class, const void *object) {
  size_t index = hz3_number_from(span->base, class, object);
  if (HZ3_UNLIKELY(index >= span->objects)) refuse(span, object);
  return index;
}

// Puts the objects of one home back, one by one; the others move to the front, and their end is returned.
static void **release_singly_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct hz3_off_list *off) {
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
    if (--span->until_settle == 0) settle_locked(store, span, off);  // below that only while it is off the lists
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
      uint64_t bits = hz3_span_bits_of(bit, count), twice = ~out & bits;
      if (HZ3_UNLIKELY(twice != 0)) refuse(span, start + (size_t)__builtin_ctzll(twice) * class->bytes);
      out &= ~bits;
    } else {
      if (HZ3_UNLIKELY(!take_bit(&out, bit))) refuse(span, *next);
    }
    next += count;
    if (next == end) break;
    bit = hz3_number_from(start, class, *next);
  } while (bit < limit);
  *at = out;
  return next;
}

// The same where objects of one word follow each other; `in_stretches`: and most are neighbours, too.
HZ3_INLINE void **release_words_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end,
                                       struct hz3_off_list *off, bool in_stretches) {
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
    while (next != end && (index = hz3_number_from(span->base, &class, *next)) < span->objects);
    end_run_locked(store, span, (size_t)(next - run), off);
  }
  return others;
}

static void **release_near_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct hz3_off_list *off) {
  return release_words_locked(store, home, size_class, objects, end, off, false);
}

static void **release_stretches_locked(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct hz3_off_list *off) {
  return release_words_locked(store, home, size_class, objects, end, off, true);
}

typedef void **release_function(struct hz3_span_store *store, unsigned home, unsigned size_class, void **objects, void **end, struct hz3_off_list *off);

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
  struct hz3_off_list off = {.free_span = free_span};
  release_function *release_locked = release_for(objects, count, hz3_size_classes[size_class].bytes);
  while (count > 0) {
    unsigned home = hz3_page_map_home(owner_of(size_class, objects[0]));
    struct hz3_span_store *store = &stores[home];
    hz3_lock_acquire(&store->lock);
    off.now_ms = 0;
    void **others = release_locked(store, home, size_class, objects, objects + count, &off);
    size_t released = count - (size_t)(others - objects);
    hz3_span_store_note_released_locked(store, size_class, released, &off);
    take_hollow_locked(store, &off);
    hz3_lock_release(&store->lock);
    count -= released;
  }
  hz3_spans_purge_hollow(stores, &off);
  hz3_spans_free(off.retired, off.free_span);
}
