// SPDX-License-Identifier: Apache-2.0
// What it is: the checked lane's layer between the API edge and the bins: every block carries a canary behind what was
//   asked for, every freed block is cleared, held back and looked at again before it is reused.
// Called by: the API edge instead of hot.h where HZ3_CHECKED is 1; hot itself at refill, flush and thread exit.
// Owns: what the object words (pages/object_map.h) and the notes of large blocks say, the quarantines.
// Invariant: nothing about a block is kept in memory that the program may write, except the canary itself.
#ifndef HZ3_HOT_CHECKED_H_
#define HZ3_HOT_CHECKED_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

struct hz3_heap;

// How a block came to be; delete and delete[] accept their own and, for programs that replace only some operators, malloc's.
enum hz3_block_origin { HZ3_FROM_MALLOC, HZ3_FROM_NEW, HZ3_FROM_NEW_ARRAY };

// What the caller of a free says about the block, beyond its address.
struct hz3_claim {
  enum hz3_block_origin origin;  // HZ3_FROM_MALLOC: nothing said
  size_t bytes;                  // HZ3_UNSAID, or the size that was asked for
  size_t align;                  // HZ3_UNSAID, or the alignment that was asked for, 1 if none
};
#define HZ3_UNSAID SIZE_MAX

// A block of exactly `bytes` usable bytes at a multiple of `align` (a power of two). NULL with errno ENOMEM.
void *hz3_checked_alloc(enum hz3_block_origin origin, size_t align, size_t bytes, bool zero);
void *hz3_checked_malloc(size_t bytes);  // the same for malloc itself
// NULL is fine. Ends the process if the block is not one, is free already, was written around, or is not as claimed.
void hz3_checked_free(void *pointer);
void hz3_checked_free_as(void *pointer, struct hz3_claim claim);
// As hz3_realloc. The new block comes from malloc, without an alignment.
void *hz3_checked_realloc(void *pointer, size_t bytes);
size_t hz3_checked_usable_size(const void *pointer);

// Shuffles objects fresh from a span, so that neighbours in memory are not handed out one after the other.
void hz3_checked_shuffle(void **objects, size_t count);
// Looks at free blocks on their way back to their spans: the last chance to see a late write.
void hz3_checked_inspect(void *const *objects, size_t count);
// Gives all blocks that the heap holds back to their spans. The heap is the caller's.
void hz3_checked_empty_quarantine(struct hz3_heap *heap);
// What the heap holds back: bytes; and for statistics (racy for other threads' heaps) its blocks, added to the number of each class.
size_t hz3_checked_quarantined_bytes(const struct hz3_heap *heap);
void hz3_checked_add_quarantined(const struct hz3_heap *heap, size_t objects[]);
// The same for large blocks, which all threads share: true if there was any; and how much there is now.
bool hz3_checked_empty_large_quarantine(void);
void hz3_checked_get_held_large(size_t *blocks, size_t *bytes);
void hz3_checked_fork_prepare(void);
void hz3_checked_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_HOT_CHECKED_H_
