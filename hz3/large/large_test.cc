// SPDX-License-Identifier: Apache-2.0
// What it is: tests of large blocks: splitting and merging, alignment, zeroed memory, resizing, moving, giving back.
#include "hz3/large/large.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hz3/base/os.h"
#include "hz3/base/refuse_test.h"
#include "hz3/base/size_class.h"
#include "hz3/config.h"
#include "hz3/large/range.h"
#include "hz3/pages/page_map.h"

namespace {

bool Resize(void *block, size_t bytes) {
  size_t before;
  return hz3_large_resize(block, bytes, &before);
}

hz3_large_stats Stats() {
  hz3_large_stats stats;
  hz3_large_get_stats(&stats);
  return stats;
}

// Bytes of the range that are backed by memory.
size_t ResidentBytes(void *start, size_t bytes) {
  std::vector<unsigned char> pages(bytes / hz3_os_page_bytes());
  EXPECT_EQ(mincore(start, bytes, pages.data()), 0);
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; })) * hz3_os_page_bytes();
}

bool IsFilled(const char *memory, size_t bytes, char value) {
  return bytes == 0 || (memory[0] == value && memcmp(memory, memory + 1, bytes - 1) == 0);
}

bool IsMapped(const void *start) {
  unsigned char page;
  return mincore(const_cast<void *>(start), 1, &page) == 0;
}

// Neighbours in address order touch, know each other, and are never both free; the free lists hold what is free.
void ExpectRangesAreSound() {
  size_t dirty = 0;
  for (unsigned bin = 0; bin < HZ3_RANGE_BINS; bin++) {
    bool has_bit = (hz3_ranges.bin_bits[bin / 64] >> (bin % 64)) & 1;
    EXPECT_EQ(hz3_ranges.bins[bin] != nullptr, has_bit) << "bin " << bin;
    for (hz3_range *range = hz3_ranges.bins[bin]; range != nullptr; range = range->bin_next) {
      ASSERT_EQ(range->state, HZ3_RANGE_FREE);
      EXPECT_EQ(range->dirty_bytes, hz3_dirty_count_bytes(range->start, range->bytes));
      dirty += range->dirty_bytes;
      for (hz3_range *other : {range->left, range->right}) {
        if (other == nullptr) continue;
        EXPECT_NE(other->state, HZ3_RANGE_FREE);
        EXPECT_NE(other->state, HZ3_RANGE_SPARE);
      }
      if (range->right != nullptr) {
        EXPECT_EQ(range->right->start, range->start + range->bytes);
        EXPECT_EQ(range->right->left, range);
      }
    }
  }
  for (hz3_range *range : hz3_ranges.shelf) {
    if (range == nullptr) continue;
    ASSERT_EQ(range->state, HZ3_RANGE_SHELVED);
    EXPECT_EQ(range->dirty_bytes, hz3_dirty_count_bytes(range->start, range->bytes));
    EXPECT_EQ(range->marked_bytes, hz3_dirty_count_bytes(range->start, range->marked_bytes));
    dirty += range->dirty_bytes;
  }
  EXPECT_EQ(hz3_ranges.dirty_bytes, dirty);
}

// As after a big purge: what exceeds the limit goes at once.
void NothingWaits() {
  hz3_ranges.retention.last_purge_ms = hz3_os_now_ms();
  hz3_ranges.retention.recent_bytes = 8 * HZ3_RETAIN_MIN_BYTES;
}

// So that mappings lie beside each other: the gaps between others' are not as big as any that is made here.
void FillGaps() {
  const size_t kRoom = size_t{4} << 30, kPlug = HZ3_HUGE_PAGE_BYTES;
  auto map = [](size_t bytes) { return static_cast<char *>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)); };
  char *room = map(kRoom), *plug;
  HZ3_REQUIRE(room != MAP_FAILED && munmap(room, kRoom) == 0);
  do {
    plug = map(kPlug);
    HZ3_REQUIRE(plug != MAP_FAILED);
  } while (plug < room || plug >= room + kRoom);
  HZ3_REQUIRE(munmap(plug, kPlug) == 0);
}

// Should one have been dear, none are asked for, for a while. False if that does not end.
bool WaitUntilHugePagesAreCheap() {
  const size_t kBytes = 2 * HZ3_HUGE_PAGE_BYTES;
  for (int tries = 0; tries < 20 && hz3_os_page_bytes() == 4096; tries++) {
    hz3_huge_use use = {};
    use.asked_bytes = 14 * HZ3_MIB;  // so that one is touched, and timed
    char *start = static_cast<char *>(hz3_os_map_aligned(nullptr, kBytes, HZ3_HUGE_PAGE_BYTES));
    HZ3_REQUIRE(start != nullptr);
    hz3_huge_answer answer = hz3_huge_pages_ask(&use, start, kBytes);
    HZ3_REQUIRE(hz3_os_unmap(start, kBytes));
    if (answer == HZ3_HUGE_ALL) return true;
    usleep(100 * 1000);
  }
  return false;
}

// On a slow machine each is, whatever the allocator thinks of it; where pages are larger none is asked for.
bool AreHugePagesDearHere() {
  char *start = static_cast<char *>(hz3_os_map_aligned(nullptr, HZ3_HUGE_PAGE_BYTES, HZ3_HUGE_PAGE_BYTES));
  HZ3_REQUIRE(start != nullptr);
  hz3_os_advise_huge(start, HZ3_HUGE_PAGE_BYTES, true);
  uint64_t before = hz3_os_thread_ns();
  *static_cast<volatile char *>(start) = 0;
  uint64_t ns = hz3_os_thread_ns() - before;
  HZ3_REQUIRE(hz3_os_unmap(start, HZ3_HUGE_PAGE_BYTES));
  return ns > 1000 * 1000 || hz3_os_page_bytes() != 4096;
}

// Every test starts and ends without any address space.
class Large : public testing::Test {
 protected:
  void SetUp() override {
    FillGaps();
    are_huge_pages_cheap_ = WaitUntilHugePagesAreCheap();
    ASSERT_EQ(Stats().mapped_bytes, 0u);
    hz3_ranges.retention = HZ3_RETENTION_INIT;
    hz3_ranges.size_hits = 0;
    hz3_ranges.witness = {};
    hz3_ranges.huge_use = {};
  }
  void TearDown() override {
    ExpectRangesAreSound();
    for (auto &block : live_) EXPECT_TRUE(hz3_large_free(block.first));
    ExpectRangesAreSound();
    hz3_large_trim(true);
    EXPECT_EQ(Stats().mapped_bytes, 0u);
    EXPECT_EQ(Stats().live_bytes, 0u);
    EXPECT_EQ(Stats().live_blocks, 0u);
    EXPECT_EQ(Stats().dirty_free_bytes, 0u);
  }
  char *Alloc(size_t bytes, size_t align = 1, bool zero = false) {
    char *block = static_cast<char *>(hz3_large_alloc(bytes, align, zero));
    EXPECT_NE(block, nullptr) << bytes << " bytes aligned to " << align;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % std::max<size_t>(align, HZ3_SLICE_BYTES), 0u);
    EXPECT_GE(hz3_large_usable_bytes(block), bytes);
    live_[block] = bytes;
    return block;
  }
  void Free(char *block) {
    live_.erase(block);
    EXPECT_TRUE(hz3_large_free(block));
  }
  char *Grow(char *block, size_t bytes) {
    char *fresh = static_cast<char *>(hz3_large_grow(block, bytes));
    EXPECT_NE(fresh, nullptr);
    live_.erase(block);
    live_[fresh] = bytes;
    return fresh;
  }
  void LearnedLimit(size_t bytes) {
    hz3_ranges.retention.limit_bytes = bytes;  // as if
    hz3_ranges.retention.known_low_bytes = 0;
  }
  bool Owns(const void *block) const { return hz3_large_usable_bytes(block) != 0; }

  bool are_huge_pages_cheap_ = false;
  std::map<char *, size_t> live_;
};

TEST_F(Large, BlocksAreWritableAndUsableIsWholePages) {
  for (size_t bytes : {size_t{1}, HZ3_MIB + 1, 3 * HZ3_MIB, 5 * HZ3_MIB + 12345, 40 * HZ3_MIB}) {
    char *block = Alloc(bytes);
    EXPECT_EQ(hz3_large_usable_bytes(block), hz3_round_up(bytes, hz3_os_page_bytes()));
    memset(block, 1, hz3_large_usable_bytes(block));
  }
  EXPECT_EQ(Stats().live_blocks, 5u);
}

TEST_F(Large, AlignsUpToAGibibyte) {
  for (size_t align = 1; align <= size_t{1} << 30; align *= 2) {
    for (size_t bytes : {size_t{1}, HZ3_MIB + 1}) {
      char *block = Alloc(bytes, align);
      block[0] = block[bytes - 1] = 1;
      Free(block);
    }
  }
  // Once more from ranges that exist already.
  for (size_t align = size_t{1} << 30; align > HZ3_SLICE_BYTES; align /= 4) Alloc(2 * HZ3_MIB, align);
  ExpectRangesAreSound();
}

// Whose range is cut at both ends, so that two descriptors are needed at once.
TEST_F(Large, AnAlignedBlockFindsADescriptorForEachEnd) {
  Free(Alloc(40 * HZ3_MIB));  // one range, from which all are cut
  Alloc(HZ3_MIB);
  hz3_range *last = hz3_ranges.spare;
  ASSERT_NE(last, nullptr);
  hz3_range *others = last->bin_next;
  last->bin_next = nullptr;
  char *block = Alloc(2 * HZ3_MIB, 2 * HZ3_MIB);
  hz3_range *range = hz3_range_of(block);
  ASSERT_TRUE(range->left != nullptr && range->right != nullptr);
  EXPECT_EQ(range->left->state, HZ3_RANGE_FREE);
  EXPECT_EQ(range->right->state, HZ3_RANGE_FREE);
  for (last = hz3_ranges.spare; last->bin_next != nullptr;) last = last->bin_next;
  last->bin_next = others;
}

TEST_F(Large, LittleIsMappedBesideAlignedBlocks) {
  struct {
    size_t align, bytes;
    int count;
  } const kLoads[] = {{2 * HZ3_MIB, 2 * HZ3_MIB, 200}, {2 * HZ3_MIB, 4 * HZ3_MIB, 100}, {8 * HZ3_MIB, 8 * HZ3_MIB, 50}, {64 * HZ3_MIB, 2 * HZ3_MIB, 20}};
  for (auto [align, bytes, count] : kLoads) {
    size_t before = Stats().mapped_bytes, used = static_cast<size_t>(count) * bytes;
    for (int i = 0; i < count; i++) Alloc(bytes, align);
    EXPECT_LE(Stats().mapped_bytes - before, used + used / 4) << bytes << " bytes aligned to " << align;
  }
}

// Whether one of the kernel's mappings starts there: what asks for huge pages and what does not are two.
bool StartsAMapping(const void *start) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (std::stoul(line, nullptr, 16) == reinterpret_cast<uintptr_t>(start)) return true;
  }
  return false;
}

// The last huge page of a block would be resident for good, though nobody may ever use what is left of it.
TEST_F(Large, TheLastHugePageIsForBlocksThatFillAQuarterOfIt) {
  EXPECT_TRUE(StartsAMapping(Alloc(4 * HZ3_MIB + 16) + 4 * HZ3_MIB));
  EXPECT_TRUE(StartsAMapping(Alloc(14 * HZ3_MIB + HZ3_MIB / 4) + 14 * HZ3_MIB));
  EXPECT_FALSE(StartsAMapping(Alloc(4 * HZ3_MIB + HZ3_MIB / 2) + 4 * HZ3_MIB));
  EXPECT_FALSE(StartsAMapping(Alloc(2 * HZ3_MIB + 16) + 2 * HZ3_MIB)) << "others will lie beside it";
}

// Of blocks of which little is written huge pages would make all resident.
TEST_F(Large, BlocksOfWhichLittleIsWrittenStayInSmallPages) {
  if (!are_huge_pages_cheap_ && AreHugePagesDearHere()) GTEST_SKIP() << "a huge page takes longer than a millisecond here, so none is asked for, and there is no witness";
  hz3_ranges.huge_use.asked_bytes = 64 * HZ3_MIB;
  for (int i = 0; i < 2; i++) {
    char *block = Alloc(8 * HZ3_MIB);
    ASSERT_EQ(hz3_ranges.huge_use.witness, block);
    block[0] = 1;
  }
  char *block = Alloc(8 * HZ3_MIB);
  for (size_t at = 0; at < 8 * HZ3_MIB; at += 2 * HZ3_MIB) block[at] = 1;
  EXPECT_EQ(ResidentBytes(block, 8 * HZ3_MIB), 4 * hz3_os_page_bytes());
}

// Each such end is a mapping of the kernel's, of which a process has 65,530: not any more once so much is mapped.
TEST_F(Large, WhereMuchIsMappedEveryBlockHasItsLastHugePage) {
  hz3_ranges.mapped_bytes += 17 * HZ3_KIB * HZ3_MIB;  // as if
  char *block = Alloc(4 * HZ3_MIB + 16);
  hz3_ranges.mapped_bytes -= 17 * HZ3_KIB * HZ3_MIB;
  EXPECT_FALSE(StartsAMapping(block + 4 * HZ3_MIB));
}

// As much as a quarter of what is there: where the blocks lie side by side they share the huge pages at their ends.
TEST_F(Large, MoreIsMappedAheadForSmallerBlocks) {
  auto mapped_for = [this](size_t bytes, size_t align, size_t there) {
    hz3_large_trim(true);  // nothing is free
    size_t as_if = there - Stats().mapped_bytes, before = Stats().mapped_bytes;
    hz3_ranges.mapped_bytes += as_if;
    Alloc(bytes, align);
    hz3_ranges.mapped_bytes -= as_if;
    return Stats().mapped_bytes - before;
  };
  EXPECT_EQ(mapped_for(2 * HZ3_MIB, 1, 0), 2 * HZ3_MIB);
  EXPECT_EQ(mapped_for(2 * HZ3_MIB, 1, 64 * HZ3_MIB), 16 * HZ3_MIB);
  EXPECT_EQ(mapped_for(2 * HZ3_MIB, 1, 1024 * HZ3_MIB), 64 * HZ3_MIB) << "but no more than that";
  EXPECT_EQ(mapped_for(4 * HZ3_MIB, 1, 64 * HZ3_MIB), 4 * HZ3_MIB) << "it has huge pages of its own";
  EXPECT_EQ(mapped_for(2 * HZ3_MIB, 4 * HZ3_MIB, 64 * HZ3_MIB), 2 * HZ3_MIB) << "the next such block does not lie beside it";
}

TEST_F(Large, ImpossibleSizesAreRefused) {
  for (size_t bytes : {SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 2 + 1, size_t{PTRDIFF_MAX}, size_t{1} << 60}) {
    EXPECT_EQ(hz3_large_alloc(bytes, 1, false), nullptr) << bytes;
    EXPECT_EQ(hz3_large_alloc(bytes, size_t{1} << 62, true), nullptr) << bytes;
  }
  EXPECT_EQ(hz3_large_alloc(1, size_t{1} << 62, false), nullptr);
  char *block = Alloc(HZ3_MIB);
  for (size_t bytes : {SIZE_MAX, SIZE_MAX / 2, size_t{PTRDIFF_MAX}, size_t{1} << 60}) {
    EXPECT_FALSE(Resize(block, bytes));
    EXPECT_EQ(hz3_large_grow(block, bytes), nullptr);
  }
  EXPECT_EQ(hz3_large_usable_bytes(block), HZ3_MIB);
}

TEST_F(Large, OnlyTheStartIsABlock) {
  char *block = Alloc(4 * HZ3_MIB);
  int on_stack;
  for (void *pointer : {static_cast<void *>(block + 1), static_cast<void *>(block + 4096), static_cast<void *>(block + HZ3_MIB),
                        static_cast<void *>(&on_stack), static_cast<void *>(nullptr), reinterpret_cast<void *>(~uintptr_t{0})}) {
    EXPECT_FALSE(Owns(pointer)) << pointer;
    EXPECT_FALSE(hz3_large_free(pointer)) << pointer;
    EXPECT_FALSE(Resize(pointer, HZ3_MIB)) << pointer;
    EXPECT_EQ(hz3_large_grow(pointer, 8 * HZ3_MIB), nullptr) << pointer;
  }
  Free(block);
  EXPECT_FALSE(hz3_large_free(block)) << "freed twice";
  EXPECT_FALSE(Owns(block));
}

TEST_F(Large, ABlockHoldsWhatItsUserMayWrite) {
  char *block = Alloc(HZ3_MIB + 1);
  size_t usable = hz3_large_usable_bytes(block);
  EXPECT_TRUE(hz3_large_holds(block));
  EXPECT_TRUE(hz3_large_holds(block + usable - 1));
  EXPECT_FALSE(hz3_large_holds(block + usable)) << "a page that nobody may use";
}

TEST_F(Large, ABlockBeginsWithoutANote) {
  char *block = Alloc(3 * HZ3_MIB);
  memset(hz3_large_note(block), 1, sizeof(struct hz3_large_note));
  Free(block);
  ASSERT_EQ(Alloc(3 * HZ3_MIB), block);
  // By member: the padding may keep anything.
  EXPECT_EQ(hz3_large_note(block)->asked_bytes, 0u);
  EXPECT_EQ(hz3_large_note(block)->word, 0u);
}

TEST_F(Large, FreeNeighboursMergeAndAreSplitAgain) {
  std::vector<char *> blocks;
  char *whole = Alloc(40 * HZ3_MIB);
  Free(whole);
  size_t mapped = Stats().mapped_bytes;
  for (int i = 0; i < 4; i++) {
    for (size_t mib : {6, 4}) blocks.push_back(Alloc(mib * HZ3_MIB));
  }
  EXPECT_EQ(Stats().mapped_bytes, mapped) << "cut from the range that was there";
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(3));
  for (char *block : blocks) {
    Free(block);
    ExpectRangesAreSound();
  }
  Alloc(40 * HZ3_MIB);
  EXPECT_EQ(Stats().mapped_bytes, mapped) << "merged again";
}

TEST_F(Large, TheSameSizeFindsTheRangeAsItWas) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 32 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  Alloc(32 * HZ3_MIB);  // as much as lives may stay dirty
  std::vector<char *> blocks;
  for (size_t mib : {2, 3, 4, 3, 5}) blocks.push_back(Alloc(mib * HZ3_MIB));
  for (hz3_range *range : hz3_ranges.shelf) ASSERT_EQ(range, nullptr) << "these sizes were not asked for again yet";
  hz3_ranges.size_hits = HZ3_SHELF_HITS;
  for (char *block : blocks) Free(block);
  EXPECT_EQ(std::count(std::begin(hz3_ranges.shelf), std::end(hz3_ranges.shelf), nullptr), 0);
  char *last = Alloc(3 * HZ3_MIB);
  EXPECT_EQ(last, blocks[3]) << "the newest of its size";
  EXPECT_EQ(Alloc(3 * HZ3_MIB, 1, true), blocks[1]);
  ExpectRangesAreSound();
  Alloc(8 * HZ3_MIB);
  for (hz3_range *range : hz3_ranges.shelf) EXPECT_EQ(range, nullptr) << "another size merges them";
  Free(last);
  for (hz3_range *range : hz3_ranges.shelf) EXPECT_EQ(range, nullptr) << "and none is shelved until sizes come again";
}

TEST_F(Large, RangesAreShelvedWhileSizesComeAgain) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 32 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  auto shelved = [] { return HZ3_SHELF_RANGES - std::count(std::begin(hz3_ranges.shelf), std::end(hz3_ranges.shelf), nullptr); };
  Alloc(32 * HZ3_MIB);
  for (unsigned i = 0; i <= HZ3_SHELF_HITS; i++) {
    EXPECT_EQ(shelved(), 0);
    char *first = Alloc(2 * HZ3_MIB), *second = Alloc(5 * HZ3_MIB);
    Free(first);
    Free(second);
    if (i * 2 >= HZ3_SHELF_HITS) break;
  }
  EXPECT_EQ(shelved(), 2);
}

TEST_F(Large, AShelvedRangeIsTakenOnlyIfAligned) {
  Alloc(32 * HZ3_MIB);
  for (int i = 0; i < 4; i++) {
    char *block = Alloc(3 * HZ3_MIB);
    auto address = reinterpret_cast<uintptr_t>(block);
    hz3_ranges.size_hits = HZ3_SHELF_HITS;
    Free(block);
    EXPECT_NE(Alloc(3 * HZ3_MIB, 2 * (address & -address)), block);
    EXPECT_NE(Alloc(3 * HZ3_MIB), nullptr);
  }
}

TEST_F(Large, WhatIsShelvedIsGivenBackLikeTheRest) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 32 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  Alloc(32 * HZ3_MIB);  // as much may stay
  char *block = Alloc(4 * HZ3_MIB);
  memset(block, 1, 4 * HZ3_MIB);
  hz3_ranges.size_hits = HZ3_SHELF_HITS;
  Free(block);
  ASSERT_EQ(Stats().dirty_free_bytes, 4 * HZ3_MIB);
  EXPECT_TRUE(hz3_large_trim(false));
  EXPECT_EQ(Stats().dirty_free_bytes, 0u);
  EXPECT_EQ(ResidentBytes(block, 4 * HZ3_MIB), 0u);
}

// Shelved ranges hold what their blocks wrote, and calloc must clear it: also what only an earlier, bigger use wrote.
TEST_F(Large, ShelvedMemoryIsCleared) {
  Alloc(32 * HZ3_MIB);
  char *block = Alloc(4 * HZ3_MIB);
  memset(block, 1, 4 * HZ3_MIB);
  for (size_t bytes : {size_t{4 * HZ3_MIB}, 4 * HZ3_MIB - HZ3_SLICE_BYTES / 2}) {
    hz3_ranges.size_hits = HZ3_SHELF_HITS;
    Free(block);
    block = Alloc(bytes);
  }
  hz3_ranges.size_hits = HZ3_SHELF_HITS;
  Free(block);
  ExpectRangesAreSound();
  EXPECT_TRUE(IsFilled(Alloc(4 * HZ3_MIB, 1, true), 4 * HZ3_MIB, 0));
}

// What a thread keeps, used as the slow paths do.
class LargeCache : public Large {
 protected:
  void SetUp() override {
    if (!HZ3_LARGE_CACHE || HZ3_CHECKED) GTEST_SKIP() << "nothing is kept";
    Large::SetUp();
  }
  static void *Take(hz3_large_cache *cache, size_t bytes, size_t align = 1, bool zero = false) {
    void *block = hz3_large_cache_take(cache, bytes, align, zero);
    return block != nullptr ? block : hz3_large_alloc(bytes, align, zero);
  }
  static bool Put(hz3_large_cache *cache, void *block) {
    if (hz3_large_cache_put(cache, block)) return true;
    size_t bytes = hz3_large_free(block);
    EXPECT_NE(bytes, 0u);
    hz3_large_cache_learn(cache, bytes);
    return false;
  }
  static void Teach(hz3_large_cache *cache, const std::vector<size_t> &sizes) {
    for (unsigned i = 0; i < 2 * HZ3_SHELF_HITS; i++) {
      std::vector<void *> blocks;
      for (size_t bytes : sizes) blocks.push_back(Take(cache, bytes));
      for (void *block : blocks) Put(cache, block);
    }
  }
  static size_t Held(const hz3_large_cache &cache) {
    size_t blocks = 0;
    hz3_large_cache_held(&cache, &blocks);
    return blocks;
  }
};

TEST_F(LargeCache, KeepsSizesThatComeAgain) {
  hz3_large_cache cache = {};
  unsigned kept = 0;
  for (unsigned i = 0; i < 2 * HZ3_SHELF_HITS; i++) kept += Put(&cache, Take(&cache, 2 * HZ3_MIB));
  EXPECT_LT(kept, HZ3_SHELF_HITS);
  EXPECT_GT(kept, 0u);
  EXPECT_EQ(Held(cache), 1u);
  hz3_range *range = cache.slots[0].range;
  EXPECT_EQ(range->bytes, 2 * HZ3_MIB);
  EXPECT_EQ(hz3_large_usable_bytes(range->start), 0u) << "what is kept is no block";
  EXPECT_EQ(hz3_large_note(range->start), nullptr);
  EXPECT_FALSE(hz3_large_holds(range->start + 5000));
  EXPECT_FALSE(hz3_large_cache_put(&cache, range->start));
  EXPECT_EQ(hz3_large_free(range->start), 0u);
  char *block = static_cast<char *>(hz3_large_cache_take(&cache, 2 * HZ3_MIB - 50000, 1, false));
  EXPECT_EQ(block, range->start) << "a block of this size would have got as much address space";
  EXPECT_EQ(hz3_large_usable_bytes(block), 2 * HZ3_MIB) << "as much as before";
  EXPECT_EQ(hz3_large_cache_take(&cache, 2 * HZ3_MIB, 1, false), nullptr) << "only one was kept";
  EXPECT_TRUE(hz3_large_cache_put(&cache, block));
  EXPECT_EQ(hz3_large_cache_take(&cache, HZ3_MIB, 1, false), nullptr) << "too small";
  EXPECT_EQ(hz3_large_cache_take(&cache, 2 * HZ3_MIB + 1, 1, false), nullptr) << "too big";
  uintptr_t address = reinterpret_cast<uintptr_t>(block);
  EXPECT_EQ(hz3_large_cache_take(&cache, 2 * HZ3_MIB, 2 * (address & -address), false), nullptr) << "not aligned";
  hz3_large_cache_flush(&cache);
  EXPECT_EQ(Held(cache), 0u);
}

TEST_F(LargeCache, ABlockMayBeBiggerThanTheOneKept) {
  hz3_large_cache cache = {};
  Teach(&cache, {2 * HZ3_MIB - 50000});
  EXPECT_EQ(Held(cache), 1u);
  size_t usable = cache.slots[0].range->touched_bytes;
  char *block = static_cast<char *>(hz3_large_cache_take(&cache, usable + 1, 1, false));
  EXPECT_GT(hz3_large_usable_bytes(block), usable) << "by a byte";
  EXPECT_TRUE(hz3_large_cache_put(&cache, block));
  block = static_cast<char *>(hz3_large_cache_take(&cache, 2 * HZ3_MIB, 1, false));
  EXPECT_EQ(hz3_large_usable_bytes(block), 2 * HZ3_MIB);
  memset(block, 1, 2 * HZ3_MIB);
  EXPECT_TRUE(hz3_large_cache_put(&cache, block));
  block = static_cast<char *>(hz3_large_cache_take(&cache, 2 * HZ3_MIB - 50000, 1, true));
  EXPECT_TRUE(IsFilled(block, 2 * HZ3_MIB - 50000, 0));
  EXPECT_TRUE(hz3_large_cache_put(&cache, block));
  hz3_large_cache_flush(&cache);
}

TEST_F(LargeCache, KeepsSeveralAtOnce) {
  hz3_large_cache cache = {};
  Teach(&cache, {2 * HZ3_MIB, 3 * HZ3_MIB, 2 * HZ3_MIB});
  EXPECT_EQ(Held(cache), 3u);
  size_t blocks = 0;
  EXPECT_EQ(hz3_large_cache_held(&cache, &blocks), 7 * HZ3_MIB);
  hz3_large_cache_flush(&cache);
}

TEST_F(LargeCache, AnotherSizeEndsTheKeeping) {
  hz3_large_cache cache = {};
  Teach(&cache, {2 * HZ3_MIB, 3 * HZ3_MIB});
  EXPECT_EQ(Held(cache), 2u);
  EXPECT_FALSE(Put(&cache, Take(&cache, 9 * HZ3_MIB)));
  EXPECT_EQ(Held(cache), 0u);
  EXPECT_FALSE(Put(&cache, Take(&cache, 2 * HZ3_MIB)));
}

// In the place of a bigger one it would be taken for as big.
TEST_F(LargeCache, EachSizeHasItsOwnPlaces) {
  hz3_large_cache cache = {};
  Teach(&cache, {2 * HZ3_MIB, 3 * HZ3_MIB});
  void *big = hz3_large_cache_take(&cache, 3 * HZ3_MIB, 1, false), *small = Alloc(2 * HZ3_MIB);
  ASSERT_NE(big, nullptr);
  EXPECT_FALSE(hz3_large_cache_put(&cache, small)) << "there is one already";
  EXPECT_TRUE(hz3_large_cache_put(&cache, big));
  hz3_large_cache_flush(&cache);
}

TEST_F(LargeCache, AfterAFlushSizesHaveToComeAgain) {
  hz3_large_cache cache = {};
  Teach(&cache, {2 * HZ3_MIB});
  hz3_large_cache_flush(&cache);
  for (int i = 0; i < HZ3_SHELF_HITS / 2; i++) EXPECT_FALSE(Put(&cache, Take(&cache, 2 * HZ3_MIB)));
}

TEST_F(LargeCache, WhoOnlyFreesKeepsNothing) {
  hz3_large_cache cache = {};
  for (unsigned i = 0; i < 4 * HZ3_SHELF_HITS; i++) EXPECT_FALSE(Put(&cache, hz3_large_alloc(2 * HZ3_MIB, 1, false)));
  Teach(&cache, {2 * HZ3_MIB});
  EXPECT_EQ(Held(cache), 1u);
  for (unsigned i = 0; i < 4 * HZ3_SHELF_HITS; i++) Put(&cache, hz3_large_alloc(2 * HZ3_MIB, 1, false));
  EXPECT_EQ(Held(cache), 0u) << "and gives up what it kept";
}

TEST_F(LargeCache, WhatIsNotAskedForAgainIsNotKept) {
  hz3_large_cache cache = {};
  for (unsigned i = 0; i < 4 * HZ3_SHELF_HITS; i++) {
    void *block = hz3_large_grow(Take(&cache, 2 * HZ3_MIB), 6 * HZ3_MIB);
    EXPECT_FALSE(Put(&cache, block)) << "all blocks that are freed have one size, those that are asked for another";
  }
}

TEST_F(LargeCache, KeptMemoryIsCleared) {
  hz3_large_cache cache = {};
  Teach(&cache, {4 * HZ3_MIB});
  for (size_t bytes : {size_t{4 * HZ3_MIB}, 4 * HZ3_MIB - HZ3_SLICE_BYTES / 2, size_t{4 * HZ3_MIB}}) {
    void *block = hz3_large_cache_take(&cache, bytes, 1, true);
    ASSERT_NE(block, nullptr);
    EXPECT_TRUE(IsFilled(static_cast<char *>(block), bytes, 0));
    memset(block, 1, bytes);
    EXPECT_TRUE(Put(&cache, block));
  }
  hz3_large_cache_flush(&cache);
  EXPECT_TRUE(IsFilled(Alloc(4 * HZ3_MIB, 1, true), 4 * HZ3_MIB, 0)) << "nor is it forgotten when it leaves";
}

// A fresh block takes the place of the one that was kept: nobody has marked yet what it holds.
TEST_F(LargeCache, WhatAFreshBlockHoldsIsCleared) {
  hz3_large_cache cache = {};
  Teach(&cache, {4 * HZ3_MIB});
  Alloc(8 * HZ3_MIB);  // nothing else is free
  void *kept = hz3_large_cache_take(&cache, 4 * HZ3_MIB, 1, false), *fresh = hz3_large_alloc(4 * HZ3_MIB, 1, false);
  memset(fresh, 1, 4 * HZ3_MIB);
  ASSERT_TRUE(hz3_large_cache_put(&cache, fresh));
  ASSERT_EQ(hz3_large_cache_take(&cache, 4 * HZ3_MIB, 1, true), fresh);
  EXPECT_TRUE(IsFilled(static_cast<char *>(fresh), 4 * HZ3_MIB, 0));
  for (void *block : {kept, fresh}) Put(&cache, block);
  hz3_large_cache_flush(&cache);
}

TEST_F(LargeCache, AllThreadsTogetherKeepALimitedAmount) {
  std::vector<hz3_large_cache> caches(20);
  for (int round = 0; round < 2; round++) {
    size_t sum = 0, blocks = 0;
    for (hz3_large_cache &cache : caches) {
      Teach(&cache, {5 * HZ3_MIB, 5 * HZ3_MIB});
      sum += hz3_large_cache_held(&cache, &blocks);
    }
    EXPECT_EQ(sum, 60 * HZ3_MIB) << "of 64; round " << round;
    for (hz3_large_cache &cache : caches) hz3_large_cache_flush(&cache);
  }
}

TEST_F(Large, TightestRangeIsTaken) {
  char *big = Alloc(32 * HZ3_MIB);
  char *wall = Alloc(2 * HZ3_MIB);
  char *small = Alloc(8 * HZ3_MIB);
  Alloc(2 * HZ3_MIB);
  (void)wall;
  Free(big);
  Free(small);
  EXPECT_EQ(Alloc(8 * HZ3_MIB), small);
}

// Of ranges that differ so little that they share a bin, whatever came back last: the tightest, then the lowest.
TEST_F(Large, TheTightestRangeOfABinIsTaken) {
  LearnedLimit(512 * HZ3_MIB);
  Free(Alloc(128 * HZ3_MIB));  // one range, from which all are cut in this order
  char *wide = Alloc(34 * HZ3_MIB);
  Alloc(2 * HZ3_MIB);
  char *low = Alloc(32 * HZ3_MIB);
  Alloc(2 * HZ3_MIB);
  char *high = Alloc(32 * HZ3_MIB);
  Alloc(2 * HZ3_MIB);
  ASSERT_TRUE(wide < low && low < high);
  for (char *block : {low, high, wide}) Free(block);
  for (char *block : {low, high, wide}) EXPECT_EQ(Alloc(32 * HZ3_MIB), block);
}

// What its last block never touched does not become resident; what is resident is not given back for that.
TEST_F(Large, ZeroedMemoryIsAsResidentAsItWas) {
  constexpr size_t kBlock = 8 * HZ3_MIB;
  const size_t page = hz3_os_page_bytes();
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  hz3_ranges.retention.limit_bytes = 2 * kBlock;
  hz3_ranges.retention.known_low_bytes = 0;
  void *absent = hz3_os_map(nullptr, kBlock);
  for (int i = 0; i < 16; i++) hz3_os_clear(absent, kBlock);  // it looks again, whatever was cleared before
  hz3_os_unmap(absent, kBlock);
  struct {
    size_t touched;
    bool is_locked;
  } const kUses[] = {{page, false}, {kBlock / 9, false}, {kBlock / 7, false}, {page, true}};
  for (auto [touched, is_locked] : kUses) {
    char *block = Alloc(kBlock);
    ASSERT_EQ(madvise(block, kBlock, MADV_NOHUGEPAGE), 0);
    ASSERT_EQ(madvise(block, kBlock, MADV_DONTNEED), 0);
    memset(block, 1, touched);
    is_locked = is_locked && syscall(SYS_mlock, block, page) == 0;  // not by a sanitizer, which does nothing
    Free(block);
    ASSERT_EQ(Alloc(kBlock, 1, true), block);
    EXPECT_EQ(ResidentBytes(block, kBlock), hz3_round_up(touched, page)) << touched;
    EXPECT_TRUE(IsFilled(block, kBlock, 0));
    syscall(SYS_munlock, block, page);
    Free(block);
    hz3_large_trim(true);
  }
}

TEST_F(Large, ZeroedMeansZeroAfterAnyUse) {
  char *block = Alloc(8 * HZ3_MIB, 1, true);
  EXPECT_TRUE(IsFilled(block, 8 * HZ3_MIB, 0));
  memset(block, 0xff, 8 * HZ3_MIB);
  Free(block);
  char *again = Alloc(8 * HZ3_MIB, 1, true);
  EXPECT_TRUE(IsFilled(again, 8 * HZ3_MIB, 0));
  memset(again, 0xff, 8 * HZ3_MIB);
  Free(again);
  // Half dirty, half fresh.
  char *wide = Alloc(24 * HZ3_MIB, 1, true);
  EXPECT_TRUE(IsFilled(wide, 24 * HZ3_MIB, 0));
}

// Zeroing a clean block must not even touch it: its pages stay unused, but for the one that tells what a huge page costs.
TEST_F(Large, CleanMemoryIsNotClearedAgain) {
  char *block = Alloc(256 * HZ3_MIB, 1, true);
  EXPECT_LE(ResidentBytes(block, 256 * HZ3_MIB), HZ3_HUGE_PAGE_BYTES);
}

TEST_F(Large, ShrinksInPlaceAndGivesTheRestBack) {
  char *block = Alloc(32 * HZ3_MIB);
  memset(block, 7, 32 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, 4 * HZ3_MIB));
  EXPECT_EQ(hz3_large_usable_bytes(block), 4 * HZ3_MIB);
  EXPECT_TRUE(IsFilled(block, 4 * HZ3_MIB, 7));
  ExpectRangesAreSound();
  char *rest = Alloc(16 * HZ3_MIB, 1, true);
  EXPECT_TRUE(IsFilled(rest, 16 * HZ3_MIB, 0)) << "what the first block wrote is still there";
  EXPECT_TRUE(IsFilled(block, 4 * HZ3_MIB, 7));
}

TEST_F(Large, MuchIsGivenBackThoughMoreThanHalfStays) {
  char *block = Alloc(320 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, 260 * HZ3_MIB));
  EXPECT_EQ(hz3_large_usable_bytes(block), 320 * HZ3_MIB) << "that little stays with the block";
  memset(block + 250 * HZ3_MIB, 7, 2 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, 200 * HZ3_MIB));
  EXPECT_EQ(hz3_large_usable_bytes(block), 200 * HZ3_MIB);
  hz3_large_trim(false);
  ExpectRangesAreSound();
  EXPECT_FALSE(IsMapped(block + 250 * HZ3_MIB) && ResidentBytes(block + 250 * HZ3_MIB, 2 * HZ3_MIB) > 0);
}

// Places of big blocks differ by big steps: where both sizes have the same one, nothing is there to give back.
TEST_F(Large, ABlockInTheSamePlaceLosesNothing) {
  const size_t kUsable = 2048 * HZ3_MIB + hz3_os_page_bytes(), kBefore = kUsable + 64 * HZ3_MIB;
  char *block = static_cast<char *>(hz3_large_alloc(kBefore, 1, false));
  if (block == nullptr) GTEST_SKIP() << "there is too little memory";
  live_[block] = kBefore;
  size_t mapped = Stats().mapped_bytes;
  ASSERT_EQ(Stats().live_bytes, 2176 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, kUsable));
  EXPECT_EQ(hz3_large_usable_bytes(block), kBefore);
  EXPECT_EQ(Stats().live_bytes, 2176 * HZ3_MIB);
  EXPECT_EQ(Stats().mapped_bytes, mapped);
}

TEST_F(Large, GrowsInPlaceIntoAFreeNeighbour) {
  char *whole = Alloc(32 * HZ3_MIB);
  Free(whole);
  char *block = Alloc(4 * HZ3_MIB);
  ASSERT_EQ(block, whole);
  memset(block, 7, 4 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, 16 * HZ3_MIB));
  EXPECT_EQ(hz3_large_usable_bytes(block), 16 * HZ3_MIB);
  memset(block + 4 * HZ3_MIB, 8, 12 * HZ3_MIB);
  EXPECT_TRUE(IsFilled(block, 4 * HZ3_MIB, 7));
  char *wall = Alloc(8 * HZ3_MIB);
  EXPECT_GE(wall, block + 16 * HZ3_MIB);
  EXPECT_FALSE(Resize(block, 24 * HZ3_MIB)) << "the neighbour is in use";
  EXPECT_EQ(hz3_large_usable_bytes(block), 16 * HZ3_MIB);
  ExpectRangesAreSound();
}

// One that waits on the shelf is as free as others.
TEST_F(Large, GrowsInPlaceIntoAShelvedNeighbour) {
  Free(Alloc(40 * HZ3_MIB));  // one range, from which both are cut
  char *block = Alloc(4 * HZ3_MIB), *neighbour = Alloc(4 * HZ3_MIB);
  ASSERT_EQ(neighbour, block + 4 * HZ3_MIB);
  Alloc(32 * HZ3_MIB);  // as much may stay, and nothing else is free
  hz3_ranges.size_hits = HZ3_SHELF_HITS;
  Free(neighbour);
  EXPECT_TRUE(Resize(block, 8 * HZ3_MIB));
}

// Shrunk below what was written, then freed: the written part must count as dirty.
TEST_F(Large, WhatASmallerSizeHidesStaysDirty) {
  char *block = Alloc(4 * HZ3_MIB);
  memset(block, 0xff, 4 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, 3 * HZ3_MIB));
  Free(block);
  EXPECT_TRUE(IsFilled(Alloc(4 * HZ3_MIB, 1, true), 4 * HZ3_MIB, 0));
}

// A block known to be dirty as a whole loses its end, which is purged, and grows into it again.
TEST_F(Large, WhatItGrowsIntoIsDirtyOnceItIsWritten) {
  char *block = Alloc(32 * HZ3_MIB);
  for (int round = 0; round < 2; round++) {
    memset(block, 1, 32 * HZ3_MIB);
    Free(block);
    block = Alloc(32 * HZ3_MIB);
  }
  EXPECT_TRUE(Resize(block, 4 * HZ3_MIB));
  hz3_large_trim(false);
  ASSERT_TRUE(Resize(block, 32 * HZ3_MIB));
  memset(block, 1, 32 * HZ3_MIB);
  Free(block);
  EXPECT_TRUE(IsFilled(Alloc(32 * HZ3_MIB, 1, true), 32 * HZ3_MIB, 0));
}

class LargeGrow : public Large, public testing::WithParamInterface<size_t> {};

TEST_P(LargeGrow, KeepsContentsAndFreesTheOldBlock) {
  size_t bytes = GetParam();
  char *block = Alloc(bytes), *wall = Alloc(HZ3_MIB);
  for (size_t i = 0; i < bytes; i++) block[i] = static_cast<char>(i * 7 >> 5);
  char *grown = Grow(block, 3 * bytes);
  EXPECT_NE(grown, block);
  EXPECT_GE(hz3_large_usable_bytes(grown), 3 * bytes);
  for (size_t i = 0; i < bytes; i++) ASSERT_EQ(grown[i], static_cast<char>(i * 7 >> 5)) << i;
  memset(grown + bytes, 1, 2 * bytes);
  EXPECT_FALSE(Owns(block));
  // The old place holds zeroes or is known to be dirty; the new one too, once it is free.
  EXPECT_TRUE(IsFilled(Alloc(bytes, 1, true), bytes, 0));
  Free(grown);
  EXPECT_TRUE(IsFilled(Alloc(3 * bytes, 1, true), 3 * bytes, 0));
  (void)wall;
}

TEST_F(Large, AMovedBlockTakesItsOldPlaceOutOfTheAddressSpace) {
  char *block = Alloc(32 * HZ3_MIB);
  memset(block, 1, 32 * HZ3_MIB);
  char *grown = Grow(block, 64 * HZ3_MIB);
  if (msync(block, 32 * HZ3_MIB, MS_ASYNC) == 0) GTEST_SKIP() << "the kernel cannot move pages and keep the mapping";
  EXPECT_TRUE(IsFilled(grown, 32 * HZ3_MIB, 1));
  EXPECT_LT(Stats().mapped_bytes, 110 * HZ3_MIB) << "half as much again as the new size";
}

// To where there is memory already a block is copied, and leaves its own for the next: moved pages would replace that memory.
TEST_F(Large, ABlockIsCopiedToWhereItsPagesAre) {
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  LearnedLimit(512 * HZ3_MIB);
  char *block = Alloc(32 * HZ3_MIB), *place = Alloc(96 * HZ3_MIB);
  memset(block, 1, 32 * HZ3_MIB);
  memset(place, 2, 96 * HZ3_MIB);
  Free(place);
  EXPECT_EQ(Grow(block, 64 * HZ3_MIB), place);
  EXPECT_TRUE(IsFilled(place, 32 * HZ3_MIB, 1));
  ASSERT_TRUE(IsMapped(block));
  EXPECT_EQ(ResidentBytes(block, 32 * HZ3_MIB), 32 * HZ3_MIB);
  EXPECT_EQ(Stats().dirty_free_bytes, 32 * HZ3_MIB);
}

// Blocks between which others moved away have no neighbours any more: free, they are of no use to bigger ones.
TEST_F(Large, WhatMovedBlocksLeaveBetweenThemLeavesTheAddressSpace) {
  size_t most_live = 0;
  for (size_t bytes = 20 * HZ3_MIB; bytes < 44 * HZ3_MIB; bytes += HZ3_MIB) {
    std::vector<char *> blocks;
    for (int i = 0; i < 8; i++) blocks.push_back(Alloc(bytes));
    for (int i = 0; i < 8; i += 2) blocks[i] = Grow(blocks[i], bytes + HZ3_MIB);
    most_live = std::max(most_live, Stats().live_bytes);
    for (char *block : blocks) Free(block);
  }
  hz3_large_trim(false);
  EXPECT_LE(Stats().mapped_bytes, 2 * most_live + 64 * HZ3_MIB);
}

// But not a mapping of which a part may stay, nor a part of one that has a neighbour in use, on either side.
TEST_F(Large, OnlyWholeMappingsThatAreCleanLeaveTheAddressSpace) {
  if (HZ3_LARGE_CACHE && HZ3_RETAIN_MIN_BYTES >= 8 * HZ3_MIB) {
    Free(Alloc(68 * HZ3_MIB));
    EXPECT_GT(Stats().dirty_free_bytes, 4 * HZ3_MIB);
    EXPECT_EQ(Stats().mapped_bytes, 68 * HZ3_MIB);
    hz3_large_trim(true);
  }
  char *top = Alloc(40 * HZ3_MIB), *middle = Alloc(4 * HZ3_MIB), *bottom = Alloc(40 * HZ3_MIB);
  if (top < bottom) std::swap(top, bottom);  // the kernel maps upwards
  ASSERT_TRUE(middle == bottom + 40 * HZ3_MIB && top == middle + 4 * HZ3_MIB);
  Free(top);
  Free(bottom);
  hz3_large_trim(false);
  EXPECT_EQ(Stats().dirty_free_bytes, 0u);
  EXPECT_EQ(Stats().mapped_bytes, 84 * HZ3_MIB);
}

// What the old place was marked with says nothing of the mapping that comes there next.
TEST_F(Large, WhereABlockMovedAwayFreshMemoryIsClean) {
  char *above = Alloc(4 * HZ3_MIB), *block = Alloc(32 * HZ3_MIB);
  if (above != block + 32 * HZ3_MIB) GTEST_SKIP() << "something else lies between them";
  memset(block, 1, 32 * HZ3_MIB);
  hz3_dirty_mark(block, 32 * HZ3_MIB);  // as if it had been another's before
  Grow(block, 64 * HZ3_MIB);
  if (IsMapped(block)) GTEST_SKIP() << "the kernel cannot move pages and keep the mapping";
  hz3_ranges.lowest = hz3_range_of(above);  // so that the next mapping is tried there
  ASSERT_EQ(Alloc(32 * HZ3_MIB), block);
  EXPECT_EQ(hz3_dirty_count_bytes(block, 32 * HZ3_MIB), 0u);
}

INSTANTIATE_TEST_SUITE_P(Sizes, LargeGrow, testing::Values(4096, HZ3_MIB - 4096, HZ3_MIB + 4096, 5 * HZ3_MIB, 20 * HZ3_MIB + 12288));

// Five blocks, others between them, that have been written and are free: none of them could hold a block of 20 MiB.
class LargeFill : public Large {
 protected:
  static constexpr size_t kHole = 8 * HZ3_MIB, kBlock = 20 * HZ3_MIB, kWitness = 2 * HZ3_MIB;
  static constexpr size_t kTouched = 2 * HZ3_MIB;  // to see what huge pages cost

  void SetUp() override {
    if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 2 * kBlock) GTEST_SKIP() << "too little is retained";
    if (!hz3_os_can_reuse_what_moved()) GTEST_SKIP() << "the kernel cannot move pages and keep the mapping";
    Large::SetUp();
    for (int i = 0; i < 5; i++) {
      holes_.push_back(Alloc(kHole));
      memset(holes_.back(), 7, kHole);
      Alloc(kHole);  // as much as lives may stay dirty
    }
    for (char *hole : holes_) Free(hole);
    ASSERT_EQ(Stats().dirty_free_bytes, 5 * kHole);
  }
  char *Written(size_t bytes) {
    char *block = Alloc(bytes);
    memset(block, 9, bytes);
    return block;
  }
  // Of the last block.
  size_t MovedBytes() const { return dirty_before_ - Stats().dirty_free_bytes; }
  void NoteDirty() { dirty_before_ = Stats().dirty_free_bytes; }

  std::vector<char *> holes_;
  size_t dirty_before_ = 5 * kHole;
};

TEST_F(LargeFill, ABlockGetsThePagesOfRangesThatAreTooSmallForIt) {
  size_t purges = Stats().purges;
  char *block = Alloc(kBlock);
  EXPECT_EQ(MovedBytes(), kBlock);
  EXPECT_EQ(Stats().purges, purges);
  EXPECT_EQ(ResidentBytes(block, kBlock), kBlock - kWitness);
  EXPECT_EQ(std::count(block, block + kBlock, 7), static_cast<ptrdiff_t>(kBlock - kWitness)) << "what the holes held";
  size_t left = 0;
  for (char *hole : holes_) left += ResidentBytes(hole, kHole);
  EXPECT_EQ(left, 5 * kHole - kBlock);
  ExpectRangesAreSound();
}

TEST_F(LargeFill, WherePagesMovedAwayMemoryIsClean) {
  Written(kBlock);
  ptrdiff_t found = 0;
  for (int i = 0; i < 20 && found < 5; i++) {
    char *zero = Alloc(kHole, 1, true);
    found += std::count(holes_.begin(), holes_.end(), zero);
    EXPECT_TRUE(IsFilled(zero, kHole, 0));
    memset(zero, 1, kHole);
  }
  EXPECT_EQ(found, 5);
}

TEST_F(LargeFill, WhatHasMovedIsClearedForWhoWantsZeroes) {
  char *block = Alloc(kBlock);
  Free(block);
  EXPECT_TRUE(IsFilled(Alloc(kBlock, 1, true), kBlock, 0));
}

TEST_F(LargeFill, ABlockOfZeroesIsLeftClean) {
  char *block = Alloc(kBlock, 1, true);
  EXPECT_EQ(MovedBytes(), 0u);
  EXPECT_LE(ResidentBytes(block, kBlock), kTouched);
}

TEST_F(LargeFill, SmallBlocksGetNothing) {
  while (Stats().dirty_free_bytes == dirty_before_) Alloc(3 * HZ3_MIB);  // also in the holes, two of them in each
  EXPECT_EQ(MovedBytes(), 3 * HZ3_MIB);
}

// While the witness, which is amid the first block, has no memory.
TEST_F(LargeFill, ProgramsThatDoNotWriteTheirBlocksGetNothing) {
  char *first = Alloc(kBlock);
  NoteDirty();
  Alloc(kBlock);
  EXPECT_EQ(MovedBytes(), 0u);
  memset(first, 1, HZ3_MIB);
  Alloc(kBlock);
  EXPECT_EQ(MovedBytes(), 0u) << "its head says nothing";
  memset(first, 1, kBlock);
  Alloc(kBlock);
  EXPECT_EQ(MovedBytes(), dirty_before_);
}

TEST_F(LargeFill, AnotherWitnessIsAskedAfterAWhile) {
  Alloc(kBlock);
  NoteDirty();
  int refused = 0;
  for (; MovedBytes() == 0 && refused < 1000; refused++) Alloc(kBlock);
  EXPECT_EQ(refused, 64);
}

TEST_F(LargeFill, OneBlockInSixteenHasAWitness) {
  const size_t kBytes = 10 * HZ3_MIB;
  hz3_ranges.witness.fills = 15;
  EXPECT_EQ(ResidentBytes(Alloc(kBytes), kBytes), kBytes);
  EXPECT_EQ(ResidentBytes(Alloc(kBytes), kBytes), kBytes - kWitness);
}

TEST_F(LargeFill, WhatIsKeptNeedNotMakeWay) {
  LearnedLimit(512 * HZ3_MIB);
  Free(Written(100 * HZ3_MIB));
  NoteDirty();
  char *block = Alloc(200 * HZ3_MIB);
  EXPECT_EQ(MovedBytes(), dirty_before_);
  EXPECT_EQ(ResidentBytes(block, 200 * HZ3_MIB), dirty_before_);
}

TEST_F(LargeFill, NotWhereSoMuchIsMappedThatMappingsMightRunOut) {
  hz3_ranges.mapped_bytes += 17 * HZ3_KIB * HZ3_MIB;  // as if
  char *block = Alloc(kBlock);
  hz3_ranges.mapped_bytes -= 17 * HZ3_KIB * HZ3_MIB;
  EXPECT_LE(ResidentBytes(block, kBlock), kTouched);
}

TEST_F(Large, PurgeGivesResidentMemoryBack) {
  char *block = Alloc(48 * HZ3_MIB);
  memset(block, 1, 48 * HZ3_MIB);
  EXPECT_EQ(ResidentBytes(block, 48 * HZ3_MIB), 48 * HZ3_MIB);
  Free(block);
  hz3_large_trim(false);
  EXPECT_EQ(Stats().dirty_free_bytes, 0u);
  EXPECT_EQ(ResidentBytes(block, 48 * HZ3_MIB), 0u);
  EXPECT_FALSE(hz3_large_trim(false)) << "nothing is left to give";
}

// What the user has locked in a block that is free now stays, and nothing else.
TEST_F(Large, LockedMemoryKeepsNothingElse) {
  const size_t kBytes = 7 * HZ3_MIB;
  std::vector<char *> blocks;
  for (int i = 0; i < 6; i++) blocks.push_back(Alloc(kBytes));  // fewer than would leave the address space together
  for (char *block : blocks) memset(block, 1, kBytes);
  char *locked = blocks[3] + 2 * HZ3_MIB;
  if (syscall(SYS_mlock, locked, hz3_os_page_bytes()) != 0) GTEST_SKIP() << "no memory may be locked here";
  for (char *block : blocks) Free(block);
  hz3_large_trim(false);
  EXPECT_EQ(Stats().dirty_free_bytes, 0u);
  for (char *block : blocks) EXPECT_LE(ResidentBytes(block, kBytes), block == blocks[3] ? HZ3_MIB : 0);
  EXPECT_EQ(ResidentBytes(locked, hz3_os_page_bytes()), hz3_os_page_bytes());
  EXPECT_FALSE(hz3_large_trim(false)) << "it is not tried again";
  ExpectRangesAreSound();
  // Whoever gets it next has zeroes, and then it counts again.
  syscall(SYS_munlock, locked, hz3_os_page_bytes());
  char *block = Alloc(Stats().mapped_bytes / 4 * 3, 1, true);
  EXPECT_TRUE(block <= locked && locked < block + hz3_large_usable_bytes(block));
  EXPECT_TRUE(IsFilled(block, hz3_large_usable_bytes(block), 0));
  Free(block);
  hz3_large_trim(false);
  EXPECT_EQ(ResidentBytes(blocks[3], kBytes), 0u);
}

// What the kernel refused to take does not count, until it is written again: who had locked it may not have the next time.
TEST_F(Large, RefusedMemoryCountsOnceItIsUsedAgain) {
  char *block = Alloc(4 * HZ3_MIB), *granule = reinterpret_cast<char *>(hz3_round_up(reinterpret_cast<uintptr_t>(block), HZ3_MIB));
  hz3_dirty_mark(granule, HZ3_MIB);
  hz3_page_map_marks(granule)->refused = UINT16_MAX;
  EXPECT_EQ(hz3_dirty_count_bytes(granule, HZ3_MIB), 0u);
  EXPECT_TRUE(hz3_dirty_test(granule)) << "calloc clears it all the same";
  hz3_dirty_mark(granule, HZ3_MIB);
  EXPECT_EQ(hz3_dirty_count_bytes(granule, HZ3_MIB), HZ3_MIB);
}

TEST_F(Large, DirtyFreeMemoryStaysBelowTheLimit) {
  NothingWaits();
  const size_t kLimit = HZ3_LARGE_CACHE ? HZ3_RETAIN_MIN_BYTES : 0;
  std::vector<char *> blocks;
  for (size_t bytes = 0; bytes < kLimit + 16 * HZ3_MIB; bytes += 2 * HZ3_MIB) blocks.push_back(Alloc(2 * HZ3_MIB));
  for (char *block : blocks) memset(block, 1, 2 * HZ3_MIB);
  size_t purges = Stats().purges;
  for (char *block : blocks) {
    Free(block);
    EXPECT_LE(Stats().dirty_free_bytes, std::max(hz3_ranges.retention.limit_bytes, Stats().live_bytes));
  }
  EXPECT_GT(Stats().purges, purges);
}

TEST_F(Large, WhatExceedsTheLimitWaitsForAMoment) {
  const size_t kBlock = 2 * HZ3_MIB, kBytes = HZ3_RETAIN_MIN_BYTES * 4;
  if (HZ3_RETAIN_MIN_BYTES < 4 * kBlock) GTEST_SKIP() << "too little is retained";
  std::vector<char *> blocks;
  for (size_t bytes = 0; bytes < kBytes; bytes += kBlock) blocks.push_back(Alloc(kBlock));
  char *last = Alloc(kBlock);
  for (char *block : blocks) {
    hz3_ranges.retention.excess_since_ms = hz3_os_now_ms();  // however slow the machine is
    Free(block);
  }
  EXPECT_EQ(Stats().dirty_free_bytes, HZ3_LARGE_CACHE ? kBytes : 0);
  hz3_ranges.retention.excess_since_ms -= 1000;
  Free(last);
  EXPECT_LE(Stats().dirty_free_bytes, hz3_ranges.retention.limit_bytes);
}

TEST_F(Large, WhatAShrunkBlockLosesWaitsForAMoment) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MIN_BYTES < 8 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  char *block = Alloc(40 * HZ3_MIB), *last = Alloc(4 * HZ3_MIB);
  EXPECT_TRUE(Resize(block, 4 * HZ3_MIB));
  EXPECT_EQ(Stats().dirty_free_bytes, 36 * HZ3_MIB);
  hz3_ranges.retention.excess_since_ms -= 1000;
  EXPECT_TRUE(Resize(last, HZ3_MIB));
  EXPECT_LE(Stats().dirty_free_bytes, hz3_ranges.retention.limit_bytes);
  EXPECT_GE(Stats().dirty_free_bytes, hz3_ranges.retention.limit_bytes / 2) << "what may stay stays";
}

// A program that holds many big blocks will want others, and none of them has a page fault.
TEST_F(Large, AsMuchAsLivesMayStay) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 40 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  NothingWaits();
  Alloc(40 * HZ3_MIB);
  char *block = Alloc(40 * HZ3_MIB);
  Free(block);
  EXPECT_EQ(Stats().dirty_free_bytes, 40 * HZ3_MIB);
}

TEST_F(Large, NoMoreThanTheMaximumStaysHoweverMuchLives) {
  constexpr size_t kMost = HZ3_RETAIN_MAX_BYTES, kMayWait = 4 * HZ3_RETAIN_MIN_BYTES;
  if (kMost < 64 * HZ3_MIB) GTEST_SKIP() << "smaller than blocks are";
  std::vector<char *> blocks;
  for (int i = 0; i < 4; i++) blocks.push_back(Alloc(kMost / 2));
  for (int i = 0; i < 2; i++) Alloc(kMost);
  for (char *block : blocks) Free(block);
  EXPECT_LE(Stats().dirty_free_bytes, kMost + kMayWait);
}

// Three quarters of the limit stay, but of blocks of one size whole ones: a part would lie idle beside the next.
TEST_F(Large, PurgeKeepsWholeBlocks) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 40 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  Alloc(40 * HZ3_MIB);  // which makes the limit
  std::vector<char *> blocks;
  for (int i = 0; i < 6; i++) blocks.push_back(Alloc(8 * HZ3_MIB));
  NothingWaits();
  for (char *block : blocks) Free(block);
  EXPECT_EQ(Stats().dirty_free_bytes, 24 * HZ3_MIB) << "of 30";
}

TEST_F(Large, PurgeStopsAtTheLimit) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MIN_BYTES < 4 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  char *block = Alloc(64 * HZ3_MIB - HZ3_SLICE_BYTES);
  memset(block, 1, 64 * HZ3_MIB - HZ3_SLICE_BYTES);
  Free(block);
  EXPECT_LE(Stats().dirty_free_bytes, hz3_ranges.retention.limit_bytes);
  EXPECT_GE(Stats().dirty_free_bytes, hz3_ranges.retention.limit_bytes / 2) << "one range is not all or nothing";
  ExpectRangesAreSound();
}

TEST_F(Large, PurgeSparesWhatIsTakenNext) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MIN_BYTES < 4 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  char *block = Alloc(64 * HZ3_MIB - HZ3_SLICE_BYTES);
  memset(block, 1, 64 * HZ3_MIB - HZ3_SLICE_BYTES);
  Free(block);
  size_t purges = Stats().purges;
  for (int i = 0; i < 4; i++) {
    block = Alloc(4 * HZ3_MIB);
    EXPECT_EQ(hz3_dirty_count_bytes(block, 4 * HZ3_MIB), 4 * HZ3_MIB) << "no page fault for the next block";
    Free(block);
  }
  EXPECT_EQ(Stats().purges, purges);
}

TEST_F(Large, TicksGiveHalfOfWhatNobodyNeeded) {
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  char *block = Alloc(2 * HZ3_MIB);
  memset(block, 1, 2 * HZ3_MIB);
  hz3_large_trim(false);
  hz3_large_purge_idle();
  Free(block);
  size_t dirty = Stats().dirty_free_bytes;
  hz3_large_purge_idle();
  EXPECT_EQ(Stats().dirty_free_bytes, dirty) << "it has only just come";
  hz3_large_purge_idle();
  EXPECT_LE(Stats().dirty_free_bytes, dirty / 2);
  for (int i = 0; i < 10; i++) hz3_large_purge_idle();
  EXPECT_LE(Stats().dirty_free_bytes, HZ3_MIB);
}

TEST_F(Large, WhatWasInUseSinceTheLastTickIsNotIdle) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 4 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  Alloc(4 * HZ3_MIB);  // as much as lives may stay dirty, up to the lane's maximum
  Free(Alloc(2 * HZ3_MIB));
  hz3_large_purge_idle();
  size_t dirty = Stats().dirty_free_bytes;
  ASSERT_GT(dirty, 0u);
  Free(Alloc(2 * HZ3_MIB));
  hz3_large_purge_idle();
  EXPECT_GE(Stats().dirty_free_bytes, dirty);
  hz3_large_purge_idle();
  EXPECT_LT(Stats().dirty_free_bytes, dirty);
}

TEST_F(Large, WhatABlockGrewIntoWasNotIdle) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 16 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  char *block = Alloc(16 * HZ3_MIB);
  memset(block, 1, 16 * HZ3_MIB);
  Alloc(32 * HZ3_MIB);  // as much may stay
  Free(block);
  ASSERT_EQ(Alloc(4 * HZ3_MIB), block);
  hz3_ranges.dirty_low_water = hz3_ranges.dirty_bytes;  // as after a tick: 12 MiB behind the block
  ASSERT_TRUE(Resize(block, 12 * HZ3_MIB));
  hz3_large_purge_idle();
  EXPECT_EQ(Stats().dirty_free_bytes, 2 * HZ3_MIB) << "half of the four that were not needed";
}

TEST_F(Large, WantedAgainAfterPurgeRaisesTheLimit) {
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  Free(Alloc(2 * HZ3_MIB));
  hz3_large_trim(false);
  Alloc(2 * HZ3_MIB);
  EXPECT_EQ(hz3_ranges.retention.limit_bytes, std::min<size_t>(HZ3_RETAIN_MIN_BYTES + 2 * HZ3_MIB, HZ3_RETAIN_MAX_BYTES));
}

// Part by part, until all of what was purged is in use again.
TEST_F(Large, EachPartOfAPurgedRangeThatIsWantedAgainRaisesTheLimit) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 32 * HZ3_MIB) GTEST_SKIP() << "the limit cannot rise so far";
  Free(Alloc(12 * HZ3_MIB));
  hz3_large_trim(false);
  ASSERT_EQ(Stats().mapped_bytes, 12 * HZ3_MIB);
  for (size_t i = 1; i <= 3; i++) {
    Alloc(4 * HZ3_MIB);
    EXPECT_EQ(hz3_ranges.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + i * 4 * HZ3_MIB) << "part " << i;
  }
  EXPECT_EQ(Stats().mapped_bytes, 12 * HZ3_MIB);
}

TEST_F(Large, WhatABlockGrowsIntoInPlaceIsWantedAgain) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 32 * HZ3_MIB) GTEST_SKIP() << "the limit cannot rise so far";
  Free(Alloc(12 * HZ3_MIB));
  hz3_large_trim(false);
  char *block = Alloc(4 * HZ3_MIB);
  for (size_t mib : {8, 12}) {
    ASSERT_TRUE(Resize(block, mib * HZ3_MIB));
    EXPECT_EQ(hz3_ranges.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + mib * HZ3_MIB);
  }
  EXPECT_EQ(Stats().mapped_bytes, 12 * HZ3_MIB);
}

// The limit may have become much lower since.
TEST_F(Large, NoFreePurgesMuchMoreThanItFrees) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 256 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  constexpr size_t kBlock = 20 * HZ3_MIB, kMost = 64 * HZ3_MIB;
  std::vector<char *> blocks;
  for (size_t i = 0; i < 12; i++) blocks.push_back(Alloc(kBlock));
  hz3_ranges.retention.limit_bytes = HZ3_RETAIN_MAX_BYTES;
  hz3_ranges.retention.known_low_bytes = 0;
  for (size_t i = 0; i < 10; i++) Free(blocks[i]);
  size_t dirty = Stats().dirty_free_bytes;
  ASSERT_EQ(dirty, 10 * kBlock) << "all may stay";
  for (size_t i = 10; i < 12; i++) {
    hz3_ranges.retention = HZ3_RETENTION_INIT;
    NothingWaits();
    Free(blocks[i]);
    EXPECT_EQ(Stats().dirty_free_bytes, dirty + kBlock - kMost) << "those after it go on with it";
    dirty = Stats().dirty_free_bytes;
  }
}

// As much as is mapped for a load that needs other memory than it did.
TEST_F(Large, WhatExceedsTheMaximumMakesWayForABlockThatFitsNowhere) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 256 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  constexpr size_t kMax = HZ3_RETAIN_MAX_BYTES, kPart = kMax / 4;
  std::vector<char *> blocks;
  for (int i = 0; i < 7; i++) {
    blocks.push_back(Alloc(kPart));
    Alloc(4 * HZ3_MIB);  // so that they do not merge
  }
  hz3_ranges.retention.limit_bytes = 2 * kMax;
  hz3_ranges.retention.known_low_bytes = 0;
  for (char *block : blocks) Free(block);
  ASSERT_EQ(Stats().dirty_free_bytes, 7 * kPart);
  Alloc(2 * kPart, 1, true);
  EXPECT_EQ(Stats().dirty_free_bytes, 5 * kPart);
  Alloc(2 * kPart, 1, true);
  EXPECT_EQ(Stats().dirty_free_bytes, kMax);
  Alloc(2 * kPart, 1, true);
  EXPECT_EQ(Stats().dirty_free_bytes, kMax) << "that much may stay";
}

// Whichever side was purged when the two became one.
TEST_F(Large, WhatWasPurgedIsRememberedWhenRangesMerge) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 32 * HZ3_MIB) GTEST_SKIP() << "the limit cannot rise so far";
  for (bool is_left : {true, false}) {
    hz3_ranges.retention = HZ3_RETENTION_INIT;
    Free(Alloc(8 * HZ3_MIB));
    char *left = Alloc(4 * HZ3_MIB), *right = Alloc(4 * HZ3_MIB);
    ASSERT_EQ(left + 4 * HZ3_MIB, right);
    Free(is_left ? left : right);
    hz3_large_trim(false);
    Free(is_left ? right : left);
    char *both = Alloc(8 * HZ3_MIB);
    ASSERT_EQ(both, left);
    EXPECT_EQ(hz3_ranges.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + 4 * HZ3_MIB) << "half of it was purged, and is wanted again";
    Free(both);
    hz3_large_trim(true);
  }
}

TEST_F(Large, BigPurgedRangesLeaveTheAddressSpace) {
  char *block = Alloc(128 * HZ3_MIB);
  block[0] = 1;
  Free(block);
  hz3_large_trim(false);
  EXPECT_FALSE(IsMapped(block + 127 * HZ3_MIB));
  EXPECT_LE(Stats().mapped_bytes, hz3_ranges.retention.limit_bytes) << "all but what was retained";
}

// Whoever found no memory tries again only if something was given back.
TEST_F(Large, ATrimThatUnmapsAllAtOnceSaysSo) {
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  LearnedLimit(512 * HZ3_MIB);
  Free(Alloc(128 * HZ3_MIB));
  EXPECT_EQ(Stats().dirty_free_bytes, 128 * HZ3_MIB);
  size_t purges = Stats().purges;
  EXPECT_TRUE(hz3_large_trim(true));
  EXPECT_EQ(Stats().purges, purges + 1);
  EXPECT_EQ(Stats().mapped_bytes, 0u);
  EXPECT_FALSE(hz3_large_trim(true));
}

// A load of one big block that comes and goes: what is kept of it never lies beside the next one.
TEST_F(Large, NoPartOfABigBlockIsKept) {
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  for (size_t i = 0; i < 12; i++) {
    size_t bytes = 200 * HZ3_MIB + i % 3 * 3 * HZ3_MIB;
    char *block = Alloc(bytes);
    for (size_t at = 0; at < bytes; at += HZ3_MIB) block[at] = 1;
    EXPECT_LE(Stats().dirty_free_bytes, HZ3_RETAIN_MIN_BYTES + 8 * HZ3_MIB) << "round " << i;
    Free(block);
  }
}

TEST_F(Large, MappingWhatWasUnmappedAMomentAgoRaisesTheLimit) {
  if (!HZ3_LARGE_CACHE) GTEST_SKIP() << "nothing is retained";
  Free(Alloc(128 * HZ3_MIB));
  hz3_large_trim(true);
  size_t before = hz3_ranges.retention.limit_bytes;
  Alloc(128 * HZ3_MIB);
  EXPECT_GT(hz3_ranges.retention.limit_bytes, before);
}

TEST_F(Large, MappingABiggerBlockThanTheOnesBeforeIsNoRegret) {
  char *block = Alloc(128 * HZ3_MIB);
  for (size_t bytes = 192 * HZ3_MIB; bytes <= 432 * HZ3_MIB; bytes += bytes / 2) {
    Free(block);
    hz3_large_trim(true);
    block = Alloc(bytes);
    EXPECT_EQ(hz3_ranges.retention.limit_bytes, size_t{HZ3_RETAIN_MIN_BYTES}) << bytes;
  }
}

// What a load keeps that swings between many blocks goes before more is mapped for one that even all of it could not hold.
TEST_F(Large, WhatIsKeptMakesWayForABiggerBlock) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 256 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  LearnedLimit(512 * HZ3_MIB);
  std::vector<char *> blocks;
  for (int i = 0; i < 4; i++) blocks.push_back(Alloc(40 * HZ3_MIB));
  hz3_ranges.witness.page = blocks[1] + 20 * HZ3_MIB;  // this program does not write its blocks
  Free(blocks[0]);
  Alloc(60 * HZ3_MIB);
  EXPECT_EQ(Stats().dirty_free_bytes, 40 * HZ3_MIB) << "that little may stay";
  Free(blocks[2]);
  ASSERT_EQ(Stats().dirty_free_bytes, 80 * HZ3_MIB);
  Alloc(60 * HZ3_MIB);
  EXPECT_EQ(Stats().dirty_free_bytes, 80 * HZ3_MIB) << "a smaller block may find it in one piece, some day";
  Alloc(100 * HZ3_MIB);
  EXPECT_LE(Stats().dirty_free_bytes, size_t{HZ3_RETAIN_MIN_BYTES});
}

// It did not go because nobody needed it, so who takes it then has lost nothing that was learned.
TEST_F(Large, WhatMadeWayWasNotPurgedTooEarly) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 256 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  const size_t kLearned = 128 * HZ3_MIB;
  LearnedLimit(kLearned);
  std::vector<char *> blocks;
  for (int i = 0; i < 4; i++) blocks.push_back(Alloc(40 * HZ3_MIB));
  hz3_ranges.witness.page = blocks[1] + 20 * HZ3_MIB;
  for (int i : {0, 2}) Free(blocks[static_cast<size_t>(i)]);
  ASSERT_EQ(Stats().dirty_free_bytes, 80 * HZ3_MIB);
  Alloc(100 * HZ3_MIB);
  ASSERT_LE(Stats().dirty_free_bytes, size_t{HZ3_RETAIN_MIN_BYTES});
  for (int i = 0; i < 2; i++) Alloc(40 * HZ3_MIB);
  EXPECT_EQ(hz3_ranges.retention.limit_bytes, kLearned);
}

TEST_F(Large, TrimUnmapsBetweenLiveBlocks) {
  char *first = Alloc(4 * HZ3_MIB), *middle = Alloc(4 * HZ3_MIB), *last = Alloc(4 * HZ3_MIB);
  memset(first, 1, 4 * HZ3_MIB);
  memset(last, 3, 4 * HZ3_MIB);
  Free(middle);
  EXPECT_TRUE(hz3_large_trim(true));
  EXPECT_FALSE(IsMapped(middle));
  EXPECT_EQ(Stats().mapped_bytes, 8 * HZ3_MIB);
  EXPECT_TRUE(IsFilled(first, 4 * HZ3_MIB, 1));
  EXPECT_TRUE(IsFilled(last, 4 * HZ3_MIB, 3));
}

TEST_F(Large, NothingMergesAcrossAnUnmappedHole) {
  char *first = Alloc(4 * HZ3_MIB), *middle = Alloc(4 * HZ3_MIB), *last = Alloc(4 * HZ3_MIB);
  ASSERT_TRUE(std::max(first, last) - std::min(first, last) == ptrdiff_t{8 * HZ3_MIB}) << "three neighbours";
  Free(middle);
  hz3_large_trim(true);
  Free(first);
  Free(last);
  ExpectRangesAreSound();
  memset(Alloc(8 * HZ3_MIB), 1, 8 * HZ3_MIB);
}

TEST_F(Large, KeepsErrno) {
  errno = 4321;
  char *block = Alloc(4 * HZ3_MIB);
  Resize(block, 2 * HZ3_MIB);
  block = Grow(block, 32 * HZ3_MIB);
  Free(block);
  hz3_large_trim(true);
  EXPECT_EQ(errno, 4321);
}

TEST_F(Large, ForkLocksOutOthers) {
  hz3_large_fork_prepare();
  void *block = nullptr;
  std::thread other([&] { block = hz3_large_alloc(HZ3_MIB, 1, false); });
  hz3_large_fork_release();
  other.join();
  EXPECT_TRUE(hz3_large_free(block));
}

TEST_F(Large, WhatThreadsHadTakenAwayThatAForkCutOffIsNotWaitedFor) {
  auto waits = [] {
    uint64_t shortest = UINT64_MAX;  // of several tries, for this thread may be held up
    for (int i = 0; i < 10; i++) {
      uint64_t start = hz3_os_now_ms();
      hz3_large_trim(true);
      shortest = std::min(shortest, hz3_os_now_ms() - start);
    }
    return shortest >= HZ3_TAKEN_AWAY_MS;
  };
  hz3_ranges.taken_away++;
  EXPECT_TRUE(waits());
  hz3_large_fork_prepare();
  hz3_large_fork_child();
  hz3_large_fork_release();
  EXPECT_FALSE(waits());
  hz3_ranges.taken_away--;
  hz3_large_fork_child();
}

// A block with its own byte in the first and last byte of every slice, which is cheap to write and to check.
struct Marked {
  char *start;
  size_t bytes;
  char mark;
};

template <typename F>
bool ForMarks(char *start, size_t bytes, F f) {
  for (size_t at = 0; at < bytes; at += HZ3_SLICE_BYTES)
    if (!f(start[at]) || !f(start[std::min(at + HZ3_SLICE_BYTES, bytes) - 1])) return false;
  return true;
}

bool HasMarks(const Marked &b) { return ForMarks(b.start, b.bytes, [&](char &c) { return c == b.mark; }); }
void SetMarks(const Marked &b) { ForMarks(b.start, b.bytes, [&](char &c) { return c = b.mark, true; }); }

// One random step over a program's blocks; returns false if contents or zeroes are wrong.
bool RandomStep(std::vector<Marked> *live, std::mt19937 &random, size_t most) {
  auto any_bytes = [&] { return size_t{1} + random() % (random() % 4 == 0 ? 24 * HZ3_MIB : 3 * HZ3_MIB); };
  char mark = static_cast<char>(1 + random() % 255);
  size_t choice = random() % 100, index = live->empty() ? 0 : random() % live->size();
  if (live->empty() || (choice < 45 && live->size() < most)) {
    bool zero = random() % 2 == 0;
    Marked block = {nullptr, any_bytes(), mark};
    size_t align = random() % 4 == 0 ? size_t{1} << random() % 26 : 1;
    block.start = static_cast<char *>(hz3_large_alloc(block.bytes, align, zero));
    if (block.start == nullptr || reinterpret_cast<uintptr_t>(block.start) % align != 0) return false;
    if (zero && !ForMarks(block.start, block.bytes, [](char c) { return c == 0; })) return false;
    SetMarks(block);
    live->push_back(block);
    return true;
  }
  Marked &block = (*live)[index];
  if (!HasMarks(block)) return false;
  if (choice < 80) {
    bool freed = hz3_large_free(block.start);
    block = live->back();
    live->pop_back();
    return freed;
  }
  size_t bytes = any_bytes(), kept = std::min(bytes, block.bytes) / HZ3_SLICE_BYTES * HZ3_SLICE_BYTES;
  Marked old = block;
  if (!Resize(block.start, bytes)) {
    if (bytes <= hz3_large_usable_bytes(block.start)) return false;  // shrinking always works
    char *grown = static_cast<char *>(hz3_large_grow(block.start, bytes));
    if (grown == nullptr) return false;
    block.start = grown;
  }
  if (!HasMarks({block.start, kept, old.mark})) return false;
  block.bytes = bytes;
  block.mark = mark;
  SetMarks(block);
  return true;
}

#if defined(__SANITIZE_THREAD__)
const int kRandomSteps = 600;  // every mapping costs it a hundred times as much
#else
const int kRandomSteps = 4000;
#endif

TEST_F(Large, RandomRunAgainstMarks) {
  std::mt19937 random(7);
  std::vector<Marked> live;
  for (int i = 0; i < kRandomSteps; i++) {
    ASSERT_TRUE(RandomStep(&live, random, 30)) << "step " << i;
    if (i % 200 == 0) {
      ExpectRangesAreSound();
      hz3_large_trim(i % 400 == 0);
      ExpectRangesAreSound();
    }
  }
  for (Marked &block : live) EXPECT_TRUE(HasMarks(block) && hz3_large_free(block.start));
  EXPECT_EQ(hz3_ranges.witness.fills > 0, HZ3_LARGE_CACHE && hz3_os_can_reuse_what_moved()) << "some get pages that moved";
}

TEST_F(Large, RandomRunOnThreads) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; t++) {
    threads.emplace_back([t, &wrong] {
      std::mt19937 random(100 + t);
      std::vector<Marked> live;
      for (int i = 0; i < kRandomSteps / 3; i++) {
        if (!RandomStep(&live, random, 8)) wrong++;
        if (i % 100 == 0) hz3_large_trim(i % 200 == 0);
      }
      for (Marked &block : live)
        if (!HasMarks(block) || !hz3_large_free(block.start)) wrong++;
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their runtimes need address space of their own
[[noreturn]] void RunOutOfAddressSpace() {
  rlimit limit = {size_t{512} << 20, size_t{512} << 20};
  setrlimit(RLIMIT_AS, &limit);
  std::vector<void *> blocks;
  for (void *block; (block = hz3_large_alloc(16 * HZ3_MIB, 1, false)) != nullptr;) blocks.push_back(block);
  bool works = blocks.size() >= 16;
  memset(blocks[0], 5, 16 * HZ3_MIB);
  works = works && hz3_large_grow(blocks[0], 200 * HZ3_MIB) == nullptr;
  works = works && IsFilled(static_cast<char *>(blocks[0]), 16 * HZ3_MIB, 5);
  works = works && !Resize(blocks[0], 200 * HZ3_MIB);
  for (void *block : blocks) works = works && hz3_large_free(block);
  hz3_large_trim(true);
  works = works && Stats().mapped_bytes == 0 && hz3_large_alloc(100 * HZ3_MIB, 1, true) != nullptr;
  _exit(works ? 0 : 1);
}

// Both locks: that of the ranges, and that of whoever maps more.
[[noreturn]] void AllocWhileAForkHoldsTheLocks() {
  hz3_large_fork_prepare();
  HZ3_REQUIRE(hz3_test::WaitsForALock([] { Stats(); }));
  hz3_lock_release_for_fork(&hz3_ranges.lock);
  HZ3_REQUIRE(!hz3_test::WaitsForALock([] { hz3_large_usable_bytes(nullptr); }));
  HZ3_REQUIRE(hz3_test::WaitsForALock([] { hz3_large_alloc(HZ3_MIB, 1, false); }));
  _exit(0);
}

TEST(LargeDeathTest, ForkHoldsEveryLock) { EXPECT_EXIT(AllocWhileAForkHoldsTheLocks(), testing::ExitedWithCode(0), ""); }

TEST(LargeDeathTest, NullWhenAddressSpaceIsUsedUpAndBackAfterwards) {
  EXPECT_EXIT(RunOutOfAddressSpace(), testing::ExitedWithCode(0), "");
}

// Where there is no room to grow on, but for the block itself, its pages move all the same: a copy would need memory for both.
[[noreturn]] void GrowWithoutRoomToGrowOn() {
  const size_t kBytes = 200 * HZ3_MIB;
  char *block = static_cast<char *>(hz3_large_alloc(kBytes, 1, false));
  memset(block, 5, 2 * HZ3_MIB);
  memset(block + 150 * HZ3_MIB, 6, 2 * HZ3_MIB);
  size_t most = hz3_test::AddressSpaceBytes() + kBytes + 40 * HZ3_MIB;
  rlimit limit = {most, most};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  char *grown = static_cast<char *>(hz3_large_grow(block, kBytes + 20 * HZ3_MIB));
  HZ3_REQUIRE(grown != nullptr);
  HZ3_REQUIRE(ResidentBytes(grown, kBytes) <= 16 * HZ3_MIB);
  HZ3_REQUIRE(IsFilled(grown, 2 * HZ3_MIB, 5) && IsFilled(grown + 150 * HZ3_MIB, 2 * HZ3_MIB, 6));
  _exit(0);
}

TEST(LargeDeathTest, GrowsWithoutRoomToGrowOn) { EXPECT_EXIT(GrowWithoutRoomToGrowOn(), testing::ExitedWithCode(0), ""); }

// What would be mapped ahead counts against a limit: where that is refused, the block alone is mapped.
[[noreturn]] void AllocWithoutRoomAhead() {
  HZ3_REQUIRE(hz3_large_alloc(64 * HZ3_MIB, 1, false) != nullptr);  // a quarter of which would be mapped
  size_t most = hz3_test::AddressSpaceBytes() + 12 * HZ3_MIB;
  rlimit limit = {most, most};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  HZ3_REQUIRE(hz3_large_alloc(2 * HZ3_MIB, 1, false) != nullptr);
  HZ3_REQUIRE(Stats().mapped_bytes == 66 * HZ3_MIB);
  _exit(0);
}

TEST(LargeDeathTest, ABlockNeedsNoRoomAhead) { EXPECT_EXIT(AllocWithoutRoomAhead(), testing::ExitedWithCode(0), ""); }

// Where there is room for what the block lacks only, and behind it: it stays, and counts with all that it is now.
[[noreturn]] void GrowWhereItIs() {
  const size_t kBytes = 40 * HZ3_MIB, kMore = 60 * HZ3_MIB;
  char *above, *block = static_cast<char *>(hz3_large_alloc(kBytes, 1, false));
  do {
    above = block;
    block = static_cast<char *>(hz3_large_alloc(kBytes, 1, false));
  } while (above != block + kBytes && block != above + kBytes);  // the first may fill a gap
  if (above < block) std::swap(above, block);                    // the kernel maps upwards
  HZ3_REQUIRE(hz3_large_free(above));
  hz3_large_trim(true);
  const size_t others = Stats().live_bytes - kBytes;
  memset(block, 5, kBytes);
  size_t most = hz3_test::AddressSpaceBytes() + 30 * HZ3_MIB;
  rlimit limit = {most, most};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  HZ3_REQUIRE(hz3_large_grow(block, kMore) == block);
  HZ3_REQUIRE(hz3_large_usable_bytes(block) == kMore && Stats().live_bytes == others + kMore && Stats().mapped_bytes == others + kMore);
  HZ3_REQUIRE(IsFilled(block, kBytes, 5) && IsFilled(block + kBytes, kMore - kBytes, 0));
  memset(block, 6, kMore);
  HZ3_REQUIRE(hz3_large_free(block) == kMore);
  HZ3_REQUIRE(Stats().live_bytes == others);
  ExpectRangesAreSound();
  HZ3_REQUIRE(!testing::Test::HasFailure());
  char *zero = static_cast<char *>(hz3_large_alloc(kMore, 1, true));
  HZ3_REQUIRE(zero != nullptr && IsFilled(zero, kMore, 0));
  _exit(0);
}

// Or would be, if what is free there, of a mapping that never touched the block's, were gone.
[[noreturn]] void GrowWhereOthersWere() {
  const size_t kBytes = 40 * HZ3_MIB, kMore = 60 * HZ3_MIB, kWall = HZ3_HUGE_PAGE_BYTES;
  HZ3_REQUIRE(hz3_large_free(hz3_large_alloc(kBytes, 1, false)));  // the tables are there
  hz3_large_trim(true);
  FillGaps();
  char *above = static_cast<char *>(hz3_large_alloc(kBytes, 1, false)), *wall = above - kWall;
  if (hz3_os_map(wall, kWall) != wall) _exit(hz3_large_alloc(kBytes, 1, false) > above ? 0 : 1);  // the kernel maps upwards
  char *block = static_cast<char *>(hz3_large_alloc(kBytes, 1, false));
  HZ3_REQUIRE(block == wall - kBytes && hz3_os_unmap(wall, kWall) && hz3_large_free(above));
  memset(block, 5, kBytes);
  size_t most = hz3_test::AddressSpaceBytes() + 30 * HZ3_MIB;
  rlimit limit = {most, most};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  HZ3_REQUIRE(hz3_large_grow(block, size_t{1} << 46) == nullptr && Stats().mapped_bytes == 2 * kBytes);  // nothing is given up for that
  HZ3_REQUIRE(hz3_large_grow(block, kMore) == block && Stats().mapped_bytes == kMore);
  HZ3_REQUIRE(IsFilled(block, kBytes, 5) && IsFilled(block + kBytes, kMore - kBytes, 0) && hz3_large_free(block));
  _exit(0);
}

TEST(LargeDeathTest, GrowsWhereItIsIfThereIsRoomForThatOnly) { EXPECT_EXIT(GrowWhereItIs(), testing::ExitedWithCode(0), ""); }

TEST(LargeDeathTest, GrowsWhereItIsOnceWhatIsFreeThereIsGone) { EXPECT_EXIT(GrowWhereOthersWere(), testing::ExitedWithCode(0), ""); }

// Above 16 MiB the pages are to be moved. With more mapped already than may be, that fails after the kernel has unmapped
// the target, which must then be nobody's.
[[noreturn]] void GrowBeyondTheLimit() {
  char *small = static_cast<char *>(hz3_large_alloc(20 * HZ3_MIB, 1, false));
  memset(small, 5, 20 * HZ3_MIB);
  HZ3_REQUIRE(hz3_large_free(hz3_large_alloc(60 * HZ3_MIB, 1, false)));
  hz3_large_trim(false);  // free, clean, and big enough
  size_t before = Stats().mapped_bytes;
  rlimit limit = {1 << 20, 1 << 20};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  HZ3_REQUIRE(hz3_large_grow(small, 36 * HZ3_MIB) == nullptr);
  HZ3_REQUIRE(IsFilled(small, 20 * HZ3_MIB, 5) && hz3_large_usable_bytes(small) == 20 * HZ3_MIB);
  HZ3_REQUIRE(Stats().live_blocks == 1 && Stats().mapped_bytes <= before - 54 * HZ3_MIB);
  ExpectRangesAreSound();
  HZ3_REQUIRE(!testing::Test::HasFailure());
  // What is left is found by nobody else.
  for (void *block; (block = hz3_large_alloc(2 * HZ3_MIB, 1, true)) != nullptr;) memset(block, 6, 2 * HZ3_MIB);
  HZ3_REQUIRE(IsFilled(small, 20 * HZ3_MIB, 5) && hz3_large_free(small));
  _exit(0);
}

TEST(LargeDeathTest, AMoveThatLosesItsTargetKeepsTheBlock) {
  EXPECT_EXIT(GrowBeyondTheLimit(), testing::ExitedWithCode(0), "");
}

// A thread that answers the next call of mremap that moves pages as the kernel does it at worst: the target is unmapped, comes to be
// somebody else's, whom the page map knows, and nothing has moved.
class TargetTaker {
 public:
  explicit TargetTaker(size_t bytes) : bytes_(bytes), listener_(hz3_test::ListenToCall(SYS_mremap)), thread_([this] { Take(); }) {}
  // Once it was called. Further calls fail.
  char *Taken() {
    thread_.join();
    close(listener_);
    return taken_;
  }
  bool IsKept() const { return IsFilled(taken_, bytes_, 9) && hz3_page_map_large_of(taken_) == &entry_; }

 private:
  void Take() {
    while (taken_ == nullptr) {
      hz3_test::HeardCall call(listener_);
      if (call.Argument(3) == 0) continue;  // grows in place, to see where a mapping ends
      taken_ = reinterpret_cast<char *>(call.Argument(4));
      HZ3_REQUIRE(mmap(taken_, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == taken_);
      memset(taken_, 9, bytes_);
      hz3_page_map_set_large(taken_, &entry_);
    }
  }

  size_t bytes_;
  int listener_, entry_ = 0;
  char *taken_ = nullptr;
  std::thread thread_;
};

[[noreturn]] void GrowWhileTheTargetIsTaken() {
  const size_t kBytes = 20 * HZ3_MIB;
  char *block = static_cast<char *>(hz3_large_alloc(kBytes, 1, false));
  memset(block, 5, kBytes);
  TargetTaker taker(kBytes);
  HZ3_REQUIRE(hz3_large_grow(block, 36 * HZ3_MIB) == nullptr);
  HZ3_REQUIRE(taker.Taken() != block && taker.IsKept());
  HZ3_REQUIRE(IsFilled(block, kBytes, 5) && hz3_large_usable_bytes(block) == kBytes);
  HZ3_REQUIRE(Stats().live_blocks == 1);
  ExpectRangesAreSound();
  HZ3_REQUIRE(!testing::Test::HasFailure());
  char *grown = static_cast<char *>(hz3_large_grow(block, 36 * HZ3_MIB));  // by copying
  HZ3_REQUIRE(grown != nullptr && IsFilled(grown, kBytes, 5) && hz3_large_free(grown));
  HZ3_REQUIRE(taker.IsKept());
  _exit(0);
}

TEST(LargeDeathTest, WhoeverTakesTheTargetOfAMoveKeepsIt) {
  EXPECT_EXIT(GrowWhileTheTargetIsTaken(), testing::ExitedWithCode(0), "");
}

// As in LargeFill.
void MakeHoles() {
  if (!hz3_os_can_reuse_what_moved()) _exit(0);
  std::vector<void *> holes;
  for (int i = 0; i < 5; i++) {
    holes.push_back(hz3_large_alloc(8 * HZ3_MIB, 1, false));
    HZ3_REQUIRE(holes.back() != nullptr && hz3_large_alloc(8 * HZ3_MIB, 1, false) != nullptr);
    memset(holes.back(), 7, 8 * HZ3_MIB);
  }
  for (void *hole : holes) HZ3_REQUIRE(hz3_large_free(hole));
  HZ3_REQUIRE(Stats().dirty_free_bytes == 40 * HZ3_MIB);
}

void AllocAndCheck(size_t bytes) {
  size_t blocks = Stats().live_blocks;
  char *block = static_cast<char *>(hz3_large_alloc(bytes, 1, false));
  HZ3_REQUIRE(block != nullptr && hz3_large_usable_bytes(block) == bytes);
  memset(block, 3, bytes);
  HZ3_REQUIRE(Stats().live_blocks == blocks + 1);
  ExpectRangesAreSound();
  HZ3_REQUIRE(!testing::Test::HasFailure());
  HZ3_REQUIRE(hz3_large_free(block));
}

[[noreturn]] void FillWithMovesRefused(uint32_t error) {
  MakeHoles();
  size_t dirty = Stats().dirty_free_bytes;
  hz3_test::RefuseCall(SYS_mremap, 2 * HZ3_MIB, error);
  AllocAndCheck(20 * HZ3_MIB);
  HZ3_REQUIRE(Stats().dirty_free_bytes >= dirty);  // nothing of it is lost, nor anything moved
  AllocAndCheck(20 * HZ3_MIB);
  _exit(0);
}

TEST(LargeDeathTest, ABlockNeedsNoPagesOfOthers) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 40 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  EXPECT_EXIT(FillWithMovesRefused(EPERM), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(FillWithMovesRefused(ENOMEM), testing::ExitedWithCode(0), "") << "the target may be gone";
}

[[noreturn]] void FillWhileTheTargetIsTaken() {
  MakeHoles();
  TargetTaker taker(2 * HZ3_MIB);
  AllocAndCheck(20 * HZ3_MIB);
  char *first_page = taker.Taken();
  HZ3_REQUIRE(taker.IsKept());
  hz3_large_trim(true);  // the second block may have been mapped there
  HZ3_REQUIRE(!IsMapped(first_page + 2 * HZ3_MIB));  // what was left of the first
  _exit(0);
}

TEST(LargeDeathTest, WhoeverTakesAPartOfABlockThatIsFilledKeepsIt) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 40 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  EXPECT_EXIT(FillWhileTheTargetIsTaken(), testing::ExitedWithCode(0), "");
}

// While a tick purges, another thread frees more and more: the tick gives back what was idle when it began, not that too.
[[noreturn]] void TickWhileOthersFree() {
  const size_t kBytes = 4 * HZ3_MIB, kBlocks = 40;
  std::vector<char *> blocks;
  for (size_t i = 0; i < kBlocks; i++) blocks.push_back(static_cast<char *>(hz3_large_alloc(kBytes, 1, false)));
  for (size_t i = 0; i < kBlocks; i += 2) memset(blocks[i], 1, kBytes);  // those between them keep them apart
  hz3_ranges.retention.limit_bytes = HZ3_RETAIN_MAX_BYTES;
  HZ3_REQUIRE(hz3_large_free(blocks[0]) && hz3_large_free(blocks[2]));
  hz3_large_purge_idle();  // now they are what nobody needed since
  size_t dirty = Stats().dirty_free_bytes;
  HZ3_REQUIRE(dirty > 0);
  int listener = hz3_test::ListenToCall(SYS_madvise);
  std::atomic<size_t> asked{0};
  std::thread other([&] {
    for (size_t next = 4;; next += 2) {
      hz3_test::HeardCall call(listener);  // refused: each granule is asked for by itself
      asked += call.Argument(1);
      if (next < kBlocks) HZ3_REQUIRE(hz3_large_free(blocks[next]));
    }
  });
  hz3_large_purge_idle();
  HZ3_REQUIRE(asked > 0 && asked <= dirty);  // half of it, once as a whole and once by granules
  _exit(0);
}

TEST(LargeDeathTest, ATickPurgesWhatWasIdle) {
  if (!HZ3_LARGE_CACHE || HZ3_RETAIN_MAX_BYTES < 256 * HZ3_MIB) GTEST_SKIP() << "too little is retained";
  EXPECT_EXIT(TickWhileOthersFree(), testing::ExitedWithCode(0), "");
}

// Nothing can leave the address space, for there are too many maps.
[[noreturn]] void TrimWithoutUnmapping(bool may_purge) {
  const size_t kBytes = 80 * HZ3_MIB;
  char *block = static_cast<char *>(hz3_large_alloc(kBytes, 1, false));
  memset(block, 5, kBytes);
  hz3_test::RefuseCall(SYS_munmap);
  if (!may_purge) hz3_test::RefuseCall(SYS_madvise);
  size_t before = Stats().mapped_bytes;
  HZ3_REQUIRE(hz3_large_free(block));
  hz3_large_trim(true);
  HZ3_REQUIRE(Stats().mapped_bytes == before && Stats().live_bytes == 0);
  HZ3_REQUIRE(Stats().dirty_free_bytes == 0);  // what was refused does not count, or it would be tried again and again
  HZ3_REQUIRE((ResidentBytes(block, kBytes) == 0) == may_purge);
  ExpectRangesAreSound();
  HZ3_REQUIRE(!testing::Test::HasFailure());
  // The same memory serves the next blocks, and zeroed means zero. (What was refused has no neighbours any more.)
  for (int i = 0; i < 9; i++) {
    char *part = static_cast<char *>(hz3_large_alloc(8 * HZ3_MIB, 1, true));
    HZ3_REQUIRE(part >= block && part + 8 * HZ3_MIB <= block + kBytes && IsFilled(part, 8 * HZ3_MIB, 0));
  }
  HZ3_REQUIRE(Stats().mapped_bytes == before);
  _exit(0);
}

TEST(LargeDeathTest, WhatCannotBeUnmappedIsPurgedAndUsedAgain) {
  EXPECT_EXIT(TrimWithoutUnmapping(true), testing::ExitedWithCode(0), "");
}

TEST(LargeDeathTest, WhatCannotBePurgedIsUsedAgain) {
  EXPECT_EXIT(TrimWithoutUnmapping(false), testing::ExitedWithCode(0), "");
}

// Memory without an entry in the page map would never be found again: it goes back.
[[noreturn]] void AllocWithoutPageMap() {
  const size_t kBytes = 512 * HZ3_MIB;
  void *small = hz3_large_alloc(2 * HZ3_MIB, 1, false);
  HZ3_REQUIRE(small != nullptr && hz3_large_alloc(kBytes, 1, false) != nullptr);
  const size_t before = hz3_test::AddressSpaceBytes(), mapped = Stats().mapped_bytes;
  hz3_test::RefuseCall(SYS_mmap, sizeof(hz3_page_map_leaf));
  size_t more = 0;  // of so many, some lie where only another leaf of the page map could name them
  while (more < 4 * HZ3_PAGE_MAP_LEAF_BYTES && hz3_large_alloc(kBytes, 1, false) != nullptr) more += kBytes;
  HZ3_REQUIRE(more < 4 * HZ3_PAGE_MAP_LEAF_BYTES);
  HZ3_REQUIRE(Stats().mapped_bytes == mapped + more && hz3_test::AddressSpaceBytes() == before + more);
  HZ3_REQUIRE(hz3_large_free(small) && hz3_large_alloc(2 * HZ3_MIB, 1, false) != nullptr);  // where there was something before
  _exit(0);
}

TEST(LargeDeathTest, WithoutAPageMapThereIsNoBlock) { EXPECT_EXIT(AllocWithoutPageMap(), testing::ExitedWithCode(0), ""); }
#endif

}  // namespace
