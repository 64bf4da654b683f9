// SPDX-License-Identifier: Apache-2.0
// What it is: the checked lane, see checked.h. Compiled in every lane, called in this one alone.
// Owns: the secret behind the canaries; each heap's quarantine.
// Locks: one for large blocks held back, rank QUARANTINE, nothing else under it. A block's word needs none: it belongs to
//   whoever owns the block, or is about to get it from the allocator.
// Invariant: a block of B bytes is asked for with at most B - 1, so its last byte is always canary. Live: canary from the
//   first byte that was not asked for, where canary_places says. Free: zero for the first CLEARED_BYTES and 16 bytes in the middle, and {0, canary} in
//   its last 16 bytes.
#include "hz3/hot/checked.h"

#include <errno.h>
#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/base/lock.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/hot/class_spans.h"
#include "hz3/hot/heap.h"
#include "hz3/hot/hot.h"
#include "hz3/hot/zero_size.h"
#include "hz3/large/large.h"
#include "hz3/pages/object_map.h"

// Cleared at free and compared at reuse; more would cost programs with big blocks more than all the other checks.
#define CLEARED_BYTES ((size_t)32)

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
#define FREED_WORD ((uint32_t)FREED << SIZE_BITS)
static unsigned word_use(uint32_t word) { return word >> SIZE_BITS & 3; }
static unsigned word_origin(uint32_t word) { return word >> (SIZE_BITS + USE_BITS) & 3; }
static size_t word_align(uint32_t word) { return (size_t)1 << (word >> (SIZE_BITS + USE_BITS + ORIGIN_BITS)); }

// What a lookup needs of a class: rows of 32 bytes, so that the offset of a bin is also that of a row.
struct shape {
  uint64_t odd_inverse;  // as in struct hz3_size_class, like twos and objects
  size_t bytes;
  size_t charge;  // what a block that is held back counts for: above 1 KiB, more for the span that it pins
  uint32_t twos, objects;
};
_Static_assert(sizeof(struct shape) == sizeof(struct hz3_bin) && sizeof(struct shape) == 1 << HZ3_OBJECT_CLASS_SHIFT, "rows");
#define CHARGE(bytes) ((bytes) <= 1024 ? (bytes) : (bytes) <= 2048 ? 16384 : (bytes) <= 65536 ? 65536 : (bytes))
#define SHAPE(class, below, object_bytes, slices, object_count)                                                     \
  [class] = {.odd_inverse = HZ3_ODD_INVERSE(object_bytes), .bytes = (object_bytes), .charge = CHARGE(object_bytes), \
             .twos = HZ3_TWOS(object_bytes), .objects = (object_count)},
static const struct shape shapes[HZ3_CLASS_COUNT] = {HZ3_SIZE_CLASSES(SHAPE)};

HZ3_INLINE const struct shape *shape_at(size_t class_offset) {
  return (const struct shape *)((const char *)shapes + class_offset);
}

struct block {
  char *start;
  size_t bytes;  // of its class
  size_t index;  // in its span
  uint32_t *word;
  size_t class_offset, charge;
};

enum found { FOUND, FOREIGN, INTERIOR };

// The address's number in its span. What is left over behind the last object has a word of its own, never used, and so a number.
HZ3_INLINE size_t number_of(const struct shape *shape, uint64_t entry, const void *pointer) {
  return hz3_object_number(shape->odd_inverse, shape->twos, hz3_object_offset(entry, pointer));
}

HZ3_INLINE enum found find(const void *pointer, struct block *block) {
  uint64_t entry = hz3_object_map_entry(pointer);
  if (HZ3_UNLIKELY(entry == 0)) return FOREIGN;
  const struct shape *shape = shape_at(hz3_object_class_offset(entry));
  size_t index = number_of(shape, entry, pointer);
  if (HZ3_UNLIKELY(index > shape->objects)) return INTERIOR;
  *block = (struct block){.start = (char *)(uintptr_t)pointer,
                          .bytes = shape->bytes,
                          .index = index,
                          .word = hz3_object_words(entry) + index,
                          .class_offset = hz3_object_class_offset(entry),
                          .charge = shape->charge};
  return FOUND;
}

// For a block of a bin: its class is known, and with it all that does not have to wait for the map. False if the map says
// otherwise.
HZ3_INLINE bool find_in_class(char *start, size_t class_offset, struct block *block) {
  const struct shape *shape = shape_at(class_offset);
  uint64_t entry = hz3_object_map_entry(start);
  size_t index = number_of(shape, entry, start);
  if (HZ3_UNLIKELY(hz3_object_class_offset(entry) != class_offset || index > shape->objects)) return false;
  *block = (struct block){.start = start, .bytes = shape->bytes, .index = index, .word = hz3_object_words(entry) + index};
  return true;
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

typedef uint64_t __attribute__((vector_size(16), may_alias, aligned(1))) loose128;

// Where the canary of a block of `bytes`, asked for with `asked` < `bytes`, is: in the 16 bytes at `first`, from `asked` on,
// in those at `second`, and in the last 16. Where classes are 16 bytes apart that is all one place; above, it shows an
// overflow by up to 25 bytes wherever it starts. No branch: sizes are what a processor can least predict.
struct canary_places {
  size_t first, second, last;
  loose128 first_mask, mask;  // bytes that are canary: of the 16 at `first`; of the others
};

static const unsigned char canary_masks[32] = {[16] = 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};

HZ3_INLINE struct canary_places canary_places(size_t asked, size_t bytes) {
  size_t last = bytes - sizeof(word128), first = hz3_min(asked & ~(size_t)7, last);
  size_t second = hz3_min(first + sizeof(word128), last), excess = asked > second ? asked - second : 0;
  return (struct canary_places){first, second, last, *(const loose128 *)(canary_masks + 16 - (asked - first)),
                                *(const loose128 *)(canary_masks + 16 - excess)};
}

// With `keep`, what precedes `asked` stays; else it may become zero.
HZ3_INLINE void write_canary(char *start, size_t asked, size_t bytes, uint64_t canary, bool keep) {
  struct canary_places at = canary_places(asked, bytes);
  loose128 all = {canary, canary}, first = all & at.first_mask;
  if (keep) first |= *(loose128 *)(start + at.first) & ~at.first_mask;
  *(loose128 *)(start + at.last) = *(loose128 *)(start + at.second) = all & at.mask;
  *(loose128 *)(start + at.first) = first;
}

HZ3_INLINE bool canary_is_intact(const char *start, size_t asked, size_t bytes, uint64_t canary) {
  struct canary_places at = canary_places(asked, bytes);
  loose128 all = {canary, canary}, wrong = (*(const loose128 *)(start + at.first) ^ all) & at.first_mask;
  wrong |= ((*(const loose128 *)(start + at.second) ^ all) | (*(const loose128 *)(start + at.last) ^ all)) & at.mask;
  return (wrong[0] | wrong[1]) == 0;
}

// A free block starts with CLEARED_BYTES of zeroes and ends with {0, canary}; small ones are all of that. An address that
// repeats instead of a branch: sizes are what a processor can least predict.
HZ3_INLINE size_t second_part(size_t bytes) {
  size_t at = bytes > 2 * sizeof(word128) ? sizeof(word128) : 0;
  __asm__("" : "+r"(at));  // a value to the compiler, not a case
  return at;
}

// Where the 16 bytes in the middle are; `bytes` > 16.
HZ3_INLINE size_t middle(size_t bytes) { return hz3_min(bytes / 2 & ~(size_t)15, bytes - 2 * sizeof(word128)); }

HZ3_INLINE void clear_freed(char *start, size_t bytes, uint64_t canary) {
  // Never over the last byte, not even for a moment: another thread may be freeing the block to the right.
  if (HZ3_LIKELY(bytes > sizeof(word128)))
    *(word128 *)start = *(word128 *)(start + second_part(bytes)) = *(word128 *)(start + middle(bytes)) = (word128){0, 0};
  *(word128 *)(start + bytes - sizeof(word128)) = (word128){0, canary};
}

HZ3_INLINE bool freed_is_intact(const char *start, size_t bytes, uint64_t canary) {
  word128 head = *(const word128 *)start | *(const word128 *)(start + second_part(bytes));
  word128 wrong = *(const word128 *)(start + bytes - sizeof(word128)) ^ (word128){0, canary};
  if (HZ3_LIKELY(bytes > sizeof(word128))) wrong |= head | *(const word128 *)(start + middle(bytes));
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

// Freed blocks wait in line, up to 256 of them with a charge of 1 MiB. When one of the two is reached, the oldest go, all
// at once, until half is left: so every block waits for at least 128 others, or 512 KiB with its own bytes, but what a thread frees that has
// no heap yet or any more. Only the owning thread changes
// the line. What fork copies in between may have lost one block but has none twice.
enum { HELD_MAX = 256, HELD_KEPT = HELD_MAX / 2 };
#define HELD_CHARGE_MAX ((size_t)1024 * 1024)  // one block may exceed it

struct hz3_quarantine {
  uint64_t slots[HELD_MAX];  // each a block and, above SLOT_BITS, its class's offset; 0 if empty
};

enum { SLOT_BITS = 48 };

static void *slot_block(uint64_t slot) { return (void *)(uintptr_t)(slot & (((uint64_t)1 << SLOT_BITS) - 1)); }
static size_t slot_class_offset(uint64_t slot) { return slot >> SLOT_BITS; }
static unsigned slot_class(uint64_t slot) { return (unsigned)(slot_class_offset(slot) / sizeof(struct hz3_bin)); }

// A fork of another thread in here leaves the child a charge that its slots do not have: with no slot left, there is none.
static HZ3_NOINLINE void let_oldest_go(struct hz3_heap *heap) {
  uint64_t *slots = heap->quarantine->slots;
  uint32_t next = heap->held_next, oldest = next - HELD_MAX;
  size_t charge = heap->held_charge;
  for (; oldest != next && (next - oldest > HELD_KEPT || charge > HELD_CHARGE_MAX / 2); oldest++) {
    uint64_t *slot = &slots[oldest % HELD_MAX], held = *slot;
    if (HZ3_UNLIKELY(held == 0)) continue;
    *slot = 0;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    charge -= shape_at(slot_class_offset(held))->charge;
    struct hz3_bin *bin = (struct hz3_bin *)((char *)heap + slot_class_offset(held));
    if (HZ3_LIKELY(bin->top != bin->hi)) hz3_bin_push(bin, slot_block(held));  // never there already: its word saw to that
    else hz3_free_slow(slot_block(held));
  }
  heap->held_charge = oldest == next ? 0 : charge;
  heap->held_limit = oldest + HELD_MAX;
}

HZ3_INLINE void put_in_line(struct hz3_heap *heap, void *pointer, size_t class_offset, size_t charge) {
  heap->quarantine->slots[heap->held_next % HELD_MAX] = (uintptr_t)pointer | (uint64_t)class_offset << SLOT_BITS;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  heap->held_next++;
  heap->held_charge = charge;
}

// The line is full, or does not exist yet.
static HZ3_NOINLINE void hold_back_slow(void *pointer, size_t class_offset) {
  struct hz3_heap *heap = (struct hz3_heap *)hz3_heap_base();
  // No heap, or a signal handler while blocks are let go: the block is free at once. The same if there is no memory.
  bool is_free_at_once = hz3_heap_offset == 0 || heap->is_letting_go;
  if (!is_free_at_once && heap->quarantine == NULL)
    heap->quarantine = (struct hz3_quarantine *)hz3_metadata_alloc(sizeof(struct hz3_quarantine));
  if (is_free_at_once || heap->quarantine == NULL) {
    hz3_free(pointer);
    return;
  }
  heap->held_limit = heap->held_next;
  heap->is_letting_go = true;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  let_oldest_go(heap);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  heap->is_letting_go = false;
  put_in_line(heap, pointer, class_offset, heap->held_charge + shape_at(class_offset)->charge);
}

// Holds the cleared block back; may let others go.
HZ3_INLINE void hold_back(const struct block *block) {
  struct hz3_heap *heap = (struct hz3_heap *)hz3_heap_base();  // a thread without a heap has the empty one, always full
  size_t charge = heap->held_charge + block->charge;
  if (HZ3_UNLIKELY(heap->held_next == heap->held_limit || charge > HELD_CHARGE_MAX)) hold_back_slow(block->start, block->class_offset);
  else put_in_line(heap, block->start, block->class_offset, charge);
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
  if (all == NULL || (is_own && heap->is_letting_go)) return;
  for (size_t i = 0; i < HELD_MAX; i++) {
    if (all->slots[i] == 0) continue;
    void *block = slot_block(all->slots[i]);
    unsigned c = slot_class(all->slots[i]);
    all->slots[i] = 0;
    hz3_checked_inspect(&block, 1);
    hz3_class_release(c, &block, 1);
  }
  heap->held_charge = 0;
  heap->held_limit = heap->held_next + HELD_MAX;
}

size_t hz3_checked_quarantined_bytes(const struct hz3_heap *heap) {
  const struct hz3_quarantine *all = heap->quarantine;
  size_t bytes = 0;
  for (size_t i = 0; all != NULL && i < HELD_MAX; i++)
    bytes += hz3_size_classes[slot_class(all->slots[i])].bytes;  // 0 for class 0, which is no class
  return bytes;
}

void hz3_checked_add_quarantined(const struct hz3_heap *heap, size_t objects[]) {
  const struct hz3_quarantine *all = heap->quarantine;
  for (size_t i = 0; all != NULL && i < HELD_MAX; i++) objects[slot_class(all->slots[i])]++;  // empty slots: class 0
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
  size_t bytes = (size_t)(page_behind(start, asked) - start);
  if (asked < bytes) write_canary(start, asked, bytes, canary_of(start), true);
  return start;
}

static void *guard_and_note_large(struct hz3_large_note *note, char *start, uint32_t word, size_t asked) {
  char *end = start + hz3_large_usable_bytes(start), *guard = page_behind(start, asked);
  if (guard < end) hz3_os_protect(guard, (size_t)(end - guard));  // refused (too many maps): the canary has to do
  return note_large(note, start, word, asked);
}

// ---- large blocks held back: no access at all ----

// Each at least until so many others were freed, or for their bytes. A few more may wait to be used again as they are; and longer,
// those of which the kernel refused to give access back.
enum { LARGE_KEPT = 8, LARGE_HELD = 12, LARGE_WAITING = 64 };
#define LARGE_HELD_BYTES ((size_t)32 * 1024 * 1024)  // the newest one may be more: its memory is given back

static struct {
  struct hz3_lock lock;
  size_t count, bytes;
  char *blocks[LARGE_HELD + LARGE_WAITING];  // oldest first
} held = {.lock = HZ3_LOCK_INIT(HZ3_RANK_QUARANTINE)};

static char *take_held_locked(size_t index) {
  char *start = held.blocks[index];
  held.bytes -= hz3_large_usable_bytes(start);
  memmove(held.blocks + index, held.blocks + index + 1, (--held.count - index) * sizeof held.blocks[0]);
  return start;
}

static void hold_again(char *start, size_t bytes) {
  hz3_lock_acquire(&held.lock);
  if (held.count < LARGE_HELD + LARGE_WAITING) {
    held.blocks[held.count++] = start;
    held.bytes += bytes;
  }
  hz3_lock_release(&held.lock);
}

// False if the kernel refuses to give access back (too many maps): then the block's memory goes, and its turn comes again;
// if there is no room to wait, its address space is lost, which harms nobody.
static bool let_go_of_large(char *start) {
  size_t bytes = hz3_large_usable_bytes(start);
  if (!hz3_os_make_writable(start, bytes)) {
    hz3_os_purge(start, bytes);
    hold_again(start, bytes);
    return false;
  }
  hz3_free_untagged(start);  // not the large box itself: who frees nothing else has his ticks here
  return true;
}

static void hold_back_large(char *start) {
  size_t bytes = hz3_large_usable_bytes(start), leaving_count = 0;
  char *leaving[LARGE_HELD];
  if (bytes > LARGE_HELD_BYTES) hz3_os_purge(start, bytes);
  hz3_os_protect(start, bytes);  // refused: late writes go unseen
  hz3_lock_acquire(&held.lock);
  while (leaving_count < LARGE_HELD && (held.count >= LARGE_HELD || (held.count > 0 && held.bytes + bytes > LARGE_HELD_BYTES)))
    leaving[leaving_count++] = take_held_locked(0);
  held.blocks[held.count++] = start;
  held.bytes += bytes;
  hz3_lock_release(&held.lock);
  while (leaving_count > 0) let_go_of_large(leaving[--leaving_count]);
}

// One that has been held for long enough, and fits; NULL if there is none.
static char *take_held(size_t align, size_t bytes) {
  char *start = NULL;
  hz3_lock_acquire(&held.lock);
  for (size_t i = 0; start == NULL && i + LARGE_KEPT < held.count; i++) {
    bool fits = hz3_large_fits(bytes, hz3_large_usable_bytes(held.blocks[i]));
    if (fits && ((uintptr_t)held.blocks[i] & (align - 1)) == 0) start = take_held_locked(i);
  }
  hz3_lock_release(&held.lock);
  return start;
}

// Gives access to so many bytes of such a block, and leaves the rest as its guard: one system call, and one when the block is freed.
// Through the large box it takes three, for the guard would have to be opened there, and be closed again.
static char *use_held_again(size_t align, size_t bytes, size_t with_guard) {
  char *start = take_held(align, with_guard);
  if (start == NULL || hz3_os_make_writable(start, bytes)) return start;
  let_go_of_large(start);
  return NULL;
}

bool hz3_checked_empty_large_quarantine(void) {
  bool any = false;
  for (int i = 0; i < LARGE_HELD + LARGE_WAITING; i++) {
    hz3_lock_acquire(&held.lock);
    char *start = held.count == 0 ? NULL : take_held_locked(0);
    hz3_lock_release(&held.lock);
    if (start == NULL) break;
    any |= let_go_of_large(start);
  }
  return any;
}

void hz3_checked_get_held_large(size_t *blocks, size_t *bytes) {
  hz3_lock_acquire(&held.lock);
  *blocks = held.count;
  *bytes = 0;
  for (size_t i = 0; i < held.count; i++) *bytes += hz3_large_place_bytes(held.blocks[i]);
  hz3_lock_release(&held.lock);
}

void hz3_checked_fork_prepare(void) {
  hz3_lock_acquire_for_fork(&held.lock);
  hz3_zero_size_fork_prepare();
}

void hz3_checked_fork_release(void) {
  hz3_zero_size_fork_release();
  hz3_lock_release_for_fork(&held.lock);
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
  bool counts = from_new || claim.origin == HZ3_FROM_MALLOC;  // whoever replaces operator new rounds up and aligns as he likes
  if (counts && claim.bytes != HZ3_UNSAID && claim.bytes != asked) hz3_fatal(HZ3_FATAL_SIZED_DELETE, start, bytes);
  if (counts && claim.align != HZ3_UNSAID && claim.align != word_align(word)) hz3_fatal(HZ3_FATAL_ALIGNED_DELETE, start, bytes);
}

// A block on its way to the program. Its memory may be what another class left behind, if it was never used.
static HZ3_NOINLINE void *start_using(const struct block *block, uint32_t word, size_t asked, bool zero) {
  if (word_use(*block->word) == LIVE) hz3_fatal(HZ3_FATAL_CORRUPTED, block->start, block->bytes);
  if (!hz3_object_is_clean(hz3_object_map_entry(block->start)))
    memset(block->start, 0, zero ? asked : hz3_min(asked, CLEARED_BYTES));
  guard_left(block->start, block->index);
  write_canary(block->start, asked, block->bytes, canary_of(block->start), false);
  *block->word = word;
  return block->start;
}

static HZ3_NOINLINE void *alloc_large(uint32_t word, size_t align, size_t bytes, bool zero) {
  size_t page = hz3_os_page_bytes();
  if (bytes > PTRDIFF_MAX - 2 * page) {
    errno = ENOMEM;
    return NULL;
  }
  size_t whole_pages = hz3_round_up(bytes, page), with_guard = whole_pages + page;
  char *start = use_held_again(align, whole_pages, with_guard);
  if (start != NULL) {
    if (zero) memset(start, 0, bytes);
    return note_large(hz3_large_note(start), start, word, bytes);
  }
  start = (char *)(zero && align <= page ? hz3_calloc(with_guard) : hz3_aligned_alloc(align, with_guard));
  if (start == NULL) return NULL;
  if (zero && align > page) memset(start, 0, bytes);
  return guard_and_note_large(hz3_large_note(start), start, word, bytes);
}

// No class with this alignment, or a signal handler inside a slow path.
static void *note_unusual(char *start, uint32_t word, size_t bytes, bool zero) {
  struct hz3_large_note *note = hz3_large_note(start);
  if (note == NULL) hz3_fatal(HZ3_FATAL_CORRUPTED, start, 0);
  if (zero) memset(start, 0, bytes);
  return guard_and_note_large(note, start, word, bytes);
}

// A block that was free: nobody may have written to it since.
HZ3_INLINE void *use_again(const struct block *block, uint32_t word, size_t asked, bool zero) {
  uint64_t canary = canary_of(block->start);
  if (HZ3_UNLIKELY(!freed_is_intact(block->start, block->bytes, canary)))
    hz3_fatal(HZ3_FATAL_USE_AFTER_FREE, block->start, block->bytes);
  if (zero && block->bytes > CLEARED_BYTES + sizeof(word128) && asked > CLEARED_BYTES)
    memset(block->start + CLEARED_BYTES, 0, asked - CLEARED_BYTES);
  write_canary(block->start, asked, block->bytes, canary, false);
  *block->word = word;
  return block->start;
}

static HZ3_NOINLINE void *prepare(char *start, uint32_t word, size_t asked, bool zero) {
  struct block block;
  if (HZ3_UNLIKELY(find(start, &block) != FOUND)) return note_unusual(start, word, asked, zero);
  if (*block.word == FREED_WORD) return use_again(&block, word, asked, zero);
  return start_using(&block, word, asked, zero);
}

// Everything but a block of the bins: bigger, aligned, of no bytes, or the bin is empty.
static HZ3_NOINLINE void *alloc_slow(enum hz3_block_origin origin, size_t align, size_t bytes, bool zero) {
  if (HZ3_UNLIKELY(bytes >= HZ3_MEDIUM_MAX || align > HZ3_MEDIUM_MAX))
    return alloc_large(live_word(origin, align, HZ3_MEDIUM_MAX), align, bytes, zero);
  void *nothing = bytes == 0 && align <= 16 ? hz3_zero_size_alloc(live_word(origin, align, 0)) : NULL;
  if (nothing != NULL) return nothing;
  char *start = (char *)(align <= 16 ? hz3_malloc_slow(bytes + 1) : hz3_aligned_alloc(align, bytes + 1));
  return start == NULL ? NULL : prepare(start, live_word(origin, align, bytes), bytes, zero);
}

HZ3_INLINE void *alloc_block(enum hz3_block_origin origin, size_t align, size_t bytes, bool zero) {
  // Of no bytes or too many, in one comparison.
  if (HZ3_UNLIKELY(bytes - 1 >= HZ3_TABLE_MAX - 1 || align > 16)) return alloc_slow(origin, align, bytes, zero);
  size_t offset = hz3_bin_offsets[bytes / 16 + 1];  // of bytes + 1
  char *start = (char *)hz3_bin_pop(hz3_bin_at(offset));
  if (HZ3_UNLIKELY(start == NULL)) return alloc_slow(origin, align, bytes, zero);
  uint32_t word = live_word(origin, align, bytes);
  struct block block;
  if (HZ3_UNLIKELY(!find_in_class(start, offset, &block) || *block.word != FREED_WORD)) return prepare(start, word, bytes, zero);
  return use_again(&block, word, bytes, zero);
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

// The record of a live block of no bytes; NULL if the pointer is none.
static uint32_t *check_zero_size(const char *pointer, enum found found, const struct texts *texts) {
  uint32_t *word = found == FOREIGN ? hz3_zero_size_word(pointer) : NULL;
  if (word == NULL) return NULL;
  if ((uintptr_t)pointer % 16 != 0) hz3_fatal(texts->interior, pointer, 0);
  if (word_use(*word) != LIVE) die_not_live(pointer, 0, *word, texts);
  return word;
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

static HZ3_NOINLINE void free_large(char *pointer, enum found found, struct hz3_claim claim) {
  uint32_t *zero_size = check_zero_size(pointer, found, &free_texts);
  if (zero_size != NULL) {
    check_claim(pointer, 0, *zero_size, 0, claim);
    *zero_size = FREED_WORD;
    hz3_zero_size_free(pointer);
    return;
  }
  struct hz3_large_note *note = check_large(pointer, found, &free_texts);
  check_claim(pointer, hz3_large_usable_bytes(pointer), note->word, note->asked_bytes, claim);
  note->word = FREED_WORD;
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
  *block.word = FREED_WORD;
  hold_back(&block);
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
  if (asked < bytes) write_canary(start, asked, bytes, canary_of(start), true);
}

// What a block loses must not be read or written any more: as a rule it moves, and its old place is held back. NULL, and nothing has
// changed, if memory is short: then it stays.
static void *move_to_smaller(char *pointer, size_t old_bytes, size_t bytes) {
  int saved = errno;
  void *fresh = move(pointer, old_bytes, bytes);
  errno = saved;
  return fresh;
}

static void *realloc_large(char *pointer, enum found found, size_t bytes) {
  if (check_zero_size(pointer, found, &realloc_texts) != NULL) return move(pointer, 0, bytes);
  struct hz3_large_note *note = check_large(pointer, found, &realloc_texts);
  size_t page = hz3_os_page_bytes(), old_bytes = note->asked_bytes;
  char *guard = page_behind(pointer, old_bytes);
  if (bytes >= HZ3_MEDIUM_MAX && bytes < PTRDIFF_MAX && page_behind(pointer, bytes) == guard) {
    move_canary(pointer, old_bytes, bytes, (size_t)(guard - pointer));
    *note = (struct hz3_large_note){bytes, live_word(HZ3_FROM_MALLOC, 1, HZ3_MEDIUM_MAX)};
    return pointer;
  }
  if (bytes < HZ3_MEDIUM_MAX || (bytes < old_bytes / 2 && old_bytes <= LARGE_HELD_BYTES)) {
    void *fresh = move_to_smaller(pointer, old_bytes, bytes);
    if (fresh != NULL) return fresh;
  }
  if (bytes > PTRDIFF_MAX - 2 * page || !unguard(pointer, old_bytes)) return move(pointer, old_bytes, bytes);
  if (bytes > old_bytes) memset(pointer + old_bytes, 0, (size_t)(guard - pointer) - old_bytes);
  // From here on a block that shrinks stays, cut or not: what it loses reads as zero where it still can be read.
  char *lost = page_behind(pointer, bytes);
  if (bytes < old_bytes / 2) hz3_os_purge(lost, (size_t)(guard - lost));
  size_t with_guard = hz3_round_up(bytes, page) + page;
  size_t before;
  char *start = hz3_large_resize(pointer, with_guard, &before) ? pointer : NULL;
  if (start == NULL) start = with_guard <= before ? pointer : (char *)hz3_large_grow(pointer, with_guard);
  if (start == NULL) {
    guard_and_note_large(note, pointer, note->word, old_bytes);
    return move(pointer, old_bytes, bytes);
  }
  return guard_and_note_large(hz3_large_note(start), start, live_word(HZ3_FROM_MALLOC, 1, HZ3_MEDIUM_MAX), bytes);
}

void *hz3_checked_realloc(void *pointer, size_t bytes) {
  struct block block;
  enum found found = find(pointer, &block);
  if (found != FOUND) return realloc_large((char *)pointer, found, bytes);
  uint32_t word = *block.word;
  size_t old_bytes = word_bytes(word);
  if (word_use(word) != LIVE) die_not_live(block.start, block.bytes, word, &realloc_texts);
  check_surroundings(&block, old_bytes, canary_of(block.start));
  if (bytes >= block.bytes) return move(block.start, old_bytes, bytes);
  if (bytes < block.bytes / 2 && block.bytes > 64) {
    void *fresh = move_to_smaller(block.start, old_bytes, bytes);
    if (fresh != NULL) return fresh;
  }
  move_canary(block.start, old_bytes, bytes, block.bytes);
  *block.word = live_word(HZ3_FROM_MALLOC, 1, bytes);
  return pointer;
}

size_t hz3_checked_usable_size(const void *pointer) {
  if (pointer == NULL) return 0;
  struct block block;
  enum found found = find(pointer, &block);
  if (check_zero_size((const char *)pointer, found, &usable_size_texts) != NULL) return 0;
  if (found != FOUND) return check_large((char *)(uintptr_t)pointer, found, &usable_size_texts)->asked_bytes;
  if (word_use(*block.word) != LIVE) die_not_live(block.start, block.bytes, *block.word, &usable_size_texts);
  return word_bytes(*block.word);
}
