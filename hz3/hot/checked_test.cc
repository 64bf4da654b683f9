// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the checked lane's layer: what surrounds a block, what is held back, and every way to die. Skipped
//   in the other lanes, where nothing calls it.
#include "hz3/hot/checked.h"

#include <gtest/gtest.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hz3/base/fatal.h"
#include "hz3/base/os.h"
#include "hz3/base/refuse_test.h"
#include "hz3/config.h"
#include "hz3/hot/hot.h"
extern "C" {
#include "hz3/hot/heap.h"
}

namespace {

constexpr hz3_claim kNoClaim = {HZ3_FROM_MALLOC, HZ3_UNSAID, HZ3_UNSAID};
const size_t kSizes[] = {1, 15, 16, 24, 100, 511, 1000, 2048, 3000, 20000, 32768, 300000, HZ3_MEDIUM_MAX - 1, HZ3_MEDIUM_MAX, 5000000};

char *Malloc(size_t bytes) {
  char *volatile block = static_cast<char *>(hz3_checked_malloc(bytes));
  EXPECT_NE(block, nullptr);
  return block;
}

char *Alloc(size_t align, size_t bytes, bool zero = false, hz3_block_origin origin = HZ3_FROM_MALLOC) {
  char *volatile block = static_cast<char *>(hz3_checked_alloc(origin, align, bytes, zero));
  EXPECT_NE(block, nullptr);
  return block;
}

bool IsFilled(const char *memory, size_t bytes, char value) {
  return std::all_of(memory, memory + bytes, [value](char c) { return c == value; });
}

// The whole line that a misuse ends with, as a regular expression.
std::string Line(std::string what) {
  for (size_t at = 0; (at = what.find_first_of("[]", at)) != std::string::npos; at += 2) what.insert(at, "\\");
  return "^hz3: fatal: " + what + ": pointer 0x[0-9a-f]+( in a block of [0-9]+ bytes)?\n$";
}

size_t HeldLarge(size_t *bytes) {
  size_t blocks;
  hz3_checked_get_held_large(&blocks, bytes);
  return blocks;
}

long ResidentPages(void *start, size_t bytes) {
  std::vector<unsigned char> pages(bytes / hz3_os_page_bytes());
  EXPECT_EQ(mincore(start, bytes, pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; });
}

size_t QuarantinedBytes() { return hz3_checked_quarantined_bytes(reinterpret_cast<hz3_heap *>(hz3_heap_base())); }

class Checked : public testing::Test {
 protected:
  void SetUp() override {
    if (!HZ3_CHECKED) GTEST_SKIP() << "for the checked lane";
    Settle();
  }
  void TearDown() override {
    if (HZ3_CHECKED) Settle();
  }
  // All that was freed goes through the last look at it.
  static void Settle() {
    hz3_trim();
    size_t bytes;
    EXPECT_EQ(HeldLarge(&bytes), 0u);
    EXPECT_EQ(bytes, 0u);
    EXPECT_EQ(QuarantinedBytes(), 0u);
    hz3_stats stats;
    hz3_get_stats(&stats);
    EXPECT_EQ(stats.live_bytes, 0u);
  }
};
using CheckedDeathTest = Checked;

TEST_F(Checked, UsableSizeIsWhatWasAskedFor) {
  for (size_t align : {size_t{1}, size_t{16}, size_t{64}, size_t{4096}, size_t{65536}, 4 * HZ3_MIB}) {
    for (size_t bytes : kSizes) {
      char *block = Alloc(align, bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % std::max<size_t>(align, 16), 0u);
      EXPECT_EQ(hz3_checked_usable_size(block), bytes);
      memset(block, 1, bytes);
      hz3_checked_free(block);
    }
  }
  EXPECT_EQ(hz3_checked_usable_size(nullptr), 0u);
  hz3_checked_free(nullptr);
}

TEST_F(Checked, ZeroedBlocksAreZeroAfterAnyUse) {
  for (int round = 0; round < 3; round++) {
    for (size_t align : {size_t{1}, size_t{128}, 4 * HZ3_MIB}) {
      for (size_t bytes : kSizes) {
        for (int i = 0; i < (bytes < 1000 ? 300 : 3); i++) {
          char *block = Alloc(align, bytes, true);
          ASSERT_TRUE(IsFilled(block, bytes, 0)) << bytes << " bytes aligned to " << align;
          memset(block, 0x77, bytes);
          hz3_checked_free(block);
        }
      }
    }
    hz3_trim();
  }
}

TEST_F(Checked, ImpossibleSizesAreRefused) {
  for (size_t bytes : {SIZE_MAX, size_t{PTRDIFF_MAX}, size_t{1} << 60}) {
    errno = 0;
    EXPECT_EQ(hz3_checked_malloc(bytes), nullptr);
    EXPECT_EQ(errno, ENOMEM);
    for (size_t old_bytes : {size_t{0}, size_t{100}, 2 * HZ3_MIB}) {
      char *block = Malloc(old_bytes);
      memset(block, 3, old_bytes);
      errno = 0;
      EXPECT_EQ(hz3_checked_realloc(block, bytes), nullptr);
      EXPECT_EQ(errno, ENOMEM);
      EXPECT_EQ(hz3_checked_usable_size(block), old_bytes);
      EXPECT_TRUE(IsFilled(block, old_bytes, 3));
      hz3_checked_free(block);
    }
  }
}

// From every size to every other: contents, size, and the canary at its new place.
TEST_F(Checked, ReallocKeepsContentsAndMovesTheCanary) {
  const size_t sizes[] = {0, 1, 24, 90, 100, 3000, 3050, 300000, 2 * HZ3_MIB - 10, 2 * HZ3_MIB, 2 * HZ3_MIB + 9000, 40 * HZ3_MIB};
  for (size_t from : sizes) {
    for (size_t to : sizes) {
      if (to == 0) continue;
      char *block = Malloc(from);
      memset(block, 3, from);
      block = static_cast<char *>(hz3_checked_realloc(block, to));
      ASSERT_NE(block, nullptr);
      EXPECT_EQ(hz3_checked_usable_size(block), to);
      EXPECT_TRUE(IsFilled(block, std::min(from, to), 3)) << from << " to " << to;
      memset(block, 4, to);
      hz3_checked_free_as(block, {HZ3_FROM_MALLOC, to, 1});
    }
  }
}

TEST_F(CheckedDeathTest, BytesBehindABlock) {
  const auto write = [](size_t bytes, size_t distance) {
    char *block = Malloc(bytes);
    block[bytes + distance] ^= 1;
    hz3_checked_free(block);
  };
  for (size_t bytes : {1, 15, 16, 24, 100, 511, 1000, 3000, 20000, 2097152 - 5})
    EXPECT_DEATH(write(bytes, 0), Line(HZ3_FATAL_OVERFLOW)) << bytes;
  // Where classes are far apart, further behind it as well.
  for (size_t distance : {1, 8, 15, 24}) EXPECT_DEATH(write(2100, distance), Line(HZ3_FATAL_OVERFLOW)) << distance;
}

TEST_F(CheckedDeathTest, BytesBehindABlockThatWasResized) {
  for (size_t bytes : {95, 105}) {  // in place
    EXPECT_DEATH({
      char *block = static_cast<char *>(hz3_checked_realloc(Malloc(100), bytes));
      block[bytes] ^= 1;
      hz3_checked_realloc(block, 100);
    }, Line(HZ3_FATAL_OVERFLOW));
  }
}

TEST_F(CheckedDeathTest, TheByteBeforeABlock) {
  EXPECT_DEATH({
    char *block;
    do block = Malloc(100);
    while (reinterpret_cast<uintptr_t>(block) % HZ3_SLICE_BYTES == 0);  // nobody is to the left of that
    block[-1] ^= 1;
    hz3_checked_free(block);
  }, Line(HZ3_FATAL_UNDERFLOW));
}

TEST_F(CheckedDeathTest, WriteAfterFreeIsSeenBeforeTheNextUse) {
  for (size_t bytes : {1, 24, 40, 100, 1000, 20000}) {
    size_t whole = hz3_size_classes[hz3_size_class_of(bytes + 1)].bytes;
    for (size_t at : {size_t{0}, std::min<size_t>(31, whole - 9), whole / 2, whole - 9}) {
      EXPECT_DEATH({
        char *block = Malloc(bytes);
        hz3_checked_free(block);
        block[at] ^= 1;
        for (int i = 0; i < 20000; i++) hz3_checked_free(Malloc(bytes));
      }, Line(HZ3_FATAL_USE_AFTER_FREE)) << bytes << " at " << at;
    }
  }
}

TEST_F(CheckedDeathTest, WriteAfterFreeIsSeenWhenTheBlockIsGivenBack) {
  EXPECT_DEATH({
    char *block = Malloc(100);
    hz3_checked_free(block);
    block[0] ^= 1;
    hz3_trim();
  }, Line(HZ3_FATAL_USE_AFTER_FREE));
}

struct Call {
  void (*make)(void *pointer);
  const char *foreign, *interior, *freed;
};
const Call kCalls[] = {
    {[](void *p) { hz3_checked_free(p); }, HZ3_FATAL_INVALID_FREE, HZ3_FATAL_MISALIGNED_FREE, HZ3_FATAL_DOUBLE_FREE},
    {[](void *p) { hz3_checked_realloc(p, 100); }, HZ3_FATAL_INVALID_REALLOC, HZ3_FATAL_MISALIGNED_REALLOC,
     HZ3_FATAL_REALLOC_AFTER_FREE},
    {[](void *p) { hz3_checked_usable_size(p); }, HZ3_FATAL_INVALID_USABLE_SIZE, HZ3_FATAL_MISALIGNED_USABLE_SIZE,
     HZ3_FATAL_USABLE_SIZE_AFTER_FREE},
};

TEST_F(CheckedDeathTest, PointersThatAreNoBlocks) {
  static char object[100];
  for (const Call &call : kCalls) {
    EXPECT_DEATH(call.make(object), Line(call.foreign));
    for (size_t bytes : {100, 20000, 5000000}) {
      char *block = Malloc(bytes);
      for (size_t offset : {size_t{8}, size_t{16}, bytes / 2})
        EXPECT_DEATH(call.make(block + offset), Line(call.interior)) << bytes << " at " << offset;
      hz3_checked_free(block);
    }
    char *nothing = Malloc(0);
    EXPECT_DEATH(call.make(nothing + 1), Line(call.interior));
    EXPECT_DEATH(call.make(nothing + 16), Line(call.foreign)) << "never handed out";
    hz3_checked_free(nothing);
  }
}

TEST_F(CheckedDeathTest, BlocksThatWereFreed) {
  for (const Call &call : kCalls) {
    for (size_t bytes : {0, 1, 100, 20000, 5000000}) {
      char *block = Malloc(bytes);
      hz3_checked_free(block);
      hz3_checked_free(Malloc(bytes));
      EXPECT_DEATH(call.make(block), Line(call.freed)) << bytes;
    }
  }
}

// A thread that has no heap yet holds nothing back, and notices all the same.
TEST_F(CheckedDeathTest, FreedByAThreadThatNeverAllocated) {
  char *block = Malloc(100);
  std::thread([block] { hz3_checked_free(block); }).join();
  EXPECT_DEATH(hz3_checked_free(block), Line(HZ3_FATAL_DOUBLE_FREE));
}

TEST_F(CheckedDeathTest, ClaimsThatDoNotFit) {
  for (size_t bytes : {0, 100, 20000, 5000000}) {
    const auto claim = [bytes](hz3_block_origin origin, size_t align, hz3_claim claim) {
      hz3_checked_free_as(Alloc(align, bytes, false, origin), claim);
    };
    EXPECT_DEATH(claim(HZ3_FROM_NEW, 1, {HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, HZ3_UNSAID}), Line(HZ3_FATAL_WRONG_DELETE));
    EXPECT_DEATH(claim(HZ3_FROM_NEW_ARRAY, 1, {HZ3_FROM_NEW, HZ3_UNSAID, HZ3_UNSAID}), Line(HZ3_FATAL_WRONG_DELETE));
    EXPECT_DEATH(claim(HZ3_FROM_NEW, 1, {HZ3_FROM_NEW, bytes + 1, 1}), Line(HZ3_FATAL_SIZED_DELETE));
    EXPECT_DEATH(claim(HZ3_FROM_MALLOC, 1, {HZ3_FROM_MALLOC, bytes + 1, HZ3_UNSAID}), Line(HZ3_FATAL_SIZED_DELETE));
    EXPECT_DEATH(claim(HZ3_FROM_NEW, 64, {HZ3_FROM_NEW, HZ3_UNSAID, 1}), Line(HZ3_FATAL_ALIGNED_DELETE));
    EXPECT_DEATH(claim(HZ3_FROM_MALLOC, 64, {HZ3_FROM_MALLOC, bytes, 128}), Line(HZ3_FATAL_ALIGNED_DELETE));
    // Legal, also where a program has replaced only one of new and delete.
    claim(HZ3_FROM_NEW, 64, {HZ3_FROM_NEW, bytes, 64});
    claim(HZ3_FROM_NEW_ARRAY, 1, kNoClaim);
    claim(HZ3_FROM_MALLOC, 1, {HZ3_FROM_NEW, HZ3_UNSAID, HZ3_UNSAID});
  }
}

TEST_F(Checked, FreedBlocksWaitForOthers) {
  for (size_t bytes : {24, 1000, 4000}) {
    char *block = Malloc(bytes);
    hz3_checked_free(block);
    for (int i = 0; i < 7; i++) {
      char *other = Malloc(bytes);
      EXPECT_NE(other, block) << bytes;
      hz3_checked_free(other);
    }
  }
  size_t objects[HZ3_CLASS_COUNT] = {};
  hz3_checked_add_quarantined(reinterpret_cast<hz3_heap *>(hz3_heap_base()), objects);
  EXPECT_EQ(objects[hz3_size_class_of(1001)], 8u);
}

TEST_F(Checked, WhatIsHeldBackIsBounded) {
  for (size_t bytes : {24, 1000, 4000, 60000, 300000, 1000000}) {
    for (int i = 0; i < 1000; i++) hz3_checked_free(Malloc(bytes));
    EXPECT_LE(QuarantinedBytes(), HZ3_MIB + HZ3_MEDIUM_MAX) << bytes;
  }
}

// A fork while another thread lets blocks go leaves the child a line whose charge its blocks do not have.
[[noreturn]] void FreeAfterSuchAFork() {
  alarm(30);
  hz3_checked_free(Malloc(100));
  auto *heap = reinterpret_cast<hz3_heap *>(hz3_heap_base());
  heap->held_charge += 4 * HZ3_MIB;
  hz3_checked_free(Malloc(100));
  _exit(heap->held_charge <= HZ3_MIB ? 0 : 1);
}

TEST_F(CheckedDeathTest, AChargeWithoutBlocksIsForgotten) {
  EXPECT_EXIT(FreeAfterSuchAFork(), testing::ExitedWithCode(0), "");
}

TEST_F(Checked, BlocksOfNoBytesHaveAddressesOfTheirOwn) {
  std::vector<char *> blocks;
  for (int i = 0; i < 70000; i++) blocks.push_back(Alloc(1, 0, i % 2 == 0));  // more than have addresses without access
  EXPECT_EQ(std::set<char *>(blocks.begin(), blocks.end()).size(), blocks.size());
  EXPECT_EXIT(*blocks[0] = 1, testing::KilledBySignal(SIGSEGV), "");
  for (char *block : blocks) {
    ASSERT_EQ(hz3_checked_usable_size(block), 0u);
    hz3_checked_free(block);
  }
  // Used again, the one freed longest ago first.
  EXPECT_EQ(Malloc(0), blocks[0]);
  hz3_checked_free(blocks[0]);
}

TEST_F(Checked, ShuffleKeepsWhatIsThere) {
  std::vector<void *> objects(1000), before;
  for (size_t i = 0; i < objects.size(); i++) objects[i] = reinterpret_cast<void *>(16 * (i + 1));
  before = objects;
  hz3_checked_shuffle(objects.data(), objects.size());
  EXPECT_NE(objects, before);
  std::sort(objects.begin(), objects.end());
  EXPECT_EQ(objects, before);
  hz3_checked_shuffle(objects.data(), 1);
  EXPECT_EQ(objects, before);
}

TEST_F(Checked, ThePageBehindALargeBlockFaults) {
  char *block = Malloc(5000000);
  EXPECT_EXIT(block[hz3_round_up(5000000, 4096)] = 1, testing::KilledBySignal(SIGSEGV), "");
  hz3_checked_free(block);
}

TEST_F(Checked, LargeBlocksWaitWithoutAccess) {
  size_t bytes;
  std::vector<char *> blocks;
  for (int i = 0; i < 10; i++) blocks.push_back(Malloc(2 * HZ3_MIB));
  for (char *block : blocks) hz3_checked_free(block);
  EXPECT_EQ(HeldLarge(&bytes), 10u);
  EXPECT_EXIT(*blocks[9] = 1, testing::KilledBySignal(SIGSEGV), "");
  char *big = Malloc(22 * HZ3_MIB - hz3_os_page_bytes()), *bigger = Malloc(40 * HZ3_MIB);  // big with its guard: whole huge pages
  hz3_checked_free(big);
  EXPECT_LE((HeldLarge(&bytes), bytes), 32 * HZ3_MIB);
  memset(bigger, 1, 40 * HZ3_MIB);
  hz3_checked_free(bigger);
  EXPECT_EQ(HeldLarge(&bytes), 1u) << "alone, and its memory has gone";
  EXPECT_EQ(ResidentPages(bigger, 40 * HZ3_MIB), 0);
  EXPECT_TRUE(hz3_checked_empty_large_quarantine());
  EXPECT_FALSE(hz3_checked_empty_large_quarantine());
}

// Not before eight others were freed, as is promised; then with the guard and the contents that a block of its size has.
TEST_F(Checked, LargeBlocksAreUsedAgainInTheirPlace) {
  const size_t kPage = hz3_os_page_bytes(), kBytes = 2 * HZ3_MIB;
  std::vector<char *> blocks;
  for (int i = 0; i < 40; i++) {
    char *block = Malloc(kBytes);
    for (int j = std::max(0, i - 8); j < i; j++) EXPECT_NE(block, blocks[j]) << i;
    if (i > 8) {
      EXPECT_EQ(block, blocks[i - 9]);
    }
    blocks.push_back(block);
    memset(block, 1, kBytes);
    hz3_checked_free(block);
  }
  for (size_t bytes : {kBytes, kBytes - 10, kBytes - 10 * kPage - 10, kBytes + 10}) {
    char *due = blocks[blocks.size() - 9], *block = Alloc(1, bytes, true);
    EXPECT_EQ(block == due, bytes <= kBytes) << bytes;
    EXPECT_EQ(hz3_checked_usable_size(block), bytes);
    EXPECT_TRUE(IsFilled(block, bytes, 0)) << bytes;
    EXPECT_EXIT(block[hz3_round_up(bytes, kPage)] = 1, testing::KilledBySignal(SIGSEGV), "");
    memset(block, 1, bytes);
    blocks.push_back(block);
    hz3_checked_free(block);
    EXPECT_EXIT(*block = 1, testing::KilledBySignal(SIGSEGV), "");
  }
  char *other = Malloc(kBytes - kBytes / 8);
  EXPECT_NE(other, blocks[blocks.size() - 9]) << "too much would be left over";
  hz3_checked_free(other);
}

// Held back or not: what the program has freed does not count as live.
TEST_F(Checked, LargeBlocksThatAreHeldBackAreNotLive) {
  auto live_bytes = [] {
    hz3_stats stats;
    hz3_get_stats(&stats);
    return std::pair(stats.large_blocks, stats.large_bytes);
  };
  const auto before = live_bytes();
  char *block = Malloc(1572864);
  EXPECT_EQ(live_bytes().first, before.first + 1);
  hz3_checked_free(block);
  EXPECT_EQ(live_bytes(), before);
}

// Of blocks that are never used again as they are, so that each goes back to the large box when its time has come.
TEST_F(Checked, WhoFreesNothingButLargeBlocksTicks) {
  hz3_checked_free(Malloc(100));
  const auto *heap = reinterpret_cast<const hz3_heap *>(hz3_heap_base());
  uint64_t start = hz3_os_now_ms();
  while (heap->last_tick_ms <= start) {
    ASSERT_LT(hz3_os_now_ms() - start, 10000u) << "no tick";
    hz3_checked_free(Malloc(15 * HZ3_MIB));
    hz3_checked_free(Malloc(20 * HZ3_MIB));
    usleep(10000);
  }
}

// Too many maps: nothing can be protected, nor given access to again.
[[noreturn]] void WorkWithoutProtection() {
  std::vector<char *> blocks;
  for (int i = 0; i < 20; i++) {
    blocks.push_back(Malloc(2 * HZ3_MIB));
    memset(blocks[i], 1, 2 * HZ3_MIB);
  }
  char *grows = Malloc(2 * HZ3_MIB);
  memset(grows, 3, 2 * HZ3_MIB);
  for (int i = 0; i < 10; i++) hz3_checked_free(blocks[i]);
  hz3_test::RefuseCall(SYS_mprotect);
  size_t bytes;
  HZ3_REQUIRE(HeldLarge(&bytes) == 10);
  hz3_checked_empty_large_quarantine();
  HZ3_REQUIRE(HeldLarge(&bytes) == 10 && bytes >= 20 * HZ3_MIB);  // they wait for their turn,
  for (int i = 0; i < 10; i++) HZ3_REQUIRE(ResidentPages(blocks[i], 2 * HZ3_MIB) == 0);  // without their memory
  for (int i = 10; i < 20; i++) hz3_checked_free(blocks[i]);
  char *fresh = Malloc(2 * HZ3_MIB);  // none of those that are due
  HZ3_REQUIRE(fresh != nullptr && std::find(blocks.begin(), blocks.end(), fresh) == blocks.end());
  memset(fresh, 2, 2 * HZ3_MIB);
  HZ3_REQUIRE(HeldLarge(&bytes) == 20);  // none is lost
  grows = static_cast<char *>(hz3_checked_realloc(grows, 3 * HZ3_MIB));
  HZ3_REQUIRE(grows != nullptr && hz3_checked_usable_size(grows) == 3 * HZ3_MIB && IsFilled(grows, 2 * HZ3_MIB, 3));
  memset(grows, 4, 3 * HZ3_MIB);
  hz3_checked_free(grows);
  char *nothing = Malloc(0);  // not without access, but a block
  HZ3_REQUIRE(nothing != nullptr && hz3_checked_usable_size(nothing) == 0);
  hz3_checked_free(nothing);
  _exit(0);
}

// Threadsafe style starts the program anew: blocks of no bytes have no addresses yet.
TEST_F(CheckedDeathTest, WorksWhereNothingCanBeProtected) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(WorkWithoutProtection(), testing::ExitedWithCode(0), "");
}

// As a signal handler that interrupts a slow path: blocks are ranges of their own, with all that is promised for them.
TEST_F(CheckedDeathTest, InsideASlowPath) {
  std::vector<char *> blocks;
  hz3_checked_free(Malloc(100));
  hz3_heap *heap = hz3_heap_enter();
  for (size_t bytes : {100, 40000}) {
    char *block = Alloc(1, bytes, true), *freed = Malloc(bytes);
    EXPECT_EQ(hz3_checked_usable_size(block), bytes);
    EXPECT_TRUE(IsFilled(block, bytes, 0));
    EXPECT_DEATH((block[bytes] ^= 1, hz3_checked_free(block)), Line(HZ3_FATAL_OVERFLOW)) << bytes;
    hz3_checked_free(freed);
    EXPECT_DEATH(hz3_checked_free(freed), Line(HZ3_FATAL_DOUBLE_FREE)) << bytes;
    blocks.push_back(block);
  }
  hz3_heap_leave(heap);
  for (char *block : blocks) hz3_checked_free(block);
}

}  // namespace
