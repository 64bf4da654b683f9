// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the size class tables against the rules that they are made by.
#include "hz3/base/size_class.h"

#include <gtest/gtest.h>

namespace {

// The rule of the header: steps of 16 up to 512 bytes, an eighth of a doubling up to 4 KiB, a quarter up to 1 MiB.
size_t NextSize(size_t bytes) {
  if (bytes < 512) return bytes + 16;
  size_t doubling = size_t{1} << hz3_log2(bytes);
  return bytes + doubling / (bytes < 4096 ? 8 : 4);
}

const hz3_size_class &Class(unsigned size_class) { return hz3_size_classes[size_class]; }

TEST(SizeClass, SizesFollowTheRule) {
  size_t bytes = 16;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++, bytes = NextSize(bytes)) ASSERT_EQ(Class(c).bytes, bytes) << "class " << c;
  EXPECT_EQ(Class(HZ3_SMALL_CLASS_LAST).bytes, 2048u);
  EXPECT_EQ(Class(HZ3_TABLE_CLASS_LAST).bytes, HZ3_TABLE_MAX);
  EXPECT_EQ(Class(HZ3_CLASS_COUNT - 1).bytes, HZ3_MEDIUM_MAX);
  EXPECT_EQ(Class(0).bytes, 0u);
}

TEST(SizeClass, MacroNamesTheClassBelow) {
#define CHECK_BELOW(number, below, size, slice_count, object_count) \
  EXPECT_EQ(Class((number)-1).bytes, size_t{below}) << "class " << (number);
  HZ3_SIZE_CLASSES(CHECK_BELOW)
#undef CHECK_BELOW
}

TEST(SizeClass, SpansHoldAllThatFitsAndWasteLittle) {
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    size_t span = Class(c).slices * HZ3_SLICE_BYTES;
    ASSERT_GE(Class(c).slices, 1u);
    EXPECT_EQ(Class(c).objects, span / Class(c).bytes) << "class " << c;
    size_t waste = span - size_t{Class(c).objects} * Class(c).bytes;
    EXPECT_LE(waste * 1000, span * 16) << "class " << c << " wastes more than 1.6 %";
    if (c <= HZ3_SMALL_CLASS_LAST) {
      EXPECT_EQ(Class(c).slices, 1u) << "a small span is one slice";
    }
  }
}

// What the page box can give: spans of a power of two slices are naturally aligned, others start anywhere.
TEST(SizeClass, SpanAlignmentFollowsFromSlices) {
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++)
    EXPECT_EQ(Class(c).align_slices, hz3_is_power_of_two(Class(c).slices) ? Class(c).slices : 1u) << "class " << c;
}

TEST(SizeClass, ClassOfIsExactForEverySize) {
  unsigned expected = 1;
  for (size_t bytes = 0; bytes <= HZ3_MEDIUM_MAX; bytes++) {
    if (bytes > Class(expected).bytes) expected++;
    ASSERT_EQ(hz3_size_class_of(bytes), expected) << bytes << " bytes";
    if (bytes > 4096) {
      ASSERT_EQ(hz3_size_class_of_medium(bytes), expected) << bytes << " bytes";
    }
  }
  EXPECT_EQ(expected, unsigned{HZ3_CLASS_COUNT - 1});
}

// Object start i of a span of the class, for spans at any start that its alignment allows.
size_t WorstAlignment(unsigned c) {
  size_t bits = Class(c).align_slices * HZ3_SLICE_BYTES;
  for (size_t i = 0; i < Class(c).objects; i++) bits |= i * Class(c).bytes;
  return bits & -bits;
}

TEST(SizeClass, AlignedClassIsTheSmallestThatAligns) {
  for (size_t align = 1; align <= HZ3_MEDIUM_MAX; align *= 2) {
    for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
      for (size_t bytes : {size_t{Class(c - 1).bytes} + 1, size_t{Class(c).bytes}}) {
        unsigned found = hz3_size_class_of_aligned(bytes, align);
        ASSERT_NE(found, 0u) << bytes << " aligned to " << align;
        ASSERT_GE(Class(found).bytes, bytes);
        ASSERT_EQ(WorstAlignment(found) % align, 0u) << bytes << " aligned to " << align << " got class " << found;
        // Above a slice only powers of two are promised; up to there, no smaller class would have done.
        if (align > HZ3_SLICE_BYTES) continue;
        for (unsigned smaller = hz3_size_class_of(bytes); smaller < found; smaller++)
          ASSERT_NE(WorstAlignment(smaller) % align, 0u) << bytes << " aligned to " << align << " fits class " << smaller;
      }
    }
  }
}

TEST(SizeClass, WhatNoClassCanServeHasNone) {
  EXPECT_EQ(hz3_size_class_of_aligned(HZ3_MEDIUM_MAX + 1, 16), 0u);
  EXPECT_EQ(hz3_size_class_of_aligned(16, 2 * HZ3_MEDIUM_MAX), 0u);
  EXPECT_EQ(hz3_size_class_of_aligned(SIZE_MAX, SIZE_MAX / 2 + 1), 0u);
}

TEST(SizeClass, OnlyStartsOfObjectsHaveANumber) {
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    size_t span = Class(c).slices * HZ3_SLICE_BYTES, bytes = Class(c).bytes;
    auto number_at = [c](size_t offset) { return hz3_object_number(Class(c).odd_inverse, Class(c).twos, offset); };
    for (size_t offset = 0; offset < span; offset++) {
      if (offset % bytes == 0 ? number_at(offset) != offset / bytes : number_at(offset) >> 43 == 0) FAIL() << "class " << c << " offset " << offset;
      if (number_at(0 - (offset + 1)) >> 43 == 0) FAIL() << "class " << c << ", " << offset + 1 << " below the span";
    }
  }
}

TEST(SizeClass, AddressesMoveWithinTheirSlice) {
  const uintptr_t slice = HZ3_SLICE_BYTES * 12345;
  EXPECT_EQ(hz3_move_in_slice(slice + 48, 32), slice + 80);
  EXPECT_EQ(hz3_move_in_slice(slice + 48, 0), slice + 48);
  EXPECT_EQ(hz3_move_in_slice(slice + 48, uintptr_t{0} - 48), slice);
  EXPECT_EQ(hz3_move_in_slice(slice + 48, uintptr_t{0} - 64), slice + HZ3_SLICE_BYTES - 16);
  EXPECT_EQ(hz3_move_in_slice(slice + HZ3_SLICE_BYTES - 16, 32), slice + 16);
  EXPECT_EQ(hz3_move_in_slice(slice + 48, HZ3_SLICE_BYTES * 3 + 16), slice + 64);
}

TEST(BaseHelpers, PowersOfTwo) {
  EXPECT_EQ(hz3_ceil_power_of_two(0), 1u);
  EXPECT_EQ(hz3_ceil_power_of_two(1), 1u);
  for (unsigned bit = 1; bit < 63; bit++) {
    size_t power = size_t{1} << bit;
    EXPECT_EQ(hz3_log2(power), bit);
    EXPECT_EQ(hz3_log2(2 * power - 1), bit);
    EXPECT_EQ(hz3_ceil_power_of_two(power), power);
    EXPECT_EQ(hz3_ceil_power_of_two(power + 1), 2 * power);
    EXPECT_TRUE(hz3_is_power_of_two(power));
    EXPECT_EQ(hz3_is_power_of_two(power + 1), false);
    EXPECT_EQ(hz3_round_up(power + 1, power), 2 * power);
    EXPECT_EQ(hz3_round_down(2 * power - 1, power), power);
  }
  EXPECT_FALSE(hz3_is_power_of_two(0));
}

}  // namespace
