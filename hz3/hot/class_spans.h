// SPDX-License-Identifier: Apache-2.0
// What it is: the spans of a size class, whichever box has them: small or medium.
// Called by: slow.c, stats.c, checked.c of this box only.
// Owns: nothing.
#ifndef HZ3_HOT_CLASS_SPANS_H_
#define HZ3_HOT_CLASS_SPANS_H_

#include "hz3/base/size_class.h"
#include "hz3/medium/medium.h"
#include "hz3/small/small.h"

HZ3_BEGIN_DECLS

HZ3_INLINE void hz3_class_release(unsigned size_class, void **objects, size_t count) {
  if (size_class > HZ3_SMALL_CLASS_LAST) hz3_medium_release(size_class, objects, count);
  else hz3_small_release(size_class, objects, count);
}

HZ3_INLINE bool hz3_class_purge(unsigned size_class) {
  return size_class > HZ3_SMALL_CLASS_LAST ? hz3_medium_purge(size_class) : hz3_small_purge(size_class);
}

HZ3_INLINE size_t hz3_class_purge_sparse(unsigned size_class, uint32_t now_ms, size_t most) {
  return size_class > HZ3_SMALL_CLASS_LAST ? hz3_medium_purge_sparse(size_class, now_ms, most) : hz3_small_purge_sparse(size_class, now_ms, most);
}

HZ3_INLINE struct hz3_class_use hz3_class_use(unsigned size_class) {
  return size_class > HZ3_SMALL_CLASS_LAST ? hz3_medium_use(size_class) : hz3_small_use(size_class);
}

// Of one home; medium blocks have but one.
HZ3_INLINE struct hz3_class_use hz3_class_use_at(unsigned size_class, unsigned home) {
  return size_class > HZ3_SMALL_CLASS_LAST ? hz3_medium_use(size_class) : hz3_small_use_at(size_class, home);
}

HZ3_END_DECLS

#endif  // HZ3_HOT_CLASS_SPANS_H_
