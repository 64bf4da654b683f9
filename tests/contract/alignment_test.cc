// SPDX-License-Identifier: Apache-2.0
//
// Alignments from 1 byte to 4 GiB through every entry point that takes one, with sizes from 0 to 1 MiB, fresh and after
// reuse; and the arguments that must be refused.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::fill_pattern;
using hz3_test::pattern_holds;
using hz3_test::pattern_key;

struct Aligner {
  const char* name;
  void* (*make)(size_t alignment, size_t size);
  void (*drop)(void* block, size_t alignment);
  size_t least;
};

void* by_posix_memalign(size_t alignment, size_t size) {
  void* p = nullptr;
  return posix_memalign(&p, alignment, size) == 0 ? p : nullptr;
}

void drop_by_free(void* block, size_t) { free(block); }

const Aligner kAligners[] = {
    {"aligned_alloc", [](size_t a, size_t n) { return aligned_alloc(a, n); }, drop_by_free, 1},
    {"memalign", [](size_t a, size_t n) { return memalign(a, n); }, drop_by_free, 1},
    {"posix_memalign", by_posix_memalign, drop_by_free, sizeof(void*)},
    {"operator_new", [](size_t a, size_t n) { return ::operator new(n, std::align_val_t(a), std::nothrow); },
     [](void* p, size_t a) { ::operator delete(p, std::align_val_t(a)); }, 1},
};

class AlignerTest : public testing::TestWithParam<Aligner> {};

INSTANTIATE_TEST_SUITE_P(All, AlignerTest, testing::ValuesIn(kAligners),
                         [](const testing::TestParamInfo<Aligner>& info) { return info.param.name; });

bool is_aligned(const void* p, size_t alignment) { return reinterpret_cast<uintptr_t>(p) % alignment == 0; }

// Of the biggest blocks only the first part is written: page faults are not what is tested.
void fill_start(void* p, size_t size, uint64_t seed) { fill_pattern(p, size < 20000 ? size : 20000, pattern_key(p, size, seed)); }

bool start_holds(const void* p, size_t size, uint64_t seed) {
  return pattern_holds(p, size < 20000 ? size : 20000, pattern_key(p, size, seed));
}

const size_t kSizes[] = {0,    1,    8,     15,    16,    17,     63,     100,     128,       1000,     2048,
                         2049, 4096, 10000, 32768, 32769, 65536, 100000, 262144, 1048576, 1048577, 3000000};

TEST_P(AlignerTest, NaturalAlignmentFreshAndReused) {
  const Aligner& aligner = GetParam();
  for (size_t alignment = aligner.least; alignment <= (size_t{4} << 20); alignment *= 2) {
    for (size_t size : kSizes) {
      for (int round = 0; round < 3; round++) {
        void* blocks[3];
        for (void*& p : blocks) {
          p = aligner.make(alignment, size);
          ASSERT_NE(p, nullptr) << alignment << " " << size;
          ASSERT_TRUE(is_aligned(p, alignment)) << alignment << " " << size;
          ASSERT_GE(malloc_usable_size(p), size);
          fill_start(p, size, 4);
        }
        for (void* p : blocks) {
          ASSERT_TRUE(start_holds(p, size, 4)) << alignment << " " << size;
          aligner.drop(p, alignment);
        }
      }
    }
  }
}

// Such blocks are mostly address space: only their first and last bytes are written.
TEST_P(AlignerTest, HugeAlignments) {
  const Aligner& aligner = GetParam();
  for (size_t alignment = size_t{8} << 20; alignment <= (size_t{1} << 32); alignment *= 2) {
    for (size_t size : {size_t{0}, size_t{1}, size_t{4096}, size_t{2000000}}) {
      for (int round = 0; round < 2; round++) {
        void* p = aligner.make(alignment, size);
        ASSERT_NE(p, nullptr) << alignment << " " << size;
        ASSERT_TRUE(is_aligned(p, alignment)) << alignment << " " << size;
        size_t usable = malloc_usable_size(p);
        ASSERT_GE(usable, size);
        if (usable > 0) static_cast<char*>(p)[0] = static_cast<char*>(p)[usable - 1] = 1;
        aligner.drop(p, alignment);
      }
    }
  }
}

TEST_P(AlignerTest, UsableBytesAreAllWritable) {
  const Aligner& aligner = GetParam();
  for (size_t alignment : {16, 64, 512, 4096, 65536}) {
    for (size_t size : kSizes) {
      void *p = aligner.make(alignment, size), *q = aligner.make(alignment, size);
      ASSERT_TRUE(p != nullptr && q != nullptr);
      size_t usable = malloc_usable_size(p);
      fill_pattern(p, usable, pattern_key(p, size, 5));
      memset(q, 0xee, malloc_usable_size(q));
      ASSERT_TRUE(pattern_holds(p, usable, pattern_key(p, size, 5))) << alignment << " " << size;
      aligner.drop(p, alignment);
      aligner.drop(q, alignment);
    }
  }
}

TEST(Alignment, ReallocOfAlignedBlocksKeepsContents) {
  for (size_t alignment : {32, 256, 4096, 1 << 16, 1 << 21}) {
    for (size_t from : kSizes) {
      for (size_t to : {size_t{1}, size_t{500}, size_t{5000}, size_t{70000}, size_t{2000000}}) {
        void* p = memalign(alignment, from);
        ASSERT_NE(p, nullptr);
        uint64_t key = pattern_key(p, from, 6);
        fill_pattern(p, from, key);
        p = realloc(p, to);
        ASSERT_NE(p, nullptr);
        ASSERT_TRUE(pattern_holds(p, from < to ? from : to, key)) << alignment << " " << from << " " << to;
        memset(p, 0, to);
        free(p);
      }
    }
  }
}

// A thousand small aligned blocks must not take a mapping each.
TEST(Alignment, SmallAlignedBlocksShareMappings) {
  std::vector<void*> blocks;
  int before = hz3_test::map_count();
  for (int i = 0; i < 1000; i++) {
    void* p = memalign(4096, 100);
    ASSERT_NE(p, nullptr);
    blocks.push_back(p);
  }
  EXPECT_LT(hz3_test::map_count() - before, 20);
  for (void* p : blocks) free(p);
}

TEST(Alignment, AlignedAllocRefusesAnythingButPowersOfTwo) {
  for (size_t alignment : {size_t{0}, size_t{3}, size_t{24}, size_t{48}, size_t{1000}, SIZE_MAX, SIZE_MAX - 7}) {
    errno = 0;
    EXPECT_EQ(aligned_alloc(alignment, 64), nullptr) << alignment;
    EXPECT_EQ(errno, EINVAL) << alignment;
  }
}

TEST(Alignment, AlignedAllocTakesOddSizes) {
  for (size_t size : {1, 63, 65, 100, 4095, 4097}) {
    void* p = aligned_alloc(64, size);
    ASSERT_NE(p, nullptr);
    EXPECT_TRUE(is_aligned(p, 64));
    EXPECT_GE(malloc_usable_size(p), static_cast<size_t>(size));
    free(p);
  }
}

TEST(Alignment, MemalignRoundsUpToAPowerOfTwo) {
  const struct { size_t asked, given; } kTable[] = {{0, 16},  {1, 16},  {3, 16},    {17, 32},    {24, 32},
                                                    {48, 64}, {65, 128}, {1000, 1024}, {4097, 8192}, {100000, 131072}};
  for (auto& row : kTable) {
    for (int i = 0; i < 10; i++) {
      void* p = memalign(row.asked, 40);
      ASSERT_NE(p, nullptr) << row.asked;
      EXPECT_TRUE(is_aligned(p, row.given)) << row.asked;
      free(p);
    }
  }
  errno = 0;
  EXPECT_EQ(memalign(SIZE_MAX / 2 + 2, 1), nullptr);
  EXPECT_EQ(errno, EINVAL);
  errno = 0;
  EXPECT_EQ(memalign(SIZE_MAX / 2 + 1, 1), nullptr);
  EXPECT_EQ(errno, ENOMEM) << "a power of two";
}

TEST(Alignment, PosixMemalignRefusesBadAlignmentsAndTouchesNothing) {
  for (size_t alignment : {size_t{0}, size_t{1}, size_t{2}, size_t{4}, size_t{7}, size_t{12}, size_t{24}, size_t{100},
                           SIZE_MAX}) {
    void* p = &errno;
    errno = 9;
    EXPECT_EQ(posix_memalign(&p, alignment, 64), EINVAL) << alignment;
    EXPECT_EQ(p, static_cast<void*>(&errno));
    EXPECT_EQ(errno, 9);
  }
}

TEST(Alignment, VallocAndPvallocAlignToPages) {
  for (size_t size : kSizes) {
    void *p = valloc(size), *q = pvalloc(size);
    ASSERT_TRUE(p != nullptr && q != nullptr);
    EXPECT_TRUE(is_aligned(p, 4096));
    EXPECT_TRUE(is_aligned(q, 4096));
    free(p);
    free(q);
  }
}

}  // namespace
