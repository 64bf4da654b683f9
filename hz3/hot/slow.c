// SPDX-License-Identifier: Apache-2.0
// What it is: everything behind the fast paths: when a thread's caches refill, flush, share and shrink, ticks, trim.
// Called by: bin.h on a miss, the API edge through hot.h.
// Owns: nothing; works on the entering thread's heap.
// Locks: none of its own; boxes take theirs.
// Invariant: between hz3_heap_enter and hz3_heap_leave a heap's magazines may be half exchanged; outside they never are.
#include <errno.h>
#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/hot/class_spans.h"
#include "hz3/hot/heap.h"
#include "hz3/hot/hot.h"
#include "hz3/large/large.h"
#include "hz3/medium/medium.h"
#include "hz3/pages/pages.h"
#include "hz3/small/small.h"

enum {
  SLOW_CALLS_PER_CLOCK = 16,       // how often a slow path looks at the clock
  LARGE_TICK_MS = 500,             // since the last tick of a thread; then it ticks with a large block that it frees, too
  FEWEST_OBJECTS = 16,             // a full bin of any class up to this size, but for heaps of a crowd:
  FEWEST_OBJECTS_BYTES = 32 * 1024,
  CLEAN_MIN_BYTES = 32 * 1024,     // above this calloc asks whether the memory is clean, which takes a slow path
  BIG_LEVEL_MAX = 4,               // a bin of big objects may grow to this level, 16 times the bytes of one magazine;
  ABOVE_TABLE_LEVEL_MAX = 6,       // or to this one if they are above HZ3_TABLE_MAX, since eight of those are more than that
  GROWN_HEAP_BYTES = (size_t)8 * HZ3_HEAP_BYTES,     // by which all bins of a heap may grow, while those of all heaps together
  GROWN_PROCESS_BYTES = (size_t)32 * HZ3_HEAP_BYTES, // grow by no more than this; half of HZ3_HEAP_BYTES every heap may have
  FIRST_REFILL = 8,                // objects of a class's first refill: a thread that needs few gets few. Then twice as many each time.
  FIRST_REFILL_LEAST_BYTES = 512,  // Of objects below 64 bytes so many bytes instead: FIRST_REFILL cache lines.
  FIRST_REFILL_MOST_BYTES = 1024,  // Of objects above 128 bytes so many, but at least one object: on a huge page all are resident
  MISSES_TO_GROW = 32,             // slow paths of a class per tick that call for bigger magazines
  EMPTIES_KEPT = 8,                // empty magazines a heap keeps; half of them go back in one operation
  QUIET_MS = 8,                    // a class of which no bin ran dry for so long is quiet, give or take half of it
  FEW_SPANS = 4,                   // a class with no more than so many of its smallest spans never counts as shrinking, nor as quiet
  SHRINKING_PART = 32,             // of one that does, a bin may hold no more than 1 in so many objects that are out,
  SWINGING_PART = 8,               // or 1 in so many if the class swings
  COOLING_BYTES = (size_t)2 * HZ3_COOL_BYTES,  // that are warm in a shard of the depot, up to which a thread may add what it does not allocate
  OWN_SAMPLES = 4,                 // of a magazine that tell whether all of it came from its thread's own spans
  DRAIN_LEVEL = 1,                 // of a drain's magazine, but for big objects
  FEWEST_IN_DEPOT = 2,             // magazines of a class that the depot may keep while no memory is being given back
  OBJECTS_PER_TICK = 64 * 1024,    // that a tick takes out of the depot, and
  HEAPS_PER_TICK = 16,             // parked heaps that it drains, and
  SPANS_PER_TICK = 64              // spans that it purges within: no more than a caller can wait for, 1 to 3 ms
};

// Atomic, all relaxed: nothing is published by them, and a bound that is a moment old is as good.
static uint64_t last_tick_ms;
static uint32_t trim_epoch;
static size_t grown_process_bytes;  // sum of all heaps' grown_bytes
static uint32_t coarse_now_ms;      // the time in steps of QUIET_MS / 2, as far as a slow path has looked at the clock
static struct {
  // When a bin last ran dry, a bin or drain was limited or the depot refused what threads share, and a bin ran dry soon after that.
  uint32_t ran_dry_ms, limited_ms, swung_ms;
} class_times[HZ3_CLASS_COUNT];

#define OFFSETS(class, below, bytes, slices, objects) \
  [(below) / 16 + ((below) != 0)...(bytes) / 16] = (class) * sizeof(struct hz3_bin),
const uint16_t hz3_bin_offsets[HZ3_TABLE_MAX / 16 + 1] = {HZ3_TABLE_CLASSES(OFFSETS)};

static size_t class_bytes(unsigned c) { return hz3_size_classes[c].bytes; }

// ---- boxes by class ----

static size_t fetch(const struct hz3_heap *heap, unsigned c, void **out, size_t count, bool *is_clean) {
  bool is_small = c <= HZ3_SMALL_CLASS_LAST;
  if (is_small) *is_clean = false;
  size_t got = is_small ? hz3_small_fetch(heap->home, c, out, count) : hz3_medium_fetch(c, out, count, is_clean);
  if (HZ3_CHECKED) hz3_checked_shuffle(out, got);
  return got;
}

static void release(unsigned c, void **objects, size_t count) {
  if (count == 0) return;
  if (HZ3_CHECKED) hz3_checked_inspect(objects, count);
  hz3_class_release(c, objects, count);
}

// ---- magazines of a heap ----

static struct hz3_magazine *take_empty(struct hz3_heap *heap, unsigned level) {
  uint32_t count;
  if (level != 0) return hz3_magazine_alloc(level, 1, &count);
  if (heap->empty_count == 0) {
    struct hz3_magazine *chain = hz3_magazine_alloc(0, EMPTIES_KEPT / 2, &count);
    if (chain == NULL) return NULL;
    heap->empty = chain->index;
    heap->empty_count = (uint16_t)count;
  }
  struct hz3_magazine *magazine = hz3_magazine_at(heap->empty);
  heap->empty = magazine->next;
  heap->empty_count--;
  return magazine;
}

static void return_empties(struct hz3_heap *heap, unsigned count) {
  if (count == 0) return;
  struct hz3_magazine *first = hz3_magazine_at(heap->empty), *last = first;
  for (unsigned i = 1; i < count; i++) last = hz3_magazine_at(last->next);
  heap->empty = last->next;
  heap->empty_count = (uint16_t)(heap->empty_count - count);
  hz3_magazine_free(first, last, count);
}

static void put_empty(struct hz3_heap *heap, struct hz3_magazine *magazine) {
  magazine->count = 0;
  if (magazine->level != 0) {
    hz3_magazine_free(magazine, magazine, 1);
    return;
  }
  // Atomic: a thread that lost the race for this magazine, while it was on a stack, may still be reading the field.
  __atomic_store_n(&magazine->next, heap->empty, __ATOMIC_RELAXED);
  heap->empty = magazine->index;
  if (++heap->empty_count >= EMPTIES_KEPT) return_empties(heap, EMPTIES_KEPT / 2);
}

static struct hz3_magazine *spare_of(const struct hz3_heap *heap, unsigned c) {
  return heap->spare[c] == 0 ? NULL : hz3_magazine_at(heap->spare[c]);
}

static void set_spare(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  struct hz3_magazine *old = spare_of(heap, c);
  if (old != NULL) heap->spare_bytes -= old->count * class_bytes(c);
  if (magazine != NULL) heap->spare_bytes += magazine->count * class_bytes(c);
  heap->spare[c] = magazine == NULL ? 0 : magazine->index;
}

// Big objects are those of which the smallest magazine may not be full. Their bins grow by what they may hold, those of
// the others by the size of their magazines.
static bool is_big(unsigned c) { return class_bytes(c) > HZ3_MAGAZINE_BYTES / HZ3_MAGAZINE_CAPACITY; }

// Objects a bin may hold at a level. 0: blocks of this class go to and from their spans one by one.
static size_t capacity_at(const struct hz3_heap *heap, unsigned c, unsigned level) {
  size_t bytes = class_bytes(c);
  if (!is_big(c)) return level == 0 ? HZ3_MAGAZINE_CAPACITY : hz3_min(hz3_magazine_capacity(level), (size_t)2 * HZ3_MAGAZINE_BYTES / bytes);
  size_t least = bytes <= FEWEST_OBJECTS_BYTES && !heap->is_of_a_crowd ? FEWEST_OBJECTS : 0;
  return hz3_min(HZ3_MAGAZINE_CAPACITY, hz3_max(((size_t)HZ3_MAGAZINE_BYTES << level) / bytes, least));
}

// Objects a drain may hold: twice as many small ones as a bin at first, for each time that it is full costs locks and a look at the depot
// (docs/decisions/0034).
static size_t drain_capacity(const struct hz3_heap *heap, unsigned c) {
  if (is_big(c)) return hz3_max(capacity_at(heap, c, 0), 1);
  return hz3_min(HZ3_MAGAZINE_CAPACITY << DRAIN_LEVEL, HZ3_MAGAZINE_BYTES / class_bytes(c));
}

static unsigned level_max(unsigned c) {
  if (!is_big(c)) return HZ3_MAGAZINE_LEVELS - 1;
  return c <= HZ3_TABLE_CLASS_LAST ? BIG_LEVEL_MAX : ABOVE_TABLE_LEVEL_MAX;
}

static size_t capacity_of(const struct hz3_heap *heap, unsigned c, const struct hz3_magazine *magazine) {
  return hz3_max(capacity_at(heap, c, is_big(c) ? heap->level[c] : magazine->level), magazine->count);
}

static unsigned magazine_level(const struct hz3_heap *heap, unsigned c) { return is_big(c) ? 0 : heap->level[c]; }

static void load(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  struct hz3_bin *bin = &heap->bins[c];
  void **slots = magazine->slots;
  bin->lo = slots;
  bin->hi = slots + capacity_of(heap, c, magazine);
  bin->top = slots + magazine->count;
}

// The bin's magazine with all its objects; the bin has none then. NULL if it had none.
static struct hz3_magazine *unload(struct hz3_bin *bin) {
  if (bin->lo == NULL) return NULL;
  struct hz3_magazine *magazine = hz3_magazine_of_slots(bin->lo);
  magazine->count = (uint16_t)hz3_bin_objects(bin);
  *bin = (struct hz3_bin){0};
  return magazine;
}

static bool fits_spare(const struct hz3_heap *heap, unsigned c, const struct hz3_magazine *spare, size_t objects) {
  return objects > 0 && spare->count + objects <= capacity_of(heap, c, spare) && heap->spare_bytes + objects * class_bytes(c) <= HZ3_HEAP_BYTES;
}

// Half of a full bin, the older half, moves to its spare. Halves, not whole magazines, where the spare has room: the next
// slow path of the class is then at least half a magazine away in either direction, and a class whose population
// wanders around a magazine's border does not pay at every crossing. An empty spare takes the bin's place: nothing is copied, and
// who allocates again gets half of it back (docs/decisions/0003).
static bool spill_to_spare(struct hz3_heap *heap, unsigned c, struct hz3_magazine *spare) {
  struct hz3_bin *bin = &heap->bins[c];
  size_t objects = (size_t)(bin->top - bin->lo), half = objects / 2;
  if (spare->count == 0 && fits_spare(heap, c, spare, objects)) {
    set_spare(heap, c, NULL);
    set_spare(heap, c, unload(&heap->bins[c]));
    load(heap, c, spare);
    return true;
  }
  if (!fits_spare(heap, c, spare, half)) return false;
  memcpy(spare->slots + spare->count, bin->lo, half * sizeof(void *));
  spare->count = (uint16_t)(spare->count + half);
  heap->spare_bytes += half * class_bytes(c);
  memmove(bin->lo, bin->lo + half, (objects - half) * sizeof(void *));
  bin->top -= half;
  return true;
}

// The reverse, for an empty bin: the newer half of the spare.
static void draw_from_spare(struct hz3_heap *heap, unsigned c, struct hz3_magazine *spare) {
  struct hz3_bin *bin = &heap->bins[c];
  size_t half = hz3_min((spare->count + 1u) / 2, (size_t)(bin->hi - bin->lo));
  spare->count = (uint16_t)(spare->count - half);
  heap->spare_bytes -= half * class_bytes(c);
  memcpy(bin->lo, spare->slots + spare->count, half * sizeof(void *));
  bin->top = bin->lo + half;
}

static void set_level(struct hz3_heap *heap, unsigned c, unsigned level) {
  size_t bytes = (capacity_at(heap, c, level) - capacity_at(heap, c, heap->level[c])) * class_bytes(c);  // modulo 2^64: may be less
  heap->grown_bytes += bytes;
  __atomic_fetch_add(&grown_process_bytes, bytes, __ATOMIC_RELAXED);
  heap->level[c] = (uint8_t)level;
  struct hz3_bin *bin = &heap->bins[c];
  if (bin->lo != NULL && is_big(c)) bin->hi = bin->lo + hz3_max(capacity_at(heap, c, level), (size_t)(bin->top - bin->lo));
}

static bool may_grow(const struct hz3_heap *heap, unsigned c) {
  unsigned level = heap->level[c];
  size_t now = capacity_at(heap, c, level), bytes = class_bytes(c);
  if (level == level_max(c)) return false;
  if (!is_big(c) && (now * bytes > HZ3_MAGAZINE_BYTES || HZ3_MAGAZINE_CAPACITY != hz3_magazine_capacity(0))) return false;
  size_t more = (capacity_at(heap, c, level + 1) - now) * bytes, grown = heap->grown_bytes + more;
  return grown <= HZ3_HEAP_BYTES / 2 || (is_big(c) && grown <= GROWN_HEAP_BYTES &&
         __atomic_load_n(&grown_process_bytes, __ATOMIC_RELAXED) + more <= GROWN_PROCESS_BYTES);
}

// A thread that was held up may set it back, until the next one looks at the clock.
static void advance_coarse_clock(uint32_t now_ms) {
  if (now_ms - __atomic_load_n(&coarse_now_ms, __ATOMIC_RELAXED) >= QUIET_MS / 2) __atomic_store_n(&coarse_now_ms, now_ms, __ATOMIC_RELAXED);
}

static uint32_t ms_since(const uint32_t *time) { return __atomic_load_n(&coarse_now_ms, __ATOMIC_RELAXED) - __atomic_load_n(time, __ATOMIC_RELAXED); }

// Written once a step, for all threads share it.
static void set_to_now(uint32_t *time) {
  if (ms_since(time) != 0) __atomic_store_n(time, __atomic_load_n(&coarse_now_ms, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

static void note_ran_dry(unsigned c) {
  set_to_now(&class_times[c].ran_dry_ms);
  if (ms_since(&class_times[c].limited_ms) < HZ3_SOON_MS) set_to_now(&class_times[c].swung_ms);
}

static bool swings(unsigned c) { return ms_since(&class_times[c].swung_ms) < HZ3_SWING_MS; }

// A bin that overflows or runs dry often may hold more, as long as the budgets last. Of big objects only if it does both in
// turn: a program that only allocates, or only frees, gains nothing by a bin that holds megabytes.
static void note_slow(struct hz3_heap *heap, unsigned c, bool is_free) {
  hz3_add_class(heap->used_bits, c);
  bool has_turned = hz3_has_class(heap->freed_bits, c) != is_free;
  if (is_free) {
    hz3_add_class(heap->freed_bits, c);
  } else {
    hz3_remove_class(heap->freed_bits, c);
    hz3_add_class(heap->refilled_bits, c);
    note_ran_dry(c);
  }
  if (heap->misses[c] < MISSES_TO_GROW && (has_turned || !is_big(c))) heap->misses[c]++;
  if (heap->misses[c] < MISSES_TO_GROW || !may_grow(heap, c)) return;
  set_level(heap, c, heap->level[c] + 1u);
  heap->misses[c] = 0;
}

static void release_magazine(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  release(c, magazine->slots, magazine->count);
  put_empty(heap, magazine);
}

static bool has_few_spans(unsigned c, const struct hz3_class_use *use) { return use->objects <= (size_t)FEW_SPANS * hz3_size_classes[c].objects; }

// A class of which less than half is out of its spans is shrinking.
static bool is_shrinking(unsigned c, const struct hz3_class_use *use) {
  return !has_few_spans(c, use) && use->out * 2 < use->objects;
}

// What caches hold of such a class pins spans, at worst one each, and so does what they hold of a quiet one, even if its spans go as
// fast as its objects. So while a thread only frees of it, its bin and drain may hold a small part of what is out
// (docs/decisions/0006); if the class swings, a bigger one, and nothing is taken from them while that is no less than they can. All
// this for the home that the object comes from: what is going on in others says nothing of it. 0: no limit.
static size_t limited_capacity(unsigned c, const void *object, size_t capacity) {
  struct hz3_class_use use = hz3_class_use_at(c, hz3_pages_home_of(object));
  bool quiet = !has_few_spans(c, &use) && ms_since(&class_times[c].ran_dry_ms) >= QUIET_MS;
  if (!quiet && !is_shrinking(c, &use)) return 0;
  bool comes_again = !quiet && swings(c);
  size_t most = use.out / (comes_again ? SWINGING_PART : SHRINKING_PART);
  if (comes_again && most >= capacity) return 0;
  set_to_now(&class_times[c].limited_ms);
  return hz3_max(hz3_min(capacity, most), 1);
}

// Whether all of a few samples are of the spans that this heap fetches from.
static bool is_own(const struct hz3_heap *heap, const struct hz3_magazine *magazine) {
  for (unsigned i = 0; i < OWN_SAMPLES; i++) {
    if (hz3_pages_home_of(magazine->slots[magazine->count * i / OWN_SAMPLES]) != heap->home) return false;
  }
  return true;
}

// Magazines of the class that the depot may keep: a quarter of the objects that are out of their spans. In proportion to
// what lives, because free objects in the depot pin the spans they lie in: a fixed limit would keep a heap that has been
// freed in random order from ever going back. And in proportion to the threads that exchange: a thread alone does better with
// what its spans hand out in order of addresses (docs/decisions/0004). While memory is being given back none is kept but in
// proportion: a few of every class would be a tenth of what stays resident. What came from a thread's own spans it keeps as if it were
// alone, or threads that need nothing of each other would get each other's, in no order (docs/decisions/0036).
static size_t depot_limit(const struct hz3_heap *heap, unsigned c, size_t magazine_objects, bool own) {
  size_t out = own ? hz3_class_use_at(c, heap->home).out : hz3_class_use(c).out;
  size_t most = hz3_min((own ? 1 : hz3_heap_count()) * HZ3_HEAP_BYTES, HZ3_DEPOT_BYTES) / class_bytes(c);
  size_t fewest = hz3_pages_is_giving_back() ? 0 : FEWEST_IN_DEPOT;
  return hz3_max(hz3_min(out / 4, most) / magazine_objects, fewest);
}

// Gives a magazine with objects to whoever needs it next; if the depot has enough, the objects go to their spans, and one
// more magazine with them, so that the depot shrinks with what lives. What a thread frees that does not allocate of the class
// may cool in the depot; other threads do better with what their spans hand out in order of addresses. Of medium blocks threads
// share the spans: what swings of those the depot may keep, as much as bins may grow by (docs/decisions/0036).
static void share(struct hz3_heap *heap, unsigned c, struct hz3_magazine *magazine) {
  bool alone = hz3_heap_count() == 1, is_small = c <= HZ3_SMALL_CLASS_LAST;
  bool own = !alone && is_small && is_own(heap, magazine), has_common_spans = !alone && !is_small;
  bool only_frees = !hz3_has_class(heap->refilled_bits, c);
  size_t always_below_bytes = only_frees ? COOLING_BYTES : 0;
  if (has_common_spans && swings(c)) always_below_bytes = hz3_min(hz3_heap_count() * GROWN_HEAP_BYTES, GROWN_PROCESS_BYTES);
  size_t limit = depot_limit(heap, c, magazine->count, own);
  if (own ? hz3_depot_push_own(c, magazine, limit) : hz3_depot_push(c, magazine, limit, always_below_bytes)) return;
  if (has_common_spans) set_to_now(&class_times[c].limited_ms);
  struct hz3_magazine *older = hz3_depot_take_own(c);
  release_magazine(heap, c, magazine);
  if (older != NULL) release_magazine(heap, c, older);
}

// ---- ticks: what nobody needed for a while goes back ----

// Takes the block that waits; NULL if none does. Its class is looked up, for if a fork cut its thread off, the tag beside it may
// be another block's. One that has none was freed before, and its span went meanwhile.
static void *take_last(struct hz3_heap *heap, unsigned *c) {
  void *object = heap->last.object;
  heap->last = (struct hz3_last_freed){0};
  *c = hz3_class_of(object);
  if (object != NULL && *c == 0) hz3_fatal(HZ3_FATAL_INVALID_FREE, object, 0);
  return object;
}

static void check_is_not_newest(const struct hz3_bin *bin, unsigned c, const void *object) {
  if (bin->lo != NULL && hz3_bin_is_newest(bin, object)) hz3_fatal(HZ3_FATAL_DOUBLE_FREE, object, class_bytes(c));
}

static void release_last(struct hz3_heap *heap) {
  unsigned c;
  void *object = take_last(heap, &c);
  if (object == NULL) return;
  check_is_not_newest(&heap->bins[c], c, object);  // the span could not know
  if (hz3_heap_has_drain(heap, c)) check_is_not_newest(&heap->drains[c], c, object);
  release(c, &object, 1);
}

static void flush_drain(struct hz3_heap *heap, unsigned c) {
  if (!hz3_heap_has_drain(heap, c)) return;
  hz3_remove_class(heap->drain_bits, c);
  release_magazine(heap, c, unload(&heap->drains[c]));
}

static void flush_class(struct hz3_heap *heap, unsigned c) {
  flush_drain(heap, c);
  struct hz3_magazine *both[2] = {unload(&heap->bins[c]), spare_of(heap, c)};
  set_spare(heap, c, NULL);
  for (int i = 0; i < 2; i++) {
    if (both[i] != NULL) release_magazine(heap, c, both[i]);
  }
  set_level(heap, c, 0);
  heap->refill[c] = heap->misses[c] = 0;
}

static void lower_level(struct hz3_heap *heap, unsigned c) {
  unsigned level = heap->level[c] - 1u;
  if (capacity_at(heap, c, level) == 0) flush_class(heap, c);  // nobody looks into the bin of such a class
  else set_level(heap, c, level);
}

void hz3_heap_flush(struct hz3_heap *heap) {
  if (HZ3_CHECKED) hz3_checked_empty_quarantine(heap);
  release_last(heap);
  hz3_large_cache_flush(&heap->large);
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) flush_class(heap, c);
  return_empties(heap, heap->empty_count);
}

// Gives up to `count` magazines back, and not much more than so many objects; returns how many these were.
static size_t release_from_depot(struct hz3_heap *heap, unsigned c, uint32_t count, size_t most_objects) {
  size_t objects = 0;
  for (; count > 0 && objects < most_objects; count--) {
    struct hz3_magazine *magazine = hz3_depot_take_any(c);
    if (magazine == NULL) break;
    objects += magazine->count;
    release_magazine(heap, c, magazine);
  }
  return objects;
}

static void flush_parked(uint64_t before_ms, uint32_t most) {
  for (struct hz3_heap *heap; most > 0 && (heap = hz3_heap_take_parked(before_ms)) != NULL; most--) {
    hz3_heap_flush(heap);
    hz3_heap_put_parked(heap, 0);
  }
}

// Threads past their destructors are few and short of life: nobody counts on finding this heap warm.
static void flush_shared(void) {
  struct hz3_heap *heap = hz3_heap_enter_shared();
  if (heap == NULL) return;
  hz3_heap_flush(heap);
  hz3_heap_leave(heap);
}

// Of a class that is shrinking, spans of which little is out: what is left may live long.
static void purge_sparse_spans(uint32_t now_ms) {
  size_t left = SPANS_PER_TICK;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT && left > 0; c++) {
    struct hz3_class_use use = hz3_class_use(c);
    if (is_shrinking(c, &use)) left -= hz3_class_purge_sparse(c, now_ms, left);
  }
}

static void tick_own(struct hz3_heap *heap, uint64_t now) {
  heap->last_tick_ms = now;
  uint32_t epoch = __atomic_load_n(&trim_epoch, __ATOMIC_RELAXED);
  bool everything = heap->trim_epoch != epoch;
  heap->trim_epoch = epoch;
  release_last(heap);  // it may be all that is left of its class
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    bool idle = !hz3_has_class(heap->used_bits, c);
    if ((heap->bins[c].lo != NULL || hz3_heap_has_drain(heap, c)) && (idle || everything)) flush_class(heap, c);
    if (heap->misses[c] < 2 && heap->level[c] > 0) lower_level(heap, c);
    heap->misses[c] = 0;
  }
  hz3_large_cache_flush(&heap->large);
  heap->used_bits[0] = heap->used_bits[1] = 0;
  heap->refilled_bits[0] = heap->refilled_bits[1] = 0;
}

static void tick(struct hz3_heap *heap) {
  // The clock is read after the time of the last tick, so that their difference is not negative.
  uint64_t last = __atomic_load_n(&last_tick_ms, __ATOMIC_RELAXED), now = hz3_os_now_ms();
  advance_coarse_clock((uint32_t)now);
  if (now - heap->last_tick_ms >= HZ3_TICK_MS) tick_own(heap, now);
  // One thread does the common part.
  if (now - last < HZ3_TICK_MS || !__atomic_compare_exchange_n(&last_tick_ms, &last, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    return;
  uint32_t unused[HZ3_CLASS_COUNT];
  hz3_depot_take_low_water(unused);
  size_t left = OBJECTS_PER_TICK;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) left -= hz3_min(left, release_from_depot(heap, c, (unused[c] + 1) / 2, left));
  flush_parked(now - HZ3_TICK_MS, HEAPS_PER_TICK);
  flush_shared();
  if (!hz3_pages_are_hollow_purges_early()) purge_sparse_spans((uint32_t)now);
  hz3_pages_purge_idle();
  hz3_large_purge_idle();
}

// Blocks that a signal handler freed while a heap was in a slow path.
static void free_deferred(void *block) {
  while (block != NULL) {
    void *next = *(void **)block;
    *(void **)block = NULL;  // nothing stays behind in free memory (checked: it would look like a late write)
    hz3_free(block);
    block = next;
  }
}

static void count_slow_call(struct hz3_heap *heap) {
  if (HZ3_UNLIKELY(++heap->slow_calls % SLOW_CALLS_PER_CLOCK == 0)) tick(heap);
}

static struct hz3_heap *enter(void) {
  struct hz3_heap *heap = hz3_heap_enter();
  if (heap != NULL) count_slow_call(heap);
  return heap;
}

static void leave(struct hz3_heap *heap) {
  // Taken before the heap is left: the shared one is another thread's from then on. An exchange, so that no handler of this
  // thread gets in between; acquire keeps the compiler from reading the links, which handlers stored in free_class, before.
  void *deferred = HZ3_LIKELY(heap->deferred == NULL) ? NULL : __atomic_exchange_n(&heap->deferred, NULL, __ATOMIC_ACQUIRE);
  hz3_heap_leave(heap);
  if (HZ3_UNLIKELY(deferred != NULL)) free_deferred(deferred);
}

static bool reclaim(struct hz3_heap *heap) {
  bool held = HZ3_CHECKED && hz3_checked_empty_large_quarantine();
  hz3_heap_flush(heap);
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) release_from_depot(heap, c, UINT32_MAX, SIZE_MAX);
  flush_parked(UINT64_MAX, UINT32_MAX);
  flush_shared();
  __atomic_fetch_add(&trim_epoch, 1, __ATOMIC_RELAXED);
  bool pages = hz3_pages_trim(true);
  return hz3_large_trim(true) || pages || held;
}

// ---- allocation ----

static size_t refill_count(struct hz3_heap *heap, unsigned c, const struct hz3_magazine *magazine) {
  size_t count = heap->refill[c], bytes = class_bytes(c);
  if (count == 0) count = hz3_max(hz3_min(FIRST_REFILL, FIRST_REFILL_MOST_BYTES / bytes), hz3_max(FIRST_REFILL_LEAST_BYTES / bytes, 1));
  count = hz3_min(count, capacity_of(heap, c, magazine));
  heap->refill[c] = (uint16_t)(count * 2);
  return count;
}

// Puts objects into an empty bin: own spare, the depot, the spans. False when out of memory. *is_clean: changed only if they are from spans.
static bool refill(struct hz3_heap *heap, unsigned c, bool *is_clean) {
  struct hz3_magazine *spare = spare_of(heap, c);
  if (spare != NULL && spare->count > 0) {
    draw_from_spare(heap, c, spare);
    return true;
  }
  struct hz3_magazine *full = hz3_depot_pop(c);
  if (full != NULL) {
    struct hz3_magazine *empty = unload(&heap->bins[c]);
    if (empty != NULL && spare == NULL && empty->level == magazine_level(heap, c)) set_spare(heap, c, empty);
    else if (empty != NULL) put_empty(heap, empty);
    load(heap, c, full);
    return true;
  }
  struct hz3_magazine *magazine = unload(&heap->bins[c]);
  if (magazine == NULL || magazine->level < magazine_level(heap, c)) {
    struct hz3_magazine *bigger = take_empty(heap, magazine_level(heap, c));
    if (magazine != NULL && bigger != NULL) put_empty(heap, magazine);
    if (bigger != NULL) magazine = bigger;
  }
  if (magazine == NULL) return false;
  size_t got = fetch(heap, c, magazine->slots, refill_count(heap, c, magazine), is_clean);
  magazine->count = (uint16_t)got;
  load(heap, c, magazine);
  return got > 0;
}

// Straight from the spans. Where memory is refused, they are asked again whether or not any could be given back: what was cached may be in them.
static void *alloc_one(struct hz3_heap *heap, unsigned c, bool *is_clean) {
  void *object;
  if (fetch(heap, c, &object, 1, is_clean) != 0) return object;
  reclaim(heap);
  return fetch(heap, c, &object, 1, is_clean) != 0 ? object : NULL;
}

static void *alloc_class(struct hz3_heap *heap, unsigned c, bool *is_clean) {
  *is_clean = false;
  void *object = hz3_bin_pop(&heap->bins[c]);
  if (object != NULL) return object;
  note_slow(heap, c, false);
  if (capacity_at(heap, c, heap->level[c]) > 0 && refill(heap, c, is_clean)) return hz3_bin_pop(&heap->bins[c]);
  return alloc_one(heap, c, is_clean);
}

// Of this thread; NULL if it has none yet, and for a signal handler inside a slow path.
static struct hz3_large_cache *large_cache(void) {
  struct hz3_heap *heap = (struct hz3_heap *)hz3_heap_base();
  return hz3_heap_offset == 0 || heap->is_busy ? NULL : &heap->large;
}

static HZ3_NOINLINE void *alloc_range(size_t bytes, size_t align, bool zero) {
  void *object = hz3_large_alloc(bytes, align, zero);
  // For what there can never be, nothing is given up: such lengths come from input.
  struct hz3_heap *heap = object == NULL && hz3_os_can_map(hz3_max(bytes, align)) ? enter() : NULL;
  if (heap != NULL) {
    reclaim(heap);
    object = hz3_large_alloc(bytes, align, zero);
    leave(heap);
  }
  if (HZ3_UNLIKELY(object == NULL)) errno = ENOMEM;
  return object;
}

// A large block; NULL with errno set.
static void *alloc_large(size_t bytes, size_t align, bool zero) {
  struct hz3_large_cache *cache = large_cache();
  void *object = cache == NULL ? NULL : hz3_large_cache_take(cache, bytes, align, zero);
  return object != NULL ? object : alloc_range(bytes, align, zero);
}

// A block of the class; NULL with errno set.
static void *alloc(unsigned c, size_t bytes, size_t align, bool zero) {
  struct hz3_heap *heap = enter();
  if (heap == NULL) return alloc_large(bytes, align, zero);  // a signal handler inside a slow path: its bins are off limits
  bool is_clean;
  void *object = alloc_class(heap, c, &is_clean);
  leave(heap);
  if (zero && object != NULL && !is_clean) memset(object, 0, bytes);
  if (HZ3_UNLIKELY(object == NULL)) errno = ENOMEM;
  return object;
}

// Also for what the table of the fast path does not know, sizes above 128 KiB and aligned blocks.
static void *alloc_from_bin(unsigned c, size_t bytes, size_t align) {
  void *object = hz3_bin_pop(hz3_bin_at(c * sizeof(struct hz3_bin)));
  return object != NULL ? object : alloc(c, bytes, align, false);
}

void *hz3_malloc_slow(size_t bytes) {
  if (bytes <= HZ3_TABLE_MAX) return alloc(hz3_bin_offsets[(bytes + 15) / 16] / sizeof(struct hz3_bin), bytes, 1, false);
  if (bytes > HZ3_MEDIUM_MAX) return alloc_large(bytes, 1, false);
  return alloc_from_bin(hz3_size_class_of_medium(bytes), bytes, 1);
}

void *hz3_calloc(size_t bytes) {
  if (bytes > HZ3_MEDIUM_MAX) return alloc_large(bytes, 1, true);
  if (bytes > CLEAN_MIN_BYTES) return alloc(hz3_size_class_of_medium(bytes), bytes, 1, true);
  void *object = hz3_malloc(bytes);
  if (HZ3_LIKELY(object != NULL)) memset(object, 0, bytes);
  return object;
}

void *hz3_aligned_alloc(size_t align, size_t bytes) {
  // As hz3_size_class_of_aligned does, with the table of the fast path.
  if (bytes <= HZ3_TABLE_MAX && align <= HZ3_TABLE_MAX) return hz3_malloc(hz3_round_up(hz3_max(bytes, align), align));
  unsigned c = hz3_size_class_of_aligned(bytes, align);
  if (c == 0) return alloc_large(bytes, align, false);
  return alloc_from_bin(c, class_bytes(c), align);
}

// ---- free ----

// For a full bin of a shrinking or quiet class: everything the heap has of it, and a magazine of the depot, goes back.
static void shrink_bin(struct hz3_heap *heap, unsigned c, size_t capacity) {
  struct hz3_magazine *magazine = unload(&heap->bins[c]), *spare = spare_of(heap, c), *shared = hz3_depot_take_own(c);
  release(c, magazine->slots, magazine->count);
  magazine->count = 0;
  load(heap, c, magazine);
  heap->bins[c].hi = magazine->slots + capacity;
  heap->refill[c] = 0;  // few at a time again, or the next refill fills what has just been emptied, for nothing
  set_spare(heap, c, NULL);
  if (spare != NULL) release_magazine(heap, c, spare);
  if (shared != NULL) release_magazine(heap, c, shared);
}

// A full bin whose class has come to bigger magazines moves into one. False when there is no memory for it.
static bool enlarge(struct hz3_heap *heap, unsigned c) {
  struct hz3_magazine *bigger = take_empty(heap, magazine_level(heap, c));
  if (bigger == NULL) return false;
  struct hz3_magazine *magazine = unload(&heap->bins[c]);
  memcpy(bigger->slots, magazine->slots, magazine->count * sizeof(void *));
  bigger->count = magazine->count;
  put_empty(heap, magazine);
  load(heap, c, bigger);
  return true;
}

// A full bin gets an empty magazine; its own becomes the spare, or is shared. Without memory for one the objects go to their spans.
static void exchange_full(struct hz3_heap *heap, unsigned c) {
  struct hz3_magazine *full = unload(&heap->bins[c]), *empty = take_empty(heap, magazine_level(heap, c)), *spare = spare_of(heap, c);
  if (empty == NULL) {
    release(c, full->slots, full->count);
    full->count = 0;
    load(heap, c, full);
    return;
  }
  // The spare is the older of the two: it leaves first, the warm one stays.
  if (spare != NULL) {
    set_spare(heap, c, NULL);
    if (spare->count > 0) share(heap, c, spare);
    else put_empty(heap, spare);
  }
  if (heap->spare_bytes + full->count * class_bytes(c) > HZ3_HEAP_BYTES) share(heap, c, full);
  else set_spare(heap, c, full);
  load(heap, c, empty);
}

// Makes room for the object in a full or missing bin. False if the class has none, or when there is no memory for a first magazine.
static bool make_room(struct hz3_heap *heap, unsigned c, const void *object) {
  bool freed_last = hz3_has_class(heap->freed_bits, c);
  note_slow(heap, c, true);
  struct hz3_bin *bin = &heap->bins[c];
  if (bin->lo == NULL) {
    struct hz3_magazine *first = capacity_at(heap, c, heap->level[c]) == 0 ? NULL : take_empty(heap, magazine_level(heap, c));
    if (first != NULL) load(heap, c, first);
    return first != NULL;
  }
  struct hz3_magazine *magazine = hz3_magazine_of_slots(bin->lo), *spare = spare_of(heap, c);
  size_t capacity = freed_last ? limited_capacity(c, object, capacity_of(heap, c, magazine)) : 0;
  if (capacity != 0) {
    shrink_bin(heap, c, capacity);
    return true;
  }
  if (bin->top != bin->hi) return true;  // the bin has just grown
  if (magazine->level < magazine_level(heap, c) && enlarge(heap, c)) return true;
  if (spare == NULL || !spill_to_spare(heap, c, spare)) exchange_full(heap, c);
  return true;
}

// Makes room for the object in a full or missing drain, and if the class is shrinking or quiet and this thread only frees of it, in the bin; a
// magazine of the depot, which is older, goes along. No sign of use: a bin that is not allocated from is idle. False when there
// is no memory for a magazine.
static bool empty_drain(struct hz3_heap *heap, unsigned c, const void *object) {
  size_t most = drain_capacity(heap, c), capacity = limited_capacity(c, object, most);
  if (capacity != 0 && hz3_has_class(heap->freed_bits, c) && (heap->bins[c].lo != NULL || heap->spare[c] != 0)) flush_class(heap, c);
  hz3_add_class(heap->freed_bits, c);
  struct hz3_bin *drain = &heap->drains[c];
  struct hz3_magazine *magazine = unload(drain), *shared = hz3_depot_take_own(c);
  if (shared != NULL) release_magazine(heap, c, shared);
  if (magazine != NULL) release(c, magazine->slots, magazine->count);
  else magazine = take_empty(heap, is_big(c) ? 0 : DRAIN_LEVEL);
  if (magazine == NULL) return false;
  hz3_add_class(heap->drain_bits, c);
  drain->lo = drain->top = magazine->slots;
  drain->hi = magazine->slots + (capacity == 0 ? most : capacity);
  return true;
}

static void free_to_class(struct hz3_heap *heap, unsigned c, void *pointer) {
  bool drains = hz3_tag_of(pointer) >= HZ3_TAG_DRAIN;
  struct hz3_bin *bin = drains ? &heap->drains[c] : &heap->bins[c];
  check_is_not_newest(bin, c, pointer);
  if (bin->top != bin->hi || (drains ? empty_drain(heap, c, pointer) : make_room(heap, c, pointer))) hz3_bin_push(bin, pointer);
  else release(c, &pointer, 1);
}

// As the fast path does: the block waits, the one before it goes to its bin. The shared heap has no fast path.
static void free_in_turn(struct hz3_heap *heap, unsigned c, void *pointer) {
  unsigned c_before;
  void *before = take_last(heap, &c_before);
  if (before != NULL) free_to_class(heap, c_before, before);
  intptr_t tag = hz3_tag_of(pointer);
  if (heap->state == HZ3_HEAP_OWNED) heap->last = (struct hz3_last_freed){pointer, tag != 0 ? (size_t)tag : c * sizeof(struct hz3_bin)};
  else free_to_class(heap, c, pointer);
}

static HZ3_NOINLINE void free_class(unsigned c, void *pointer) {
  struct hz3_heap *heap = hz3_heap_enter();
  if (heap != NULL) {
    // Before a tick can take the block that waits to its span.
    if (heap->last.object == pointer) hz3_fatal(HZ3_FATAL_DOUBLE_FREE, pointer, class_bytes(c));
    count_slow_call(heap);
    if (c > HZ3_TABLE_CLASS_LAST) free_to_class(heap, c, pointer);
    else free_in_turn(heap, c, pointer);
    leave(heap);
    return;
  }
  // A signal handler inside a slow path of this thread: leave the block for the end of that slow path.
  heap = hz3_heap_entered();
  *(void **)pointer = heap->deferred;
  heap->deferred = pointer;
}

static HZ3_NOINLINE void free_range(void *pointer) {
  size_t bytes = hz3_large_free(pointer);
  if (bytes == 0) hz3_fatal(HZ3_FATAL_INVALID_FREE, pointer, 0);
  struct hz3_heap *heap = hz3_heap_enter();
  if (heap == NULL) return;
  // Seldom, for those who use nothing but large blocks: what these leave is kept as their own box thinks right.
  if (HZ3_UNLIKELY(hz3_os_now_ms() - heap->last_tick_ms >= LARGE_TICK_MS)) tick(heap);
  if (heap->state == HZ3_HEAP_OWNED) hz3_large_cache_learn(&heap->large, bytes);
  leave(heap);
}

// Whether its thread keeps it is looked up first.
void hz3_free_untagged(void *pointer) {
  if (pointer == NULL) return;
  struct hz3_large_cache *cache = large_cache();
  if (cache != NULL && hz3_large_cache_put(cache, pointer)) return;
  unsigned c = hz3_class_of_untagged(pointer);
  if (c != 0) free_class(c, pointer);
  else free_range(pointer);
}

void hz3_free_slow(void *pointer) {
  intptr_t tag = hz3_tag_of(pointer);
  if (tag != 0) free_class(hz3_tag_class(tag), pointer);
  else hz3_free_untagged(pointer);
}

// ---- trim ----

// Not where memory was refused: what the kernel refuses then is mappings, of which these pages stay part, and while a span is
// purged, other threads that are out of memory would not find the room in it.
static bool purge_inside_spans(void) {
  bool any = false;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) any |= hz3_class_purge(c);
  return any;
}

bool hz3_trim(void) {
  struct hz3_heap *heap = enter();
  if (heap == NULL) return false;
  bool any = reclaim(heap);
  any |= purge_inside_spans();
  leave(heap);
  return any;
}
