// SPDX-License-Identifier: Apache-2.0
// What it is: everything behind the fast paths: when a thread's caches refill, exchange, share and shrink.
// Called by: bin.h on a miss, the API edge through hot.h.
// Owns: nothing; works on the entering thread's heap.
// Locks: none of its own; boxes take theirs.
// Invariant: between hz3_heap_enter and hz3_heap_leave a heap's magazines may be half exchanged; outside they never are.
#include <errno.h>
#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/base/os.h"
#include "hz3/hot/caches.h"
#include "hz3/hot/hot.h"
#include "hz3/hot/tick.h"

enum {
  SLOW_CALLS_PER_CLOCK = 16,       // how often a slow path looks at the clock
  LARGE_TICK_MS = 500,             // since the last tick of a thread; then it ticks with a large block that it frees, too
  CLEAN_MIN_BYTES = 32 * 1024,     // above this calloc asks whether the memory is clean, which takes a slow path
  FIRST_REFILL = 8,                // objects of a class's first refill: a thread that needs few gets few. Then twice as many each time.
  FIRST_REFILL_LEAST_BYTES = 512,  // Of objects below 64 bytes so many bytes instead: FIRST_REFILL cache lines.
  FIRST_REFILL_MOST_BYTES = 1024,  // Of objects above 128 bytes so many, but at least one object: on a huge page all are resident
  MISSES_TO_GROW = 32,             // slow paths of a class in a step of the coarse clock that call for bigger magazines
  QUIET_MS = 2 * HZ3_COARSE_STEP_MS,  // a class of which no bin ran dry for so long is quiet, give or take half of it
  SHRINKING_PART = 32,             // of a shrinking or quiet class, a bin may hold no more than 1 in so many objects that are out,
  SWINGING_PART = 8,               // or 1 in so many if the class swings
  COOLING_BYTES = (size_t)2 * HZ3_COOL_BYTES,  // that are warm in a shard of the depot, up to which a thread may add what it does not allocate
  OWN_SAMPLES = 4,                 // of a magazine that tell whether all of it came from its thread's own spans
  DRAIN_LEVEL = 1,                 // of a drain's magazine at first, but for big objects
  DRAIN_PART = 32,                 // then a drain of small ones holds no more than 1 in so many of those that are out, but
  FEWEST_IN_DRAIN = 16,            // so many in any case; and if it grows
  GROWN_DRAIN_PART = 64,           // no more than 1 in so many
  FEWEST_IN_DEPOT = 2              // magazines of a class that the depot may keep while no memory is being given back
};

// When a bin last ran dry, a bin or drain was limited or the depot refused what threads share, and a bin ran dry soon after that. Atomic,
// all relaxed: a time that is a moment old is as good.
static struct {
  uint32_t ran_dry_ms, limited_ms, swung_ms;
} class_times[HZ3_CLASS_COUNT];

#define OFFSETS(class, below, bytes, slices, objects) \
  [(below) / 16 + ((below) != 0)...(bytes) / 16] = (class) * sizeof(struct hz3_bin),
const uint16_t hz3_bin_offsets[HZ3_TABLE_MAX / 16 + 1] = {HZ3_TABLE_CLASSES(OFFSETS)};

static uint32_t ms_since(const uint32_t *time) { return __atomic_load_n(&hz3_coarse_now_ms, __ATOMIC_RELAXED) - __atomic_load_n(time, __ATOMIC_RELAXED); }

// Written once a step, for all threads share it.
static void set_to_now(uint32_t *time) {
  if (ms_since(time) != 0) __atomic_store_n(time, __atomic_load_n(&hz3_coarse_now_ms, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

static void note_ran_dry(unsigned c) {
  set_to_now(&class_times[c].ran_dry_ms);
  if (ms_since(&class_times[c].limited_ms) < HZ3_SOON_MS) set_to_now(&class_times[c].swung_ms);
}

static bool swings(unsigned c) { return ms_since(&class_times[c].swung_ms) < HZ3_SWING_MS; }

// A bin that overflows or runs dry often may hold more, as long as the budgets last. Often is within one step of the coarse clock: a program
// that writes big blocks misses fewer, loses no time by that, and what more of them a bin held would be cold when used (docs/decisions/0024).
static void count_miss(struct hz3_heap *heap, unsigned c) {
  uint32_t now_ms = __atomic_load_n(&hz3_coarse_now_ms, __ATOMIC_RELAXED);
  if (heap->misses_ms != now_ms) memset(heap->misses, 0, sizeof heap->misses);
  heap->misses_ms = now_ms;
  if (heap->misses[c] < MISSES_TO_GROW) heap->misses[c]++;
  if (heap->misses[c] < MISSES_TO_GROW || !hz3_cache_may_grow(heap, c)) return;
  hz3_cache_set_level(heap, c, heap->level[c] + 1u);
  heap->misses[c] = 0;
}

// Of big objects only what does both in turn is a miss: a program that only allocates, or only frees, gains nothing by a bin that holds megabytes.
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
  if (has_turned || !hz3_class_is_big(c)) count_miss(heap, c);
}

// Of the home that the object comes from: what is going on in others says nothing of it.
static struct hz3_class_use use_around(unsigned c, const void *object) { return hz3_class_use_at(c, hz3_pages_home_of(object)); }

// What caches hold of a shrinking class pins spans, at worst one each, and so does what they hold of a quiet one, even if its spans go as
// fast as its objects. So while a thread only frees of it, its bin and drain may hold a small part of what is out
// (docs/decisions/0006); if the class swings, a bigger one, and nothing is taken from them while that is no less than they can. 0: no limit.
static size_t limited_capacity(unsigned c, const struct hz3_class_use *use, size_t capacity) {
  bool quiet = !hz3_class_has_few_spans(c, use) && ms_since(&class_times[c].ran_dry_ms) >= QUIET_MS;
  if (!quiet && !hz3_class_is_shrinking(c, use)) return 0;
  bool comes_again = !quiet && swings(c);
  size_t most = use->out / (comes_again ? SWINGING_PART : SHRINKING_PART);
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
  size_t most = hz3_min((own ? 1 : hz3_heap_count()) * HZ3_HEAP_BYTES, HZ3_DEPOT_BYTES) / hz3_class_bytes(c);
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
  if (has_common_spans && swings(c)) always_below_bytes = hz3_min(hz3_heap_count() * HZ3_GROWN_HEAP_BYTES, HZ3_GROWN_PROCESS_BYTES);
  size_t limit = depot_limit(heap, c, magazine->count, own);
  if (own ? hz3_depot_push_own(c, magazine, limit) : hz3_depot_push(c, magazine, limit, always_below_bytes)) return;
  if (has_common_spans) set_to_now(&class_times[c].limited_ms);
  struct hz3_magazine *older = hz3_depot_take_own(c);
  hz3_cache_release_magazine(heap, c, magazine);
  if (older != NULL) hz3_cache_release_magazine(heap, c, older);
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
  if (HZ3_UNLIKELY(++heap->slow_calls % SLOW_CALLS_PER_CLOCK == 0)) hz3_tick(heap);
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

// ---- allocation ----

static size_t refill_count(struct hz3_heap *heap, unsigned c, const struct hz3_magazine *magazine) {
  size_t count = heap->refill[c], bytes = hz3_class_bytes(c);
  if (count == 0) count = hz3_max(hz3_min(FIRST_REFILL, FIRST_REFILL_MOST_BYTES / bytes), hz3_max(FIRST_REFILL_LEAST_BYTES / bytes, 1));
  count = hz3_min(count, hz3_cache_capacity(heap, c, magazine));
  heap->refill[c] = (uint16_t)(count * 2);
  return count;
}

// Puts objects into an empty bin: own spare, the depot, the spans. False when out of memory. *is_clean: changed only if they are from spans.
static bool refill(struct hz3_heap *heap, unsigned c, bool *is_clean) {
  struct hz3_magazine *spare = hz3_cache_spare(heap, c);
  if (spare != NULL && spare->count > 0) {
    hz3_cache_draw_from_spare(heap, c, spare);
    return true;
  }
  struct hz3_magazine *full = hz3_depot_pop(c);
  if (full != NULL) {
    struct hz3_magazine *empty = hz3_cache_unload(&heap->bins[c]);
    if (empty != NULL && spare == NULL && empty->level == hz3_cache_magazine_level(heap, c)) hz3_cache_set_spare(heap, c, empty);
    else if (empty != NULL) hz3_cache_put_empty(heap, empty);
    hz3_cache_load(heap, c, full);
    return true;
  }
  struct hz3_magazine *magazine = hz3_cache_unload(&heap->bins[c]);
  if (magazine == NULL || magazine->level < hz3_cache_magazine_level(heap, c)) {
    struct hz3_magazine *bigger = hz3_cache_take_empty(heap, hz3_cache_magazine_level(heap, c));
    if (magazine != NULL && bigger != NULL) hz3_cache_put_empty(heap, magazine);
    if (bigger != NULL) magazine = bigger;
  }
  if (magazine == NULL) return false;
  size_t got = hz3_cache_fetch(heap, c, magazine->slots, refill_count(heap, c, magazine), is_clean);
  magazine->count = (uint16_t)got;
  hz3_cache_load(heap, c, magazine);
  return got > 0;
}

// Straight from the spans. Where memory is refused, they are asked again whether or not any could be given back: what was cached may be in them.
static void *alloc_one(struct hz3_heap *heap, unsigned c, bool *is_clean) {
  void *object;
  if (hz3_cache_fetch(heap, c, &object, 1, is_clean) != 0) return object;
  hz3_reclaim(heap);
  return hz3_cache_fetch(heap, c, &object, 1, is_clean) != 0 ? object : NULL;
}

static void *alloc_class(struct hz3_heap *heap, unsigned c, bool *is_clean) {
  *is_clean = false;
  void *object = hz3_bin_pop(&heap->bins[c]);
  if (object != NULL) return object;
  note_slow(heap, c, false);
  if (hz3_cache_capacity_at(heap, c, heap->level[c]) > 0 && refill(heap, c, is_clean)) return hz3_bin_pop(&heap->bins[c]);
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
    hz3_reclaim(heap);
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
  if (zero && object != NULL && !is_clean) hz3_os_clear(object, bytes);
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
  return alloc_from_bin(c, hz3_class_bytes(c), align);
}

// ---- free ----

// For a full bin of a shrinking or quiet class: everything the heap has of it, and a magazine of the depot, goes back.
static void shrink_bin(struct hz3_heap *heap, unsigned c, size_t capacity) {
  struct hz3_magazine *magazine = hz3_cache_unload(&heap->bins[c]), *spare = hz3_cache_spare(heap, c), *shared = hz3_depot_take_own(c);
  hz3_cache_release(c, magazine->slots, magazine->count);
  magazine->count = 0;
  hz3_cache_load(heap, c, magazine);
  heap->bins[c].hi = magazine->slots + capacity;
  heap->refill[c] = 0;  // few at a time again, or the next refill fills what has just been emptied, for nothing
  hz3_cache_set_spare(heap, c, NULL);
  if (spare != NULL) hz3_cache_release_magazine(heap, c, spare);
  if (shared != NULL) hz3_cache_release_magazine(heap, c, shared);
}

// A full bin whose class has come to bigger magazines moves into one. False when there is no memory for it.
static bool enlarge(struct hz3_heap *heap, unsigned c) {
  struct hz3_magazine *bigger = hz3_cache_take_empty(heap, hz3_cache_magazine_level(heap, c));
  if (bigger == NULL) return false;
  struct hz3_magazine *magazine = hz3_cache_unload(&heap->bins[c]);
  memcpy(bigger->slots, magazine->slots, magazine->count * sizeof(void *));
  bigger->count = magazine->count;
  hz3_cache_put_empty(heap, magazine);
  hz3_cache_load(heap, c, bigger);
  return true;
}

// A full bin gets an empty magazine; its own becomes the spare, or is shared. Without memory for one the objects go to their spans.
static void exchange_full(struct hz3_heap *heap, unsigned c) {
  struct hz3_magazine *full = hz3_cache_unload(&heap->bins[c]), *empty = hz3_cache_take_empty(heap, hz3_cache_magazine_level(heap, c)), *spare = hz3_cache_spare(heap, c);
  if (empty == NULL) {
    hz3_cache_release(c, full->slots, full->count);
    full->count = 0;
    hz3_cache_load(heap, c, full);
    return;
  }
  // The spare is the older of the two: it leaves first, the warm one stays.
  if (spare != NULL) {
    hz3_cache_set_spare(heap, c, NULL);
    if (spare->count > 0) share(heap, c, spare);
    else hz3_cache_put_empty(heap, spare);
  }
  if (heap->spare_bytes + full->count * hz3_class_bytes(c) > HZ3_HEAP_BYTES) share(heap, c, full);
  else hz3_cache_set_spare(heap, c, full);
  hz3_cache_load(heap, c, empty);
}

// Makes room for the object in a full or missing bin. False if the class has none, or when there is no memory for a first magazine.
static bool make_room(struct hz3_heap *heap, unsigned c, const void *object) {
  bool freed_last = hz3_has_class(heap->freed_bits, c);
  note_slow(heap, c, true);
  struct hz3_bin *bin = &heap->bins[c];
  if (bin->lo == NULL) {
    struct hz3_magazine *first = hz3_cache_capacity_at(heap, c, heap->level[c]) == 0 ? NULL : hz3_cache_take_empty(heap, hz3_cache_magazine_level(heap, c));
    if (first != NULL) hz3_cache_load(heap, c, first);
    return first != NULL;
  }
  struct hz3_magazine *magazine = hz3_magazine_of_slots(bin->lo), *spare = hz3_cache_spare(heap, c);
  if (freed_last) {
    struct hz3_class_use use = use_around(c, object);
    size_t capacity = limited_capacity(c, &use, hz3_cache_capacity(heap, c, magazine));
    if (capacity != 0) {
      shrink_bin(heap, c, capacity);
      return true;
    }
  }
  if (bin->top != bin->hi) return true;  // the bin has just grown
  if (magazine->level < hz3_cache_magazine_level(heap, c) && enlarge(heap, c)) return true;
  if (spare == NULL || !hz3_cache_spill_to_spare(heap, c, spare)) exchange_full(heap, c);
  return true;
}

// Objects a drain may hold: twice as many small ones as a bin at first, for each time that it is full costs locks and a look at the depot
// (docs/decisions/0034), and as many as a bin that has grown (0042); but no more than a part of those that are out, or the drains of many threads
// would hold most of a class.
static size_t drain_capacity(const struct hz3_heap *heap, unsigned c, const struct hz3_class_use *use) {
  if (hz3_class_is_big(c)) return hz3_max(hz3_cache_capacity_at(heap, c, 0), 1);
  size_t first = HZ3_MAGAZINE_CAPACITY << DRAIN_LEVEL, part = hz3_max(hz3_min(use->out / DRAIN_PART, first), use->out / GROWN_DRAIN_PART);
  size_t most = hz3_min(hz3_max(hz3_cache_capacity_at(heap, c, heap->level[c]), first), HZ3_MAGAZINE_BYTES / hz3_class_bytes(c));
  return hz3_min(most, hz3_max(part, FEWEST_IN_DRAIN));
}

// Full spans drain so that their own thread gets what is near each other (docs/decisions/0040). What others free goes to them in whole magazines, as ever.
static bool goes_to_depot(const struct hz3_heap *heap, unsigned c, const struct hz3_magazine *magazine) {
  if (c > HZ3_SMALL_CLASS_LAST || is_own(heap, magazine)) return false;
  struct hz3_class_use use = use_around(c, magazine->slots[0]);
  return !hz3_class_has_room(&use);
}

// Makes room for the object in a full or missing drain, and if the class is shrinking or quiet and this thread only frees of it, in the bin; a
// magazine of the depot, which is older, goes along. No sign of use: a bin that is not allocated from is idle. But what goes to the depot does so as
// from a bin, of which it may hold and grow as much. False when there is no memory for a magazine.
static bool empty_drain(struct hz3_heap *heap, unsigned c, const void *object) {
  struct hz3_class_use use = use_around(c, object);
  size_t most = drain_capacity(heap, c, &use), limit = limited_capacity(c, &use, most);
  if (limit != 0 && hz3_has_class(heap->freed_bits, c) && (heap->bins[c].lo != NULL || heap->spare[c] != 0)) hz3_cache_flush_class(heap, c);
  hz3_add_class(heap->freed_bits, c);
  struct hz3_bin *drain = &heap->drains[c];
  struct hz3_magazine *magazine = hz3_cache_unload(drain);
  bool is_for_depot = magazine != NULL && goes_to_depot(heap, c, magazine);
  if (is_for_depot) {
    if (!hz3_class_is_big(c)) count_miss(heap, c);
    most = hz3_max(most, hz3_cache_capacity_at(heap, c, heap->level[c]));
  }
  unsigned level = hz3_class_is_big(c) ? 0 : hz3_max(heap->level[c], DRAIN_LEVEL);
  struct hz3_magazine *empty = is_for_depot || magazine == NULL ? hz3_cache_take_empty(heap, level) : NULL;
  if (is_for_depot && empty != NULL) {
    share(heap, c, magazine);
  } else {
    struct hz3_magazine *shared = hz3_depot_take_own(c);
    if (shared != NULL) hz3_cache_release_magazine(heap, c, shared);
    if (magazine != NULL) hz3_cache_release(c, magazine->slots, magazine->count);
  }
  if (empty != NULL) magazine = empty;  // otherwise it grows when a tick has emptied it
  if (magazine == NULL) return false;
  hz3_add_class(heap->drain_bits, c);
  drain->lo = drain->top = magazine->slots;
  drain->hi = magazine->slots + hz3_min(limit == 0 ? most : limit, hz3_magazine_capacity(magazine->level));
  return true;
}

static void free_to_class(struct hz3_heap *heap, unsigned c, void *pointer) {
  bool drains = hz3_tag_of(pointer) >= HZ3_TAG_DRAIN;
  struct hz3_bin *bin = drains ? &heap->drains[c] : &heap->bins[c];
  hz3_cache_check_is_not_newest(bin, c, pointer);
  if (bin->top == bin->hi) {
    if (!(drains ? empty_drain(heap, c, pointer) : make_room(heap, c, pointer))) {
      hz3_cache_release(c, &pointer, 1);
      return;
    }
    bin->uneven = hz3_heap_count() > 1 && hz3_pages_home_of(pointer) != heap->home;
  }
  hz3_bin_push(bin, pointer);
}

// As the fast path does: the block waits, the one before it goes to its bin. The shared heap has no fast path.
static void free_in_turn(struct hz3_heap *heap, unsigned c, void *pointer) {
  unsigned c_before;
  void *before = hz3_cache_take_last(heap, &c_before);
  if (before != NULL) free_to_class(heap, c_before, before);
  intptr_t tag = hz3_tag_of(pointer);
  if (heap->state == HZ3_HEAP_OWNED) heap->last = (struct hz3_last_freed){pointer, tag != 0 ? (size_t)tag : c * sizeof(struct hz3_bin)};
  else free_to_class(heap, c, pointer);
}

static HZ3_NOINLINE void free_class(unsigned c, void *pointer) {
  struct hz3_heap *heap = hz3_heap_enter_to_free();
  if (heap != NULL) {
    hz3_cache_check_is_not_freed(heap, c, pointer);  // before a tick can take it to its span
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
  if (HZ3_UNLIKELY(hz3_os_now_ms() - heap->last_tick_ms >= LARGE_TICK_MS)) hz3_tick(heap);
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
  bool any = hz3_reclaim(heap);
  any |= purge_inside_spans();
  leave(heap);
  return any;
}
