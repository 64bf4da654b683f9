// SPDX-License-Identifier: Apache-2.0
// What it is: how large a block is, and realloc: in place, or by moving to another.
// Called by: the API edge through hot.h.
// Owns: nothing. Locks: none.
#include <errno.h>
#include <string.h>

#include "hz3/base/fatal.h"
#include "hz3/hot/class_spans.h"
#include "hz3/hot/hot.h"
#include "hz3/large/large.h"

size_t hz3_usable_size(const void *pointer) {
  if (pointer == NULL) return 0;
  unsigned c = hz3_class_of(pointer);
  if (c != 0) return hz3_size_classes[c].bytes;
  size_t bytes = hz3_large_usable_bytes(pointer);
  if (bytes == 0) hz3_fatal(HZ3_FATAL_INVALID_USABLE_SIZE, pointer, 0);
  return bytes;
}

static void *move(void *pointer, size_t old_bytes, size_t bytes) {
  void *fresh = hz3_malloc(bytes);
  if (fresh == NULL) return NULL;
  memcpy(fresh, pointer, hz3_min(old_bytes, bytes));
  hz3_free(pointer);
  return fresh;
}

// What has grown once is likely to grow on (docs/decisions/0026); without that room if there is none. A jump, not the greater of
// the two: the processor then looks for the new block while the size of the old one is still being looked up.
static HZ3_NOINLINE void *grow(void *pointer, size_t old_bytes, size_t bytes) {
  size_t roomy = old_bytes + old_bytes / 4;
  int saved = errno;
  void *fresh = HZ3_UNLIKELY(bytes < roomy) ? move(pointer, old_bytes, roomy) : NULL;
  if (fresh != NULL) return fresh;
  errno = saved;
  return move(pointer, old_bytes, bytes);
}

// Stays without memory for the smaller block.
static HZ3_NOINLINE void *shrink(void *pointer, size_t old_bytes, size_t bytes) {
  int saved = errno;
  void *fresh = move(pointer, old_bytes, bytes);
  if (fresh != NULL) return fresh;
  errno = saved;
  return pointer;
}

static void *realloc_large(void *pointer, size_t bytes) {
  size_t old_bytes;
  if (bytes <= HZ3_MEDIUM_MAX) {
    old_bytes = hz3_large_usable_bytes(pointer);
    if (bytes <= old_bytes / 2) return shrink(pointer, old_bytes, bytes);
  }
  if (hz3_large_resize(pointer, bytes, &old_bytes)) return pointer;
  if (old_bytes == 0) hz3_fatal(HZ3_FATAL_INVALID_REALLOC, pointer, 0);
  if (bytes <= old_bytes) return shrink(pointer, old_bytes, bytes);
  void *fresh = hz3_large_grow(pointer, bytes);
  return fresh != NULL ? fresh : move(pointer, old_bytes, bytes);  // reclaims, and sets errno
}

// In place unless the block grows out of its class or would waste more than half of it, and more than 64 bytes have.
HZ3_INLINE void *realloc_in_class(void *pointer, unsigned c, size_t bytes) {
  size_t old_bytes = hz3_size_classes[c].bytes;
  if (bytes > old_bytes) return grow(pointer, old_bytes, bytes);
  return bytes > old_bytes / 2 || old_bytes <= 64 ? pointer : shrink(pointer, old_bytes, bytes);
}

static HZ3_NOINLINE void *realloc_untagged(void *pointer, size_t bytes) {
  unsigned c = hz3_class_of(pointer);
  return c == 0 ? realloc_large(pointer, bytes) : realloc_in_class(pointer, c, bytes);
}

void *hz3_realloc(void *pointer, size_t bytes) {
  intptr_t tag = hz3_tag_of(pointer);
  if (HZ3_UNLIKELY(tag == 0)) return realloc_untagged(pointer, bytes);
  return realloc_in_class(pointer, hz3_tag_class(tag), bytes);
}
