// SPDX-License-Identifier: Apache-2.0
// What it is: the checked lane, see checked.h. Empty work in the other lanes: nothing here is called there.
// Owns: the secret behind the canaries; each heap's quarantine.
// Locks: one for large blocks held back, rank QUARANTINE, nothing else under it. A block's word needs none: it belongs to
//   whoever owns the block, or is about to get it from the allocator.
// Invariant: a block of B bytes is asked for with at most B - 1, so its last byte is always canary. Live: canary from the
//   first byte that was not asked for. Free: zero for the first CLEARED_BYTES, and {0, canary} in its last 16 bytes.
#include "hz3/hot/checked.h"

#include <errno.h>
#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/base/lock.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/hot/heap.h"
#include "hz3/hot/hot.h"
#include "hz3/large/large.h"
#include "hz3/medium/medium.h"
#include "hz3/pages/object_map.h"
#include "hz3/pages/pages.h"
#include "hz3/small/small.h"

// Cleared at free and compared at reuse; more would cost programs with big blocks more than all the other checks.
#define CLEARED_BYTES ((size_t)32)
// Classes up to here are 16 bytes apart, so that the first and the last word of a canary are all of it.
#define FINE_CLASS_BYTES ((size_t)512)
enum { CANARY_WORDS = 4 };  // behind the first one, above that

// ---- state words ----

enum { NEVER_USED, LIVE, FREED };
enum { SIZE_BITS = 21, USE_BITS = 2, ORIGIN_BITS = 2 };
_Static_assert(HZ3_MEDIUM_MAX < (1u << SIZE_BITS), "the requested size fits");

static uint32_t live_word(enum hz3_block_origin origin, size_t align, size_t bytes) {
  uint32_t word = (uint32_t)hz3_log2(align);
  word = word << ORIGIN_BITS | (uint32_t)origin;
  return (word << USE_BITS | LIVE) << SIZE_BITS | (uint32_t)bytes;
}
static size_t word_bytes(uint32_t word) { return word & ((1u << SIZE_BITS) - 1); }
static unsigned word_use(uint32_t word) { return word >> SIZE_BITS & 3; }
static unsigned word_origin(uint32_t word) { return word >> (SIZE_BITS + USE_BITS) & 3; }
static size_t word_align(uint32_t word) { return (size_t)1 << (word >> (SIZE_BITS + USE_BITS + ORIGIN_BITS)); }

struct block {
  char *start;
  size_t bytes;  // of its class
  size_t index;  // in its span
  uint32_t *word;
  unsigned size_class;
};

enum found { FOUND, FOREIGN, INTERIOR };

HZ3_INLINE enum found find(const void *pointer, struct block *block) {
  uint64_t entry = hz3_object_map_entry(pointer);
  if (HZ3_UNLIKELY(entry == 0)) return FOREIGN;
  unsigned c = hz3_object_class(entry);
  size_t offset = hz3_object_offset(entry, pointer), index = hz3_size_class_index(c, offset), bytes = hz3_size_classes[c].bytes;
  if (HZ3_UNLIKELY(index * bytes != offset || index >= hz3_size_classes[c].objects)) return INTERIOR;
  *block = (struct block){.start = (char *)(uintptr_t)pointer,
                          .bytes = bytes,
                          .index = index,
                          .word = hz3_object_words(entry) + index,
                          .size_class = c};
  return FOUND;
}

// ---- what is written around and into blocks ----

typedef uint64_t __attribute__((may_alias)) word64;
typedef uint64_t __attribute__((vector_size(16), may_alias)) word128;

static uint64_t secret;

// Called before any block is handed out for the first time: with what comes from a span, and for each large block.
static void make_secret(void) {
  uint64_t none = 0;
  if (__atomic_load_n(&secret, __ATOMIC_RELAXED) != 0) return;
  // Whoever comes second takes the winner's.
  __atomic_compare_exchange_n(&secret, &none, hz3_os_random() | 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Differs from block to block, so that bytes copied from one canary do not pass for another, but for the last byte, which
// is looked at from the block to the right. No byte is zero, since that is the one most often written by mistake.
HZ3_INLINE uint64_t canary_of(const char *start) {
  return (__atomic_load_n(&secret, __ATOMIC_RELAXED) ^ (uintptr_t)start) | 0x0101010101010101u;
}

HZ3_INLINE unsigned char last_canary_byte(void) { return (unsigned char)(canary_of(NULL) >> 56); }

// Canary from `asked` to `bytes`: the word in which it begins and the last, which is all where classes are close; above, a
// few words more, so that an overflow by up to 32 bytes shows. `asked` < `bytes`; the block and `bytes` are aligned to words.
// What precedes `asked` in its word becomes that of `kept`.
HZ3_INLINE void write_canary(char *start, size_t asked, size_t bytes, uint64_t canary, uint64_t kept) {
  word64 *words = (word64 *)start;
  size_t first = asked / 8, last = bytes / 8 - 1;
  words[last] = canary;
  if (bytes > FINE_CLASS_BYTES)
    for (size_t i = 1; i <= CANARY_WORDS; i++) words[hz3_min(first + i, last)] = canary;
  words[first] = (canary & ~(uint64_t)0 << (asked % 8 * 8)) | kept;
}

HZ3_INLINE bool canary_is_intact(const char *start, size_t asked, size_t bytes, uint64_t canary) {
  const word64 *words = (const word64 *)start;
  size_t first = asked / 8, last = bytes / 8 - 1;
  uint64_t wrong = (words[first] ^ canary) >> (asked % 8 * 8), behind = words[last] ^ canary;
  if (bytes > FINE_CLASS_BYTES)
    for (size_t i = 1; i <= CANARY_WORDS; i++) behind |= words[hz3_min(first + i, last)] ^ canary;
  return (wrong | (first == last ? 0 : behind)) == 0;
}

// What precedes `asked` in its word.
HZ3_INLINE uint64_t kept_by(const char *start, size_t asked) {
  return ((const word64 *)start)[asked / 8] & ~(~(uint64_t)0 << (asked % 8 * 8));
}

// A free block starts with CLEARED_BYTES of zeroes and ends with {0, canary}; small ones are all of that. An address that
// repeats instead of a branch: sizes are what a processor can least predict.
HZ3_INLINE size_t second_part(size_t bytes) {
  size_t at = bytes > 2 * sizeof(word128) ? sizeof(word128) : 0;
  __asm__("" : "+r"(at));  // a value to the compiler, not a case
  return at;
}

HZ3_INLINE void clear_freed(char *start, size_t bytes, uint64_t canary) {
  // Never over the last byte, not even for a moment: another thread may be freeing the block to the right.
  if (HZ3_LIKELY(bytes > sizeof(word128))) *(word128 *)start = *(word128 *)(start + second_part(bytes)) = (word128){0, 0};
  *(word128 *)(start + bytes - sizeof(word128)) = (word128){0, canary};
}

HZ3_INLINE bool freed_is_intact(const char *start, size_t bytes, uint64_t canary) {
  word128 head = *(const word128 *)start | *(const word128 *)(start + second_part(bytes));
  word128 wrong = *(const word128 *)(start + bytes - sizeof(word128)) ^ (word128){0, canary};
  if (HZ3_LIKELY(bytes > sizeof(word128))) wrong |= head;
  return (wrong[0] | wrong[1]) == 0;
}

// The last byte of the block to the left is canary whatever that block's state; if that was never used, its right neighbour
// wrote it. Another thread may be handed that block just now: it writes the same byte.
HZ3_INLINE void guard_left(char *start, size_t index) {
  if (index != 0) ((unsigned char *)start)[-1] = last_canary_byte();
}

HZ3_INLINE bool left_is_intact(const char *start, size_t index) {
  return index == 0 || ((const unsigned char *)start)[-1] == last_canary_byte();
}

// ---- quarantine ----

// Freed blocks wait in line: each one that comes lets the oldest of its ring go. Rings for blocks up to 1 KiB, 32 KiB and
// 1 MiB, bounded by counts that amount to 256 KiB, 512 KiB and 2 MiB per thread. Only the owning thread changes them; what
// fork copies in between may have lost one block but has none twice.
enum { RINGS = 3, SMALL_CLASS_LAST = 40 };
static const uint16_t ring_first[RINGS] = {0, 256, 272}, ring_mask[RINGS] = {255, 15, 1};
enum { SLOTS = 274 };

struct hz3_quarantine {
  uint32_t next[RINGS];
  void *slots[SLOTS];
};

// Puts the block into the line and takes out the oldest, NULL if there is room yet.
HZ3_INLINE void *exchange(struct hz3_quarantine *all, unsigned size_class, void *block) {
  unsigned ring = (unsigned)(size_class > SMALL_CLASS_LAST) + (unsigned)(size_class > (unsigned)HZ3_TABLE_CLASS_LAST);
  void **slot = &all->slots[ring_first[ring] + (all->next[ring]++ & ring_mask[ring])], *oldest = *slot;
  *slot = block;
  return oldest;
}

static HZ3_COLD struct hz3_quarantine *make_quarantine(struct hz3_heap *heap) {
  heap->quarantine = (struct hz3_quarantine *)hz3_metadata_alloc(sizeof(struct hz3_quarantine));
  return heap->quarantine;
}

// Holds the cleared block back; lets another one go.
HZ3_INLINE void hold_back(void *pointer, unsigned size_class) {
  // No heap yet, or no more: the block is free at once. The same for a signal handler that came in between.
  struct hz3_heap *heap = (struct hz3_heap *)hz3_heap_base();
  if (HZ3_LIKELY(hz3_heap_offset != 0 && !heap->is_in_quarantine)) {
    struct hz3_quarantine *all = heap->quarantine;
    if (HZ3_LIKELY(all != NULL || (all = make_quarantine(heap)) != NULL)) {
      heap->is_in_quarantine = true;
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
      pointer = exchange(all, size_class, pointer);
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
      heap->is_in_quarantine = false;
      if (HZ3_UNLIKELY(pointer == NULL)) return;
    }
  }
  hz3_free(pointer);
}

void hz3_checked_inspect(void *const *objects, size_t count) {
  for (size_t i = 0; i < count; i++) {
    struct block block;
    if (find(objects[i], &block) != FOUND || word_use(*block.word) == LIVE) hz3_fatal(HZ3_FATAL_CORRUPTED, objects[i], 0);
    if (word_use(*block.word) == FREED && !freed_is_intact(block.start, block.bytes, canary_of(block.start)))
      hz3_fatal(HZ3_FATAL_USE_AFTER_FREE, block.start, block.bytes);
  }
}

void hz3_checked_empty_quarantine(struct hz3_heap *heap) {
  struct hz3_quarantine *all = heap->quarantine;
  bool is_own = hz3_heap_offset != 0 && heap == (struct hz3_heap *)hz3_heap_base();
  if (all == NULL || (is_own && heap->is_in_quarantine)) return;
  for (size_t i = 0; i < SLOTS; i++) {
    void *block = all->slots[i];
    all->slots[i] = NULL;
    if (block == NULL) continue;
    unsigned c = hz3_object_class(hz3_object_map_entry(block));
    hz3_checked_inspect(&block, 1);
    if (c <= HZ3_SMALL_CLASS_LAST) hz3_small_release(c, &block, 1);
    else hz3_medium_release(c, &block, 1);
  }
}

size_t hz3_checked_quarantined_bytes(const struct hz3_heap *heap) {
  const struct hz3_quarantine *all = heap->quarantine;
  size_t bytes = 0;
  for (size_t i = 0; all != NULL && i < SLOTS; i++)
    if (all->slots[i] != NULL) bytes += hz3_size_classes[hz3_object_class(hz3_object_map_entry(all->slots[i]))].bytes;
  return bytes;
}

size_t hz3_checked_quarantined_objects(const struct hz3_heap *heap, unsigned size_class) {
  const struct hz3_quarantine *all = heap->quarantine;
  size_t objects = 0;
  for (size_t i = 0; all != NULL && i < SLOTS; i++)
    objects += all->slots[i] != NULL && hz3_object_class(hz3_object_map_entry(all->slots[i])) == size_class;
  return objects;
}

void hz3_checked_shuffle(void **objects, size_t count) {
  make_secret();
  if (count < 2) return;
  uint64_t random = canary_of((const char *)objects[0]) ^ hz3_os_now_ms();
  for (size_t i = count - 1; i > 0; i--) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    size_t other = (size_t)((random >> 32) * (i + 1) >> 32);
    void *object = objects[i];
    objects[i] = objects[other];
    objects[other] = object;
  }
}

// ---- large blocks: the note beside the descriptor, and a page behind the block that nobody may touch ----

static char *page_behind(const void *pointer, size_t asked) {
  return (char *)hz3_round_up((uintptr_t)pointer + asked, hz3_os_page_bytes());
}

static void *note_large(struct hz3_large_note *note, char *start, uint32_t word, size_t asked) {
  make_secret();
  note->asked_bytes = asked;
  note->word = word;
  char *end = start + hz3_large_usable_bytes(start), *guard = page_behind(start, asked);
  if (guard < end) hz3_os_protect(guard, (size_t)(end - guard));  // refused (too many maps): the canary has to do
  if (start + asked < guard) write_canary(start, asked, (size_t)(guard - start), canary_of(start), kept_by(start, asked));
  return start;
}

// ---- the interface ----

struct texts {
  const char *foreign, *interior, *freed;
};
static const struct texts free_texts = {HZ3_FATAL_INVALID_FREE, HZ3_FATAL_MISALIGNED_FREE, HZ3_FATAL_DOUBLE_FREE};
static const struct texts realloc_texts = {HZ3_FATAL_INVALID_REALLOC, HZ3_FATAL_MISALIGNED_REALLOC, HZ3_FATAL_REALLOC_AFTER_FREE};
static const struct texts usable_size_texts = {HZ3_FATAL_INVALID_USABLE_SIZE, HZ3_FATAL_MISALIGNED_USABLE_SIZE,
                                               HZ3_FATAL_USABLE_SIZE_AFTER_FREE};

static HZ3_COLD void die_not_live(const char *start, size_t bytes, uint32_t word, const struct texts *texts) {
  hz3_fatal(word_use(word) == FREED ? texts->freed : texts->foreign, start, bytes);
}

static HZ3_COLD void die_unknown(const void *pointer, enum found found, const struct texts *texts) {
  bool interior = found == INTERIOR || hz3_large_holds(pointer);
  hz3_fatal(interior ? texts->interior : texts->foreign, pointer, 0);
}

HZ3_INLINE void check_surroundings(const struct block *block, size_t asked, uint64_t canary) {
  if (HZ3_UNLIKELY(!canary_is_intact(block->start, asked, block->bytes, canary)))
    hz3_fatal(HZ3_FATAL_OVERFLOW, block->start, block->bytes);
  if (HZ3_UNLIKELY(!left_is_intact(block->start, block->index))) hz3_fatal(HZ3_FATAL_UNDERFLOW, block->start, block->bytes);
}

static void check_claim(const char *start, size_t bytes, uint32_t word, size_t asked, struct hz3_claim claim) {
  bool from_new = word_origin(word) != HZ3_FROM_MALLOC;
  if (from_new && claim.origin != HZ3_FROM_MALLOC && claim.origin != word_origin(word)) hz3_fatal(HZ3_FATAL_WRONG_DELETE, start, bytes);
  if (claim.bytes != HZ3_UNSAID && claim.bytes != asked) hz3_fatal(HZ3_FATAL_SIZED_DELETE, start, bytes);
  bool align_counts = claim.align != HZ3_UNSAID && (from_new || claim.origin == HZ3_FROM_MALLOC);
  if (align_counts && claim.align != word_align(word)) hz3_fatal(HZ3_FATAL_ALIGNED_DELETE, start, bytes);
}

// The first use of a block: its memory may be what another class left behind.
static HZ3_NOINLINE void start_using(char *start, size_t index, size_t asked, bool zero) {
  if (!hz3_object_is_clean(hz3_object_map_entry(start))) memset(start, 0, zero ? asked : hz3_min(asked, CLEARED_BYTES));
  guard_left(start, index);
}

// A block on its way to the program: nobody may have written to it while it was free.
HZ3_INLINE void prepare(const struct block *block, uint32_t word, size_t asked, bool zero) {
  uint64_t canary = canary_of(block->start);
  if (HZ3_LIKELY(word_use(*block->word) == FREED)) {
    if (HZ3_UNLIKELY(!freed_is_intact(block->start, block->bytes, canary)))
      hz3_fatal(HZ3_FATAL_USE_AFTER_FREE, block->start, block->bytes);
    if (zero && block->bytes > CLEARED_BYTES + sizeof(word128) && asked > CLEARED_BYTES)
      memset(block->start + CLEARED_BYTES, 0, asked - CLEARED_BYTES);
  } else {
    if (word_use(*block->word) == LIVE) hz3_fatal(HZ3_FATAL_CORRUPTED, block->start, block->bytes);
    start_using(block->start, block->index, asked, zero);
  }
  write_canary(block->start, asked, block->bytes, canary, 0);
  *block->word = word;
}

static HZ3_NOINLINE void *alloc_large(uint32_t word, size_t align, size_t bytes, bool zero) {
  size_t page = hz3_os_page_bytes();
  if (bytes > PTRDIFF_MAX - 2 * page) {
    errno = ENOMEM;
    return NULL;
  }
  size_t with_guard = hz3_round_up(bytes, page) + page;
  char *start = (char *)(zero && align <= page ? hz3_calloc(with_guard) : hz3_aligned_alloc(align, with_guard));
  if (start == NULL) return NULL;
  if (zero && align > page) memset(start, 0, bytes);
  return note_large(hz3_large_note(start), start, word, bytes);
}

// As hz3_malloc.
HZ3_INLINE void *alloc_plain(size_t bytes) {
  if (HZ3_UNLIKELY(bytes > HZ3_TABLE_MAX)) return hz3_malloc_slow(bytes);
  size_t offset = hz3_bin_offsets[(bytes + 15) / 16];
  void *object = hz3_bin_pop(hz3_bin_at(offset));
  if (HZ3_UNLIKELY(object == NULL)) return hz3_malloc_slow(bytes);
  // Both ends of the block, long before its word is there to say what they must look like.
  __builtin_prefetch(object);
  __builtin_prefetch((char *)object + hz3_size_classes[offset / sizeof(struct hz3_bin)].bytes - 1);
  return object;
}

// No class with this alignment, or a signal handler inside a slow path.
static HZ3_NOINLINE void *note_unusual(char *start, uint32_t word, size_t bytes, bool zero) {
  struct hz3_large_note *note = hz3_large_note(start);
  if (note == NULL) hz3_fatal(HZ3_FATAL_CORRUPTED, start, 0);
  if (zero) memset(start, 0, bytes);
  return note_large(note, start, word, bytes);
}

HZ3_INLINE void *alloc_block(enum hz3_block_origin origin, size_t align, size_t bytes, bool zero) {
  if (HZ3_UNLIKELY(bytes >= HZ3_MEDIUM_MAX || align > HZ3_MEDIUM_MAX))
    return alloc_large(live_word(origin, align, HZ3_MEDIUM_MAX), align, bytes, zero);
  uint32_t word = live_word(origin, align, bytes);
  char *start = (char *)(HZ3_LIKELY(align <= 16) ? alloc_plain(bytes + 1) : hz3_aligned_alloc(align, bytes + 1));
  if (HZ3_UNLIKELY(start == NULL)) return NULL;
  struct block block;
  if (HZ3_UNLIKELY(find(start, &block) != FOUND)) return note_unusual(start, word, bytes, zero);
  prepare(&block, word, bytes, zero);
  return start;
}

void *hz3_checked_malloc(size_t bytes) { return alloc_block(HZ3_FROM_MALLOC, 1, bytes, false); }

void *hz3_checked_alloc(enum hz3_block_origin origin, size_t align, size_t bytes, bool zero) {
  return alloc_block(origin, align, bytes, zero);
}

// Takes the guard away, so that the large box may use all of the range again. False if the kernel refuses.
static bool unguard(char *start, size_t asked) {
  char *end = start + hz3_large_usable_bytes(start), *guard = page_behind(start, asked);
  return guard >= end || hz3_os_make_writable(guard, (size_t)(end - guard));
}

static struct hz3_large_note *check_large(char *pointer, enum found found, const struct texts *texts) {
  struct hz3_large_note *note = found == FOREIGN ? hz3_large_note(pointer) : NULL;
  if (note == NULL) die_unknown(pointer, found, texts);
  size_t bytes = hz3_large_usable_bytes(pointer), canary_end = (size_t)(page_behind(pointer, note->asked_bytes) - pointer);
  if (word_use(note->word) != LIVE) hz3_fatal(texts->freed, pointer, bytes);
  if (note->asked_bytes < canary_end && !canary_is_intact(pointer, note->asked_bytes, canary_end, canary_of(pointer)))
    hz3_fatal(HZ3_FATAL_OVERFLOW, pointer, bytes);
  return note;
}

// ---- large blocks held back: no access at all ----

enum { LARGE_HELD = 8 };
#define LARGE_HELD_BYTES ((size_t)32 * 1024 * 1024)  // the newest one may be more: its memory is given back

static struct {
  struct hz3_lock lock;
  size_t count, bytes;
  char *blocks[LARGE_HELD];  // oldest first
} held = {.lock = HZ3_LOCK_INIT(HZ3_RANK_QUARANTINE)};

static char *take_oldest_held_locked(void) {
  char *oldest = held.blocks[0];
  held.bytes -= hz3_large_usable_bytes(oldest);
  memmove(held.blocks, held.blocks + 1, --held.count * sizeof held.blocks[0]);
  return oldest;
}

static void let_go_of_large(char *start) {
  // Refused (too many maps): the address space is lost, which harms nobody.
  if (!hz3_os_make_writable(start, hz3_large_usable_bytes(start))) return;
  if (!hz3_large_free(start)) hz3_fatal(HZ3_FATAL_DOUBLE_FREE, start, 0);
}

static void hold_back_large(char *start) {
  size_t bytes = hz3_large_usable_bytes(start), leaving_count = 0;
  char *leaving[LARGE_HELD];
  if (bytes > LARGE_HELD_BYTES) hz3_os_purge(start, bytes);
  hz3_os_protect(start, bytes);  // refused: late writes go unseen
  hz3_lock_acquire(&held.lock);
  while (held.count == LARGE_HELD || (held.count > 0 && held.bytes + bytes > LARGE_HELD_BYTES))
    leaving[leaving_count++] = take_oldest_held_locked();
  held.blocks[held.count++] = start;
  held.bytes += bytes;
  hz3_lock_release(&held.lock);
  while (leaving_count > 0) let_go_of_large(leaving[--leaving_count]);
}

bool hz3_checked_empty_large_quarantine(void) {
  for (bool any = false;; any = true) {
    hz3_lock_acquire(&held.lock);
    char *start = held.count == 0 ? NULL : take_oldest_held_locked();
    hz3_lock_release(&held.lock);
    if (start == NULL) return any;
    let_go_of_large(start);
  }
}

void hz3_checked_get_held_large(size_t *blocks, size_t *bytes) {
  hz3_lock_acquire(&held.lock);
  *blocks = held.count;
  *bytes = held.bytes;
  hz3_lock_release(&held.lock);
}

void hz3_checked_fork_prepare(void) { hz3_lock_acquire_for_fork(&held.lock); }
void hz3_checked_fork_release(void) { hz3_lock_release_for_fork(&held.lock); }

static HZ3_NOINLINE void free_large(char *pointer, enum found found, struct hz3_claim claim) {
  struct hz3_large_note *note = check_large(pointer, found, &free_texts);
  check_claim(pointer, hz3_large_usable_bytes(pointer), note->word, note->asked_bytes, claim);
  note->word = FREED << SIZE_BITS;
  hold_back_large(pointer);
}

HZ3_INLINE void free_block(void *pointer, struct hz3_claim claim) {
  struct block block;
  enum found found = find(pointer, &block);
  if (HZ3_UNLIKELY(found != FOUND)) {
    if (pointer != NULL) free_large((char *)pointer, found, claim);
    return;
  }
  uint32_t word = *block.word;
  if (HZ3_UNLIKELY(word_use(word) != LIVE)) die_not_live(block.start, block.bytes, word, &free_texts);
  uint64_t canary = canary_of(block.start);
  check_surroundings(&block, word_bytes(word), canary);
  check_claim(block.start, block.bytes, word, word_bytes(word), claim);
  clear_freed(block.start, block.bytes, canary);
  *block.word = FREED << SIZE_BITS;
  hold_back(pointer, block.size_class);
}

void hz3_checked_free(void *pointer) { free_block(pointer, (struct hz3_claim){HZ3_FROM_MALLOC, HZ3_UNSAID, HZ3_UNSAID}); }

void hz3_checked_free_as(void *pointer, struct hz3_claim claim) { free_block(pointer, claim); }

static void *move(char *pointer, size_t old_bytes, size_t bytes) {
  void *fresh = hz3_checked_malloc(bytes);
  if (fresh == NULL) return NULL;
  memcpy(fresh, pointer, hz3_min(old_bytes, bytes));
  hz3_checked_free(pointer);
  return fresh;
}

// Moves the canary of a block that stays where it is, to end at `bytes`; the bytes that join the program's part become zero.
static void move_canary(char *start, size_t old_asked, size_t asked, size_t bytes) {
  if (asked > old_asked) memset(start + old_asked, 0, asked - old_asked);
  if (asked < bytes) write_canary(start, asked, bytes, canary_of(start), kept_by(start, asked));
}

static void *realloc_large(char *pointer, enum found found, size_t bytes) {
  struct hz3_large_note *note = check_large(pointer, found, &realloc_texts);
  size_t page = hz3_os_page_bytes(), old_bytes = note->asked_bytes;
  char *guard = page_behind(pointer, old_bytes);
  if (bytes >= HZ3_MEDIUM_MAX && bytes < PTRDIFF_MAX && page_behind(pointer, bytes) == guard) {
    move_canary(pointer, old_bytes, bytes, (size_t)(guard - pointer));
    *note = (struct hz3_large_note){bytes, live_word(HZ3_FROM_MALLOC, 1, HZ3_MEDIUM_MAX)};
    return pointer;
  }
  bool stays_large = bytes >= HZ3_MEDIUM_MAX && bytes <= PTRDIFF_MAX - 2 * page;
  if (!stays_large || !unguard(pointer, old_bytes)) return move(pointer, old_bytes, bytes);
  if (bytes > old_bytes) memset(pointer + old_bytes, 0, (size_t)(guard - pointer) - old_bytes);
  size_t with_guard = hz3_round_up(bytes, page) + page;
  size_t before;
  char *start = hz3_large_resize(pointer, with_guard, &before) ? pointer : (char *)hz3_large_grow(pointer, with_guard);
  if (start == NULL) {
    note_large(note, pointer, note->word, old_bytes);
    return move(pointer, old_bytes, bytes);
  }
  return note_large(hz3_large_note(start), start, live_word(HZ3_FROM_MALLOC, 1, HZ3_MEDIUM_MAX), bytes);
}

void *hz3_checked_realloc(void *pointer, size_t bytes) {
  struct block block;
  enum found found = find(pointer, &block);
  if (found != FOUND) return realloc_large((char *)pointer, found, bytes);
  uint32_t word = *block.word;
  size_t old_bytes = word_bytes(word);
  if (word_use(word) != LIVE) die_not_live(block.start, block.bytes, word, &realloc_texts);
  check_surroundings(&block, old_bytes, canary_of(block.start));
  if (bytes >= block.bytes || (bytes < block.bytes / 2 && block.bytes > 64)) return move(block.start, old_bytes, bytes);
  move_canary(block.start, old_bytes, bytes, block.bytes);
  *block.word = live_word(HZ3_FROM_MALLOC, 1, bytes);
  return pointer;
}

size_t hz3_checked_usable_size(const void *pointer) {
  if (pointer == NULL) return 0;
  struct block block;
  enum found found = find(pointer, &block);
  if (found != FOUND) return check_large((char *)(uintptr_t)pointer, found, &usable_size_texts)->asked_bytes;
  if (word_use(*block.word) != LIVE) die_not_live(block.start, block.bytes, *block.word, &usable_size_texts);
  return word_bytes(*block.word);
}
