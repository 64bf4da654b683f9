// SPDX-License-Identifier: Apache-2.0
//
// Every entry point that makes a block, for every size around the borders of any plausible size class: distinct,
// aligned, writable to the end of its usable size, kept by realloc, zeroed by calloc.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::fill_pattern;
using hz3_test::pattern_holds;
using hz3_test::pattern_key;

// All sizes up to 4 KiB + 1, then 16 steps per doubling up to 2 MiB with both neighbours, and page multiples likewise.
std::vector<size_t> border_sizes() {
  std::set<size_t> sizes;
  for (size_t size = 0; size <= 4097; size++) sizes.insert(size);
  for (size_t base = 4096; base < (2u << 20); base *= 2) {
    for (size_t step = 0; step <= 16; step++) {
      size_t border = base + base / 16 * step;
      sizes.insert({border - 1, border, border + 1});
    }
  }
  for (size_t pages = 1; pages <= 32; pages++) sizes.insert({pages * 4096 - 1, pages * 4096, pages * 4096 + 1});
  return {sizes.begin(), sizes.end()};
}

// Every 7th of the sizes below 4 KiB and all above: enough where each size costs much.
std::vector<size_t> some_sizes() {
  std::vector<size_t> all = border_sizes(), some;
  for (size_t i = 0; i < all.size(); i++) {
    if (all[i] < 64 || all[i] > 4090 || all[i] % 7 == 0) some.push_back(all[i]);
  }
  return some;
}

struct Maker {
  const char* name;
  void* (*make)(size_t size);
  size_t alignment;
};

void* by_posix_memalign(size_t size) {
  void* p = nullptr;
  return posix_memalign(&p, 32, size) == 0 ? p : nullptr;
}

const Maker kMakers[] = {
    {"malloc", [](size_t n) { return malloc(n); }, 16},
    {"calloc_1", [](size_t n) { return calloc(1, n); }, 16},
    {"calloc_n", [](size_t n) { return calloc(n, 1); }, 16},
    {"realloc_null", [](size_t n) { return realloc(nullptr, n); }, 16},
    {"reallocarray_null", [](size_t n) { return reallocarray(nullptr, n, 1); }, 16},
    {"aligned_alloc", [](size_t n) { return aligned_alloc(64, n); }, 64},
    {"memalign", [](size_t n) { return memalign(256, n); }, 256},
    {"posix_memalign", by_posix_memalign, 32},
    {"valloc", [](size_t n) { return valloc(n); }, 4096},
    {"pvalloc", [](size_t n) { return pvalloc(n); }, 4096},
};

class MakerTest : public testing::TestWithParam<Maker> {};

INSTANTIATE_TEST_SUITE_P(All, MakerTest, testing::ValuesIn(kMakers),
                         [](const testing::TestParamInfo<Maker>& info) { return info.param.name; });

// Three blocks of a size live at once, each filled to its usable size: neighbours that overlap destroy each other.
TEST_P(MakerTest, BlocksAreDistinctAlignedAndWritableToTheEnd) {
  const Maker& maker = GetParam();
  for (size_t size : some_sizes()) {
    unsigned char* blocks[3];
    size_t usable[3];
    for (int i = 0; i < 3; i++) {
      blocks[i] = static_cast<unsigned char*>(maker.make(size));
      ASSERT_NE(blocks[i], nullptr) << size;
      ASSERT_EQ(reinterpret_cast<uintptr_t>(blocks[i]) % maker.alignment, 0u) << size;
      usable[i] = malloc_usable_size(blocks[i]);
      ASSERT_GE(usable[i], size);
      fill_pattern(blocks[i], usable[i], pattern_key(blocks[i], size, 1));
    }
    for (int i = 0; i < 3; i++) {
      ASSERT_EQ(malloc_usable_size(blocks[i]), usable[i]) << size;
      ASSERT_TRUE(pattern_holds(blocks[i], usable[i], pattern_key(blocks[i], size, 1))) << size;
    }
    for (unsigned char* block : blocks) free(block);
  }
}

// The same size again after free: reuse must not lose alignment.
TEST_P(MakerTest, ReuseKeepsAlignment) {
  const Maker& maker = GetParam();
  for (size_t size : {size_t{0}, size_t{1}, size_t{24}, size_t{100}, size_t{5000}, size_t{40000}, size_t{300000}}) {
    for (int round = 0; round < 200; round++) {
      std::vector<void*> blocks;
      for (int i = 0; i < 20; i++) blocks.push_back(maker.make(size));
      for (void* p : blocks) {
        ASSERT_NE(p, nullptr);
        ASSERT_EQ(reinterpret_cast<uintptr_t>(p) % maker.alignment, 0u) << size;
      }
      for (void* p : blocks) free(p);
    }
  }
}

TEST(Size, EverySizeIs16Aligned) {
  std::vector<void*> blocks;
  for (size_t size : border_sizes()) {
    void* p = malloc(size);
    ASSERT_NE(p, nullptr);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(p) % 16, 0u) << size;
    blocks.push_back(p);
  }
  std::sort(blocks.begin(), blocks.end());
  ASSERT_EQ(std::adjacent_find(blocks.begin(), blocks.end()), blocks.end());
  for (void* p : blocks) free(p);
}

TEST(Size, LiveBlocksDoNotOverlap) {
  std::vector<std::pair<uintptr_t, size_t>> blocks;
  for (size_t size : border_sizes()) {
    void* p = malloc(size);
    ASSERT_NE(p, nullptr);
    blocks.push_back({reinterpret_cast<uintptr_t>(p), malloc_usable_size(p)});
  }
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); i++) ASSERT_LE(blocks[i - 1].first + blocks[i - 1].second, blocks[i].first);
  for (auto& block : blocks) free(reinterpret_cast<void*>(block.first));
}

TEST(Size, CallocIsZeroOnRecycledMemory) {
  for (size_t size : some_sizes()) {
    void* dirty[4];
    for (void*& p : dirty) {
      p = malloc(size);
      ASSERT_NE(p, nullptr);
      memset(p, 0xa5, malloc_usable_size(p));
    }
    for (void* p : dirty) free(p);
    for (void*& p : dirty) {
      p = calloc(size % 2 == 0 ? 2 : 1, size % 2 == 0 ? size / 2 : size);
      ASSERT_NE(p, nullptr);
      const unsigned char* bytes = static_cast<unsigned char*>(p);
      ASSERT_EQ(std::count(bytes, bytes + size, 0), static_cast<ptrdiff_t>(size)) << size;
    }
    for (void* p : dirty) free(p);
  }
}

// Large blocks come back through the operating system or through retained ranges: both must look zero.
TEST(Size, LargeCallocIsZeroAfterUse) {
  for (int round = 0; round < 6; round++) {
    for (size_t size : {size_t{3} << 20, size_t{9} << 20, (size_t{33} << 20) + 5}) {
      unsigned char* used = static_cast<unsigned char*>(malloc(size));
      ASSERT_NE(used, nullptr);
      memset(used, 0x5a, size);
      free(used);
      unsigned char* p = static_cast<unsigned char*>(calloc(size / 5, 5));
      ASSERT_NE(p, nullptr);
      for (size_t i = 0; i < size / 5 * 5; i += 61) ASSERT_EQ(p[i], 0) << size << " at " << i;
      p[size / 2] = 1;
      free(p);
    }
  }
}

TEST(Size, UsableSizeIsKeptByReallocToTheSameSize) {
  for (size_t size : some_sizes()) {
    void* p = malloc(size);
    ASSERT_NE(p, nullptr);
    size_t usable = malloc_usable_size(p);
    uint64_t key = pattern_key(p, size, 2);
    fill_pattern(p, usable, key);
    if (usable == 0) {  // realloc to zero would free it
      free(p);
      continue;
    }
    // All usable bytes belong to the program, so growing to the usable size and beyond keeps them.
    p = realloc(p, usable);
    ASSERT_NE(p, nullptr);
    ASSERT_TRUE(pattern_holds(p, usable, key)) << size;
    p = realloc(p, usable + 1);
    ASSERT_NE(p, nullptr);
    ASSERT_TRUE(pattern_holds(p, usable, key)) << size;
    ASSERT_GE(malloc_usable_size(p), usable + 1);
    free(p);
  }
  EXPECT_EQ(malloc_usable_size(nullptr), 0u);
}

TEST(Size, ReallocKeepsContentsFromAnySizeToAnySize) {
  std::vector<size_t> sizes;
  for (size_t size : {1, 15, 16, 17, 100, 512, 513, 1024, 2047, 2048, 2049, 4096, 8191, 8200, 16384, 32767, 32768,
                      32769, 65536, 65537, 131072, 200000, 262144, 262145, 524288, 1048575, 1048576, 1048577, 2097152,
                      5000000}) {
    sizes.push_back(size);
  }
  for (size_t from : sizes) {
    for (size_t to : sizes) {
      void* p = malloc(from);
      ASSERT_NE(p, nullptr);
      uint64_t key = pattern_key(p, from, 3);
      fill_pattern(p, from, key);
      void* q = realloc(p, to);
      ASSERT_NE(q, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(q) % 16, 0u);
      ASSERT_GE(malloc_usable_size(q), to);
      ASSERT_TRUE(pattern_holds(q, std::min(from, to), key)) << from << " to " << to;
      memset(q, 1, to);
      free(q);
    }
  }
}

// Growth by small steps, as strings and vectors do, through all ranges and back.
TEST(Size, ReallocInSmallStepsUpAndDown) {
  size_t size = 1;
  unsigned char* p = static_cast<unsigned char*>(malloc(size));
  ASSERT_NE(p, nullptr);
  p[0] = 1;
  while (size < (8u << 20)) {
    size_t next = size + size / 7 + 1;
    p = static_cast<unsigned char*>(realloc(p, next));
    ASSERT_NE(p, nullptr);
    for (size_t i = size; i < next; i++) p[i] = static_cast<unsigned char>(i * 7 + 1);
    ASSERT_EQ(p[size / 2], static_cast<unsigned char>(size / 2 * 7 + 1));
    size = next;
  }
  while (size > 1) {
    size = size * 3 / 4;
    p = static_cast<unsigned char*>(realloc(p, size));
    ASSERT_NE(p, nullptr);
    for (size_t i = 0; i < size; i += size / 64 + 1) ASSERT_EQ(p[i], static_cast<unsigned char>(i * 7 + 1));
  }
  free(p);
}

// A block shrunk to almost nothing must not pin the memory it once had.
TEST(Size, ShrinkingReallocReleasesMemory) {
  std::vector<void*> blocks;
  for (int i = 0; i < 64; i++) {
    void* p = malloc(1 << 20);
    ASSERT_NE(p, nullptr);
    memset(p, 1, 1 << 20);
    p = realloc(p, 100);
    ASSERT_NE(p, nullptr);
    ASSERT_LT(malloc_usable_size(p), 4096u);
    blocks.push_back(p);
  }
  malloc_trim(0);
  EXPECT_LT(hz3_test::status_kb("RssAnon"), 48 << 10);
  for (void* p : blocks) free(p);
}

TEST(Size, ZeroSizesAreUniqueAndFreeable) {
  std::set<void*> seen;
  std::vector<void*> blocks;
  for (int i = 0; i < 1000; i++) {
    for (void* p : {malloc(0), calloc(0, 0), calloc(0, 8), calloc(8, 0), realloc(nullptr, 0), aligned_alloc(64, 0),
                    memalign(128, 0), ::operator new(0)}) {
      ASSERT_NE(p, nullptr);
      ASSERT_TRUE(seen.insert(p).second);
      blocks.push_back(p);
    }
  }
  for (void* p : blocks) free(p);
}

TEST(Size, ReallocToZeroFreesAndReturnsNull) {
  for (size_t size : {size_t{0}, size_t{8}, size_t{1000}, size_t{40000}, size_t{900000}, size_t{8} << 20}) {
    // Were the blocks not freed, 8 MiB times 2000 rounds would not fit a sensible figure.
    long before = hz3_test::status_kb("VmSize");
    for (int i = 0; i < 2000; i++) {
      void* p = malloc(size);
      ASSERT_NE(p, nullptr);
      errno = 5;
      ASSERT_EQ(realloc(p, 0), nullptr);
      ASSERT_EQ(errno, 5);
    }
    EXPECT_LT(hz3_test::status_kb("VmSize") - before, 1 << 20);
  }
  void* p = malloc(10);
  EXPECT_EQ(reallocarray(p, 0, 16), nullptr);
  p = malloc(10);
  EXPECT_EQ(reallocarray(p, 16, 0), nullptr);
}

TEST(Size, PvallocGivesWholePages) {
  for (size_t size : {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, size_t{70000}}) {
    void* p = pvalloc(size);
    ASSERT_NE(p, nullptr);
    EXPECT_GE(malloc_usable_size(p), (std::max<size_t>(size, 1) + 4095) / 4096 * 4096);
    free(p);
  }
}

}  // namespace
