// SPDX-License-Identifier: Apache-2.0
// What it is: the checked lane's lookup from an address to its span's object words: one 32-bit word per object, out of
//   line, for the caller's records. One load finds all that is needed to name the object.
// Called by: pages (writes), hot (reads). Unused in the other lanes.
// Owns: the map, two levels, leaves of 2 MiB address space per 16 GiB; the words.
// Locks: none; an entry changes only while no object of its slice is live.
#ifndef HZ3_PAGES_OBJECT_MAP_H_
#define HZ3_PAGES_OBJECT_MAP_H_

#include "hz3/base/size_class.h"

HZ3_BEGIN_DECLS

// An entry, for one slice, so that each part is one or two instructions away: the slice's index in its span (4 bits),
// whether the span's memory was zero when it was carved, the size class, the words' address. 0: no span.
enum {
  HZ3_OBJECT_CLEAN_SHIFT = 4,
  HZ3_OBJECT_CLASS_SHIFT = 5,
  HZ3_OBJECT_WORDS_SHIFT = 16,
  HZ3_OBJECT_LEAF_BITS = 18,
  HZ3_OBJECT_ROOT_BITS = 48 - 16 - HZ3_OBJECT_LEAF_BITS
};

extern void *hz3_object_map_root[1 << HZ3_OBJECT_ROOT_BITS];  // leaves: arrays of uint64_t

HZ3_INLINE uint64_t hz3_object_map_entry(const void *pointer) {
  size_t slice = (uintptr_t)pointer / HZ3_SLICE_BYTES, root = slice >> HZ3_OBJECT_LEAF_BITS;
  if (HZ3_UNLIKELY(root >= (size_t)1 << HZ3_OBJECT_ROOT_BITS)) return 0;
  // Acquire: pairs with hz3_os_map_once.
  const uint64_t *leaf = (const uint64_t *)__atomic_load_n(&hz3_object_map_root[root], __ATOMIC_ACQUIRE);
  if (HZ3_UNLIKELY(leaf == NULL)) return 0;
  // Relaxed: whoever holds a pointer into the span got it, by whatever way, after the entry was made.
  return __atomic_load_n(&leaf[slice & (((size_t)1 << HZ3_OBJECT_LEAF_BITS) - 1)], __ATOMIC_RELAXED);
}

// The class times 32: the offset of its bin, and of its row in a table of rows of 32 bytes.
HZ3_INLINE size_t hz3_object_class_offset(uint64_t entry) { return entry & (127 << HZ3_OBJECT_CLASS_SHIFT); }
HZ3_INLINE bool hz3_object_is_clean(uint64_t entry) { return entry >> HZ3_OBJECT_CLEAN_SHIFT & 1; }
HZ3_INLINE uint32_t *hz3_object_words(uint64_t entry) {
  return (uint32_t *)(uintptr_t)(entry >> HZ3_OBJECT_WORDS_SHIFT);
}
// Offset of the address from the start of its span.
HZ3_INLINE size_t hz3_object_offset(uint64_t entry, const void *pointer) {
  return (uintptr_t)pointer % HZ3_SLICE_BYTES + (entry & 15) * HZ3_SLICE_BYTES;
}

// Makes the map ready for [start, start + bytes). False when out of memory. Thread-safe.
bool hz3_object_map_reserve(const void *start, size_t bytes);
// Zeroed words for a span of the class, one for each object and for what is left over behind the last, so that the index of
// no address in the span exceeds them; NULL when out of memory. And back.
uint32_t *hz3_object_words_alloc(unsigned size_class);
void hz3_object_words_free(unsigned size_class, uint32_t *words);
// Enters a new span. The range must be reserved.
void hz3_object_map_set(const char *base, unsigned size_class, bool is_clean, uint32_t *words);
// Removes it and returns its words.
uint32_t *hz3_object_map_clear(const char *base, unsigned size_class);

HZ3_END_DECLS

#endif  // HZ3_PAGES_OBJECT_MAP_H_
