// SPDX-License-Identifier: Apache-2.0
// What it is: tests of bins, heaps and policy: what a thread caches, shares and gives back, from first use to exit.
#include "hz3/hot/hot.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "hz3/base/os.h"
#include "hz3/base/pinned_test.h"
#include "hz3/base/refuse_test.h"
#include "hz3/config.h"
#include "hz3/pages/pages.h"
#include "hz3/remote/remote.h"
extern "C" {
#include "hz3/hot/caches.h"
#include "hz3/hot/heap.h"
}

namespace {

hz3_stats Stats() {
  hz3_stats stats;
  hz3_get_stats(&stats);
  return stats;
}

hz3_class_stats ClassStats(unsigned c) { return Stats().classes[c]; }

hz3_heap *OwnHeap() { return reinterpret_cast<hz3_heap *>(hz3_heap_base()); }

bool IsFilled(const void *memory, size_t bytes, char value) {
  const char *at = static_cast<const char *>(memory);
  return bytes == 0 || (at[0] == value && memcmp(at, at + 1, bytes - 1) == 0);
}

// A bin is sound: its objects are distinct blocks of its class.
void ExpectBinIsSound(const hz3_bin &bin, unsigned c) {
  if (bin.lo == nullptr) {
    EXPECT_TRUE(bin.top == nullptr && bin.hi == nullptr) << "class " << c;
    return;
  }
  ASSERT_GE(bin.top, bin.lo);
  EXPECT_LE(bin.top, bin.hi);
  EXPECT_LE(bin.hi - bin.lo, static_cast<ptrdiff_t>(hz3_magazine_capacity(HZ3_MAGAZINE_LEVELS - 1)));
  std::set<void *> seen;
  for (void **slot = bin.lo; slot < bin.top; slot++) EXPECT_TRUE(seen.insert(*slot).second) << "class " << c;
  for (void *object : seen) EXPECT_EQ(hz3_usable_size(object), hz3_size_classes[c].bytes);
}

void ExpectHeapIsSound() {
  size_t spare_bytes = 0;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    ExpectBinIsSound(OwnHeap()->bins[c], c);
    if (c <= HZ3_TABLE_CLASS_LAST) {
      ExpectBinIsSound(OwnHeap()->drains[c], c);
      EXPECT_EQ(OwnHeap()->drains[c].lo != nullptr, hz3_heap_has_drain(OwnHeap(), c));
    }
    uint32_t spare = OwnHeap()->spare[c];
    if (spare != 0) spare_bytes += hz3_magazine_at(spare)->count * size_t{hz3_size_classes[c].bytes};
  }
  EXPECT_EQ(OwnHeap()->spare_bytes, spare_bytes);
  EXPECT_LE(spare_bytes, size_t{HZ3_HEAP_BYTES});
}

// Until a class is not taken for one that swings for what came and went before.
void WaitForASwingToEnd() { usleep((HZ3_SOON_MS + HZ3_SWING_MS + 10) * 1000); }

bool IsDraining(const void *block) { return hz3_tag_of(block) >= HZ3_TAG_DRAIN; }

// Every test starts and ends with no block live, and none cached.
class Hot : public testing::Test {
 protected:
  void SetUp() override { Settle(); }
  void TearDown() override { Settle(); }
  static void Settle() {
    hz3_free(hz3_malloc(1));
    hz3_trim();
    EXPECT_EQ(Stats().live_bytes, 0u);
    EXPECT_EQ(Stats().cached_bytes, 0u);
    EXPECT_EQ(Stats().mapped_bytes, 0u);
    OwnHeap()->slow_calls = 0;  // a short test sees no tick, which in tiny is due every millisecond
  }
};

TEST_F(Hot, BinTableAgreesWithTheClasses) {
  for (size_t bytes = 0; bytes <= HZ3_TABLE_MAX; bytes++)
    ASSERT_EQ(hz3_bin_offsets[(bytes + 15) / 16], hz3_size_class_of(bytes) * sizeof(hz3_bin)) << bytes;
}

TEST_F(Hot, EverySizeGivesAUsableBlock) {
  std::map<char *, size_t> blocks;
  for (size_t bytes = 0; bytes <= 3 * HZ3_MIB; bytes += bytes < 1024 ? 1 : bytes / 13) {
    char *block = static_cast<char *>(hz3_malloc(bytes));
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 16, 0u);
    EXPECT_GE(hz3_usable_size(block), std::max<size_t>(bytes, 1));
    memset(block, 1, hz3_usable_size(block));
    blocks[block] = hz3_usable_size(block);
  }
  char *end = nullptr;
  for (auto &block : blocks) {
    EXPECT_LE(end, block.first);
    end = block.first + block.second;
  }
  for (auto &block : blocks) hz3_free(block.first);
}

TEST_F(Hot, TheLastFreedButOneIsTheNextGiven) {
  for (size_t bytes : {1, 16, 100, 1000, 5000, 32768}) {
    for (int i = 0; i < 100; i++) {
      hz3_free(hz3_malloc(200));  // no block of the class waits
      void *first = hz3_malloc(bytes), *second = hz3_malloc(bytes), *last_taken = hz3_malloc(bytes);
      hz3_free(first);
      hz3_free(second);
      EXPECT_EQ(hz3_malloc(bytes), first) << bytes;
      hz3_free(first);
      hz3_free(last_taken);
    }
    std::vector<void *> blocks(300);
    for (void *&block : blocks) block = hz3_malloc(bytes);
    for (void *block : blocks) hz3_free(block);
    if (IsDraining(blocks[298])) continue;
    ASSERT_EQ(OwnHeap()->last.object, blocks[299]) << bytes;
    EXPECT_EQ(hz3_malloc(bytes), blocks[298]) << bytes;
    hz3_free(blocks[298]);
  }
}

TEST_F(Hot, WhatWasTakenLastIsGivenNext) {
  for (size_t bytes : {1, 16, 100, 1000, 32768}) {
    void *three[] = {hz3_malloc(bytes), hz3_malloc(bytes), hz3_malloc(bytes)};
    for (void *block : three) hz3_free(block);
    void *waits = OwnHeap()->last.object;
    for (int round = 0; round < 20; round++) {
      void *first = hz3_malloc(bytes), *second = hz3_malloc(bytes);
      OwnHeap()->slow_calls = 0;  // no tick
      hz3_free(second);
      EXPECT_EQ(hz3_malloc(bytes), second) << bytes;
      hz3_free(second);
      hz3_free(first);
      EXPECT_EQ(OwnHeap()->last.object, waits) << bytes;
      EXPECT_EQ(hz3_malloc(bytes), first) << bytes;
      EXPECT_EQ(hz3_malloc(bytes), second) << bytes;
      hz3_free(second);
      hz3_free(first);
    }
  }
}

// Magazines change classes, and spans do, so what a slot above the top holds may be anybody's.
TEST_F(Hot, WhatASlotHeldIsNoPlaceForABlockOfAnotherClass) {
  void *block = hz3_malloc(100), *other = hz3_malloc(1000), *waits = hz3_malloc(100);
  OwnHeap()->slow_calls = 0;
  hz3_free(waits);
  hz3_bin &bin = OwnHeap()->bins[hz3_size_class_of(100)];
  ASSERT_LT(bin.top, bin.hi);
  *bin.top = other;
  hz3_free(other);
  EXPECT_EQ(OwnHeap()->last.object, other);
  EXPECT_EQ(hz3_malloc(100), waits);
  hz3_free(block);
  hz3_free(waits);
}

TEST_F(Hot, BlocksUpToTheTableWait) {
  for (size_t bytes : {size_t{16}, HZ3_TABLE_MAX, HZ3_TABLE_MAX + 1, HZ3_MEDIUM_MAX}) {
    hz3_free(hz3_malloc(200));  // no block of the class waits
    void *before = hz3_malloc(16), *block = hz3_malloc(bytes), *last_taken = hz3_malloc(16);
    OwnHeap()->slow_calls = 0;  // no tick
    hz3_free(before);
    hz3_free(block);
    EXPECT_EQ(OwnHeap()->last.object, bytes <= HZ3_TABLE_MAX ? block : before) << bytes;
    hz3_free(last_taken);
  }
}

// The allocator's own clock, which may go by 10 ms at a time.
void WaitForATick() {
  for (uint64_t start = hz3_os_now_ms(); hz3_os_now_ms() - start < HZ3_TICK_MS;) usleep(1000);
}

// Zeroed, and of some size: that takes a slow path, whatever is cached.
void TakeSlowPaths(int count) {
  for (; count > 0; count--) hz3_free(hz3_calloc(40000));
}

size_t KeptLarge() {
  size_t blocks = 0;
  for (hz3_heap *heap = hz3_heap_first(); heap != nullptr; heap = heap->next_heap) hz3_large_cache_held(&heap->large, &blocks);
  return blocks;
}

void SwingLarge() {
  for (int i = 0; i < 30; i++) {
    void *a = hz3_malloc(2 * HZ3_MIB), *b = hz3_malloc(3 * HZ3_MIB);
    hz3_free(a);
    hz3_free(b);
  }
}

TEST_F(Hot, LargeBlocksThatComeAgainStayWithTheirThread) {
  if (!HZ3_LARGE_CACHE || HZ3_CHECKED) GTEST_SKIP() << "nothing is kept";
  SwingLarge();
  EXPECT_EQ(KeptLarge(), 2u);
  EXPECT_EQ(Stats().live_bytes, 0u);
  EXPECT_EQ(Stats().large_blocks, 0u);
  void *block = hz3_malloc(2 * HZ3_MIB);
  EXPECT_EQ(KeptLarge(), 1u);
  EXPECT_EQ(Stats().large_bytes, 2 * HZ3_MIB);
  hz3_free(block);
  hz3_trim();
  EXPECT_EQ(KeptLarge(), 0u);
  std::thread([] {
    SwingLarge();
    EXPECT_EQ(KeptLarge(), 2u);
    hz3_free(hz3_malloc(700));  // so its heap is parked, not flushed
  }).join();
  EXPECT_EQ(KeptLarge(), 0u) << "a thread that ends keeps nothing";
  SwingLarge();
  WaitForATick();
  for (int i = 0; i < 200; i++) hz3_free(hz3_malloc(HZ3_MIB / 2 + i));  // slow paths
  EXPECT_EQ(KeptLarge(), 0u) << "a tick takes what is kept";
}

TEST_F(Hot, HitsDoNotTouchTheObject) {
  size_t page = hz3_os_page_bytes();
  void *keep = hz3_malloc(page), *next = hz3_malloc(16), *block = hz3_aligned_alloc(page, page);
  ASSERT_EQ(mprotect(block, page, PROT_NONE), 0);
  hz3_free(block);
  hz3_free(next);  // puts the block before it into its bin
  void *again = hz3_aligned_alloc(page, page);
  EXPECT_EQ(again, block);
  ASSERT_EQ(mprotect(block, page, PROT_READ | PROT_WRITE), 0);
  hz3_free(again);
  hz3_free(keep);
}

TEST_F(Hot, RandomRunKeepsCountsAndBudgets) {
  std::mt19937 random(11);
  std::map<void *, size_t> live;
  std::vector<void *> order;
  std::vector<size_t> count(HZ3_CLASS_COUNT, 0);
  for (int i = 0; i < 60000; i++) {
    if (order.size() < 3000 && (order.empty() || random() % 100 < 52)) {
      size_t limit = random() % 50 == 0 ? 1 << 20 : random() % 10 == 0 ? 32768 : 512;
      size_t bytes = random() % limit;
      void *block = hz3_malloc(bytes);
      ASSERT_TRUE(live.emplace(block, bytes).second) << "handed out twice";
      order.push_back(block);
      count[hz3_size_class_of(bytes)]++;
    } else {
      std::swap(order[random() % order.size()], order.back());
      void *block = order.back();
      order.pop_back();
      count[hz3_size_class_of(live[block])]--;
      live.erase(block);
      hz3_free(block);
    }
    if (i % 4000 != 0) continue;
    ExpectHeapIsSound();
    for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) ASSERT_EQ(ClassStats(c).live_objects, count[c]) << "class " << c;
  }
  for (void *block : order) hz3_free(block);
}

// Bursts far over what a heap may keep: the rest is in the depot up to its limit, and then in the spans.
TEST_F(Hot, CachesStayWithinTheirBudgets) {
  for (size_t bytes : {64, 1024, 8192, 32768, 262144}) {
    std::vector<void *> blocks(4 * HZ3_DEPOT_BYTES / bytes + 100);
    for (void *&block : blocks) block = hz3_malloc(bytes);
    for (void *block : blocks) hz3_free(block);
    ExpectHeapIsSound();
    unsigned c = hz3_size_class_of(bytes);
    size_t bin_bytes = hz3_magazine_capacity(HZ3_MAGAZINE_LEVELS - 1) * bytes;
    EXPECT_LE(ClassStats(c).cached_objects * bytes, HZ3_HEAP_BYTES + HZ3_DEPOT_BYTES + 3 * bin_bytes) << bytes;
    EXPECT_EQ(ClassStats(c).live_objects, 0u);
  }
}

// The spares of all classes together, each of which is within its own.
TEST_F(Hot, SparesOfAllClassesShareABudget) {
  for (unsigned c = 1; hz3_size_classes[c].bytes <= 32 * HZ3_KIB; c++) {
    std::vector<void *> blocks(200);
    for (void *&block : blocks) block = hz3_malloc(hz3_size_classes[c].bytes);
    for (void *block : blocks) hz3_free(block);
    ExpectHeapIsSound();
    OwnHeap()->last_tick_ms = hz3_os_now_ms();  // a tick would take the spares
  }
  if (HZ3_TICK_MS >= 100) {
    EXPECT_GT(OwnHeap()->spare_bytes, size_t{HZ3_HEAP_BYTES} / 2) << "there was nothing to limit";
  }
}

TEST_F(Hot, TheDepotKeepsNoFewMagazinesWhileMemoryIsGivenBack) {
  const size_t kBytes = 1024;
  std::vector<void *> blocks(3 * HZ3_MAGAZINE_CAPACITY + 10);
  for (void *&block : blocks) block = hz3_malloc(kBytes);
  OwnHeap()->last_tick_ms = hz3_os_now_ms();  // a tick would forget that these were asked for
  for (size_t count = 16; count <= 1024 && !hz3_pages_is_giving_back(); count *= 2) {  // more than may stay dirty; nothing is touched
    std::vector<void *> big(count);
    for (void *&block : big) block = hz3_malloc(HZ3_MEDIUM_MAX);
    for (void *block : big) hz3_free(block);
  }
  EXPECT_TRUE(hz3_pages_is_giving_back());
  OwnHeap()->slow_calls = 0;  // no tick
  for (void *block : blocks) hz3_free(block);
  EXPECT_EQ(hz3_depot_objects(hz3_size_class_of(kBytes)), 0u);
}

// Keeps this thread, and its heap's home, where they are: that of the first CPU if many more threads have allocated than can run at once.
class AtHome {
 public:
  AtHome() { hz3_heap_settle(OwnHeap()); }

 private:
  struct Initialised {
    Initialised() { hz3_free(hz3_malloc(16)); }
  } initialised_;  // before, or the allocator would know of one CPU only
  hz3_test::Pinned first_cpu_;
};

// In a thread with another home.
void DoElsewhere(unsigned home, const std::function<void()> &action) {
  std::thread([&] {
    hz3_test::Pinned second_cpu(1);
    hz3_free(hz3_malloc(16));
    hz3_heap_settle(OwnHeap());
    if (OwnHeap()->home != home) action();
    else DoElsewhere(home, action);
  }).join();
}

// What a thread frees of a class that it does not ask for waits in the depot for those who do, beyond its share of what is out.
TEST_F(Hot, TheDepotKeepsMoreOfWhatAThreadOnlyFrees) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (hz3_os_cpu_count() < 2) GTEST_SKIP() << "no other home";
  AtHome at_home;
  const size_t kBytes = 1024;
  const unsigned c = hz3_size_class_of(kBytes);
  auto stay_small = [c] { OwnHeap()->slow_calls = OwnHeap()->misses[c] = 0; };  // no tick, nor bigger magazines
  size_t kept[2];
  for (bool only_frees : {false, true}) {
    std::vector<void *> blocks(15 * HZ3_MAGAZINE_CAPACITY);
    DoElsewhere(OwnHeap()->home, [&] {
      for (void *&block : blocks) {
        block = hz3_malloc(kBytes);
        stay_small();
      }
    });
    stay_small();
    uint64_t bit = uint64_t{1} << (c % 64), *refilled = &OwnHeap()->refilled_bits[c / 64];
    *refilled = only_frees ? *refilled & ~bit : *refilled | bit;
    for (size_t i = 0; i < blocks.size(); i++) {
      if (i == blocks.size() / 2) kept[only_frees] = hz3_depot_objects(c);
      hz3_free(blocks[i]);
      stay_small();
    }
    EXPECT_EQ(OwnHeap()->level[c], 0u);
    hz3_trim();
  }
  EXPECT_GT(kept[true], kept[false]);
}

TEST_F(Hot, RefillsBeginSmallAfterATrim) {
  const unsigned c = hz3_size_class_of(64);
  std::vector<void *> blocks(2000);
  for (void *&block : blocks) block = hz3_malloc(64);
  for (void *block : blocks) hz3_free(block);
  hz3_trim();
  void *block = hz3_malloc(64);
  EXPECT_LE(hz3_heap_cached_objects(OwnHeap(), c), 7u);
  hz3_free(block);
}

TEST_F(Hot, TrimGivesEverythingBack) {
  std::vector<void *> blocks;
  for (size_t bytes = 1; bytes < 4 * HZ3_MIB; bytes = bytes * 5 / 4 + 1)
    for (int i = 0; i < 10; i++) blocks.push_back(hz3_malloc(bytes));
  EXPECT_GT(Stats().mapped_bytes, 0u);
  for (void *block : blocks) hz3_free(block);
  EXPECT_TRUE(hz3_trim());
  EXPECT_EQ(Stats().mapped_bytes, 0u);
  EXPECT_FALSE(hz3_trim());
}

TEST_F(Hot, StatsAddUp) {
  std::vector<void *> blocks;
  size_t bytes = 0;
  for (size_t size : {10, 1000, 10000, 100000}) {
    for (int i = 0; i < 100; i++) blocks.push_back(hz3_malloc(size));
    bytes += 100 * hz3_usable_size(blocks.back());
  }
  void *large = hz3_malloc(6 * HZ3_MIB);
  hz3_stats stats = Stats();
  EXPECT_EQ(stats.large_blocks, 1u);
  EXPECT_EQ(stats.large_bytes, 6 * HZ3_MIB);
  EXPECT_EQ(stats.live_bytes, bytes + 6 * HZ3_MIB);
  EXPECT_GE(stats.mapped_bytes, stats.live_bytes + stats.cached_bytes);
  EXPECT_EQ(stats.live_bytes + stats.cached_bytes + stats.free_bytes, stats.mapped_bytes);
  EXPECT_GT(stats.metadata_bytes, 0u);
  EXPECT_GE(stats.heaps, 1u);
  hz3_free(large);
  for (void *block : blocks) hz3_free(block);
}

TEST_F(Hot, CallocIsZeroOnRecycledMemory) {
  std::mt19937 random(5);
  std::vector<std::pair<char *, size_t>> live;
  for (int i = 0; i < 3000; i++) {
    size_t limit = random() % 40 == 0 ? 3 * HZ3_MIB : random() % 4 == 0 ? 200000 : 2000;
    size_t bytes = random() % limit;
    char *block = static_cast<char *>(hz3_calloc(bytes));
    ASSERT_TRUE(IsFilled(block, bytes, 0)) << bytes << " bytes, step " << i;
    memset(block, 0xff, hz3_usable_size(block));
    live.emplace_back(block, bytes);
    if (live.size() < 40) continue;
    std::swap(live[random() % live.size()], live.back());
    hz3_free(live.back().first);
    live.pop_back();
    if (random() % 1000 == 0) hz3_trim();
  }
  for (auto &block : live) hz3_free(block.first);
}

TEST_F(Hot, AlignedBlocksOfAllSizes) {
  for (size_t align = 1; align <= size_t{1} << 30; align *= 2) {
    std::vector<void *> blocks;
    for (size_t bytes : {size_t{0}, size_t{1}, align - 1, align, size_t{100}, size_t{3000}, size_t{40000}, HZ3_MIB, 3 * HZ3_MIB}) {
      if (bytes > size_t{1} << 28) continue;
      void *block = hz3_aligned_alloc(align, bytes);
      ASSERT_NE(block, nullptr) << bytes << " aligned to " << align;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % align, 0u);
      EXPECT_GE(hz3_usable_size(block), bytes);
      if (bytes > 0) memset(block, 1, std::min<size_t>(bytes, HZ3_MIB));
      blocks.push_back(block);
    }
    for (void *block : blocks) hz3_free(block);
  }
}

TEST_F(Hot, ReallocKeepsContents) {
  std::mt19937 random(9);
  for (int round = 0; round < 25; round++) {
    size_t bytes = 1 + random() % 100;
    char *block = static_cast<char *>(hz3_malloc(bytes)), mark = 1;
    memset(block, mark, bytes);
    for (int step = 0; step < 12; step++) {
      size_t limit = random() % 3 == 0 ? 4 * HZ3_MIB : random() % 2 == 0 ? 100000 : 3000;
      size_t fresh = 1 + random() % limit;
      block = static_cast<char *>(hz3_realloc(block, fresh));
      ASSERT_NE(block, nullptr);
      ASSERT_TRUE(IsFilled(block, std::min(bytes, fresh), mark)) << bytes << " to " << fresh;
      ASSERT_GE(hz3_usable_size(block), fresh);
      bytes = fresh;
      memset(block, ++mark, bytes);
    }
    hz3_free(block);
  }
}

// A block that grows byte by byte is copied once for each quarter that it has grown by.
TEST_F(Hot, ReallocInSmallStepsSeldomMoves) {
  char *block = static_cast<char *>(hz3_malloc(1));
  int moves = 0;
  for (size_t bytes = 2; bytes <= 64 * 1024; bytes++) {
    char *grown = static_cast<char *>(hz3_realloc(block, bytes));
    ASSERT_NE(grown, nullptr);
    moves += grown != block;
    block = grown;
  }
  EXPECT_LE(moves, 30);  // 16, 32, 48, 64 bytes, and at least by a quarter each from there on
  hz3_free(block);
}

TEST_F(Hot, ReallocWithinTheClassStaysInPlace) {
  void *block = hz3_malloc(1000);
  EXPECT_EQ(hz3_realloc(block, hz3_usable_size(block)), block);
  EXPECT_EQ(hz3_realloc(block, 600), block);
  void *moved = hz3_realloc(block, 100);
  EXPECT_LT(hz3_usable_size(moved), 1000u) << "most of the block would be wasted";
  hz3_free(moved);
  moved = hz3_realloc(hz3_malloc(4 * HZ3_MIB), 100000);
  EXPECT_EQ(Stats().large_blocks, 0u) << "so would be most of a large one";
  hz3_free(moved);
}

TEST_F(Hot, ImpossibleSizesAreRefused) {
  void *block = hz3_malloc(100), *large = hz3_malloc(2 * HZ3_MIB);
  for (size_t bytes : {SIZE_MAX, SIZE_MAX / 2, size_t{1} << 60}) {
    errno = 0;
    EXPECT_EQ(hz3_malloc(bytes), nullptr);
    EXPECT_EQ(errno, ENOMEM);
    EXPECT_EQ(hz3_calloc(bytes), nullptr);
    EXPECT_EQ(hz3_aligned_alloc(64, bytes), nullptr);
    EXPECT_EQ(hz3_realloc(block, bytes), nullptr);
    EXPECT_EQ(hz3_realloc(large, bytes), nullptr);
  }
  EXPECT_EQ(hz3_aligned_alloc(size_t{1} << 62, 1), nullptr);
  hz3_free(block);
  hz3_free(large);
}

TEST_F(Hot, FreeKeepsErrno) {
  std::vector<void *> blocks;
  for (size_t bytes = 1; bytes < 8 * HZ3_MIB; bytes = bytes * 3 / 2 + 1)
    for (int i = 0; i < 100; i++) blocks.push_back(hz3_malloc(bytes % 200000));
  blocks.push_back(hz3_malloc(80 * HZ3_MIB));
  errno = 4321;
  for (void *block : blocks) hz3_free(block);
  hz3_free(nullptr);
  EXPECT_EQ(errno, 4321);
}

// ---- threads ----

TEST_F(Hot, HeapsAreParkedAndAdopted) {
  void *freed = nullptr;
  std::thread([&freed] {
    freed = hz3_malloc(3000);
    void *next = hz3_malloc(16);
    hz3_free(freed);
    hz3_free(next);
  }).join();
  size_t heaps = Stats().heaps;
  for (int i = 0; i < 100; i++) {
    std::thread([freed, i] {
      void *block = hz3_malloc(3000);
      EXPECT_TRUE(i > 0 || block == freed) << "the next thread finds the cache warm";
      hz3_free(block);
    }).join();
  }
  EXPECT_EQ(Stats().heaps, heaps);
}

// The one parked first is drained first, once it was parked long enough; heaps beyond the first few are of a crowd.
TEST_F(Hot, HeapsAreDrainedInTheOrderInWhichTheyWereParked) {
  std::atomic<int> begun{0}, may_end{0};
  std::vector<std::thread> threads;
  hz3_heap *heaps[HZ3_CROWD_HEAPS + 2];
  const int count = HZ3_CROWD_HEAPS + 2;
  for (int t = 0; t < count; t++) {
    threads.emplace_back([&, t] {
      hz3_free(hz3_malloc(700));
      heaps[t] = OwnHeap();
      begun++;
      while (may_end <= t) std::this_thread::yield();
    });
  }
  while (begun < count) std::this_thread::yield();
  for (std::thread &thread : threads) {
    may_end++;
    thread.join();
  }
  EXPECT_EQ(hz3_heap_take_parked(0), nullptr) << "all were parked after that";
  for (hz3_heap *parked : heaps) {
    ASSERT_EQ(hz3_heap_take_parked(UINT64_MAX), parked);
    hz3_heap_flush(parked);
    EXPECT_EQ(parked->empty_count, 0u);
    hz3_heap_put_parked(parked, 0);
  }
  int before_the_crowd = 0;
  for (hz3_heap *heap = hz3_heap_first(); heap != nullptr; heap = heap->next_heap)
    before_the_crowd += !heap->is_of_a_crowd && heap->state != HZ3_HEAP_SHARED;
  EXPECT_EQ(before_the_crowd, HZ3_CROWD_HEAPS);
}

TEST_F(Hot, OneOfACrowdCachesFewBigBlocks) {
  const unsigned c = hz3_size_class_of(32 * HZ3_KIB);
  const bool before = OwnHeap()->is_of_a_crowd;
  for (bool is_of_a_crowd : {true, false}) {
    OwnHeap()->is_of_a_crowd = is_of_a_crowd;
    OwnHeap()->slow_calls = 0;  // no tick
    void *blocks[12];
    for (void *&block : blocks) block = hz3_malloc(32 * HZ3_KIB);
    for (void *block : blocks) hz3_free(block);
    const size_t in_bin = OwnHeap()->bins[c].lo == nullptr ? 0 : static_cast<size_t>(OwnHeap()->bins[c].hi - OwnHeap()->bins[c].lo);
    const size_t most = HZ3_MAGAZINE_BYTES / (32 * HZ3_KIB);
    EXPECT_EQ(in_bin, is_of_a_crowd ? most : std::min<size_t>(HZ3_MAGAZINE_CAPACITY, 16));
    hz3_trim();
  }
  OwnHeap()->is_of_a_crowd = before;
}

TEST_F(Hot, ThreadThatHoldsMuchLeavesLittle) {
  WaitForASwingToEnd();  // of a test before: the depot keeps more of medium blocks then
  std::thread([] {
    std::vector<void *> blocks;
    for (size_t bytes = 16; bytes <= 32768; bytes *= 2)
      for (int i = 0; i < 200; i++) blocks.push_back(hz3_malloc(bytes));
    for (void *block : blocks) hz3_free(block);
  }).join();
  EXPECT_LE(Stats().cached_bytes, HZ3_DEPOT_BYTES + 512 * HZ3_KIB);
}

TEST_F(Hot, BlocksOutliveTheirThread) {
  std::vector<std::pair<char *, size_t>> blocks;
  std::thread([&blocks] {
    for (size_t bytes = 1; bytes < 3 * HZ3_MIB; bytes = bytes * 2 + 1) {
      blocks.emplace_back(static_cast<char *>(hz3_malloc(bytes)), bytes);
      memset(blocks.back().first, 42, bytes);
    }
  }).join();
  hz3_trim();
  for (auto &block : blocks) {
    EXPECT_TRUE(IsFilled(block.first, block.second, 42));
    hz3_free(block.first);
  }
}

// Producers and consumers: a block is owned by exactly one thread at a time, whoever frees it.
TEST_F(Hot, ThreadsExchangeBlocksExactlyOnce) {
  const int kThreads = 4, kRounds = 15000;
  std::atomic<int> doubled{0};
  std::mutex lock;
  std::vector<void *> pool;
  auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<void *> mine;
    for (int i = 0; i < kRounds; i++) {
      size_t limit = random() % 200 == 0 ? 2 * HZ3_MIB : random() % 8 == 0 ? 40000 : 600;
      void *block = hz3_malloc(sizeof(int) + random() % limit);
      if (__atomic_exchange_n(static_cast<int *>(block), 0x5a5a5a5a, __ATOMIC_RELAXED) == 0x5a5a5a5a) doubled++;
      mine.push_back(block);
      if (mine.size() > 60) {
        std::lock_guard<std::mutex> guard(lock);
        for (int n = 0; n < 40; n++) {
          pool.push_back(mine.back());
          mine.pop_back();
        }
        std::shuffle(pool.begin(), pool.end(), random);
        while (pool.size() > 400 || (!pool.empty() && mine.size() < 50)) {
          mine.push_back(pool.back());
          pool.pop_back();
        }
      }
      while (mine.size() > 55) {
        __atomic_store_n(static_cast<int *>(mine.back()), 0, __ATOMIC_RELAXED);
        hz3_free(mine.back());
        mine.pop_back();
      }
    }
    for (void *block : mine) {
      __atomic_store_n(static_cast<int *>(block), 0, __ATOMIC_RELAXED);
      hz3_free(block);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; t++) threads.emplace_back(work, t);
  for (std::thread &thread : threads) thread.join();
  for (void *block : pool) {
    *static_cast<int *>(block) = 0;
    hz3_free(block);
  }
  EXPECT_EQ(doubled, 0);
}

// One allocates, the other frees: every block passes through the depot, and the memory in use stays small.
TEST_F(Hot, OneWayTrafficReusesMemory) {
  const int kBlocks = 200000, kWindow = 1000;
  std::vector<void *> ring(kWindow);
  std::atomic<int> produced{0}, consumed{0};
  std::thread producer([&] {
    for (int i = 0; i < kBlocks; i++) {
      while (i - consumed.load(std::memory_order_acquire) >= kWindow) std::this_thread::yield();
      ring[static_cast<size_t>(i % kWindow)] = hz3_malloc(256);
      produced.store(i + 1, std::memory_order_release);
    }
  });
  std::thread consumer([&] {
    for (int i = 0; i < kBlocks; i++) {
      while (produced.load(std::memory_order_acquire) <= i) std::this_thread::yield();
      hz3_free(ring[static_cast<size_t>(i % kWindow)]);
      consumed.store(i + 1, std::memory_order_release);
    }
  });
  producer.join();
  consumer.join();
  EXPECT_LE(Stats().mapped_bytes, 16 * HZ3_MIB) << "200,000 blocks of 256 bytes are 51 MB";
}

// ---- ticks ----

// Slow calls of one class drive the clock; what other classes cached is given back within a few ticks.
void DriveTicks(int ticks) {
  for (int t = 0; t < ticks; t++) {
    WaitForATick();
    std::vector<void *> blocks;
    for (int i = 0; i < 200; i++) blocks.push_back(hz3_malloc(500000));
    for (void *block : blocks) hz3_free(block);
  }
}

TEST_F(Hot, TicksDrainIdleBinsAndTheDepot) {
  std::vector<void *> blocks(4 * HZ3_MIB / 128);
  for (void *&block : blocks) block = hz3_malloc(128);
  for (void *block : blocks) hz3_free(block);
  unsigned c = hz3_size_class_of(128);
  size_t cached = ClassStats(c).cached_objects;
  EXPECT_GT(cached, 0u);
  DriveTicks(4);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), c), 0u) << "idle for several ticks";
  EXPECT_LE(ClassStats(c).cached_objects, cached / 2);
  DriveTicks(10);
  EXPECT_LE(ClassStats(c).cached_objects * 128, 64 * HZ3_KIB);
}

TEST_F(Hot, BusyClassesGetBiggerMagazinesWithinABudget) {
  if (HZ3_MAGAZINE_CAPACITY != hz3_magazine_capacity(0)) GTEST_SKIP() << "the lane fixes the capacity";
  unsigned c = hz3_size_class_of(64);
  std::vector<void *> blocks(1600);
  for (size_t bytes : {64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256}) {
    for (int round = 0; round < 20; round++) {
      for (void *&block : blocks) block = hz3_malloc(bytes);
      for (void *block : blocks) hz3_free(block);
    }
    EXPECT_LE(OwnHeap()->grown_bytes, size_t{HZ3_HEAP_BYTES} / 2);
    ExpectHeapIsSound();
    if (bytes != 64) continue;
    EXPECT_GE(hz3_heap_cached_objects(OwnHeap(), c), blocks.size()) << "the whole swing fits by now";
  }
  DriveTicks(4);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), c), 0u) << "idle for several ticks";
  hz3_trim();
  EXPECT_EQ(OwnHeap()->grown_bytes, 0u);
}

// ---- drains ----

void FreeAll(const std::vector<void *> &blocks) {
  for (void *block : blocks) hz3_free(block);
}

// What is left when every third stays; nothing is cached.
std::vector<void *> ThinOut(std::vector<void *> all) {
  std::vector<void *> left;
  std::shuffle(all.begin(), all.end(), std::mt19937(1));
  for (size_t i = 0; i < all.size(); i++) {
    if (i % 3 == 0) left.push_back(all[i]);
    else hz3_free(all[i]);
  }
  hz3_trim();
  return left;
}

// A class that empties no span drains half of the time only, by a count that goes on from test to test: until it does, some of its blocks come and go.
void LetSomePass(size_t bytes, const std::vector<void *> &left) {
  std::vector<void *> passing(40);
  for (int round = 0; round < 40 && std::count_if(left.begin(), left.end(), IsDraining) < 2; round++) {  // 3,200 exchanged: a few windows
    for (void *&block : passing) block = hz3_malloc(bytes);
    FreeAll(passing);
    hz3_trim();
  }
}

// What is left of so many spans' blocks, those of spans that drain last; nothing is cached.
std::vector<void *> Thinned(size_t bytes, size_t spans) {
  std::vector<void *> all(spans * hz3_size_classes[hz3_size_class_of(bytes)].objects);
  WaitForASwingToEnd();
  for (void *&block : all) block = hz3_malloc(bytes);
  std::vector<void *> left = ThinOut(all);
  LetSomePass(bytes, left);
  OwnHeap()->slow_calls = 0;  // no tick
  std::partition(left.begin(), left.end(), [](void *block) { return !IsDraining(block); });
  return left;
}

// Then one is in the drain, the other waits.
std::set<void *> FreeTwoThatDrain(std::vector<void *> *left) {
  std::set<void *> freed;
  for (int i = 0; i < 2; i++) {
    EXPECT_TRUE(IsDraining(left->back()));
    hz3_free(left->back());
    OwnHeap()->slow_calls = 0;  // no tick: a heap that was parked comes with a count
    freed.insert(left->back());
    left->pop_back();
  }
  return freed;
}

TEST_F(Hot, WhatDrainsIsNotGivenOutBeforeItsSpanHadIt) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  AtHome at_home;
  for (size_t bytes : {16, 64, 1024, 16384, 32768}) {
    const unsigned c = hz3_size_class_of(bytes);
    std::vector<void *> left = Thinned(bytes, 40);
    std::set<void *> freed = FreeTwoThatDrain(&left);
    EXPECT_TRUE(hz3_heap_has_drain(OwnHeap(), c)) << bytes;
    EXPECT_EQ(hz3_bin_objects(&OwnHeap()->drains[c]), 1u) << bytes;
    EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), c), 2u) << bytes;
    ExpectHeapIsSound();
    for (int i = 0; i < 8; i++) {
      left.push_back(hz3_malloc(bytes));
      EXPECT_EQ(freed.count(left.back()), 0u) << bytes;
    }
    FreeAll(left);
    hz3_trim();
    EXPECT_FALSE(hz3_heap_has_drain(OwnHeap(), c)) << bytes;
  }
}

// The spans that are left of 64.
size_t ShrinkAQueue(unsigned c) {
  const size_t per_span = hz3_size_classes[c].objects;
  std::mt19937 random(1);
  std::vector<void *> queue(64 * per_span);
  for (void *&block : queue) block = hz3_malloc(256);
  std::shuffle(queue.begin(), queue.end(), random);
  size_t head = 0;
  while (queue.size() - head > 2 * per_span) {
    if (random() % 100 < 48) queue.push_back(hz3_malloc(256));
    else hz3_free(queue[head++]);
  }
  const size_t left = ClassStats(c).spans;
  FreeAll(std::vector<void *>(queue.begin() + static_cast<ptrdiff_t>(head), queue.end()));
  return left;
}

// Blocks come and go in turn, a few more go, and none is chosen by its place: spans empty. Not while the class swings, as it does if it is used as
// soon as its spans were given up, be it by a tick.
TEST_F(Hot, AShrinkingQueueLetsGoOfItsSpans) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  size_t left = 64;
  for (int tries = 0; tries < 3 && left > 32; tries++) {
    hz3_trim();
    WaitForASwingToEnd();
    left = ShrinkAQueue(hz3_size_class_of(256));
  }
  EXPECT_LE(left, 32u) << "of 64, where what was freed was what came next";
}

// A few blocks come and go, spans stay as empty as they are: draining is in vain, and pauses.
TEST_F(Hot, WhoEmptiesNoSpanKeepsWhatItFrees) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  AtHome at_home;
  std::vector<void *> left = Thinned(64, 20), frame(40);
  size_t kept = 0, frames = 2000;
  for (size_t i = 0; i < frames; i++) {
    for (void *&block : frame) block = hz3_malloc(64);
    for (void *block : frame) kept += !IsDraining(block);
    FreeAll(frame);
  }
  EXPECT_GE(kept, frames * frame.size() / 2);
  FreeAll(left);
}

// Most blocks of the class are gone, what is left lies scattered, and a little comes and goes: seldom by a slow path. Refills once fetched
// in each frame what the next free threw away.
TEST_F(Hot, FramesInAShrinkingClassStayCached) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins hold no more than three";
  std::mt19937 random(1);
  for (size_t bytes : {64, 512}) {
    std::vector<void *> blocks(10000), frame;
    for (void *&block : blocks) block = hz3_malloc(bytes);
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (; blocks.size() > 500; blocks.pop_back()) hz3_free(blocks.back());
    uint32_t slow_calls = 0;
    const int frames = 2000;
    for (int round = 0; round < frames; round++) {
      uint32_t before = OwnHeap()->slow_calls;
      for (size_t left = random() % 40; left > 0; left--) frame.push_back(hz3_malloc(bytes));
      FreeAll(frame);
      frame.clear();
      slow_calls += OwnHeap()->slow_calls - before;
    }
    EXPECT_LE(slow_calls, frames / 10) << bytes;
    FreeAll(blocks);
  }
}

// Freed in the order in which they came, so that spans go as fast as their blocks do.
TEST_F(Hot, CachesOfAQuietClassShrinkWithIt) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins hold no more than three";
  enum { kBusy, kQuiet, kAskedForAgain, kCases };
  const size_t kBytes = 1024, kLeft = 400;
  const unsigned c = hz3_size_class_of(kBytes);
  size_t kept[kCases];
  for (int when = kBusy; when < kCases; when++) {
    std::vector<void *> blocks(4 * kLeft);
    for (void *&block : blocks) block = hz3_malloc(kBytes);
    if (when != kBusy) {
      usleep(40000);
      OwnHeap()->last_tick_ms = hz3_os_now_ms();  // no tick, but a look at the clock
      TakeSlowPaths(16);
    }
    if (when == kAskedForAgain) {
      hz3_heap_flush(OwnHeap());
      blocks.push_back(hz3_malloc(kBytes));
    }
    for (size_t i = 0; i < blocks.size(); i++) {
      OwnHeap()->slow_calls = 0;  // neither, nor does the clock go on
      if (i == blocks.size() - kLeft) kept[when] = ClassStats(c).cached_objects;
      hz3_free(blocks[i]);
    }
    hz3_trim();
  }
  EXPECT_LE(kept[kQuiet], 2 * kLeft / 16) << "its bin and its drain; a bin and its spare without the limit";
  EXPECT_GE(kept[kBusy], size_t{HZ3_MAGAZINE_CAPACITY} / 2);
  EXPECT_GE(kept[kAskedForAgain], size_t{HZ3_MAGAZINE_CAPACITY} / 2);
}

// Nothing swings any more, there was no tick, but a look at the clock, which does not go on while slow_calls stay 0.
void StopTheClock() {
  WaitForASwingToEnd();
  OwnHeap()->last_tick_ms = hz3_os_now_ms();
  TakeSlowPaths(16);
}

// Of batches that come and go, the third in a row falls like the first, but more of it is left to its thread: two is how many it takes until
// they are known for what they are.
TEST_F(Hot, CachesOfAClassThatSwingsHoldMore) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins hold no more than three";
  std::mt19937 random(1);
  std::vector<void *> blocks(8000);
  uint32_t slow_frees[3] = {0, 0, 0};
  StopTheClock();
  for (uint32_t &fall : slow_frees) {
    for (void *&block : blocks) {
      OwnHeap()->slow_calls = 0;
      block = hz3_malloc(256);
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (void *block : blocks) {
      OwnHeap()->slow_calls = 0;
      hz3_free(block);
      fall += OwnHeap()->slow_calls;
    }
  }
  EXPECT_LT(slow_frees[2] * 2, slow_frees[0]);
}

// The same of medium blocks, whose spans threads share: the depot keeps them then.
TEST_F(Hot, TheDepotKeepsMediumBlocksOfAClassThatSwings) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins hold no more than three";
  const size_t bytes = 8192;
  std::vector<void *> blocks(HZ3_HEAP_BYTES / bytes * 6);
  size_t kept[2];
  std::thread([] { hz3_free(hz3_malloc(16)); }).join();
  ASSERT_GT(hz3_heap_count(), 1u);
  StopTheClock();
  hz3_test::Pinned pinned;  // each CPU keeps its share
  for (size_t &after : kept) {
    for (void *&block : blocks) {
      OwnHeap()->slow_calls = 0;
      block = hz3_malloc(bytes);
    }
    for (void *block : blocks) {
      OwnHeap()->slow_calls = 0;
      hz3_free(block);
    }
    after = hz3_depot_objects(hz3_size_class_of(bytes));
  }
  EXPECT_LE(kept[0] * bytes, 2 * HZ3_HEAP_BYTES);
  EXPECT_GT(kept[1] * bytes, 3 * HZ3_HEAP_BYTES);
}

// Spans that went are needed again at once, for a third batch: those that are left with room do not drain, until a while later.
TEST_F(Hot, SpansOfAClassThatSwingsDoNotDrain) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  AtHome at_home;
  std::vector<void *> blocks(12 * hz3_size_classes[hz3_size_class_of(1024)].objects);
  for (int tries = 0;; tries++) {
    ASSERT_LT(tries, 100) << "the machine is too slow";
    uint64_t start = 0;
    for (int batches = 0; batches < 2; batches++) {
      start = hz3_os_now_ms();
      for (void *&block : blocks) block = hz3_malloc(1024);
      FreeAll(blocks);
      hz3_trim();  // the spans go
    }
    for (void *&block : blocks) block = hz3_malloc(1024);
    const bool is_soon = hz3_os_now_ms() - start < HZ3_SOON_MS / 2;
    std::vector<void *> left = ThinOut(blocks);
    LetSomePass(1024, left);
    const auto draining = std::count_if(left.begin(), left.end(), IsDraining);
    const bool is_swing = is_soon && hz3_os_now_ms() - start < HZ3_SWING_MS / 2;
    if (is_swing) {
      EXPECT_EQ(draining, 0);
      WaitForASwingToEnd();
      LetSomePass(1024, left);
      EXPECT_GT(std::count_if(left.begin(), left.end(), IsDraining), 0);
    }
    FreeAll(left);
    if (is_swing) return;
  }
}

// A queue whose backlog falls by a part and rises again, each time with half as many in the other direction.
class Queue {
 public:
  // Of a hundred that are taken out, `staying` stay for some turn-overs more.
  explicit Queue(size_t bytes, size_t staying = 0)
      : bytes_(bytes), most_(size_t{64} * HZ3_SLICE_BYTES / bytes), staying_(staying), stayed_(most_ / 4) {}
  ~Queue() {
    FreeAll({blocks_.begin(), blocks_.end()});
    FreeAll({stayed_.begin(), stayed_.end()});
  }
  void Fill() {
    while (blocks_.size() < most_) Push();
  }
  void Rise() {
    while (blocks_.size() < most_) {
      Push();
      Pop();
      Push();
    }
  }
  void FallBy(size_t blocks) {
    while (blocks_.size() > most_ - blocks) {
      Pop();
      Pop();
      Push();
    }
  }
  void TurnOver(size_t times, size_t part) {
    for (size_t passed = 0; passed < times * most_; passed += 4 * (most_ / part)) {
      FallBy(most_ / part);
      Rise();
    }
  }
  // How many in a hundred are near the one before.
  size_t Near() const {
    size_t near = 0;
    for (size_t i = 1; i < blocks_.size(); i++) near += static_cast<size_t>(std::abs(blocks_[i] - blocks_[i - 1])) <= 2 * bytes_;
    return near * 100 / blocks_.size();
  }
  size_t Pages() const {
    std::set<uintptr_t> pages;
    for (char *block : blocks_) pages.insert(reinterpret_cast<uintptr_t>(block) / 4096);
    return pages.size();
  }
  size_t FewestPages() const { return blocks_.size() * bytes_ / 4096; }
  size_t Most() const { return most_; }

 private:
  void Push() { blocks_.push_back(static_cast<char *>(hz3_malloc(bytes_))); }
  void Pop() {
    char *block = blocks_.front();
    blocks_.pop_front();
    if (random_() % 100 < staying_) std::swap(block, stayed_[random_() % stayed_.size()]);
    hz3_free(block);
  }
  const size_t bytes_, most_, staying_;
  std::deque<char *> blocks_;
  std::vector<char *> stayed_;
  std::mt19937 random_;
};

// Where what is freed is what comes next, every turn-over leaves half as many of them near. A tick of a busy machine may come in between, hence
// some tries. The queue is there at once, or taken from while it grows for the first time, where another one was before; its tides are a small part of
// it, or a large one.
TEST_F(Hot, AQueueKeepsTheOrderOfAddresses) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains, and blocks are handed out in no order";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins and drains hold no more than three and six";
  for (size_t bytes : {64, 256, 1024}) {
    for (bool grows_in_use : {false, true}) {
      for (size_t part : {20, 3}) {
        size_t near = 0;
        for (int tries = 0; tries < 4 && near <= 75; tries++) {
          usleep(2 * HZ3_SWING_MS * 1000);
          if (grows_in_use) Queue(bytes).Fill();
          Queue queue(bytes);
          if (grows_in_use) queue.Rise();
          else queue.Fill();
          queue.TurnOver(10, part);
          near = queue.Near();
        }
        EXPECT_GT(near, 75u) << bytes << (grows_in_use ? ", grows in use" : ", filled") << ", tides of 1 in " << part;
      }
    }
  }
}

// Where a few stay for longer, what comes back to spans one by one is not what is asked for next.
TEST_F(Hot, AQueueOfWhichSomeStayKeepsTheOrderOfAddresses) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains, and blocks are handed out in no order";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins and drains hold no more than three and six";
  for (size_t bytes : {64, 256, 1024}) {
    size_t near = 0;
    for (int tries = 0; tries < 4 && near <= 50; tries++) {  // see above
      usleep(2 * HZ3_SWING_MS * 1000);
      Queue queue(bytes, 10);
      queue.Fill();
      queue.TurnOver(20, 20);
      near = queue.Near();
    }
    EXPECT_GT(near, 50u) << bytes;
  }
}

// What is left of a queue at low tide had lain in all pages it ever had, where what is freed is what comes next.
TEST_F(Hot, AQueueAtLowTideLiesInFewPages) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins and drains hold no more than three and six";
  for (size_t bytes : {64, 256}) {
    size_t pages = 0, fewest = 1;
    for (int tries = 0; tries < 4 && (tries == 0 || pages > 4 * fewest); tries++) {  // see above
      usleep(2 * HZ3_SWING_MS * 1000);
      Queue queue(bytes);
      for (int tide = 0; tide < 4; tide++) {
        queue.Fill();
        queue.FallBy(queue.Most() / 16 * 15);
      }
      pages = queue.Pages();
      fewest = queue.FewestPages();
    }
    EXPECT_LE(pages, 4 * fewest) << bytes;
  }
}

// A batch that comes and goes beside many more blocks of its class stays in the bin, in the order in which it goes.
TEST_F(Hot, ABatchBesideABacklogStaysCached) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "bins hold no more than three";
  usleep(2 * HZ3_SWING_MS * 1000);
  const size_t per_span = HZ3_SLICE_BYTES / 64, kRounds = 1000, kMostToLearn = 20000;
  std::vector<void *> backlog(32 * per_span), batch(2 * per_span);  // which fills spans, so that these drain at first
  for (void *&block : backlog) block = hz3_malloc(64);
  auto round = [&batch] {
    size_t drained = 0;
    for (void *&block : batch) block = hz3_malloc(64);
    for (void *block : batch) drained += IsDraining(block);
    FreeAll(batch);
    return drained;
  };
  // Until it is known for a batch some hundred rounds pass if the class was a queue before: most of its spans come and go as a whole,
  // and tell nothing.
  size_t to_learn = 0;
  while (to_learn < kMostToLearn && round() > 0) to_learn++;
  EXPECT_LT(to_learn, kMostToLearn);
  size_t drained = 0;
  for (size_t i = 0; i < kRounds; i++) drained += round();
  EXPECT_LT(drained, kRounds * batch.size() / 10);
  FreeAll(backlog);
}

// Full spans drain for their own threads: what another frees of them waits in the depot, as ever.
TEST_F(Hot, WhatOthersFreeOfFullSpansGoesToTheDepot) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  if (hz3_os_cpu_count() < 2) GTEST_SKIP() << "no other home";
  AtHome at_home;
  usleep(2 * HZ3_SWING_MS * 1000);
  const size_t kBytes = 1024;
  const unsigned c = hz3_size_class_of(kBytes);
  std::vector<void *> blocks(64 * hz3_size_classes[c].objects);
  for (void *&block : blocks) block = hz3_malloc(kBytes);
  const size_t first = blocks.size() / 2, freed = blocks.size() / 16;  // an eighth is more
  for (size_t i = 0; i < freed; i++) EXPECT_TRUE(IsDraining(blocks[first + i]));
  DoElsewhere(OwnHeap()->home, [&] {
    for (size_t i = 0; i < freed; i++) {
      OwnHeap()->slow_calls = 0;  // no tick
      hz3_free(blocks[first + i]);
    }
  });
  EXPECT_GE(hz3_depot_objects(c), 2u * HZ3_MAGAZINE_CAPACITY);
  blocks.erase(blocks.begin() + static_cast<ptrdiff_t>(first), blocks.begin() + static_cast<ptrdiff_t>(first + freed));
  FreeAll(blocks);
}

// Nor is what follows it in memory prefetched, for its own thread may still be writing there.
TEST_F(Hot, FreesLookAheadOnlyAtHome) {
  if (HZ3_CHECKED) GTEST_SKIP() << "freed blocks stay out of the bins for a while";
  if (hz3_os_cpu_count() < 2) GTEST_SKIP() << "no other home";
  AtHome at_home;
  const size_t kBytes = 1024;
  const unsigned c = hz3_size_class_of(kBytes);
  std::vector<void *> blocks(4 * HZ3_MAGAZINE_CAPACITY);
  auto allocate = [&] {
    for (void *&block : blocks) block = hz3_malloc(kBytes);
  };
  auto freed_are_uneven = [&] {
    hz3_trim();  // bins are as new
    for (void *block : blocks) {
      OwnHeap()->slow_calls = 0;  // no tick
      hz3_free(block);
    }
    return (OwnHeap()->bins[c].uneven | OwnHeap()->drains[c].uneven) != 0;
  };
  allocate();
  EXPECT_FALSE(freed_are_uneven());
  DoElsewhere(OwnHeap()->home, allocate);
  EXPECT_TRUE(freed_are_uneven());
}

// Each time that a drain is full costs: it holds more where that is often, as a bin does.
TEST_F(Hot, DrainsGrow) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  AtHome at_home;
  if (HZ3_MAGAZINE_CAPACITY < 62) GTEST_SKIP() << "the lane fixes the capacity";
  const size_t kBytes = 64, kFirst = 2 * HZ3_MAGAZINE_CAPACITY;
  const unsigned c = hz3_size_class_of(kBytes);
  auto capacity = [&] { return static_cast<size_t>(OwnHeap()->drains[c].hi - OwnHeap()->drains[c].lo); };
  size_t own = 0;
  for (int tries = 0; tries < 4 && own <= kFirst; tries++) {  // a tick may just have emptied it
    usleep(2 * HZ3_SWING_MS * 1000);
    Queue queue(kBytes);
    queue.Fill();
    queue.TurnOver(2, 3);
    queue.FallBy(queue.Most() / 20);
    own = capacity();
  }
  EXPECT_GT(own, kFirst);
  if (hz3_os_cpu_count() < 2) return;  // no other home
  hz3_trim();
  usleep(2 * HZ3_SWING_MS * 1000);
  std::vector<void *> blocks(256 * hz3_size_classes[c].objects);
  for (void *&block : blocks) block = hz3_malloc(kBytes);
  size_t of_another = 0;
  DoElsewhere(OwnHeap()->home, [&] {
    for (size_t freed = blocks.size() / 16; freed > 0; freed--) {  // with an eighth they would not go to the depot
      OwnHeap()->slow_calls = 0;  // no tick
      hz3_free(blocks.back());
      blocks.pop_back();
      of_another = std::max(of_another, capacity());
    }
  });
  EXPECT_GT(of_another, hz3_magazine_capacity(1));
  FreeAll(blocks);
}

TEST_F(Hot, FewSpansAndBigBlocksDoNotDrain) {
  for (size_t bytes : {64, 40000}) {
    std::vector<void *> left = Thinned(bytes, bytes == 64 ? 4 : 40);
    for (void *block : left) EXPECT_FALSE(IsDraining(block)) << bytes;
    FreeAll(left);
  }
}

TEST_F(Hot, TicksAndTrimsEmptyDrains) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  AtHome at_home;
  const unsigned c = hz3_size_class_of(256);
  std::vector<void *> left = Thinned(256, 20);
  FreeTwoThatDrain(&left);
  DriveTicks(4);
  EXPECT_FALSE(hz3_heap_has_drain(OwnHeap(), c));
  EXPECT_EQ(ClassStats(c).cached_objects, 0u);
  std::thread([&left] {
    hz3_free(hz3_malloc(16));
    FreeTwoThatDrain(&left);
  }).join();
  EXPECT_EQ(ClassStats(c).cached_objects, 2u) << "parked with their heap";
  hz3_trim();
  EXPECT_EQ(ClassStats(c).cached_objects, 0u);
  FreeAll(left);
}

// A magazine of the depot's, with these objects.
void PushToDepot(unsigned c, const std::vector<void *> &objects) {
  uint32_t count;
  hz3_magazine *magazine = hz3_magazine_alloc(0, 1, &count);
  ASSERT_NE(magazine, nullptr);
  std::copy(objects.begin(), objects.end(), magazine->slots);
  magazine->count = static_cast<uint16_t>(objects.size());
  ASSERT_TRUE(hz3_depot_push(c, magazine, SIZE_MAX, 0));
}

// Each full drain takes a magazine of the depot along, without waiting for a tick.
TEST_F(Hot, ADrainEmptiesTheDepot) {
  if (HZ3_CHECKED) GTEST_SKIP() << "what is freed there bears a pattern";
  AtHome at_home;
  const unsigned c = hz3_size_class_of(1024);
  std::vector<void *> blocks = Thinned(1024, 20);
  for (int i = 0; i < 2; i++) {
    PushToDepot(c, {blocks.back()});
    blocks.pop_back();
  }
  for (void *block : blocks) {
    OwnHeap()->slow_calls = 0;  // no tick
    hz3_free(block);
  }
  EXPECT_EQ(hz3_depot_objects(c), 0u);
}

// Magazines come and go through the depot: none is left behind empty.
TEST_F(Hot, RefillsFromTheDepotLoseNoMagazine) {
  if (HZ3_CHECKED) GTEST_SKIP() << "what is freed there bears a pattern";
  const unsigned c = hz3_size_class_of(64);
  std::vector<void *> blocks(HZ3_MAGAZINE_CAPACITY);
  for (void *&block : blocks) block = hz3_malloc(64);
  size_t before = 0;
  for (int round = 0; round < 3000; round++) {
    PushToDepot(c, blocks);
    for (void *&block : blocks) {
      OwnHeap()->slow_calls = OwnHeap()->misses[c] = 0;  // no tick, nor bigger magazines
      block = hz3_malloc(64);
    }
    if (round == 100) before = Stats().metadata_bytes;
  }
  EXPECT_EQ(Stats().metadata_bytes, before);
  for (void *block : blocks) hz3_free(block);
}

// The most that was cached after a round: a tick may take it away at any moment.
size_t SwingBy(size_t count, size_t bytes) {
  size_t most = 0;
  std::vector<void *> blocks(count);
  for (int round = 0; round < 300; round++) {
    for (void *&block : blocks) block = hz3_malloc(bytes);
    for (void *block : blocks) hz3_free(block);
    most = std::max(most, hz3_heap_cached_objects(OwnHeap(), hz3_size_class_of(bytes)));
  }
  return most;
}

// A class of which one block is more than a magazine's bytes starts without a bin, and gets one.
TEST_F(Hot, BinsOfBigBlocksGrowAndGoAgain) {
  for (size_t bytes : {size_t{HZ3_MAGAZINE_BYTES} / 2, size_t{HZ3_MAGAZINE_BYTES} * 2, size_t{HZ3_MAGAZINE_BYTES} * 4}) {
    unsigned c = hz3_size_class_of(bytes);
    hz3_free(hz3_malloc(bytes));
    size_t waits = bytes <= HZ3_TABLE_MAX;  // the block freed last
    EXPECT_LE(hz3_heap_cached_objects(OwnHeap(), c), hz3_max(HZ3_MAGAZINE_BYTES / bytes, bytes <= 32768 ? 16 : 0) + waits) << bytes;
    const size_t most = SwingBy(16, bytes);
    EXPECT_GE(most, 1u) << bytes;
    if (bytes > HZ3_TABLE_MAX && HZ3_HEAP_BYTES >= HZ3_MIB && !HZ3_CHECKED) {
      EXPECT_GE(most, 12u) << "1 MiB in the bin and as much in its spare would be 8";
    }
    EXPECT_LE(OwnHeap()->grown_bytes, size_t{HZ3_HEAP_BYTES} * 8);
    ExpectHeapIsSound();
    hz3_trim();
    EXPECT_EQ(OwnHeap()->grown_bytes, 0u);
  }
}

// Programs that write big blocks miss some of them in a step of the coarse clock, and are no faster with more of those at hand.
TEST_F(Hot, BinsGrowByMissesWithinOneStep) {
  if (HZ3_CHECKED) GTEST_SKIP() << "what is freed waits in the quarantine";
  const size_t bytes = size_t{HZ3_MAGAZINE_BYTES} * 2;
  const unsigned c = hz3_size_class_of(bytes);
  hz3_trim();
  auto level_after_swings = [&](bool in_one_step) {
    std::vector<void *> blocks(40);
    for (int round = 0; round < 200; round++) {
      if (!in_one_step) OwnHeap()->misses_ms--;  // as if the last one was some time ago
      for (void *&block : blocks) {
        OwnHeap()->slow_calls = 0;  // no tick, and nobody looks at the clock
        block = hz3_malloc(bytes);
      }
      for (void *block : blocks) {
        OwnHeap()->slow_calls = 0;
        hz3_free(block);
      }
    }
    return OwnHeap()->level[c];
  };
  EXPECT_EQ(level_after_swings(false), 0u);
  if (hz3_cache_may_grow(OwnHeap(), c)) {
    EXPECT_GT(level_after_swings(true), 0u);
  }
  hz3_trim();
}

// A tick of this thread, which finds that the class was in use, but seldom.
void TickWhileSeldomUsed(unsigned c) {
  hz3_heap *heap = OwnHeap();
  heap->misses[c] = 0;
  heap->used_bits[c / 64] |= uint64_t{1} << (c % 64);
  heap->last_tick_ms = 0;
  for (int calls = 0; calls < 1000 && heap->last_tick_ms == 0; calls++) TakeSlowPaths(1);
}

// A bin of which the class is to have none any more, since one block is more than it may hold, goes with what is in it: one of no
// capacity is full and empty at once, and takes a block beyond its end.
TEST_F(Hot, ABinThatHasShrunkToNothingIsGone) {
  const size_t bytes = 4 * HZ3_MAGAZINE_BYTES;
  const unsigned c = hz3_size_class_of(bytes);
  std::vector<void *> blocks(16);
  for (int round = 0; round < 1000 && (OwnHeap()->bins[c].lo == nullptr || OwnHeap()->level[c] < 2); round++) {
    for (void *&block : blocks) block = hz3_malloc(bytes);
    for (void *block : blocks) hz3_free(block);
  }
  ASSERT_GE(hz3_heap_cached_objects(OwnHeap(), c), 1u);
  for (int tick = 0; tick < 8; tick++) TickWhileSeldomUsed(c);
  ASSERT_EQ(OwnHeap()->level[c], 0u);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), c), 0u);
  for (void *&block : blocks) block = hz3_malloc(bytes);
  for (void *block : blocks) hz3_free(block);
  ExpectHeapIsSound();
}

// What is cached, counted class by class and heap by heap, is what the statistics say of all at once.
TEST_F(Hot, StatsAreSumsOverHeaps) {
  const int kThreads = 20;
  std::atomic<int> waiting{0};
  std::atomic<bool> release{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([&, t] {
      std::vector<void *> blocks(100);
      for (unsigned c = 1 + static_cast<unsigned>(t) % 3; c < HZ3_CLASS_COUNT; c += 3) {
        for (void *&block : blocks) block = hz3_malloc(hz3_size_classes[c].bytes);
        for (void *block : blocks) hz3_free(block);
      }
      OwnHeap()->slow_calls = 0;  // no tick that takes what is left
      hz3_free(hz3_malloc(64));
      waiting++;
      while (!release) usleep(1000);
    });
  }
  while (waiting < kThreads) usleep(1000);
  hz3_stats stats = Stats();
  size_t cached_bytes = 0;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    size_t cached = hz3_depot_objects(c);
    for (hz3_heap *heap = hz3_heap_first(); heap != nullptr; heap = heap->next_heap) cached += hz3_heap_cached_objects(heap, c);
    EXPECT_EQ(stats.classes[c].cached_objects, cached) << "class " << c;
    EXPECT_EQ(stats.classes[c].live_objects, 0u) << "class " << c;
    cached_bytes += cached * hz3_size_classes[c].bytes;
  }
  EXPECT_GE(cached_bytes, kThreads * 64u);
  EXPECT_EQ(stats.cached_bytes, cached_bytes);
  EXPECT_EQ(stats.live_bytes, 0u);
  release = true;
  for (std::thread &thread : threads) thread.join();
}

TEST_F(Hot, BinsOfBigBlocksDoNotGrowInOneDirection) {
  const size_t bytes = 4 * HZ3_MAGAZINE_BYTES;
  std::vector<void *> blocks(100);
  for (void *&block : blocks) block = hz3_malloc(bytes);
  EXPECT_EQ(OwnHeap()->level[hz3_size_class_of(bytes)], 0u);
  for (void *block : blocks) hz3_free(block);
  EXPECT_EQ(OwnHeap()->level[hz3_size_class_of(bytes)], 0u);
}

// What counts within a tick begins anew with the next; what a class in use has cached stays, until memory is wanted elsewhere.
TEST_F(Hot, ATickBeginsAnew) {
  const unsigned c = hz3_size_class_of(700);
  hz3_free(hz3_malloc(700));
  hz3_free(hz3_malloc(16));
  TickWhileSeldomUsed(c);  // whatever tests before have trimmed
  hz3_free(hz3_malloc(700));
  hz3_free(hz3_malloc(16));
  const size_t cached = hz3_heap_cached_objects(OwnHeap(), c);
  ASSERT_GT(cached, 0u);
  ASSERT_NE(OwnHeap()->refilled_bits[c / 64] & uint64_t{1} << (c % 64), 0u);
  OwnHeap()->misses[c + 1] = 20;
  TickWhileSeldomUsed(c);
  EXPECT_EQ(OwnHeap()->misses[c + 1], 0u);
  EXPECT_EQ(OwnHeap()->refilled_bits[c / 64] & uint64_t{1} << (c % 64), 0u);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), c), cached);
  std::thread([] { hz3_trim(); }).join();
  TickWhileSeldomUsed(c);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), c), 0u) << "another thread has trimmed";
}

// Magazines that a tick empties, one for each class, are of use to others.
TEST_F(Hot, AHeapKeepsFewEmptyMagazines) {
  for (unsigned c = 1; hz3_size_classes[c].bytes <= 4 * HZ3_KIB; c++) {
    OwnHeap()->slow_calls = 0;  // no tick yet
    hz3_free(hz3_malloc(hz3_size_classes[c].bytes));
  }
  void *large = hz3_malloc(2 * HZ3_MIB);
  memset(OwnHeap()->used_bits, 0, sizeof OwnHeap()->used_bits);
  OwnHeap()->last_tick_ms = 0;
  hz3_free(large);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), hz3_size_class_of(700)), 0u);
  EXPECT_LT(OwnHeap()->empty_count, 8);
}

TEST_F(Hot, WhoUsesLargeBlocksOnlyTicksToo) {
  hz3_free(hz3_malloc(700));
  hz3_free(hz3_malloc(16));
  void *large = hz3_malloc(2 * HZ3_MIB);
  memset(OwnHeap()->used_bits, 0, sizeof OwnHeap()->used_bits);
  OwnHeap()->last_tick_ms = 0;
  hz3_free(large);
  EXPECT_EQ(hz3_heap_cached_objects(OwnHeap(), hz3_size_class_of(700)), 0u);
}

// Free slices and free ranges that nobody needs, while little is going on.
TEST_F(Hot, TicksGiveIdleMemoryBack) {
  for (size_t bytes : {HZ3_MEDIUM_MAX, 2 * HZ3_MIB}) {
    std::vector<void *> blocks(HZ3_RETAIN_MIN_BYTES / bytes);
    if (blocks.size() < 2) GTEST_SKIP() << "too little is retained";
    for (void *&block : blocks) block = hz3_malloc(bytes);
    for (void *block : blocks) hz3_free(block);
    const size_t dirty = Stats().dirty_bytes;
    ASSERT_GE(dirty, blocks.size() / 2 * bytes);
    for (int tick = 0; tick < 4; tick++) {
      WaitForATick();
      TakeSlowPaths(64);
    }
    EXPECT_LE(Stats().dirty_bytes, dirty / 4 * 3) << bytes;
    hz3_trim();
  }
}

// With this many busy threads the budget of the process is the smaller one.
TEST_F(Hot, BinsOfAllHeapsGrowWithinOneBudget) {
  const int kThreads = 48;
  std::atomic<int> grown{0};
  std::atomic<bool> release{false};
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([&] {
      for (size_t bytes = 64; bytes <= 256; bytes += 16) SwingBy(1600, bytes);
      for (size_t bytes = 32768; bytes <= 4 * 32768; bytes += 32768 / 2) SwingBy(32, bytes);
      grown++;
      while (!release) usleep(1000);
    });
  }
  while (grown < kThreads) usleep(1000);
  size_t sum = 0;
  for (hz3_heap *heap = hz3_heap_first(); heap != nullptr; heap = heap->next_heap) {
    EXPECT_LE(heap->grown_bytes, size_t{HZ3_HEAP_BYTES} * 8);
    sum += heap->grown_bytes;
  }
  EXPECT_LE(sum, HZ3_HEAP_BYTES * (32 + kThreads / 2));
  // Of those that are done, ticks take back what has grown, where many come before the last of them is done.
  if (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(60 * HZ3_TICK_MS)) {
    EXPECT_GE(sum, size_t{HZ3_HEAP_BYTES} * 16) << "they did not grow";
  }
  release = true;
  for (std::thread &thread : threads) thread.join();
}

// As far as the budgets allow.
void GrowBins(bool of_big_blocks) {
  hz3_free(hz3_malloc(16));
  hz3_heap *heap = OwnHeap();
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    while (hz3_class_is_big(c) == of_big_blocks && hz3_cache_may_grow(heap, c)) hz3_cache_set_level(heap, c, heap->level[c] + 1u);
  }
}

// What bins of others have grown by within what each heap may have takes nothing from those that need more.
TEST_F(Hot, BinsOfBigBlocksGrowBesideManyThreadsWhoseBinsHaveGrown) {
  const size_t kThreads = 80, kEach = size_t{HZ3_HEAP_BYTES} / 2;
  std::atomic<size_t> grown{0}, sum{0};
  std::atomic<bool> release{false};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; t++) {
    threads.emplace_back([&] {
      GrowBins(false);
      sum += OwnHeap()->grown_bytes;
      grown++;
      while (!release) usleep(1000);
    });
  }
  while (grown < kThreads) usleep(1000);
  EXPECT_LE(sum, kThreads * kEach);
  GrowBins(true);
  EXPECT_GT(OwnHeap()->grown_bytes, kEach);
  release = true;
  for (std::thread &thread : threads) thread.join();
  hz3_trim();
  EXPECT_EQ(OwnHeap()->grown_bytes, 0u);
}

TEST_F(Hot, TicksDrainParkedHeaps) {
  std::thread([] { hz3_free(hz3_malloc(700)); }).join();
  unsigned c = hz3_size_class_of(700);
  EXPECT_GT(ClassStats(c).cached_objects, 0u);
  DriveTicks(4);
  EXPECT_EQ(ClassStats(c).cached_objects, 0u);
}

// Threads that all hold something of the class before the first of them ends, so that each has a heap of its own.
void EndSideBySide(int count, size_t bytes) {
  std::vector<std::thread> threads;
  std::atomic<int> waiting{0};
  for (int i = 0; i < count; i++) {
    threads.emplace_back([&] {
      hz3_free(hz3_malloc(bytes));
      waiting++;
      while (waiting < count) std::this_thread::yield();
    });
  }
  for (std::thread &thread : threads) thread.join();
}

// Whoever ticks after many threads ended does not wait for all of their heaps.
TEST_F(Hot, ATickDrainsSomeParkedHeaps) {
  constexpr int kThreads = 64;
  auto parked = [] {
    int count = 0;
    for (hz3_heap *heap = hz3_heap_first(); heap != nullptr; heap = heap->next_heap) count += heap->parked_bytes > 0;
    return count;
  };
  EndSideBySide(kThreads, 700);
  ASSERT_GE(parked(), kThreads);
  int before = parked();
  WaitForATick();
  for (int calls = 0; calls < 10000 && parked() == before; calls++) hz3_free(hz3_malloc(500000));
  EXPECT_LT(parked(), before);
  EXPECT_GE(parked(), before - 16);
  DriveTicks(10);
  EXPECT_EQ(parked(), 0);
}

// However many threads end at once: those that find no room give back what they hold.
TEST_F(Hot, ParkedHeapsHoldNoMoreThanTheirBudget) {
  constexpr int kThreads = 64;
  std::vector<std::thread> threads;
  std::atomic<int> waiting{0};
  for (int i = 0; i < kThreads; i++) {
    threads.emplace_back([&] {
      for (size_t bytes = 1024; bytes <= 32768; bytes *= 2) SwingBy(16, bytes);
      waiting++;
      while (waiting < kThreads) std::this_thread::yield();
    });
  }
  for (std::thread &thread : threads) thread.join();
  size_t sum = 0;
  for (hz3_heap *heap = hz3_heap_first(); heap != nullptr; heap = heap->next_heap) sum += heap->parked_bytes;
  EXPECT_LE(sum, 8 * HZ3_MIB);
  EXPECT_GE(sum, HZ3_MIB) << "there was nothing to park";
}

// A heap that was emptied while its thread lived is one like others when that thread ends.
TEST_F(Hot, WhatAThreadCachesAfterATrimIsDrained) {
  unsigned c = hz3_size_class_of(700);
  for (bool by_tick : {true, false}) {
    std::thread([] {
      hz3_free(hz3_malloc(16));
      hz3_trim();
      hz3_free(hz3_malloc(700));
    }).join();
    EXPECT_GT(ClassStats(c).cached_objects, 0u);
    if (by_tick) DriveTicks(4);
    else hz3_trim();
    EXPECT_EQ(ClassStats(c).cached_objects, 0u);
  }
}

// Nor does it wait for all of a depot that nobody needs.
TEST_F(Hot, ATickDrainsSomeOfTheDepot) {
  if (HZ3_CHECKED) GTEST_SKIP() << "what is freed there bears a pattern";
  const unsigned c = hz3_size_class_of(16), level = HZ3_MAGAZINE_LEVELS - 1;
  const size_t capacity = hz3_magazine_capacity(level), most = 64 * 1024;
  std::vector<void *> blocks((3 * most / capacity + 1) * capacity);
  for (void *&block : blocks) block = hz3_malloc(16);
  for (auto first = blocks.begin(); first != blocks.end(); first += static_cast<ptrdiff_t>(capacity)) {
    uint32_t count;
    hz3_magazine *magazine = hz3_magazine_alloc(level, 1, &count);
    ASSERT_NE(magazine, nullptr);
    std::copy_n(first, capacity, magazine->slots);
    magazine->count = static_cast<uint16_t>(capacity);
    ASSERT_TRUE(hz3_depot_push(c, magazine, SIZE_MAX, 0));
  }
  uint32_t unused[HZ3_CLASS_COUNT];
  hz3_depot_take_low_water(unused);  // from here on nobody needs them
  const size_t before = hz3_depot_objects(c);
  ASSERT_EQ(before, blocks.size());
  WaitForATick();
  for (int calls = 0; calls < 10000 && hz3_depot_objects(c) == before; calls++) hz3_free(hz3_malloc(500000));
  const size_t drained = before - hz3_depot_objects(c);
  EXPECT_GE(drained, most);
  EXPECT_LT(drained, most + capacity) << "half would be more";
}

// Of blocks of 1 KiB, spans of each of which all but a few blocks are free; these are appended.
std::set<hz3_span *> LeaveSparseSpans(size_t count, std::vector<void *> *kept) {
  std::map<hz3_span *, std::vector<void *>> spans;
  void *block;
  do {
    block = hz3_malloc(1024);
    OwnHeap()->slow_calls = 0;  // no tick
    spans[hz3_pages_span_of(block)].push_back(block);
  } while (spans.size() <= count);
  spans.erase(hz3_pages_span_of(block));  // it has one block only
  hz3_free(block);
  std::set<hz3_span *> sparse;
  for (auto &[span, blocks] : spans) {
    sparse.insert(span);
    for (size_t i = 0; i < blocks.size(); i++) {
      OwnHeap()->slow_calls = 0;
      if (i < 8) kept->push_back(blocks[i]);
      else hz3_free(blocks[i]);
    }
  }
  hz3_trim();  // what is cached
  while (hz3_pages_are_hollow_purges_early()) hz3_pages_purge_idle();  // what tests before have left
  return sparse;
}

// By ticks, or as hollow ones; not by a trim.
ptrdiff_t CountPurged(const std::set<hz3_span *> &spans) {
  return std::count_if(spans.begin(), spans.end(), [](const hz3_span *span) { return span->was_purged; });
}

// As if a tick had found them sparse a second ago.
void LetSparseSpansAge(const std::set<hz3_span *> &spans) {
  for (hz3_span *span : spans)
    if (!span->was_purged) span->marked_ms = static_cast<uint32_t>(hz3_os_now_ms()) - 1000;
}

// Takes slow paths until the heap has ticked once.
void Tick() {
  WaitForATick();
  const uint64_t last_tick_ms = OwnHeap()->last_tick_ms;
  for (int calls = 0; calls < 10000 && OwnHeap()->last_tick_ms == last_tick_ms; calls++) TakeSlowPaths(1);
}

// Nor does it purge within all spans of which little is left, nor as soon as it finds them so.
TEST_F(Hot, ATickPurgesWithinSomeSpans) {
  if (HZ3_CHECKED) GTEST_SKIP() << "the pattern in free blocks stays";
  std::vector<void *> kept;
  std::set<hz3_span *> spans = LeaveSparseSpans(100, &kept);
  ASSERT_EQ(CountPurged(spans), 0);
  Tick();
  EXPECT_EQ(CountPurged(spans), 0);
  LetSparseSpansAge(spans);
  Tick();
  EXPECT_EQ(CountPurged(spans), 64);
  Tick();
  EXPECT_EQ(CountPurged(spans), 100) << "the next one takes the others";
  for (void *block : kept) hz3_free(block);
}

// Where what was purged within spans was wanted again at once, ticks leave them alone for a while.
TEST_F(Hot, TicksDoNotPurgeWithinSpansWhileThatIsEarly) {
  if (HZ3_CHECKED) GTEST_SKIP() << "the pattern in free blocks stays";
  std::vector<void *> kept;
  std::set<hz3_span *> spans = LeaveSparseSpans(20, &kept);
  for (int more = 100; more > 0; more -= hz3_pages_are_hollow_purges_early()) hz3_pages_note_hollow_use(static_cast<uint32_t>(hz3_os_now_ms()));
  LetSparseSpansAge(spans);
  Tick();
  EXPECT_EQ(CountPurged(spans), 0);
  while (hz3_pages_are_hollow_purges_early()) hz3_pages_purge_idle();
  Tick();
  EXPECT_EQ(CountPurged(spans), 20);
  for (void *block : kept) hz3_free(block);
}

// Each parked heap is taken for draining once: what was emptied is not taken again.
TEST_F(Hot, EmptiedParkedHeapsAreNotTakenAgain) {
  constexpr int kThreads = 64;
  EndSideBySide(kThreads, 700);
  int taken = 0;
  std::vector<hz3_heap *> heaps;
  for (hz3_heap *heap; (heap = hz3_heap_take_parked(UINT64_MAX)) != nullptr; taken++) heaps.push_back(heap);
  EXPECT_GE(taken, kThreads);
  for (hz3_heap *heap : heaps) {
    hz3_heap_flush(heap);
    hz3_heap_put_parked(heap, 0);
  }
  EXPECT_EQ(hz3_heap_take_parked(UINT64_MAX), nullptr);
}

// Heaps stay for good, so one that was emptied has to be of use to the next thread.
TEST_F(Hot, ThreadsAfterEachOtherNeedOneHeap) {
  auto run = [] { std::thread([] { hz3_free(hz3_malloc(700)); }).join(); };
  run();
  const size_t heaps = hz3_heap_count();
  for (int i = 0; i < 20; i++) {
    run();
    hz3_trim();  // empties what the thread has left
  }
  EXPECT_EQ(hz3_heap_count(), heaps);
}

// What no address space could hold costs nobody his caches.
TEST_F(Hot, AbsurdSizesFlushNothing) {
  hz3_free(hz3_malloc(700));
  unsigned c = hz3_size_class_of(700);
  hz3_free(hz3_malloc(16));
  size_t cached = ClassStats(c).cached_objects;
  ASSERT_GT(cached, 0u);
  for (size_t bytes : {SIZE_MAX / 2, SIZE_MAX - 100, size_t{1} << 60}) {
    errno = 0;
    EXPECT_EQ(hz3_malloc(bytes), nullptr);
    EXPECT_EQ(errno, ENOMEM);
  }
  EXPECT_EQ(hz3_aligned_alloc(size_t{1} << 62, 1), nullptr);
  EXPECT_EQ(ClassStats(c).cached_objects, cached);
}

// ---- unusual moments ----

// As a signal handler that interrupts a slow path: the bins are off limits, everything still works.
TEST_F(Hot, InsideASlowPathAllocationsAreLargeAndFreesWait) {
  std::vector<void *> blocks(1000);
  for (void *&block : blocks) block = hz3_malloc(64);
  hz3_heap *heap = hz3_heap_enter();
  ASSERT_EQ(heap, OwnHeap());
  EXPECT_EQ(hz3_heap_enter(), nullptr);
  void *inside = hz3_malloc(200);  // no bin of this class yet: the slow path
  ASSERT_NE(inside, nullptr);
  memset(inside, 1, 200);
  void *zeroed = hz3_calloc(200);
  EXPECT_TRUE(IsFilled(zeroed, 200, 0));
  EXPECT_FALSE(hz3_trim());
  for (void *block : blocks) hz3_free(block);  // overflows the bin again and again
  EXPECT_NE(heap->deferred, nullptr);
  hz3_heap_leave(heap);
  hz3_free(hz3_malloc(5000));  // the next slow path frees what had to wait
  EXPECT_EQ(heap->deferred, nullptr);
  EXPECT_EQ(ClassStats(hz3_size_class_of(64)).live_objects, 0u);
  hz3_free(inside);
  hz3_free(zeroed);
}

// A key made after the allocator's own has its destructor run after the heap is parked.
pthread_key_t late_key;
void AllocateLate(void *) {
  for (size_t bytes : {100, 5000, 300000}) {
    void *block = hz3_calloc(bytes);
    EXPECT_TRUE(IsFilled(block, bytes, 0));
    block = hz3_realloc(block, 2 * bytes);
    memset(block, 1, 2 * bytes);
    hz3_free(block);
  }
  // Enough for a tick, and for whatever else slow paths do once in a while.
  void *blocks[300];
  for (void *&block : blocks) block = hz3_malloc(40000);
  for (void *block : blocks) hz3_free(block);
  hz3_trim();
  // A signal handler inside a slow path.
  void *waits = hz3_malloc(200);
  hz3_heap *shared = hz3_heap_enter_shared();
  EXPECT_EQ(shared, hz3_heap_entered());
  EXPECT_EQ(hz3_heap_enter_shared(), nullptr);
  hz3_free(waits);
  EXPECT_EQ(shared->deferred, waits);
  hz3_heap_leave(shared);
  hz3_free(hz3_malloc(200));
}

TEST_F(Hot, ThreadsPastTheirDestructorsShareAHeap) {
  ASSERT_EQ(pthread_key_create(&late_key, AllocateLate), 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; i++) {
    threads.emplace_back([] {
      hz3_free(hz3_malloc(100));
      pthread_setspecific(late_key, &late_key);
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(Stats().live_bytes, 0u);
  pthread_key_delete(late_key);
}

// It has none then: a heap that the handler would get takes locks which come before those that are held.
TEST_F(Hot, AHandlerInTheFirstFreesOfAThreadGetsNoHeap) {
  void *interrupted = hz3_malloc(200), *next = hz3_malloc(200);
  std::thread([interrupted, next] {
    hz3_heap *shared = hz3_heap_enter_to_free();
    ASSERT_EQ(shared, hz3_heap_entered());
    void *inside = hz3_malloc(300);
    EXPECT_NE(inside, nullptr);
    EXPECT_EQ(hz3_heap_offset, 0u);
    hz3_free(interrupted);
    EXPECT_EQ(shared->deferred, interrupted);
    hz3_heap_leave(shared);
    hz3_free(next);
    EXPECT_EQ(shared->deferred, nullptr);
    hz3_free(inside);
  }).join();
  EXPECT_EQ(ClassStats(hz3_size_class_of(200)).live_objects, 0u);
}

// Nobody counts on finding that heap warm.
void CacheLate(void *) { hz3_free(hz3_malloc(700)); }

TEST_F(Hot, TicksDrainTheSharedHeap) {
  pthread_key_t key;
  ASSERT_EQ(pthread_key_create(&key, CacheLate), 0);
  std::thread([key] {
    hz3_free(hz3_malloc(16));
    pthread_setspecific(key, &key);
  }).join();
  const unsigned c = hz3_size_class_of(700);
  EXPECT_GT(ClassStats(c).cached_objects, 0u);
  DriveTicks(1);
  EXPECT_EQ(ClassStats(c).cached_objects, 0u);
  pthread_key_delete(key);
}

TEST_F(Hot, ChildOfAForkAllocatesAndFrees) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 2; t++) {
    threads.emplace_back([t, &stop] {
      std::mt19937 random(t);
      while (!stop) {
        std::vector<void *> blocks;
        for (int i = 0; i < 100; i++) blocks.push_back(hz3_malloc(random() % 3000));
        for (void *block : blocks) hz3_free(block);
      }
    });
  }
  void *parents = hz3_malloc(777);
  for (int i = 0; i < 30; i++) {
    pid_t child = fork();
    if (child == 0) {
      hz3_free(parents);
      for (size_t bytes = 1; bytes < 3 * HZ3_MIB; bytes = bytes * 3 / 2 + 1) hz3_free(hz3_malloc(bytes));
      hz3_trim();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  for (std::thread &thread : threads) thread.join();
  hz3_free(parents);
}

// A fork may cut a thread off where it has stored which block waits, but not its tag yet: the child has the block, and beside it the
// tag of the one before.
TEST_F(Hot, AChildLooksUpTheClassOfABlockThatWaits) {
  hz3_heap *heap = nullptr;
  void *before = nullptr, *waits = nullptr;
  std::atomic<bool> has_freed{false}, may_end{false};
  std::thread other([&] {
    heap = OwnHeap();
    before = hz3_malloc(100);
    waits = hz3_malloc(3000);
    heap = OwnHeap();
    heap->slow_calls = 0;  // no tick
    hz3_free(before);
    hz3_free(waits);
    has_freed = true;
    while (!may_end) usleep(1000);
  });
  while (!has_freed) usleep(1000);
  ASSERT_EQ(heap->last.object, waits);
  const size_t tag = heap->last.tag;
  heap->last.tag = hz3_size_class_of(100) * sizeof(hz3_bin);
  for (bool is_adopted : {true, false}) {
    pid_t child = fork();
    if (child == 0) {
      if (is_adopted) {
        hz3_heap_offset = 0;  // as a thread that begins: it takes the heap over
        heap->slow_calls = 0;
        hz3_free(hz3_malloc(5000));
        HZ3_REQUIRE(OwnHeap() == heap);
        hz3_free(hz3_malloc(5000));
        HZ3_REQUIRE(hz3_malloc(100) == before && hz3_malloc(3000) == waits);
      }
      hz3_trim();
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << (is_adopted ? "adopted" : "drained");
  }
  heap->last.tag = tag;
  may_end = true;
  other.join();
}

// Neither ThreadSanitizer nor musl, whose own locks may be held then, knows threads of such a child.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
// A thread that runs instruction by instruction until its own handler forks, at the one that `fork_at` says, or until it has come to have a
// heap, or to have none any more, a hundred instructions ago.
struct Stepped {
  long fork_at, steps, steps_since;
  bool had_heap, is_in_child;
  pid_t child;
};
Stepped stepped;

void SetTrapFlag(bool on) {
  __asm__ volatile(
      "lea -128(%%rsp), %%rsp; pushfq; andq $~0x100, (%%rsp); orq %0, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::"r"(uint64_t{on} << 8)
      : "cc", "memory");
}

void ForkAtStep(int, siginfo_t *, void *context) {
  stepped.steps++;
  if ((hz3_heap_offset != 0) != stepped.had_heap) stepped.steps_since++;
  if (stepped.steps < stepped.fork_at && stepped.steps_since < 100) return;
  static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_EFL] &= ~0x100;
  if (stepped.steps < stepped.fork_at) return;
  stepped.child = fork();
  stepped.is_in_child = stepped.child == 0;
}

// In the child, once what was interrupted is done: no two threads have the same heap.
void ExpectHeapsOfTheirOwn() {
  if (!stepped.is_in_child) return;
  std::set<hz3_heap *> heaps;
  if (hz3_heap_offset != 0) heaps.insert(OwnHeap());
  const size_t before = heaps.size();
  std::mutex mutex;
  std::atomic<int> arrived{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; t++) {
    threads.emplace_back([&] {
      hz3_free(hz3_malloc(48));
      {
        std::lock_guard<std::mutex> guard(mutex);
        heaps.insert(OwnHeap());
      }
      for (arrived++; arrived < 3;) sched_yield();
    });
  }
  for (std::thread &thread : threads) thread.join();
  _exit(heaps.size() == before + 3 ? 0 : 1);
}

// Before the allocator's own destructor.
struct StepsAtExit {
  ~StepsAtExit() { SetTrapFlag(true); }
};

void *BeginInSteps(void *) {
  SetTrapFlag(true);
  void *block = hz3_malloc(48);
  SetTrapFlag(false);
  ExpectHeapsOfTheirOwn();
  hz3_free(block);
  return nullptr;
}

void *EndInSteps(void *key) {
  pthread_setspecific(*static_cast<pthread_key_t *>(key), key);  // its destructor runs after the allocator's, which is older
  hz3_free(hz3_malloc(48));
  static thread_local StepsAtExit steps;
  return &steps;
}

TEST_F(Hot, NoTwoThreadsOfAChildShareAHeapWhereverAHandlerForks) {
  struct sigaction action = {}, old;
  action.sa_sigaction = ForkAtStep;
  action.sa_flags = SA_SIGINFO;
  ASSERT_EQ(sigaction(SIGTRAP, &action, &old), 0);
  pthread_key_t after_exit;
  ASSERT_EQ(pthread_key_create(&after_exit, [](void *) { ExpectHeapsOfTheirOwn(); }), 0);
  for (bool had_heap : {false, true}) {
    long forks = 0;
    for (;; forks++) {
      stepped = {forks + 1, 0, 0, had_heap, false, 0};
      pthread_t thread;
      ASSERT_EQ(pthread_create(&thread, nullptr, had_heap ? EndInSteps : BeginInSteps, &after_exit), 0);
      ASSERT_EQ(pthread_join(thread, nullptr), 0);
      if (stepped.child == 0) break;
      int status = 0;
      ASSERT_EQ(waitpid(stepped.child, &status, 0), stepped.child);
      EXPECT_EQ(status, 0) << (had_heap ? "last" : "first") << " instructions of a thread, " << forks;
    }
    EXPECT_GE(forks, 100) << "it was not stepped";
  }
  pthread_key_delete(after_exit);
  sigaction(SIGTRAP, &old, nullptr);
}
#endif

// What is half emptied must not be handed out by the child as well.
TEST_F(Hot, AChildDoesNotUseAHeapThatIsBeingEmptied) {
  hz3_trim();
  std::thread([] { hz3_free(hz3_malloc(100)); }).join();
  hz3_heap *heap = hz3_heap_take_parked(UINT64_MAX);
  ASSERT_NE(heap, nullptr);
  pid_t child = fork();
  if (child == 0) _exit(hz3_heap_take_parked(UINT64_MAX) == heap || heap->state != HZ3_HEAP_ABANDONED ? 1 : 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  hz3_heap_flush(heap);
  hz3_heap_put_parked(heap, 0);
  EXPECT_FALSE(heap->is_busy);
}

// ---- misuse ----

using HotDeathTest = Hot;

const char kInvalidFree[] = "^hz3: fatal: free of a pointer that this allocator did not return: pointer 0x[0-9a-f]+\n$";

TEST_F(HotDeathTest, ForeignPointers) {
  int on_stack;
  static char global[64];
  EXPECT_DEATH(hz3_free(&on_stack), kInvalidFree);
  EXPECT_DEATH(hz3_free(global), kInvalidFree);
  EXPECT_DEATH(hz3_free(reinterpret_cast<void *>(16)), kInvalidFree);
  EXPECT_DEATH(hz3_free(reinterpret_cast<void *>(~uintptr_t{15})), kInvalidFree);
  EXPECT_DEATH(hz3_usable_size(&on_stack),
               "^hz3: fatal: malloc_usable_size of a pointer that this allocator did not return: pointer 0x[0-9a-f]+\n$");
  EXPECT_DEATH(hz3_realloc(global, 100),
               "^hz3: fatal: realloc of a pointer that this allocator did not return: pointer 0x[0-9a-f]+\n$");
}

TEST_F(HotDeathTest, PointersIntoFreeOrLargeMemory) {
  char *large = static_cast<char *>(hz3_malloc(4 * HZ3_MIB)), *block = static_cast<char *>(hz3_malloc(40000));
  EXPECT_DEATH(hz3_free(large + 16), kInvalidFree);
  EXPECT_DEATH({ SwingLarge(); void *kept = hz3_malloc(2 * HZ3_MIB); hz3_free(kept); hz3_free(kept); }, kInvalidFree);
  EXPECT_DEATH(hz3_free(large + HZ3_MIB), kInvalidFree);
  char *free_slice = reinterpret_cast<char *>(hz3_round_down(reinterpret_cast<uintptr_t>(block), 4 * HZ3_MIB)) + 60 * HZ3_SLICE_BYTES;
  EXPECT_DEATH(hz3_free(free_slice), kInvalidFree);
  hz3_free(large);
  EXPECT_DEATH(hz3_free(large), kInvalidFree);
  hz3_free(block);
}

TEST_F(HotDeathTest, SameBlockTwiceInARow) {
  void *block = hz3_malloc(100), *other = hz3_malloc(100);
  EXPECT_DEATH((hz3_free(block), hz3_free(block)), "^hz3: fatal: double free: pointer 0x[0-9a-f]+ in a block of 112 bytes\n$");
  hz3_free(block);
  hz3_free(other);
}

// Whatever the count of slow paths: one of them is a tick, which takes what waits to its span.
TEST_F(HotDeathTest, SameBlockTwiceInARowEvenIfTheSecondFreeTicks) {
  void *block = hz3_malloc(100);
  for (uint32_t calls = 0; calls < 64; calls++) {
    auto twice = [=] {
      hz3_free(block);
      OwnHeap()->slow_calls = calls;
      OwnHeap()->last_tick_ms = 0;
      hz3_free(block);
    };
    EXPECT_DEATH(twice(), "double free");
  }
  hz3_free(block);
}

TEST_F(HotDeathTest, SameBlockTwiceAroundAnotherEvenIfATickTakesIt) {
  DriveTicks(1);  // the first after a trim empties every bin
  void *block = hz3_malloc(100), *other = hz3_malloc(3000), *behind = hz3_malloc(3000);
  for (uint32_t calls = 0; calls < 64; calls++) {
    auto twice = [=] {
      hz3_free(block);
      hz3_free(other);
      hz3_free(block);
      OwnHeap()->slow_calls = calls;
      OwnHeap()->last_tick_ms = 0;
      OwnHeap()->used_bits[0] = OwnHeap()->used_bits[1] = ~uint64_t{0};  // no bin is idle: only what waits goes
      hz3_free(behind);
    };
    EXPECT_DEATH(twice(), "double free");
  }
  hz3_free(block);
  hz3_free(other);
  hz3_free(behind);
}

TEST_F(HotDeathTest, TwiceWithOthersBetweenIsFoundAtTheSpan) {
  void *block = hz3_malloc(100), *other = hz3_malloc(100), *keep = hz3_malloc(100);
  EXPECT_DEATH((hz3_free(block), hz3_free(other), hz3_free(block), hz3_trim()),
               "^hz3: fatal: double free: pointer 0x[0-9a-f]+ in a block of 112 bytes\n$");
  hz3_free(block);
  hz3_free(other);
  hz3_free(keep);
}

TEST_F(HotDeathTest, TwiceInADrainIsFound) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing drains";
  std::vector<void *> left = Thinned(100, 20);
  auto twice = [&left](bool others_between) {
    void *block = left.back(), *other = hz3_malloc(3000);
    hz3_free(block);
    if (others_between) FreeAll({left[left.size() - 2], left[left.size() - 3]});
    hz3_free(other);
    hz3_free(block);
    hz3_free(hz3_malloc(5000));  // the block waits no longer
    if (others_between) hz3_trim();
  };
  for (bool others_between : {false, true})
    EXPECT_DEATH(twice(others_between), "^hz3: fatal: double free: pointer 0x[0-9a-f]+ in a block of 112 bytes\n$");
  FreeAll(left);
}

TEST_F(HotDeathTest, PointerIntoABlockIsFoundAtTheSpan) {
  if (HZ3_CHECKED) GTEST_SKIP() << "the checked lane sees a block in use among the free ones before that";
  char *block = static_cast<char *>(hz3_malloc(100));
  EXPECT_DEATH((hz3_free(block + 16), hz3_trim()),
               "^hz3: fatal: free of a pointer into the middle of a block: pointer 0x[0-9a-f]+ in a block of 112 bytes\n$");
  hz3_free(block);
}

// ---- scarcity ----

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their runtimes need address space of their own
[[noreturn]] void RunOutOfAddressSpace() {
  const size_t limit_bytes = hz3_test::AddressSpaceBytes() + (size_t{96} << 20);
  rlimit limit = {limit_bytes, limit_bytes};
  bool works = true;
  setrlimit(RLIMIT_AS, &limit);
  for (size_t bytes : {100, 3000, 100000, 3000000}) {
    size_t count = 0;
    errno = 0;
    void *block = hz3_malloc(bytes), *list = nullptr;
    memset(block, 6, bytes);
    // Linked through themselves: there is no memory for a vector.
    for (void **next; (next = static_cast<void **>(hz3_malloc(bytes))) != nullptr; list = next, count++) *next = list;
    works = works && errno == ENOMEM && count * bytes > size_t{48} << 20 && hz3_calloc(bytes) == nullptr;
    works = works && hz3_realloc(block, size_t{90} << 20) == nullptr && IsFilled(block, bytes, 6);
    hz3_free(block);
    while (list != nullptr) {
      void *next = *static_cast<void **>(list);
      hz3_free(list);
      list = next;
    }
  }
  // What one size left behind was of use for the next; at the end all of it can go.
  hz3_trim();
  works = works && Stats().live_bytes == 0 && Stats().mapped_bytes == 0;
  _exit(works ? 0 : 1);
}

TEST_F(HotDeathTest, NullWhenAddressSpaceIsUsedUpAndBackAfterwards) {
  EXPECT_EXIT(RunOutOfAddressSpace(), testing::ExitedWithCode(0), "");
}

// The room that realloc leaves is a wish: where there is memory for the block alone, it grows.
[[noreturn]] void GrowWhereThereIsJustEnough() {
  const size_t kFull = hz3_size_classes[HZ3_CLASS_COUNT - 2].bytes;  // a quarter more would be a large block
  char *block = static_cast<char *>(hz3_malloc(kFull));
  HZ3_REQUIRE(block != nullptr);
  memset(block, 3, kFull);
  hz3_test::RefuseCall(SYS_mmap);
  errno = 4321;
  block = static_cast<char *>(hz3_realloc(block, kFull + 1));
  HZ3_REQUIRE(block != nullptr && IsFilled(block, kFull, 3) && errno == 4321);
  // Without memory even for a smaller block it stays where it is.
  while (hz3_malloc(100) != nullptr) continue;
  errno = 4321;
  HZ3_REQUIRE(hz3_realloc(block, 100) == block && errno == 4321);
  hz3_free(block);
  _exit(0);
}

TEST_F(HotDeathTest, ReallocGrowsWithoutRoomToGrowOn) {
  EXPECT_EXIT(GrowWhereThereIsJustEnough(), testing::ExitedWithCode(0), "");
}

// Magazines need memory too. Without any, what does not fit a bin goes straight to the spans: nothing is lost.
[[noreturn]] void FreeWithoutMagazines() {
  const size_t kCount = 400000;
  std::vector<void *> blocks(kCount);
  for (int round = 0; round < 2; round++) {
    for (void *&block : blocks) HZ3_REQUIRE((block = hz3_malloc(100)) != nullptr);
    if (round == 0) hz3_test::RefuseCall(SYS_mmap);
    size_t mapped = Stats().mapped_bytes;
    for (void *block : blocks) hz3_free(block);
    HZ3_REQUIRE(Stats().live_bytes == 0 && Stats().mapped_bytes <= mapped);
  }
  hz3_trim();
  HZ3_REQUIRE(Stats().cached_bytes == 0 && Stats().mapped_bytes == 0);
  _exit(0);
}

TEST_F(HotDeathTest, FreesWithoutMemoryForMagazines) {
  EXPECT_EXIT(FreeWithoutMagazines(), testing::ExitedWithCode(0), "");
}

// In a child, where no threads of other tests were before: two threads whose blocks come from the same spans write to the same cache lines.
[[noreturn]] void AllocateSideBySide() {
  const size_t kBytes = 48, kBlocks = 20000;
  std::set<hz3_span *> spans[2];
  pthread_barrier_t together;
  pthread_barrier_init(&together, nullptr, 2);
  auto work = [&](unsigned t) {
    std::vector<void *> blocks(kBlocks);
    for (size_t i = 0; i < kBlocks; i++) {
      if (i % 500 == 0) pthread_barrier_wait(&together);
      blocks[i] = hz3_malloc(kBytes);
      spans[t].insert(hz3_pages_span_of(blocks[i]));
    }
  };
  std::thread first(work, 0), second(work, 1);
  first.join();
  second.join();
  std::vector<hz3_span *> shared;
  std::set_intersection(spans[0].begin(), spans[0].end(), spans[1].begin(), spans[1].end(), std::back_inserter(shared));
  HZ3_REQUIRE(spans[0].size() * HZ3_SLICE_BYTES >= kBlocks * kBytes && shared.size() <= 1);  // one that was begun before, perhaps
  _exit(0);
}

TEST_F(HotDeathTest, ThreadsSideBySideTakeFromSpansOfTheirOwn) {
  if (hz3_os_cpu_count() < 2) GTEST_SKIP() << "nothing is side by side";
  EXPECT_EXIT(AllocateSideBySide(), testing::ExitedWithCode(0), "");
}

// In a child, where no threads of other tests were before: one that frees much leaves little in the depot, as a place for
// exchange, and more once there are others.
[[noreturn]] void FreeAloneAndAmongMany() {
  const size_t kBytes = 1024, kThreads = HZ3_DEPOT_BYTES / HZ3_HEAP_BYTES;
  const unsigned c = hz3_size_class_of(kBytes);
  std::vector<void *> blocks(10 * HZ3_DEPOT_BYTES / kBytes);
  for (void *&block : blocks) block = hz3_malloc(kBytes);
  // Frees every ninth block: not an eighth, so that the depot gets what is not of the thread's own spans. The most that it has held meanwhile.
  auto most_kept = [&] {
    size_t most = 0;
    for (size_t i = 0; i < blocks.size(); i += 9) {
      OwnHeap()->slow_calls = 0;  // no tick, which would take some of it
      OwnHeap()->misses[c] = 0;   // nor bigger magazines: the limit is a number of them
      hz3_free(blocks[i]);
      most = std::max(most, hz3_depot_objects(c) * kBytes);
    }
    return most;
  };
  auto refill = [&] {
    for (size_t i = 0; i < blocks.size(); i += 9) blocks[i] = hz3_malloc(kBytes);
  };
  const size_t alone = most_kept();
  refill();
  HZ3_REQUIRE(hz3_heap_count() == 1);
  HZ3_REQUIRE(alone <= HZ3_HEAP_BYTES + 2 * HZ3_COOL_BYTES);
  pthread_barrier_t all_here;
  pthread_barrier_init(&all_here, nullptr, kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; i++)
    threads.emplace_back([&] {
      hz3_free(hz3_malloc(16));
      pthread_barrier_wait(&all_here);
    });
  for (std::thread &thread : threads) thread.join();
  HZ3_REQUIRE(hz3_heap_count() == 1 + kThreads);
  std::thread([] { hz3_free(hz3_malloc(16)); }).join();
  HZ3_REQUIRE(hz3_heap_count() == 1 + kThreads);  // it has the heap of one that ended
  {
    hz3_test::Pinned pinned;                     // of its own spans, each CPU keeps so much
    HZ3_REQUIRE(most_kept() <= HZ3_HEAP_BYTES);
  }
  refill();
  size_t among_many = 0;
  DoElsewhere(hz3_pages_home_of(blocks[0]), [&] { among_many = most_kept(); });
  const size_t shards = (hz3_os_cpu_count() + HZ3_CPUS_PER_SHARD - 1) / HZ3_CPUS_PER_SHARD;  // each has its share
  const size_t magazine_bytes = (HZ3_MAGAZINE_CAPACITY + 1) * kBytes;  // the limit is a number of magazines
  HZ3_REQUIRE(among_many > alone && among_many * shards > HZ3_DEPOT_BYTES - magazine_bytes);
  _exit(0);
}

[[noreturn]] void FollowItsCpuAmongMany() {
  hz3_free(hz3_malloc(16));  // or the allocator would know of one CPU only
  auto home_on = [](size_t cpu) {
    hz3_test::Pinned pinned(cpu);
    hz3_trim();  // or there is one at hand
    void *block = hz3_malloc(1024);
    unsigned home = hz3_pages_home_of(block);
    hz3_free(block);
    return home;
  };
  const unsigned cpus = hz3_os_cpu_count(), own = home_on(0);
  HZ3_REQUIRE(home_on(1) == own);
  std::function<void(unsigned)> allocate_at_once = [&](unsigned more) {
    hz3_free(hz3_malloc(16));
    if (more > 0) std::thread(allocate_at_once, more - 1).join();
  };
  allocate_at_once(2 * cpus - 1);
  HZ3_REQUIRE(hz3_heap_count() == 2 * cpus && home_on(0) == own && home_on(1) == own);
  allocate_at_once(2 * cpus);
  HZ3_REQUIRE(hz3_heap_count() > 2 * cpus && home_on(0) == 0 && home_on(1) == 1 && home_on(0) == 0);
  _exit(0);
}

TEST_F(HotDeathTest, AmongManyThreadsAHeapHasTheHomeOfItsCpu) {
  if (hz3_os_cpu_count() < 2) GTEST_SKIP() << "no other home";
  EXPECT_EXIT(FollowItsCpuAmongMany(), testing::ExitedWithCode(0), "");
}

TEST_F(HotDeathTest, TheDepotKeepsMoreAmongMoreThreads) {
  if (hz3_os_cpu_count() < 2) GTEST_SKIP() << "no other home";
  EXPECT_EXIT(FreeAloneAndAmongMany(), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
