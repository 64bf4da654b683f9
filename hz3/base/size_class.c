// SPDX-License-Identifier: Apache-2.0
// What it is: the size class tables, see size_class.h.
#include "hz3/base/size_class.h"

// Spans whose slice count is a power of two start naturally aligned, so that blocks of 2^k bytes are 2^k aligned.
#define ROW(class, below, size, slice_count, object_count)                                                     \
  [class] = {.bytes = (size),                                                                                  \
             .align_slices = ((slice_count) & ((slice_count)-1)) == 0 ? (slice_count) : 1,                     \
             .slices = (slice_count),                                                                          \
             .objects = (object_count),                                                                        \
             .twos = HZ3_TWOS(size),                                                                           \
             .odd_inverse = HZ3_ODD_INVERSE(size)},

const struct hz3_size_class hz3_size_classes[HZ3_CLASS_COUNT] = {HZ3_SIZE_CLASSES(ROW)};

unsigned hz3_size_class_of(size_t bytes) {
  if (bytes > 4096) return hz3_size_class_of_medium(bytes);
  if (bytes > 512) {
    unsigned log2 = hz3_log2(bytes - 1);
    return 33 + (log2 - 9) * 8 + (unsigned)(((bytes - 1) >> (log2 - 3)) & 7);
  }
  return bytes == 0 ? 1 : (unsigned)((bytes + 15) / 16);
}

// Every class that is the smallest for some multiple of 2^k, k <= 16, is a multiple of 2^k itself (checked by size_class_test).
unsigned hz3_size_class_of_aligned(size_t bytes, size_t align) {
  if (bytes > HZ3_MEDIUM_MAX || align > HZ3_MEDIUM_MAX) return 0;
  bytes = hz3_max(bytes, align);
  return hz3_size_class_of(align > HZ3_SLICE_BYTES ? hz3_ceil_power_of_two(bytes) : hz3_round_up(bytes, align));
}
