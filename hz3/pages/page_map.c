// SPDX-License-Identifier: Apache-2.0
// What it is: the page map, see page_map.h.
#include "hz3/pages/page_map.h"

#include "hz3/base/os.h"
#include "hz3/pages/pages_internal.h"

struct hz3_page_map_leaf *hz3_page_map_root[1 << HZ3_PAGE_MAP_ROOT_BITS];

static void set_owner(const void *pointer, uintptr_t owner) {
  __atomic_store_n(&hz3_page_map_leaf_of(pointer)->owner[hz3_page_map_index(pointer)], owner, __ATOMIC_RELEASE);
}

bool hz3_page_map_reserve(const void *start, size_t bytes) {
  uintptr_t leaf_bytes = (uintptr_t)1 << (HZ3_GRANULE_BITS + HZ3_PAGE_MAP_LEAF_BITS);
  uintptr_t first = (uintptr_t)start & ~(leaf_bytes - 1);
  for (uintptr_t at = first; at < (uintptr_t)start + bytes; at += leaf_bytes) {
    if (at >> HZ3_ADDRESS_BITS != 0) return false;
    struct hz3_page_map_leaf **slot = &hz3_page_map_root[at >> (HZ3_GRANULE_BITS + HZ3_PAGE_MAP_LEAF_BITS)];
    if (__atomic_load_n(slot, __ATOMIC_ACQUIRE) != NULL) continue;
    struct hz3_page_map_leaf *leaf = (struct hz3_page_map_leaf *)hz3_os_map(NULL, sizeof *leaf), *expected = NULL;
    if (leaf == NULL) return false;
    if (!__atomic_compare_exchange_n(slot, &expected, leaf, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
      hz3_os_unmap(leaf, sizeof *leaf);
  }
  return true;
}

void hz3_page_map_set_chunk(struct hz3_chunk *chunk) {
  for (size_t at = 0; at < HZ3_CHUNK_BYTES; at += (size_t)1 << HZ3_GRANULE_BITS) set_owner(chunk->base + at, (uintptr_t)chunk);
}

void hz3_page_map_clear_chunk(struct hz3_chunk *chunk) {
  for (size_t at = 0; at < HZ3_CHUNK_BYTES; at += (size_t)1 << HZ3_GRANULE_BITS) set_owner(chunk->base + at, 0);
}

struct hz3_span *hz3_pages_span_of(const void *pointer) {
  struct hz3_chunk *chunk = hz3_page_map_chunk_of(pointer);
  if (chunk == NULL) return NULL;
  size_t slice = hz3_chunk_slice(pointer);
  struct hz3_span *span = &chunk->spans[chunk->first_slice[slice]];
  // A free slice still names the span it was part of last; that span may since have become shorter, or never have had it.
  if (slice - span->first_slice >= span->slices) return NULL;
  return __atomic_load_n(&span->size_class, __ATOMIC_RELAXED) == 0 ? NULL : span;
}

void hz3_page_map_set_large(const void *pointer, void *large) {
  set_owner(pointer, large == NULL ? 0 : (uintptr_t)large | HZ3_PAGE_MAP_LARGE);
}

uint16_t *hz3_page_map_dirty_mask(const void *pointer) { return &hz3_page_map_leaf_of(pointer)->dirty[hz3_page_map_index(pointer)]; }
