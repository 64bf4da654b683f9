// SPDX-License-Identifier: Apache-2.0
// What it is: the page map: for each slice of address space, the span that it is part of, or the large block that starts there.
// Called by: pages, large; slow paths only.
// Owns: its two levels.
// Locks: none; leaves are published by compare-and-swap and never unmapped.
#ifndef HZ3_PAGES_PAGE_MAP_H_
#define HZ3_PAGES_PAGE_MAP_H_

#include "hz3/base/base.h"
#include "hz3/base/size_class.h"

HZ3_BEGIN_DECLS

#if defined(__aarch64__)
enum { HZ3_ADDRESS_BITS = 48 };
#else
enum { HZ3_ADDRESS_BITS = 47 };
#endif
enum { HZ3_PAGE_MAP_LEAF_SLICES = 1 << 16 };
#define HZ3_PAGE_MAP_LEAF_BYTES (HZ3_PAGE_MAP_LEAF_SLICES * HZ3_SLICE_BYTES)
#define HZ3_PAGE_MAP_LEAVES (((size_t)1 << HZ3_ADDRESS_BITS) / HZ3_PAGE_MAP_LEAF_BYTES)
#define HZ3_PAGE_MAP_SPAN ((uintptr_t)1)
// The entry of a slice of a span is the span's address and, in the bits that no such address has, its kind: HZ3_PAGE_MAP_SPAN, the home
// and the size class. Who knows these compares them all at once (docs/decisions/0032).
#define HZ3_PAGE_MAP_KIND ((uintptr_t)0xFFFF00000000000F)
HZ3_INLINE uintptr_t hz3_page_map_kind(unsigned size_class, unsigned home) {
  return (uintptr_t)size_class << 48 | (uintptr_t)home << 1 | HZ3_PAGE_MAP_SPAN;
}
HZ3_INLINE unsigned hz3_page_map_class(uintptr_t owner) { return (unsigned)(owner >> 48); }
HZ3_INLINE unsigned hz3_page_map_home(uintptr_t owner) { return (unsigned)(owner >> 1) % 8; }

// Of a MiB of large ranges, one bit per slice.
struct hz3_slice_marks {
  uint16_t dirty;    // memory may be non-zero
  uint16_t refused;  // the kernel did not take it back, since some of the MiB was locked; not in use since
};
struct hz3_page_map_leaf {
  uintptr_t owner[HZ3_PAGE_MAP_LEAF_SLICES];  // large descriptor, or span with its kind
  struct hz3_slice_marks marks[HZ3_PAGE_MAP_LEAF_SLICES / 16];
};
extern void *hz3_page_map_root[HZ3_PAGE_MAP_LEAVES];  // leaves

// The address is one that there can be; NULL if nothing was ever entered near it.
HZ3_INLINE struct hz3_page_map_leaf *hz3_page_map_leaf_of(const void *pointer) {
  // Acquire: pairs with hz3_os_map_once.
  return (struct hz3_page_map_leaf *)__atomic_load_n(&hz3_page_map_root[(uintptr_t)pointer / HZ3_PAGE_MAP_LEAF_BYTES], __ATOMIC_ACQUIRE);
}

HZ3_INLINE size_t hz3_page_map_index(const void *pointer) { return (uintptr_t)pointer / HZ3_SLICE_BYTES % HZ3_PAGE_MAP_LEAF_SLICES; }

// Any pointer value; 0: nobody. Lock-free.
HZ3_INLINE uintptr_t hz3_page_map_owner(const void *pointer) {
  if (HZ3_UNLIKELY((uintptr_t)pointer / HZ3_PAGE_MAP_LEAF_BYTES >= HZ3_PAGE_MAP_LEAVES)) return 0;
  const struct hz3_page_map_leaf *leaf = hz3_page_map_leaf_of(pointer);
  // Acquire: pairs with the stores in page_map.c, so that the descriptor's fields are seen.
  return HZ3_UNLIKELY(leaf == NULL) ? 0 : __atomic_load_n(&leaf->owner[hz3_page_map_index(pointer)], __ATOMIC_ACQUIRE);
}

// The same for an address in a chunk that there is, or was.
HZ3_INLINE uintptr_t hz3_page_map_owner_in_chunk(const void *pointer) {
  return __atomic_load_n(&hz3_page_map_leaf_of(pointer)->owner[hz3_page_map_index(pointer)], __ATOMIC_ACQUIRE);
}

// NULL unless a large descriptor is entered there. Lock-free.
HZ3_INLINE void *hz3_page_map_large_of(const void *pointer) {
  uintptr_t owner = hz3_page_map_owner(pointer);
  return owner & HZ3_PAGE_MAP_SPAN ? NULL : (void *)owner;
}

void hz3_page_map_set_large(const void *pointer, void *large);  // NULL clears; the range must be reserved
// Makes the map ready for [start, start + bytes). False when out of memory.
bool hz3_page_map_reserve(const void *start, size_t bytes);
// Of the MiB around the address, which must be reserved. For who owns the slices: the large box, or the thread whose block they are.
struct hz3_slice_marks *hz3_page_map_marks(const void *pointer);

HZ3_END_DECLS

#endif  // HZ3_PAGES_PAGE_MAP_H_
