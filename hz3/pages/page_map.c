// SPDX-License-Identifier: Apache-2.0
// What it is: the page map: who owns each MiB of the address space, for slow paths.
// Owns: its two levels.
// Locks: none; leaves are published by compare-and-swap and never unmapped.
#include "hz3/base/os.h"
#include "hz3/pages/pages_internal.h"

#if defined(__aarch64__)
enum { ADDRESS_BITS = 48 };
#else
enum { ADDRESS_BITS = 47 };
#endif
enum { GRANULE_BITS = 20, LEAF_BITS = 14, ROOT_BITS = ADDRESS_BITS - GRANULE_BITS - LEAF_BITS };
#define LARGE_BIT ((uintptr_t)1)

struct leaf {
  uintptr_t owner[1 << LEAF_BITS];  // chunk, or large descriptor with LARGE_BIT
  uint16_t dirty[1 << LEAF_BITS];   // for large ranges
};
static struct leaf *root[1 << ROOT_BITS];

static struct leaf *leaf_of(const void *pointer) {
  uintptr_t address = (uintptr_t)pointer;
  if (address >> ADDRESS_BITS != 0) return NULL;
  // Acquire: pairs with the compare-and-swap that publishes the leaf.
  return __atomic_load_n(&root[address >> (GRANULE_BITS + LEAF_BITS)], __ATOMIC_ACQUIRE);
}

static size_t leaf_index(const void *pointer) {
  return ((uintptr_t)pointer >> GRANULE_BITS) & (((size_t)1 << LEAF_BITS) - 1);
}

static uintptr_t owner_of(const void *pointer) {
  struct leaf *leaf = leaf_of(pointer);
  // Acquire: pairs with set_owner, so that the descriptor's fields are seen.
  return leaf == NULL ? 0 : __atomic_load_n(&leaf->owner[leaf_index(pointer)], __ATOMIC_ACQUIRE);
}

static void set_owner(const void *pointer, uintptr_t owner) {
  __atomic_store_n(&leaf_of(pointer)->owner[leaf_index(pointer)], owner, __ATOMIC_RELEASE);
}

bool hz3_page_map_reserve(const void *start, size_t bytes) {
  uintptr_t leaf_bytes = (uintptr_t)1 << (GRANULE_BITS + LEAF_BITS);
  uintptr_t first = (uintptr_t)start & ~(leaf_bytes - 1);
  for (uintptr_t at = first; at < (uintptr_t)start + bytes; at += leaf_bytes) {
    if (at >> ADDRESS_BITS != 0) return false;
    struct leaf **slot = &root[at >> (GRANULE_BITS + LEAF_BITS)];
    if (__atomic_load_n(slot, __ATOMIC_ACQUIRE) != NULL) continue;
    struct leaf *leaf = (struct leaf *)hz3_os_map(NULL, sizeof *leaf), *expected = NULL;
    if (leaf == NULL) return false;
    if (!__atomic_compare_exchange_n(slot, &expected, leaf, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
      hz3_os_unmap(leaf, sizeof *leaf);
  }
  return true;
}

void hz3_page_map_set_chunk(struct hz3_chunk *chunk) {
  for (size_t at = 0; at < HZ3_CHUNK_BYTES; at += (size_t)1 << GRANULE_BITS) set_owner(chunk->base + at, (uintptr_t)chunk);
}

void hz3_page_map_clear_chunk(struct hz3_chunk *chunk) {
  for (size_t at = 0; at < HZ3_CHUNK_BYTES; at += (size_t)1 << GRANULE_BITS) set_owner(chunk->base + at, 0);
}

struct hz3_span *hz3_pages_span_of(const void *pointer) {
  uintptr_t owner = owner_of(pointer);
  if (owner == 0 || (owner & LARGE_BIT) != 0) return NULL;
  struct hz3_chunk *chunk = (struct hz3_chunk *)owner;
  size_t slice = (size_t)((const char *)pointer - chunk->base) / HZ3_SLICE_BYTES;
  struct hz3_span *span = &chunk->spans[chunk->first_slice[slice]];
  // A free slice still names the span it was part of last; that span may since have become shorter, or never have had it.
  if (slice - span->first_slice >= span->slices) return NULL;
  return __atomic_load_n(&span->size_class, __ATOMIC_RELAXED) == 0 ? NULL : span;
}

void *hz3_page_map_large_of(const void *pointer) {
  uintptr_t owner = owner_of(pointer);
  return owner & LARGE_BIT ? (void *)(owner & ~LARGE_BIT) : NULL;
}

void hz3_page_map_set_large(const void *pointer, void *large) {
  set_owner(pointer, large == NULL ? 0 : (uintptr_t)large | LARGE_BIT);
}

uint16_t *hz3_page_map_dirty_mask(const void *pointer) { return &leaf_of(pointer)->dirty[leaf_index(pointer)]; }
