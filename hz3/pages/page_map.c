// SPDX-License-Identifier: Apache-2.0
// What it is: the page map, see page_map.h.
#include "hz3/pages/page_map.h"

#include "hz3/base/os.h"
#include "hz3/pages/pages_internal.h"

_Static_assert(HZ3_SPAN_HOMES == 8 && _Alignof(struct hz3_chunk) >= 16 && sizeof(struct hz3_span) % 16 == 0, "below an address: three bits for a home, one for a span");
_Static_assert(HZ3_ADDRESS_BITS <= 48 && HZ3_CLASS_COUNT <= 1 << 16, "above an address: the size class");

void *hz3_page_map_root[HZ3_PAGE_MAP_LEAVES];

bool hz3_page_map_reserve(const void *start, size_t bytes) {
  uintptr_t first = hz3_round_down((uintptr_t)start, HZ3_PAGE_MAP_LEAF_BYTES);
  for (uintptr_t at = first; at < (uintptr_t)start + bytes; at += HZ3_PAGE_MAP_LEAF_BYTES) {
    if (at >> HZ3_ADDRESS_BITS != 0) return false;
    if (!hz3_os_map_once(&hz3_page_map_root[at / HZ3_PAGE_MAP_LEAF_BYTES], sizeof(struct hz3_page_map_leaf))) return false;
  }
  return true;
}

// Slices of one leaf.
static void set_owner(const void *start, size_t slices, uintptr_t owner) {
  uintptr_t *at = &hz3_page_map_leaf_of(start)->owner[hz3_page_map_index(start)];
  // Release: pairs with the load in hz3_page_map_owner.
  for (size_t i = 0; i < slices; i++) __atomic_store_n(&at[i], owner, __ATOMIC_RELEASE);
}

void hz3_page_map_set_span(struct hz3_span *span) {
  set_owner(span->base, span->slices, (uintptr_t)span | hz3_page_map_kind(span->size_class, span->home));
}
void hz3_page_map_clear_span(struct hz3_span *span) { set_owner(span->base, span->slices, 0); }
void hz3_page_map_set_large(const void *pointer, void *large) { set_owner(pointer, 1, (uintptr_t)large); }

struct hz3_span *hz3_pages_span_of(const void *pointer) {
  uintptr_t owner = hz3_page_map_owner(pointer);
  return owner & HZ3_PAGE_MAP_SPAN ? (struct hz3_span *)(owner & ~HZ3_PAGE_MAP_KIND) : NULL;
}

unsigned hz3_pages_home_of(const void *pointer) { return hz3_page_map_home(hz3_page_map_owner(pointer)); }

struct hz3_slice_marks *hz3_page_map_marks(const void *pointer) {
  return &hz3_page_map_leaf_of(pointer)->marks[hz3_page_map_index(pointer) / 16];
}
