// SPDX-License-Identifier: Apache-2.0
// What it is: address space in 4 MiB chunks of 64 slices, handed out as spans; the page map; giving memory back.
// Called by: small, medium (spans), large (page map, retention, huge pages), hot (lookups, trim, fork).
// Owns: chunks, the tag table, the page map.
// Locks: one, rank PAGES, not held while memory is mapped or purged; before it one for whoever maps more, rank PAGES_GROWTH, held meanwhile.
// Invariant: per chunk, free, used and being purged partition 64 slices; dirty marks slices whose memory may be non-zero.
#ifndef HZ3_PAGES_PAGES_H_
#define HZ3_PAGES_PAGES_H_

#include "hz3/base/base.h"
#include "hz3/base/size_class.h"

HZ3_BEGIN_DECLS

enum { HZ3_SPAN_NO_LIST = 255, HZ3_SPAN_NO_SAMPLE = UINT16_MAX, HZ3_SPAN_HOMES = 8 };

// A run of slices that holds objects of one class. The descriptor lives in the chunk's metadata, never beside objects.
// While it is allocated, the fields belong to the box that allocated it, under that box's lock, except those that pages alone
// writes: `base`, `objects`, `size_class`, `first_slice`, `slices`, `is_clean` and `is_closed`.
struct hz3_span {
  struct hz3_span *next, *prev;  // list of spans with room; before the first is the last
  char *base;
  uint64_t *out_words;  // one bit per object that is out: handed out, and not come back
  uint64_t out_word;    // where 64 bits are enough
  uint16_t settle_out;  // with so few out its list, or what becomes of it, is to be looked at
  uint16_t sample;      // the object that is watched for how long it is out, or HZ3_SPAN_NO_SAMPLE (span_store.c)
  int32_t until_settle; // objects that have to come back before settle_out are out
  union {
    uint32_t marked_ms;   // of a sparse span: when the pages between its objects were purged, if was_purged; else when it was first seen on its list, 0: nobody has
    uint32_t sampled_at;  // of any other, if there is a sample: what its store had handed out then
  };
  uint16_t objects;     // that it has room for: those of the class's smallest span, once or several times
  uint16_t carved;      // objects [0, carved) were handed out at least once, the rest is untouched memory
  uint16_t size_class;  // 0: not a span
  uint8_t first_slice, slices;
  uint8_t list;   // index of the list it is on, HZ3_SPAN_NO_LIST if on none
  bool is_clean : 1;   // memory from `carved` on is known to be zero
  bool is_closed : 1;  // while it is being allocated: some of it has no access yet
  bool is_draining : 1;  // what comes back does so through the drains of threads (span_store.c)
  bool was_purged : 1;  // the pages between its objects were, as those of a sparse or hollow span, and are not in use again
  bool is_purged;  // every whole page between its objects was given back, and none of them came back since
  uint8_t home;    // of those who fetch from it; also in the page map, for those who ask without its lock
};
HZ3_STATIC_ASSERT(sizeof(struct hz3_span) <= 64, "one span descriptor per cache line");

// What there is of a class, or of one home of it. The two may be of different moments.
struct hz3_class_use {
  size_t spans, objects, out;  // objects: that the spans have room for; out: handed out and not come back, those in caches among them
};
enum { HZ3_ROOM_SHARE = 8, HZ3_FEW_SPANS = 4 };
// Of no more than so many of the smallest spans: such a class never drains, nor counts as shrinking or quiet.
HZ3_INLINE bool hz3_class_has_few_spans(unsigned size_class, const struct hz3_class_use *use) {
  return use->objects <= (size_t)HZ3_FEW_SPANS * hz3_size_classes[size_class].objects;
}
// Whether an eighth of its room is free, or more: from there on its spans drain (docs/decisions/0034).
HZ3_INLINE bool hz3_class_has_room(const struct hz3_class_use *use) { return use->out * HZ3_ROOM_SHARE <= use->objects * (HZ3_ROOM_SHARE - 1); }

// A class of which something is wanted again within HZ3_SOON_MS of being given up swings, like what a program needs for each batch;
// for HZ3_SWING_MS then less of it is given up (docs/decisions/0035).
enum { HZ3_SOON_MS = 8, HZ3_SWING_MS = 64 };

// A span of the class, tagged, nothing carved; NULL when the kernel gives no more memory. In memory that a span of the same home
// was the last to use, and that has not been given back since, if there is any. `times` as large as the class's smallest one (which
// is 1 in the checked lane, and makes 64 slices at most), or as small as that if this spares fresh memory. home < HZ3_SPAN_HOMES. Thread-safe.
struct hz3_span *hz3_pages_alloc_span(unsigned size_class, unsigned home, unsigned times);
// The same, NULL if there is no such memory.
struct hz3_span *hz3_pages_alloc_span_at_home(unsigned size_class, unsigned home, unsigned times);
// Takes back a span of which no object is live or cached. May purge other slices. Thread-safe; keeps errno.
void hz3_pages_free_span(struct hz3_span *span);

// The span that holds this address, NULL if it is not slice memory in use. Any pointer value. Lock-free; the answer is
// stable as long as the caller owns an object of the span.
struct hz3_span *hz3_pages_span_of(const void *pointer);

// The home of the span that holds this address; there is one. Lock-free; it may change at once.
unsigned hz3_pages_home_of(const void *pointer);

// How much dirty free memory to keep. The bound starts at the lane's minimum and grows by what was purged and wanted again within a
// second: up to the lane's maximum, and up to twice as much after each second in which the load goes on coming back, eight times in all.
// More than the minimum is kept only while about as much is in use as at the purges that came too early: from less the load has never
// come back, and a burst whose threads take turns is to teach nothing that outlives it. The bound halves with the first purge after five
// seconds in which none was too early (docs/decisions/0007).
// What exceeds the bound may wait a moment, for many loads come back at once: see hz3_retention_keep.
struct hz3_retention {
  size_t limit_bytes;
  size_t known_low_bytes;   // the least in use from which the load has come back
  size_t recent_bytes;      // purged within a second of each other and not wanted again yet
  size_t recent_low_bytes;  // the least in use at those purges
  uint64_t last_purge_ms, last_regret_ms;
  uint64_t excess_since_ms;  // 0: the bound holds
  uint64_t coming_back_since_ms;  // the first regret since the bound was at its minimum, or when it last halved
};
#define HZ3_RETENTION_INIT {HZ3_RETAIN_MIN_BYTES, SIZE_MAX, 0, SIZE_MAX, 0, 0, 0, 0}
// All under the lock of the source. The bound now, for a source of which `used_bytes` are in use.
size_t hz3_retention_limit(const struct hz3_retention *retention, size_t used_bytes);
// After memory became free: how much may stay for now. That is the bound, if for a tenth of a second no free has found it kept; before that
// four times the lane's minimum more, less by half of what was purged lately: a big drop leaves no more behind than a small one.
size_t hz3_retention_keep(struct hz3_retention *retention, size_t dirty_bytes, size_t limit_bytes);
void hz3_retention_note_purge(struct hz3_retention *retention, size_t bytes, size_t used_bytes);
// Memory that was purged is handed out again. Whether any of it was purged too early.
bool hz3_retention_note_regret(struct hz3_retention *retention, size_t bytes);

// Memory that is being purged or unmapped is neither free nor in use. Who gives memory back because some was refused waits until others have
// done so, too, and then finds it; but no longer than this, which no call takes unless its thread is held up.
enum { HZ3_TAKEN_AWAY_MS = 20 };

// For a tick: what is to stay of so much dirty free memory, of which `low_water_bytes` were not needed since the last one: all but
// half of those, and no more goes than a caller can wait for.
size_t hz3_idle_keep(size_t dirty_bytes, size_t low_water_bytes);

#define HZ3_HUGE_PAGE_BYTES ((size_t)2 * 1024 * 1024)
// What is known of what was asked for on behalf of one source of memory. Relaxed atomics: hints.
struct hz3_huge_use {
  size_t asked_bytes;  // and never less
  char *last;          // a page of what was asked for last
  char *witness;       // a huge page that was left to small ones, of which those that are written become resident; NULL: none
  size_t witness_due_bytes;  // asked_bytes from which on there is to be another
  unsigned sparse_looks;     // how many of them in a row turned out to be hardly written, as far as that matters
};
// Which huge pages of it were, or will be made when touched. ONLY_FIRST: that one has been touched.
enum hz3_huge_answer { HZ3_HUGE_NONE, HZ3_HUGE_ONLY_FIRST, HZ3_HUGE_BUT_FIRST, HZ3_HUGE_ALL };
// Asks for huge pages for fresh memory, or, while they are dear or most of them would hardly be written, for small ones. What tells, from
// time to time, is the first of its huge pages: it is touched at once, or left to small pages, as a witness (docs/decisions/0028, 0041).
// Thread-safe; keeps errno.
enum hz3_huge_answer hz3_huge_pages_ask(struct hz3_huge_use *use, char *start, size_t bytes);

// Whether at the last tick there was much more dirty free memory than needed, or since then more than may wait, and none was purged too
// early since: a hint, lock-free.
bool hz3_pages_is_giving_back(void);
// A store wants a span.
void hz3_pages_note_wanted(uint32_t now_ms);
// Whether hollow spans need not wait any more: memory is being given back, no store wanted a span within HZ3_SOON_MS, and the bound of what is
// kept is at its minimum, above which it is for a load that comes back. Otherwise what is nearly free is likely to be free in a moment, or in
// use again. A hint.
bool hz3_pages_are_hollow_due(uint32_t now_ms);
// Pages of a span in use are about to be purged.
void hz3_pages_note_hollow_purge(void);
// Objects of a span are handed out again of which pages were purged at that time.
void hz3_pages_note_hollow_use(uint32_t purged_ms);
// Whether more than a quarter of those spans were used again within a second, lately: the last ten ticks or so. Ticks then do not purge
// within spans, nor start giving back.
bool hz3_pages_are_hollow_purges_early(void);
// For the tick: gives dirty free memory back that nobody needed since the last call, see hz3_idle_keep; of chunks in use only free
// halves.
void hz3_pages_purge_idle(void);
// Gives every free slice back to the kernel; with `unmap`, wholly free chunks leave the address space too.
// True if anything was given back.
bool hz3_pages_trim(bool unmap);

struct hz3_pages_stats {
  size_t mapped_bytes, free_bytes, dirty_bytes, chunks, purges;
  size_t kept_bytes;  // free spans that their classes keep: dirty, and in neither of the two
};
void hz3_pages_get_stats(struct hz3_pages_stats *stats);
void hz3_pages_fork_prepare(void);
void hz3_pages_fork_child(void);  // in the child, before the release: what threads that are gone had taken away is not waited for
void hz3_pages_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_PAGES_PAGES_H_
