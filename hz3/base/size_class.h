// SPDX-License-Identifier: Apache-2.0
// What it is: the table of size classes, the same for every lane.
// Called by: every box, and the API edge (info.c).
// Invariant: sizes step by 16 bytes up to 512, by 1/8 of a doubling up to 4 KiB, by 1/4 up to 1 MiB; every size is a
//   multiple of 16, so every block is 16-byte aligned; spans waste at most 1.6 % (checked by size_class_test).
#ifndef HZ3_BASE_SIZE_CLASS_H_
#define HZ3_BASE_SIZE_CLASS_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

#define HZ3_SLICE_BYTES ((size_t)64 * 1024)

// The address so many bytes further on in the same slice, around whose end it wraps. One instruction; in C, compilers make up to four of it.
HZ3_INLINE uintptr_t hz3_move_in_slice(uintptr_t address, uintptr_t bytes) {
#if defined(__x86_64__)
  __asm__("addw %w1, %w0" : "+r"(address) : "r"(bytes) : "cc");
  return address;
#else
  return (address & ~(HZ3_SLICE_BYTES - 1)) | ((address + bytes) & (HZ3_SLICE_BYTES - 1));
#endif
}

// X(class, size of the class below, object bytes, slices per span, objects per span): classes found by table, up to 128 KiB
#define HZ3_TABLE_CLASSES(X) \
  X(1, 0, 16, 1, 4096) X(2, 16, 32, 1, 2048) X(3, 32, 48, 1, 1365) X(4, 48, 64, 1, 1024) \
  X(5, 64, 80, 1, 819) X(6, 80, 96, 1, 682) X(7, 96, 112, 1, 585) X(8, 112, 128, 1, 512) \
  X(9, 128, 144, 1, 455) X(10, 144, 160, 1, 409) X(11, 160, 176, 1, 372) X(12, 176, 192, 1, 341) \
  X(13, 192, 208, 1, 315) X(14, 208, 224, 1, 292) X(15, 224, 240, 1, 273) X(16, 240, 256, 1, 256) \
  X(17, 256, 272, 1, 240) X(18, 272, 288, 1, 227) X(19, 288, 304, 1, 215) X(20, 304, 320, 1, 204) \
  X(21, 320, 336, 1, 195) X(22, 336, 352, 1, 186) X(23, 352, 368, 1, 178) X(24, 368, 384, 1, 170) \
  X(25, 384, 400, 1, 163) X(26, 400, 416, 1, 157) X(27, 416, 432, 1, 151) X(28, 432, 448, 1, 146) \
  X(29, 448, 464, 1, 141) X(30, 464, 480, 1, 136) X(31, 480, 496, 1, 132) X(32, 496, 512, 1, 128) \
  X(33, 512, 576, 1, 113) X(34, 576, 640, 1, 102) X(35, 640, 704, 1, 93) X(36, 704, 768, 1, 85) \
  X(37, 768, 832, 1, 78) X(38, 832, 896, 1, 73) X(39, 896, 960, 1, 68) X(40, 960, 1024, 1, 64) \
  X(41, 1024, 1152, 1, 56) X(42, 1152, 1280, 1, 51) X(43, 1280, 1408, 1, 46) X(44, 1408, 1536, 1, 42) \
  X(45, 1536, 1664, 1, 39) X(46, 1664, 1792, 1, 36) X(47, 1792, 1920, 1, 34) X(48, 1920, 2048, 1, 32) \
  X(49, 2048, 2304, 1, 28) X(50, 2304, 2560, 2, 51) X(51, 2560, 2816, 1, 23) X(52, 2816, 3072, 1, 21) \
  X(53, 3072, 3328, 2, 39) X(54, 3328, 3584, 1, 18) X(55, 3584, 3840, 1, 17) X(56, 3840, 4096, 1, 16) \
  X(57, 4096, 5120, 3, 38) X(58, 5120, 6144, 2, 21) X(59, 6144, 7168, 1, 9) X(60, 7168, 8192, 1, 8) \
  X(61, 8192, 10240, 3, 19) X(62, 10240, 12288, 3, 16) X(63, 12288, 14336, 2, 9) X(64, 14336, 16384, 2, 8) \
  X(65, 16384, 20480, 5, 16) X(66, 20480, 24576, 3, 8) X(67, 24576, 28672, 4, 9) X(68, 28672, 32768, 4, 8) \
  X(69, 32768, 40960, 5, 8) X(70, 40960, 49152, 3, 4) X(71, 49152, 57344, 7, 8) X(72, 57344, 65536, 1, 1) \
  X(73, 65536, 81920, 5, 4) X(74, 81920, 98304, 3, 2) X(75, 98304, 114688, 7, 4) X(76, 114688, 131072, 2, 1)

// The same for all classes.
#define HZ3_SIZE_CLASSES(X) \
  HZ3_TABLE_CLASSES(X) \
  X(77, 131072, 163840, 5, 2) X(78, 163840, 196608, 3, 1) X(79, 196608, 229376, 7, 2) X(80, 229376, 262144, 4, 1) \
  X(81, 262144, 327680, 5, 1) X(82, 327680, 393216, 6, 1) X(83, 393216, 458752, 7, 1) X(84, 458752, 524288, 8, 1) \
  X(85, 524288, 655360, 10, 1) X(86, 655360, 786432, 12, 1) X(87, 786432, 917504, 14, 1) X(88, 917504, 1048576, 16, 1)

enum {
  HZ3_CLASS_COUNT = 89,        // class 0 is no class: unknown pointers and large blocks
  HZ3_SMALL_CLASS_LAST = 48,   // 2 KiB: the small box; above, the medium box
  HZ3_TABLE_CLASS_LAST = 76,   // 128 KiB: the last class found by table
};
#define HZ3_TABLE_MAX ((size_t)128 * 1024)
#define HZ3_MEDIUM_MAX ((size_t)1024 * 1024)

struct hz3_size_class {
  uint32_t bytes;         // object size
  uint32_t align_slices;  // spans of this class start at a multiple of this many slices
  uint16_t slices;        // slices per span
  uint16_t objects;       // objects per span
  uint32_t twos;          // how often 2 divides `bytes`
  uint64_t odd_inverse;   // of `bytes` without its twos, modulo 2^64; see hz3_object_number
};

extern const struct hz3_size_class hz3_size_classes[HZ3_CLASS_COUNT];

// Class for 4096 < bytes <= HZ3_MEDIUM_MAX: four classes per doubling.
HZ3_INLINE unsigned hz3_size_class_of_medium(size_t bytes) {
  unsigned log2 = hz3_log2(bytes - 1);  // bytes in (2^log2, 2^(log2+1)]
  return 57 + (log2 - 12) * 4 + (unsigned)(((bytes - 1) >> (log2 - 2)) & 3);
}

// Class for 0 <= bytes <= HZ3_MEDIUM_MAX, for slow paths and tests; the hot path has a table of bin offsets.
unsigned hz3_size_class_of(size_t bytes);

// Smallest class whose blocks of at least `bytes` are all aligned to `align` (a power of two <= 1 MiB); 0 if none.
unsigned hz3_size_class_of_aligned(size_t bytes, size_t align);

#define HZ3_TWOS(bytes) ((unsigned)__builtin_ctz(bytes))
// Each of Newton's steps doubles the bits that are right, five at first.
#define HZ3_INVERSE_STEP(odd, x) ((x) * (2 - (odd) * (x)))
#define HZ3_INVERSE_OF_ODD(odd) \
  HZ3_INVERSE_STEP(odd, HZ3_INVERSE_STEP(odd, HZ3_INVERSE_STEP(odd, HZ3_INVERSE_STEP(odd, (3 * (odd)) ^ 2))))
#define HZ3_ODD_INVERSE(bytes) HZ3_INVERSE_OF_ODD((uint64_t)(bytes) >> HZ3_TWOS(bytes))
// The number in its span of the object that starts at this offset. 2^43 or more if none starts there, or if the offset is negative modulo
// 2^64, so one comparison tells. With bytes = odd * 2^twos, the product is number * 2^twos for a multiple of `bytes`; for one of 2^twos
// only it is y * 2^twos with odd * y > 2^(64 - twos), and for any other offset the rotation brings ones to the top (the divisibility
// test of Granlund and Montgomery, 1994).
HZ3_INLINE size_t hz3_object_number(uint64_t odd_inverse, unsigned twos, size_t offset) {
  uint64_t product = offset * odd_inverse;
  return product >> twos | product << (64 - twos);
}

HZ3_END_DECLS

#endif  // HZ3_BASE_SIZE_CLASS_H_
