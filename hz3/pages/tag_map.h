// SPDX-License-Identifier: Apache-2.0
// What it is: the flat table of tags, one per 64 KiB slice of a window of the address space. A tag is the byte offset of
//   the bin that freed blocks of this slice go to, negative above 128 KiB; 0 = no bin: unknown pointer, NULL, large block.
//   A class has two bins: that which is allocated from, and the drain, from which all goes on to the spans.
// Called by: hot (read), pages (write).
// Owns: hz3_tag_map, replaced by a wider one when chunks land outside; old tables stay, readers may hold them.
// Locks: writers hold hz3_pages.lock, and whoever replaces the table that of growth as well; who only changes which of the two
//   bins of its class a span in use has, holds that of the span's store: should the table be replaced at the same time, the
//   change is lost, and nothing else. Readers take none: a table is complete before it is published, and whoever frees a block
//   got its pointer after the tag was set.
// Invariant: a tag names one of the two bins of the right class, or is 0; for 0, and outside the window, lookups go through the
//   page map.
#ifndef HZ3_PAGES_TAG_MAP_H_
#define HZ3_PAGES_TAG_MAP_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

struct hz3_tag_map {
  uintptr_t base;    // first address of the window
  uintptr_t slices;  // its length
  int16_t tags[];
};

enum {
  HZ3_TAG_STEP = 32,     // the tag of a class is so many times its number, a bin's bytes; and for its drain
  HZ3_TAG_DRAIN = 4096,  // so much more, a page
};

HZ3_INLINE unsigned hz3_tag_class(intptr_t tag) { return (unsigned)((size_t)(tag > 0 ? tag : -tag) % HZ3_TAG_DRAIN / HZ3_TAG_STEP); }

extern const struct hz3_tag_map *hz3_tag_map;  // never NULL; empty until the first chunk

// 0 outside the window, for any pointer value.
HZ3_INLINE intptr_t hz3_tag_of(const void *pointer) {
  // Relaxed: the loads below depend on this one, which orders them after the table was filled.
  const struct hz3_tag_map *map = __atomic_load_n(&hz3_tag_map, __ATOMIC_RELAXED);
  uintptr_t slice = ((uintptr_t)pointer - map->base) >> 16;
  if (HZ3_UNLIKELY(slice >= map->slices)) return 0;
  // Relaxed: the span may come to the other bin of its class meanwhile, which is as right. In this form, and with the value hidden
  // from it, GCC needs no instruction more than for a plain read; clang has to be told the alignment, for it warns of atomics without.
  const void *at = __builtin_assume_aligned((const char *)map->tags + sizeof(int16_t) * slice, sizeof(int16_t));
  intptr_t tag = __atomic_load_n((const int16_t *)at, __ATOMIC_RELAXED);
  __asm__("" : "+r"(tag));
  return tag;
}

HZ3_END_DECLS

#endif  // HZ3_PAGES_TAG_MAP_H_
