// SPDX-License-Identifier: Apache-2.0
// What it is: the page map: for each MiB of address space, who owns it. Chunks own whole granules; a large block is entered at
//   the granule of its start (large blocks are at least 1 MiB, or 1 MiB aligned, so starts never share a granule).
// Called by: pages, large; slow paths only.
// Owns: its two levels.
// Locks: none; leaves are published by compare-and-swap and never unmapped.
#ifndef HZ3_PAGES_PAGE_MAP_H_
#define HZ3_PAGES_PAGE_MAP_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

#if defined(__aarch64__)
enum { HZ3_ADDRESS_BITS = 48 };
#else
enum { HZ3_ADDRESS_BITS = 47 };
#endif
enum { HZ3_GRANULE_BITS = 20, HZ3_PAGE_MAP_LEAF_BITS = 14, HZ3_PAGE_MAP_ROOT_BITS = HZ3_ADDRESS_BITS - HZ3_GRANULE_BITS - HZ3_PAGE_MAP_LEAF_BITS };
#define HZ3_PAGE_MAP_LARGE ((uintptr_t)1)

struct hz3_page_map_leaf {
  uintptr_t owner[1 << HZ3_PAGE_MAP_LEAF_BITS];  // chunk, or large descriptor with HZ3_PAGE_MAP_LARGE
  uint16_t dirty[1 << HZ3_PAGE_MAP_LEAF_BITS];   // for large ranges
};
extern struct hz3_page_map_leaf *hz3_page_map_root[1 << HZ3_PAGE_MAP_ROOT_BITS];

HZ3_INLINE struct hz3_page_map_leaf *hz3_page_map_leaf_of(const void *pointer) {
  uintptr_t address = (uintptr_t)pointer;
  if (HZ3_UNLIKELY(address >> HZ3_ADDRESS_BITS != 0)) return NULL;
  // Acquire: pairs with the compare-and-swap that publishes the leaf.
  return __atomic_load_n(&hz3_page_map_root[address >> (HZ3_GRANULE_BITS + HZ3_PAGE_MAP_LEAF_BITS)], __ATOMIC_ACQUIRE);
}

HZ3_INLINE size_t hz3_page_map_index(const void *pointer) {
  return ((uintptr_t)pointer >> HZ3_GRANULE_BITS) & (((size_t)1 << HZ3_PAGE_MAP_LEAF_BITS) - 1);
}

HZ3_INLINE uintptr_t hz3_page_map_owner(const void *pointer) {
  struct hz3_page_map_leaf *leaf = hz3_page_map_leaf_of(pointer);
  // Acquire: pairs with set_owner, so that the descriptor's fields are seen.
  return HZ3_UNLIKELY(leaf == NULL) ? 0 : __atomic_load_n(&leaf->owner[hz3_page_map_index(pointer)], __ATOMIC_ACQUIRE);
}

// NULL unless the address lies in a chunk. Lock-free.
struct hz3_chunk;
HZ3_INLINE struct hz3_chunk *hz3_page_map_chunk_of(const void *pointer) {
  uintptr_t owner = hz3_page_map_owner(pointer);
  return HZ3_UNLIKELY(owner & HZ3_PAGE_MAP_LARGE) ? NULL : (struct hz3_chunk *)owner;
}

// NULL unless a large descriptor is entered there. Lock-free.
HZ3_INLINE void *hz3_page_map_large_of(const void *pointer) {
  uintptr_t owner = hz3_page_map_owner(pointer);
  return owner & HZ3_PAGE_MAP_LARGE ? (void *)(owner & ~HZ3_PAGE_MAP_LARGE) : NULL;
}

void hz3_page_map_set_large(const void *pointer, void *large);  // NULL clears; the range must be reserved
// Makes the map ready for [start, start + bytes). False when out of memory.
bool hz3_page_map_reserve(const void *start, size_t bytes);
// One bit per slice of the granule: memory may be non-zero. For the box that owns the granule, under its lock.
uint16_t *hz3_page_map_dirty_mask(const void *pointer);

HZ3_END_DECLS

#endif  // HZ3_PAGES_PAGE_MAP_H_
