// SPDX-License-Identifier: Apache-2.0
// What it is: blocks above 1 MiB, and alignments above 1 MiB: ranges of address space, split and merged with their
//   neighbours, best fit by size-binned free lists, resized in place or by moving pages.
// Called by: hot.
// Owns: ranges and their descriptors; the dirty bits of its slices in the page map.
// Locks: one, rank LARGE, never held across a system call; before it one for whoever maps more, rank LARGE_GROWTH, held meanwhile.
// Invariant: neighbours in address order are linked; no two free neighbours, but for the few ranges freed last, which wait to
//   be used again as they are; a slice's dirty bit is set if its memory may be non-zero and the range is free.
#ifndef HZ3_LARGE_LARGE_H_
#define HZ3_LARGE_LARGE_H_

#include "hz3/base/base.h"
#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

// Blocks of this size and more begin and end with whole huge pages, which can move from one to another, where that takes no more than a
// quarter more address space (docs/decisions/0037).
#define HZ3_LARGE_WHOLE_MIN_BYTES (2 * HZ3_HUGE_PAGE_BYTES)

// A block of at least `bytes`, aligned to `align` (a power of two >= 1), zeroed when asked (only memory that may be
// non-zero is cleared). NULL when the kernel gives no more. Thread-safe.
void *hz3_large_alloc(size_t bytes, size_t align, bool zero);
// The block's bytes of address space; 0 if the pointer is not the start of a live large block. Thread-safe, keeps errno.
size_t hz3_large_free(void *pointer);
// Usable bytes of a live large block, 0 if it is none. Lock-free.
size_t hz3_large_usable_bytes(const void *pointer);
size_t hz3_large_place_bytes(const void *pointer);  // the same with the rest of its address space, which statistics count
// Kept for the caller beside each live block, zero for a new one: the checked lane's records, out of line of user data.
struct hz3_large_note {
  size_t asked_bytes;
  uint32_t word;
};
struct hz3_large_note *hz3_large_note(const void *pointer);  // NULL if it is not the start of a live block; lock-free
// Whether the address lies in a live block. Looks back for its start, up to 4 GiB: for error messages.
bool hz3_large_holds(const void *pointer);
// Changes the size without moving. False if that is not possible (nothing changed). *old_bytes: usable bytes before, 0 if
// the pointer is not the start of a live large block.
bool hz3_large_resize(void *pointer, size_t bytes, size_t *old_bytes);
// A bigger block with the old contents, by moving pages where that is cheaper than copying; the old block is free then. The same
// block where address space is scarce and it can be mapped on. NULL when out of memory (the old block is untouched).
void *hz3_large_grow(void *pointer, size_t bytes);

// What a thread keeps of the blocks that it frees, while it asks for the same few sizes again and again: it takes no lock for
// them (docs/decisions/0031). All zero: nothing. One thread at a time may use it, like the heap that it is a part of. What is
// kept is no live block any more, and not yet free for others.
enum { HZ3_LARGE_CACHE_SLOTS = 4 };
struct hz3_large_slot {
  struct hz3_range *range;  // NULL: none
  size_t bytes;             // of address space, of the blocks that may be kept here; 0: not in use, nor are the slots behind it
};
struct hz3_large_cache {
  struct hz3_large_slot slots[HZ3_LARGE_CACHE_SLOTS];
  size_t freed_bytes[HZ3_LARGE_CACHE_SLOTS];  // of the last blocks that were not kept
  uint8_t next_freed, hits;
};
// Whether a block may be used again in a place of so many bytes: as much may be left over as in a range cut for it.
HZ3_INLINE bool hz3_large_fits(size_t bytes, size_t place) {
  size_t left = place - bytes;
  bool is_whole = bytes >= HZ3_LARGE_WHOLE_MIN_BYTES && left < HZ3_HUGE_PAGE_BYTES && left <= bytes / 4;
  return bytes <= place && (left < place / 16 || is_whole);
}
// As hz3_large_alloc, from what is kept; NULL if that has nothing of this size.
void *hz3_large_cache_take(struct hz3_large_cache *cache, size_t bytes, size_t align, bool zero);
// False if the pointer is not the start of a live large block, or the block is not to be kept: then nothing has changed.
bool hz3_large_cache_put(struct hz3_large_cache *cache, void *pointer);
// After hz3_large_free gave so many bytes back: whether such blocks are to be kept.
void hz3_large_cache_learn(struct hz3_large_cache *cache, size_t bytes);
// Gives back all that is kept, and keeps nothing until sizes come again.
void hz3_large_cache_flush(struct hz3_large_cache *cache);
// Bytes kept; adds the number of blocks. Racy for the cache of another thread.
size_t hz3_large_cache_held(const struct hz3_large_cache *cache, size_t *blocks);

// For the tick: gives dirty free memory back that nobody needed since the last call, see hz3_idle_keep in pages.h.
void hz3_large_purge_idle(void);
// Gives free memory back; with `unmap`, its address space too. True if anything was given back.
bool hz3_large_trim(bool unmap);

struct hz3_large_stats {
  size_t mapped_bytes, live_bytes, live_blocks, dirty_free_bytes, purges;
};
void hz3_large_get_stats(struct hz3_large_stats *stats);
void hz3_large_fork_prepare(void);
void hz3_large_fork_child(void);
void hz3_large_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_LARGE_LARGE_H_
