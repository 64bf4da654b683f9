// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the memory for the allocator's own structures.
#include "hz3/base/metadata.h"

#include <gtest/gtest.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "hz3/base/refuse_test.h"

namespace {

bool IsZero(const void *memory, size_t bytes) {
  const char *at = static_cast<const char *>(memory);
  return std::all_of(at, at + bytes, [](char c) { return c == 0; });
}

bool IsAligned(const void *memory, size_t align) { return reinterpret_cast<uintptr_t>(memory) % align == 0; }

TEST(Metadata, IsZeroedAlignedAndApart) {
  std::vector<std::pair<char *, size_t>> blocks;
  for (size_t bytes : {8, 16, 24, 64, 100, 1000, 4096, 8192, 5000, 64 * 1024, 1 << 20, 40}) {
    for (int i = 0; i < 20; i++) {
      char *block = static_cast<char *>(hz3_metadata_alloc(bytes));
      ASSERT_NE(block, nullptr);
      size_t align = bytes % 4096 == 0 ? 4096 : std::min<size_t>(hz3_ceil_power_of_two(bytes), 64);
      EXPECT_TRUE(IsAligned(block, align)) << bytes << " bytes at " << static_cast<void *>(block);
      EXPECT_TRUE(IsZero(block, bytes));
      memset(block, 0xff, bytes);  // an overlap with a later block shows there
      blocks.emplace_back(block, bytes);
    }
  }
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); i++) EXPECT_LE(blocks[i - 1].first + blocks[i - 1].second, blocks[i].first);
}

// Wherever a mapping ends: what would fit there, but not at its alignment, goes to the next one.
TEST(Metadata, NothingReachesBeyondItsMapping) {
  constexpr size_t kBytes = 100, kLeft = 104, kPage = 4096;
  size_t before = hz3_metadata_bytes();
  std::vector<char *> blocks;
  while (hz3_metadata_bytes() - before < 3 * 256 * 1024) {
    char *word = static_cast<char *>(hz3_metadata_alloc(8));
    memset(word, 0xff, 8);
    if (reinterpret_cast<uintptr_t>(word + 8) % kPage != kPage - kLeft) continue;
    char *block = static_cast<char *>(hz3_metadata_alloc(kBytes));
    EXPECT_TRUE(IsZero(block, kBytes));
    blocks.push_back(block);
  }
  ASSERT_GE(blocks.size(), 100u);
  for (char *block : blocks) EXPECT_TRUE(IsZero(block, kBytes)) << "it is somebody else's, too";
}

TEST(Metadata, CountsWhatIsMapped) {
  size_t before = hz3_metadata_bytes();
  ASSERT_NE(hz3_metadata_alloc(3 << 20), nullptr);
  size_t grown = hz3_metadata_bytes() - before;
  EXPECT_GE(grown, size_t{3} << 20);
  EXPECT_LE(grown, size_t{4} << 20);
}

TEST(Metadata, SmallBlocksShareAMapping) {
  size_t before = hz3_metadata_bytes();
  for (int i = 0; i < 1000; i++) ASSERT_NE(hz3_metadata_alloc(64), nullptr);
  EXPECT_LE(hz3_metadata_bytes() - before, size_t{256} * 1024);
}

TEST(Metadata, BitmapsAreRecycledPerSize) {
  for (size_t bytes = 8; bytes <= 16 * 1024; bytes *= 2) {
    void *first = hz3_metadata_alloc_bitmap(bytes), *second = hz3_metadata_alloc_bitmap(bytes);
    ASSERT_NE(first, nullptr);
    ASSERT_NE(second, nullptr);
    EXPECT_NE(first, second);
    hz3_metadata_free_bitmap(first, bytes);
    hz3_metadata_free_bitmap(second, bytes);
    void *again = hz3_metadata_alloc_bitmap(bytes), *other = hz3_metadata_alloc_bitmap(bytes);
    EXPECT_TRUE((again == first && other == second) || (again == second && other == first));
    EXPECT_TRUE(IsZero(again, bytes)) << bytes << " bytes: the list link is left in the bitmap";
    EXPECT_TRUE(IsZero(other, bytes));
    hz3_metadata_free_bitmap(again, bytes);
    hz3_metadata_free_bitmap(other, bytes);
  }
}

TEST(Metadata, ThreadsNeverGetTheSameMemory) {
  const int kThreads = 4, kBlocks = 2000;
  std::vector<char *> blocks[kThreads];
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([t, &blocks] {
      for (int i = 0; i < kBlocks; i++) {
        char *block = static_cast<char *>(i % 2 ? hz3_metadata_alloc(64) : hz3_metadata_alloc_bitmap(64));
        memset(block, t + 1, 64);
        blocks[t].push_back(block);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (int t = 0; t < kThreads; t++) {
    for (char *block : blocks[t]) EXPECT_TRUE(std::all_of(block, block + 64, [t](char c) { return c == t + 1; }));
  }
}

TEST(Metadata, ForkLocksOutOthers) {
  hz3_metadata_fork_prepare();
  void *block = nullptr;
  std::thread other([&] { block = hz3_metadata_alloc(64); });
  hz3_metadata_fork_release();
  other.join();
  EXPECT_NE(block, nullptr);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their runtimes need address space of their own
[[noreturn]] void AllocWhileAForkHoldsTheLock() {
  hz3_metadata_fork_prepare();
  HZ3_REQUIRE(hz3_test::WaitsForALock([] { hz3_metadata_alloc(64); }));
  _exit(0);
}

TEST(MetadataDeathTest, ForkHoldsTheLock) { EXPECT_EXIT(AllocWhileAForkHoldsTheLock(), testing::ExitedWithCode(0), ""); }

[[noreturn]] void AllocWithoutAddressSpace() {
  rlimit none = {0, 0};
  setrlimit(RLIMIT_AS, &none);
  bool refused = hz3_metadata_alloc(1 << 20) == nullptr;
  while (hz3_metadata_alloc(4096) != nullptr) {  // what is left of the last mapping
  }
  refused = refused && hz3_metadata_alloc_bitmap(4096) == nullptr;
  _exit(refused ? 0 : 1);
}

TEST(MetadataDeathTest, NullWhenAddressSpaceIsUsedUp) {
  EXPECT_EXIT(AllocWithoutAddressSpace(), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
