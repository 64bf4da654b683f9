// SPDX-License-Identifier: Apache-2.0
// What it is: the checked lane's map from addresses to object words, see object_map.h.
#include "hz3/pages/object_map.h"

#include "hz3/base/metadata.h"
#include "hz3/base/os.h"

#define LEAF_BYTES (sizeof(uint64_t) << HZ3_OBJECT_LEAF_BITS)
#define LEAF_SPAN (HZ3_SLICE_BYTES << HZ3_OBJECT_LEAF_BITS)

void *hz3_object_map_root[1 << HZ3_OBJECT_ROOT_BITS];

static size_t words_bytes(unsigned size_class) {
  const struct hz3_size_class *shape = &hz3_size_classes[size_class];
  size_t left_over = (size_t)shape->slices * HZ3_SLICE_BYTES - (size_t)shape->objects * shape->bytes;
  return hz3_ceil_power_of_two(hz3_max(shape->objects + (left_over != 0), 2) * sizeof(uint32_t));
}

uint32_t *hz3_object_words_alloc(unsigned size_class) { return (uint32_t *)hz3_metadata_alloc_bitmap(words_bytes(size_class)); }

void hz3_object_words_free(unsigned size_class, uint32_t *words) {
  __builtin_memset(words, 0, words_bytes(size_class));
  hz3_metadata_free_bitmap(words, words_bytes(size_class));
}

bool hz3_object_map_reserve(const void *start, size_t bytes) {
  for (uintptr_t at = hz3_round_down((uintptr_t)start, LEAF_SPAN); at < (uintptr_t)start + bytes; at += LEAF_SPAN) {
    if (!hz3_os_map_once(&hz3_object_map_root[at / LEAF_SPAN], LEAF_BYTES)) return false;
  }
  return true;
}

static uint64_t *slot_of(const char *base) {
  size_t slice = (uintptr_t)base / HZ3_SLICE_BYTES;
  return (uint64_t *)hz3_object_map_root[slice >> HZ3_OBJECT_LEAF_BITS] + (slice & (((size_t)1 << HZ3_OBJECT_LEAF_BITS) - 1));
}

void hz3_object_map_set(const char *base, unsigned size_class, bool is_clean, uint32_t *words) {
  uint64_t entry = (uint64_t)(uintptr_t)words << HZ3_OBJECT_WORDS_SHIFT | (uint64_t)size_class << HZ3_OBJECT_CLASS_SHIFT |
                   (uint64_t)is_clean << HZ3_OBJECT_CLEAN_SHIFT;
  // Relaxed: whoever asks about a block got its pointer from the thread that entered the span, which orders the two.
  for (unsigned i = 0; i < hz3_size_classes[size_class].slices; i++)
    __atomic_store_n(slot_of(base + i * HZ3_SLICE_BYTES), entry | i, __ATOMIC_RELAXED);
}

uint32_t *hz3_object_map_clear(const char *base, unsigned size_class) {
  uint32_t *words = hz3_object_words(*slot_of(base));
  for (unsigned i = 0; i < hz3_size_classes[size_class].slices; i++)
    __atomic_store_n(slot_of(base + i * HZ3_SLICE_BYTES), 0, __ATOMIC_RELAXED);
  return words;
}
