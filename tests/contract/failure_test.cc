// SPDX-License-Identifier: Apache-2.0
//
// Every way to ask for too much, through every entry point: NULL and ENOMEM, the old block kept, nothing thrown away;
// and errno left alone wherever nothing failed.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

extern "C" {
void cfree(void* block);
void free_sized(void* block, size_t size);
void free_aligned_sized(void* block, size_t alignment, size_t size);
}

namespace {

// volatile: the compiler must neither warn about nor evaluate the absurd sizes.
volatile size_t max = SIZE_MAX;

// Sizes no machine can give: near SIZE_MAX in all the ways a rounding could wrap, above PTRDIFF_MAX, and above any
// address space.
const size_t kHuge[] = {SIZE_MAX,           SIZE_MAX - 1,        SIZE_MAX - 7,      SIZE_MAX - 15,     SIZE_MAX - 16,
                        SIZE_MAX - 17,      SIZE_MAX - 63,       SIZE_MAX - 4094,   SIZE_MAX - 4095,   SIZE_MAX - 4096,
                        SIZE_MAX - 65535,   SIZE_MAX - 65536,    SIZE_MAX - 100000, SIZE_MAX - (1 << 20),
                        SIZE_MAX - (2 << 20), SIZE_MAX - (4 << 20), SIZE_MAX / 2 + 1, SIZE_MAX / 2,    SIZE_MAX / 2 - 4096,
                        size_t{1} << 62,    size_t{1} << 56,     size_t{1} << 50,   size_t{1} << 48};

struct Entry {
  const char* name;
  void* (*make)(size_t size);
};

const Entry kEntries[] = {
    {"malloc", [](size_t n) { return malloc(n); }},
    {"calloc_1", [](size_t n) { return calloc(1, n); }},
    {"calloc_n", [](size_t n) { return calloc(n, 1); }},
    {"calloc_8", [](size_t n) { return calloc(n / 8 + 1, 8); }},
    {"realloc", [](size_t n) { return realloc(nullptr, n); }},
    {"reallocarray", [](size_t n) { return reallocarray(nullptr, n, 1); }},
    {"aligned_alloc_16", [](size_t n) { return aligned_alloc(16, n); }},
    {"aligned_alloc_64", [](size_t n) { return aligned_alloc(64, n); }},
    {"aligned_alloc_1G", [](size_t n) { return aligned_alloc(1 << 30, n); }},
    {"memalign_8", [](size_t n) { return memalign(8, n); }},
    {"memalign_64", [](size_t n) { return memalign(64, n); }},
    {"memalign_64K", [](size_t n) { return memalign(1 << 16, n); }},
    {"memalign_4M", [](size_t n) { return memalign(4 << 20, n); }},
    {"valloc", [](size_t n) { return valloc(n); }},
    {"pvalloc", [](size_t n) { return pvalloc(n); }},
};

class EntryTest : public testing::TestWithParam<Entry> {};

INSTANTIATE_TEST_SUITE_P(All, EntryTest, testing::ValuesIn(kEntries),
                         [](const testing::TestParamInfo<Entry>& info) { return info.param.name; });

TEST_P(EntryTest, HugeSizesGiveNullAndEnomem) {
  for (size_t size : kHuge) {
    errno = 0;
    void* p = GetParam().make(size);
    EXPECT_EQ(p, nullptr) << std::hex << size;
    EXPECT_EQ(errno, ENOMEM) << std::hex << size;
    free(p);
  }
}

// Twice what there is, memory and swap: where the kernel guesses, it is the length that went wrong.
TEST_P(EntryTest, MoreThanThereIsMemoryIsRefused) {
  std::ifstream mode_file("/proc/sys/vm/overcommit_memory"), memory_file("/proc/meminfo");
  int mode = -1;
  mode_file >> mode;
  if (mode == 1) GTEST_SKIP() << "the kernel is set to refuse nothing";
  size_t there_kb = 0, kb = 0;
  for (std::string name, unit; memory_file >> name >> kb && std::getline(memory_file, unit);) {
    if (name == "MemTotal:" || name == "SwapTotal:") there_kb += kb;
  }
  ASSERT_GT(there_kb, 0u);
  const size_t size = std::max(2 * there_kb << 10, size_t{1} << 30);
  errno = 0;
  void* p = GetParam().make(size);
  EXPECT_EQ(p, nullptr) << size;
  EXPECT_EQ(errno, ENOMEM);
  free(p);
}

TEST_P(EntryTest, SuccessLeavesErrnoAlone) {
  for (size_t size : {size_t{0}, size_t{1}, size_t{100}, size_t{5000}, size_t{100000}, size_t{3000000}, size_t{64} << 20}) {
    for (int i = 0; i < (size < 1 << 20 ? 50 : 3); i++) {
      errno = 11;
      void* p = GetParam().make(size);
      ASSERT_NE(p, nullptr);
      ASSERT_EQ(errno, 11) << size;
      free(p);
      ASSERT_EQ(errno, 11) << size;
    }
  }
}

// Alignment and size that only together are too much.
TEST(Failure, AlignmentOverflow) {
  for (size_t alignment = 16; alignment != 0; alignment *= 2) {
    for (size_t size : {SIZE_MAX - alignment + 1, SIZE_MAX - alignment, SIZE_MAX - alignment - 16, SIZE_MAX / 2}) {
      errno = 0;
      EXPECT_EQ(aligned_alloc(alignment, size), nullptr) << alignment << " " << size;
      EXPECT_EQ(errno, ENOMEM) << alignment << " " << size;
      void* p = &errno;
      errno = 3;
      EXPECT_EQ(posix_memalign(&p, alignment, size), ENOMEM) << alignment << " " << size;
      EXPECT_EQ(p, static_cast<void*>(&errno));
      EXPECT_EQ(errno, 3);
    }
  }
  // Alignments that no address space holds, for a size that would be harmless.
  for (size_t alignment = size_t{1} << 48; alignment != 0; alignment *= 2) {
    errno = 0;
    EXPECT_EQ(aligned_alloc(alignment, 100), nullptr) << alignment;
    EXPECT_EQ(errno, ENOMEM);
  }
}

TEST(Failure, CallocOverflow) {
  const struct { size_t count, size; } kTable[] = {
      {SIZE_MAX, 2}, {2, SIZE_MAX}, {SIZE_MAX, SIZE_MAX}, {SIZE_MAX / 2 + 1, 2}, {SIZE_MAX / 3, 4},
      {size_t{1} << 32, size_t{1} << 32}, {size_t{1} << 33, size_t{1} << 31}, {(size_t{1} << 32) + 1, size_t{1} << 32},
      {SIZE_MAX / 16 + 1, 16}, {SIZE_MAX / 16 + 2, 16}, {3, SIZE_MAX / 3 + 1}};
  for (auto& row : kTable) {
    errno = 0;
    EXPECT_EQ(calloc(row.count, row.size), nullptr) << row.count << " " << row.size;
    EXPECT_EQ(errno, ENOMEM);
    errno = 0;
    EXPECT_EQ(reallocarray(nullptr, row.count, row.size), nullptr) << row.count << " " << row.size;
    EXPECT_EQ(errno, ENOMEM);
  }
}

TEST(Failure, ReallocKeepsTheOldBlock) {
  for (size_t size : {size_t{1}, size_t{24}, size_t{1000}, size_t{40000}, size_t{700000}, size_t{5} << 20}) {
    void* p = malloc(size);
    ASSERT_NE(p, nullptr);
    uint64_t key = hz3_test::pattern_key(p, size, 7);
    hz3_test::fill_pattern(p, size, key);
    for (size_t huge : kHuge) {
      // Through an integer: a compiler that knows realloc takes p for freed.
      uintptr_t address = reinterpret_cast<uintptr_t>(p);
      errno = 0;
      ASSERT_EQ(realloc(reinterpret_cast<void*>(address), huge), nullptr);
      ASSERT_EQ(errno, ENOMEM);
      errno = 0;
      ASSERT_EQ(reallocarray(reinterpret_cast<void*>(address), huge, 3), nullptr);
      ASSERT_EQ(errno, ENOMEM);
      p = reinterpret_cast<void*>(address);
    }
    ASSERT_TRUE(hz3_test::pattern_holds(p, size, key)) << size;
    p = realloc(p, size + 1);
    ASSERT_NE(p, nullptr);
    ASSERT_TRUE(hz3_test::pattern_holds(p, size, key)) << size;
    free(p);
  }
}

TEST(Failure, PvallocMinusOne) {
  errno = 0;
  EXPECT_EQ(pvalloc(max), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  errno = 0;
  EXPECT_EQ(valloc(max), nullptr);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(Failure, FailuresCostNoMemory) {
  long before = hz3_test::status_kb("VmSize");
  for (int i = 0; i < 20000; i++) {
    ASSERT_EQ(malloc(kHuge[i % (sizeof kHuge / sizeof *kHuge)]), nullptr);
    ASSERT_EQ(memalign(1 << 20, max - 5), nullptr);
  }
  EXPECT_LE(hz3_test::status_kb("VmSize") - before, 1024);
}

// A length from input that there can never be memory for does not cost the program its caches.
TEST(Failure, ImpossibleSizesLeaveTheCachesAlone) {
  std::vector<void*> blocks(30000);
  auto faults_of = [&](size_t impossible) {
    rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    for (int round = 0; round < 20; round++) {
      for (void*& p : blocks) *static_cast<char*>(p = malloc(400)) = 1;
      for (void* p : blocks) free(p);
      if (impossible != 0) free(malloc(impossible));
    }
    getrusage(RUSAGE_SELF, &after);
    return after.ru_minflt - before.ru_minflt;
  };
  faults_of(0);
  long without = faults_of(0);
  for (size_t impossible : {size_t{1} << 41, size_t{1} << 46}) EXPECT_LE(faults_of(impossible), 2 * without + 2000) << impossible;
}

TEST(Failure, FreeKeepsErrno) {
  errno = 12345;
  free(nullptr);
  EXPECT_EQ(errno, 12345);
  for (size_t size : {size_t{8}, size_t{3000}, size_t{80000}, size_t{2} << 20, size_t{300} << 20}) {
    for (int i = 0; i < 20; i++) {
      void* p = malloc(size);
      ASSERT_NE(p, nullptr);
      static_cast<char*>(p)[0] = 1;
      errno = 12345;
      free(p);
      ASSERT_EQ(errno, 12345) << size;
    }
  }
}

size_t in_use() {
  struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

TEST(Failure, SizedFreesTakeTheirBlocks) {
  const size_t before = in_use();
  for (size_t size : {size_t{0}, size_t{1}, size_t{33}, size_t{3000}, size_t{80000}, size_t{2} << 20}) {
    for (int i = 0; i < 200; i++) {
      void *p = malloc(size), *q = aligned_alloc(128, size), *r = calloc(1, size);
      ASSERT_TRUE(p && q && r);
      errno = 77;
      free_sized(p, size);
      free_aligned_sized(q, 128, size);
      free_sized(r, size);
      ASSERT_EQ(errno, 77);
    }
  }
  free_sized(nullptr, 0);
  free_aligned_sized(nullptr, 16, 5);
  for (int i = 0; i < 2000; i++) cfree(malloc(1000));
  cfree(nullptr);
  EXPECT_LT(in_use(), before + (1 << 20));
}

}  // namespace
