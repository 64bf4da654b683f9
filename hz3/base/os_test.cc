// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the kernel calls: what they do, how they fail, and that errno stays.
#include "hz3/base/os.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

#include "hz3/base/refuse_test.h"

namespace {

enum { kMarkedErrno = 4321 };

class Os : public testing::Test {
 protected:
  void SetUp() override { errno = kMarkedErrno; }
  void TearDown() override { EXPECT_EQ(errno, kMarkedErrno); }
};

bool IsZero(const char *memory, size_t bytes) {
  return std::all_of(memory, memory + bytes, [](char c) { return c == 0; });
}

// mincore fails with ENOMEM when a page of the range is not mapped.
bool IsMapped(void *start, size_t bytes) {
  std::vector<unsigned char> pages(bytes / hz3_os_page_bytes() + 1);
  int saved = errno;
  bool mapped = mincore(start, bytes, pages.data()) == 0;
  errno = saved;
  return mapped;
}

TEST_F(Os, MapIsZeroedWritableAndGoesAway) {
  const size_t kBytes = 3 * hz3_os_page_bytes();
  char *memory = static_cast<char *>(hz3_os_map(nullptr, kBytes));
  ASSERT_NE(memory, nullptr);
  EXPECT_TRUE(IsZero(memory, kBytes));
  memset(memory, 1, kBytes);
  EXPECT_TRUE(hz3_os_unmap(memory, kBytes));
  EXPECT_FALSE(IsMapped(memory, kBytes));
}

TEST_F(Os, MapAlignedToEveryPower) {
  const size_t kBytes = 5 * hz3_os_page_bytes();
  for (size_t align = hz3_os_page_bytes(); align <= size_t{1} << 30; align *= 2) {
    char *memory = static_cast<char *>(hz3_os_map_aligned(nullptr, kBytes, align));
    ASSERT_NE(memory, nullptr) << align;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % align, 0u);
    memset(memory, 1, kBytes);
    EXPECT_TRUE(hz3_os_unmap(memory, kBytes));
  }
}

// Neither where it was asked for nor below is room for it: of a bigger mapping, both ends go.
TEST_F(Os, MapAlignedKeepsNothingButTheBlock) {
  const size_t kAlign = 64 << 20, kBytes = 1 << 20, kPage = hz3_os_page_bytes();
  char *away = static_cast<char *>(hz3_os_map(nullptr, 2 * kAlign));
  ASSERT_NE(away, nullptr);
  char *taken = reinterpret_cast<char *>(hz3_round_up(reinterpret_cast<uintptr_t>(away), kAlign));
  hz3_os_unmap(away, 2 * kAlign);
  ASSERT_EQ(hz3_os_map(taken, kPage), taken);
  char *memory = static_cast<char *>(hz3_os_map_aligned(taken + kPage, kBytes, kAlign));
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % kAlign, 0u);
  EXPECT_TRUE(IsMapped(memory, kBytes));
  EXPECT_FALSE(IsMapped(memory - kPage, kPage));
  EXPECT_FALSE(IsMapped(memory + kBytes, kPage));
  hz3_os_unmap(memory, kBytes);
  hz3_os_unmap(taken, kPage);
}

// Nor does the kernel have to promise memory for what is cut off.
TEST_F(Os, MapAlignedIsNoMatterOfHowMuchMemoryThereIs) {
  const size_t kBytes = 1 << 20, kPage = hz3_os_page_bytes();
  size_t align = size_t{1} << 30;
  while (hz3_os_can_map(align)) align *= 2;
  void *away = mmap(nullptr, 2 * align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (away == MAP_FAILED) GTEST_SKIP() << "a limit on address space, or strict overcommit";
  char *taken = reinterpret_cast<char *>(hz3_round_up(reinterpret_cast<uintptr_t>(away), align));
  hz3_os_unmap(away, 2 * align);
  ASSERT_EQ(hz3_os_map(taken, kPage), taken);
  void *memory = hz3_os_map_aligned(taken + kPage, kBytes, align);
  EXPECT_NE(memory, nullptr);
  if (memory != nullptr) hz3_os_unmap(memory, kBytes);
  hz3_os_unmap(taken, kPage);
}

// Where the first place is askew, there mostly is room below it: what would be cut off again a limit might not allow.
[[noreturn]] void MapAlignedWithNothingToCutOff() {
  const size_t kAlign = 64 << 20, kBytes = 1 << 20, kPage = hz3_os_page_bytes();
  char *away = static_cast<char *>(hz3_os_map(nullptr, 3 * kAlign));
  char *aligned = reinterpret_cast<char *>(hz3_round_up(reinterpret_cast<uintptr_t>(away), kAlign));
  HZ3_REQUIRE(away != nullptr && hz3_os_unmap(away, 3 * kAlign));
  hz3_test::RefuseCall(SYS_mmap, static_cast<uint32_t>(kBytes + kAlign));
  HZ3_REQUIRE(hz3_os_map_aligned(aligned + kPage, kBytes, kAlign) == aligned);
  HZ3_REQUIRE(IsMapped(aligned, kBytes) && !IsMapped(aligned + kBytes, kPage));
  _exit(0);
}

TEST(OsDeathTest, MapAlignedNeedsNoMoreThanTheBlock) {
  EXPECT_EXIT(MapAlignedWithNothingToCutOff(), testing::ExitedWithCode(0), "");
}

// Of threads that all find the slot empty one fills it, and what the others mapped goes away again.
TEST_F(Os, MapOnceFillsASlotOnceForAllThreads) {
  enum { kThreads = 4, kSlots = 200 };
  const size_t kBytes = 64 << 20;
  auto mapped_bytes = [] {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * hz3_os_page_bytes();
  };
  const size_t before = mapped_bytes();
  std::vector<void *> slots(kSlots), seen[kThreads];
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (auto &mine : seen) {
    threads.emplace_back([&] {
      for (ready++; ready < kThreads;) continue;
      for (void *&slot : slots) mine.push_back(hz3_os_map_once(&slot, kBytes) ? __atomic_load_n(&slot, __ATOMIC_ACQUIRE) : nullptr);
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (auto &mine : seen) EXPECT_EQ(mine, slots);
  EXPECT_EQ(std::set<void *>(slots.begin(), slots.end()).size(), size_t{kSlots});
  EXPECT_LT(mapped_bytes() - before, (kSlots + kSlots / 2) * kBytes);
  for (void *slot : slots) EXPECT_TRUE(slot != nullptr && hz3_os_unmap(slot, kBytes));
  void *refused = nullptr;
  EXPECT_FALSE(hz3_os_map_once(&refused, SIZE_MAX / 2));
  EXPECT_EQ(refused, nullptr);
}

TEST_F(Os, ImpossibleSizesAreRefused) {
  EXPECT_EQ(hz3_os_map(nullptr, SIZE_MAX / 2), nullptr);
  EXPECT_EQ(hz3_os_map_aligned(nullptr, size_t{1} << 62, size_t{1} << 20), nullptr);
  EXPECT_EQ(hz3_os_map_aligned(nullptr, hz3_os_page_bytes(), size_t{1} << 62), nullptr);
}

TEST_F(Os, MoreThanThereIsCanNotBeMapped) {
  EXPECT_TRUE(hz3_os_can_map(0));
  EXPECT_TRUE(hz3_os_can_map(size_t{1} << 30));
  EXPECT_FALSE(hz3_os_can_map(size_t{1} << 46));
  for (int which : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit before;
    ASSERT_EQ(getrlimit(which, &before), 0);
    rlimit limited = {size_t{1} << 40, before.rlim_max};
    ASSERT_EQ(setrlimit(which, &limited), 0);
    EXPECT_TRUE(hz3_os_can_map(size_t{1} << 30));
    limited.rlim_cur = size_t{1} << 30;
    ASSERT_EQ(setrlimit(which, &limited), 0);
    EXPECT_TRUE(hz3_os_can_map(size_t{1} << 30));
    EXPECT_FALSE(hz3_os_can_map((size_t{1} << 30) + 1));
    ASSERT_EQ(setrlimit(which, &before), 0);
  }
}

TEST_F(Os, AllMemoryAndSwapCanBeMapped) {
  struct sysinfo info;
  ASSERT_EQ(sysinfo(&info), 0);
  size_t all = (info.totalram + info.totalswap) * info.mem_unit;
  EXPECT_TRUE(hz3_os_can_map(all));
  EXPECT_FALSE(hz3_os_can_map(all + info.mem_unit));
}

TEST_F(Os, RefusalsAreReported) {
  char *memory = static_cast<char *>(hz3_os_map(nullptr, hz3_os_page_bytes()));
  ASSERT_NE(memory, nullptr);
  EXPECT_FALSE(hz3_os_unmap(memory + 1, 1));
  EXPECT_FALSE(hz3_os_purge(memory + 1, 1));
  hz3_os_unmap(memory, hz3_os_page_bytes());
}

TEST_F(Os, PurgedMemoryReadsAsZero) {
  const size_t kPage = hz3_os_page_bytes();
  char *memory = static_cast<char *>(hz3_os_map(nullptr, 3 * kPage));
  memset(memory, 7, 3 * kPage);
  EXPECT_TRUE(hz3_os_purge(memory + kPage, kPage));
  EXPECT_EQ(memory[0], 7);
  EXPECT_TRUE(IsZero(memory + kPage, kPage));
  EXPECT_EQ(memory[2 * kPage], 7);
  hz3_os_unmap(memory, 3 * kPage);
}

TEST_F(Os, LockedMemoryIsNotPurged) {
  const size_t kPage = hz3_os_page_bytes();
  char *memory = static_cast<char *>(hz3_os_map(nullptr, kPage));
  // By the system call: the sanitizers turn the function into nothing.
  if (syscall(SYS_mlock, memory, kPage) != 0) {
    errno = kMarkedErrno;
    GTEST_SKIP() << "no memory may be locked here";
  }
  memset(memory, 7, kPage);
  EXPECT_FALSE(hz3_os_purge(memory, kPage));
  EXPECT_EQ(memory[0], 7);
  hz3_os_unmap(memory, kPage);
}

TEST_F(Os, ProtectedMemoryFaultsUntilItIsWritableAgain) {
  const size_t kPage = hz3_os_page_bytes();
  volatile char *memory = static_cast<char *>(hz3_os_map(nullptr, 3 * kPage));
  memory[kPage - 1] = memory[kPage] = memory[2 * kPage] = 7;
  char *middle = const_cast<char *>(memory) + kPage;
  EXPECT_TRUE(hz3_os_protect(middle, kPage));
  EXPECT_EQ(memory[kPage - 1] + memory[2 * kPage], 14);
  for (char *at : {middle, middle + kPage - 1}) {
    EXPECT_DEATH(_exit(*static_cast<volatile char *>(at) & 0), "");
    EXPECT_DEATH(*static_cast<volatile char *>(at) = 1, "");
  }
  errno = kMarkedErrno;  // a death test does not keep it
  EXPECT_TRUE(hz3_os_make_writable(middle, kPage));
  EXPECT_EQ(memory[kPage], 7);
  memory[kPage] = 8;
  hz3_os_unmap(const_cast<char *>(memory), 3 * kPage);
  EXPECT_FALSE(hz3_os_protect(middle, kPage)) << "nothing is mapped there";
  EXPECT_FALSE(hz3_os_make_writable(middle, kPage));
}

// Whether each of so many bytes is what Number wrote: their index, in units of a cache line.
void Number(char *memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) memory[i] = static_cast<char>(i / 64);
}
bool IsNumbered(const char *memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (memory[i] != static_cast<char>(i / 64)) return false;
  return true;
}

TEST_F(Os, MovedPagesArriveAndLeaveTheirPlaceMapped) {
  const size_t kBytes = 64 * hz3_os_page_bytes();
  char *from = static_cast<char *>(hz3_os_map(nullptr, kBytes));
  char *to = static_cast<char *>(hz3_os_map(nullptr, kBytes));
  Number(from, kBytes);
  if (hz3_os_move_pages(from, to, kBytes) != HZ3_OS_MOVED) GTEST_SKIP() << "the kernel cannot move pages and keep the mapping";
  EXPECT_TRUE(IsNumbered(to, kBytes));
  memset(from, 1, kBytes);
  hz3_os_unmap(from, kBytes);
  hz3_os_unmap(to, kBytes);
}

// Pages numbered and in three of the kernel's mappings: of 4, 3 and 1 page. Nothing is mapped behind them.
char *MapNumbered(size_t page) {
  char *from = static_cast<char *>(hz3_os_map(nullptr, 9 * page));
  hz3_os_unmap(from + 8 * page, page);
  hz3_os_advise_huge(from, 4 * page, false);
  hz3_os_advise_huge(from + 4 * page, 3 * page, true);
  hz3_os_advise_huge(from + 7 * page, page, false);
  Number(from, 8 * page);
  return from;
}

TEST_F(Os, PagesOfSeveralMappingsMove) {
  const size_t kPage = hz3_os_page_bytes();
  char *to = static_cast<char *>(hz3_os_map(nullptr, 8 * kPage)), *from = MapNumbered(kPage);
  hz3_os_moved moved = hz3_os_move_pages(from, to, 8 * kPage);
  if (moved == HZ3_OS_NOT_MOVED) GTEST_SKIP() << "the kernel cannot move pages and keep the mapping";
  EXPECT_EQ(moved, HZ3_OS_MOVED);
  EXPECT_TRUE(IsNumbered(to, 8 * kPage));
  EXPECT_TRUE(IsMapped(from, 8 * kPage));
  EXPECT_FALSE(IsMapped(from + 8 * kPage, kPage)) << "to see how far a mapping goes, it was made longer";
  hz3_os_unmap(from, 8 * kPage);
  hz3_os_unmap(to, 8 * kPage);
}

TEST_F(Os, MemoryThatPagesMovedAwayFromIsOfUse) {
  char *pages = static_cast<char *>(hz3_os_map(nullptr, 2 * hz3_os_page_bytes()));
  pages[0] = 1;
  bool can_move = hz3_os_move_pages(pages, pages + hz3_os_page_bytes(), hz3_os_page_bytes()) == HZ3_OS_MOVED;
  hz3_os_unmap(pages, 2 * hz3_os_page_bytes());
  errno = kMarkedErrno;
  bool can_reuse = hz3_os_can_reuse_what_moved();
  EXPECT_EQ(errno, kMarkedErrno);
  EXPECT_TRUE(can_move || !can_reuse);
#if defined(__x86_64__)  // where no emulator is in the way
  EXPECT_EQ(can_reuse, can_move);
#endif
}

[[noreturn]] void FindOutWithMovesRefused() {
  hz3_test::RefuseCall(SYS_mremap, static_cast<uint32_t>(hz3_os_page_bytes()), EPERM);
  HZ3_REQUIRE(!hz3_os_can_reuse_what_moved());
  _exit(0);
}

TEST(OsDeathTest, WhereNoPagesMoveNothingIsReused) { EXPECT_EXIT(FindOutWithMovesRefused(), testing::ExitedWithCode(0), ""); }

[[noreturn]] void MoveWithTheSecondMappingRefused() {
  const size_t kPage = hz3_os_page_bytes();
  char *to = static_cast<char *>(hz3_os_map(nullptr, 8 * kPage)), *from = MapNumbered(kPage);
  hz3_test::RefuseCall(SYS_mremap, static_cast<uint32_t>(3 * kPage), EPERM);
  HZ3_REQUIRE(hz3_os_move_pages(from, to, 8 * kPage) != HZ3_OS_TARGET_LOST);
  HZ3_REQUIRE(IsNumbered(IsNumbered(from, 8 * kPage) ? from : to, 8 * kPage));
  _exit(IsNumbered(to, 8 * kPage) ? 0 : 2);  // 2: the first one did not move either
}

TEST(OsDeathTest, WhatIsRefusedWhenOthersHaveMovedIsCopied) {
  EXPECT_EXIT(MoveWithTheSecondMappingRefused(), testing::ExitedWithCode(0), "");
}

// As a filter that fails the call, and as the kernel: what the target is now is not known, so nobody touches it.
[[noreturn]] void MoveWithTheSecondMappingLost() {
  const size_t kPage = hz3_os_page_bytes();
  char *to = static_cast<char *>(hz3_os_map(nullptr, 8 * kPage)), *from = MapNumbered(kPage);
  hz3_test::RefuseCall(SYS_mremap, static_cast<uint32_t>(3 * kPage));
  hz3_os_moved moved = hz3_os_move_pages(from, to, 8 * kPage);
  if (moved == HZ3_OS_NOT_MOVED) _exit(2);  // the first one did not move either
  HZ3_REQUIRE(moved == HZ3_OS_TARGET_LOST);
  HZ3_REQUIRE(IsNumbered(from, 8 * kPage));
  HZ3_REQUIRE(!IsMapped(to, 4 * kPage));
  HZ3_REQUIRE(IsMapped(to + 4 * kPage, 3 * kPage));
  HZ3_REQUIRE(!IsMapped(to + 7 * kPage, kPage));
  char *next = static_cast<char *>(hz3_os_map(nullptr, 4 * kPage));
  HZ3_REQUIRE(hz3_os_move_pages(from, next, 4 * kPage) == HZ3_OS_NOT_MOVED);  // which could move
  HZ3_REQUIRE(IsNumbered(from, 8 * kPage) && IsMapped(next, 4 * kPage));
  _exit(0);
}

TEST(OsDeathTest, ATargetThatMayBeLostIsLeftAlone) {
  EXPECT_EXIT(MoveWithTheSecondMappingLost(), testing::ExitedWithCode(0), "");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their runtimes need address space of their own
// With more mapped already than may be, the kernel unmaps the target and then finds that the move would exceed the limit.
[[noreturn]] void MoveBeyondTheLimit() {
  const size_t kBytes = 4 * hz3_os_page_bytes();
  char *from = static_cast<char *>(hz3_os_map(nullptr, kBytes));
  char *to = static_cast<char *>(hz3_os_map(nullptr, kBytes));
  memset(from, 7, kBytes);
  rlimit limit = {1 << 20, 1 << 20};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  errno = kMarkedErrno;
  hz3_os_moved moved = hz3_os_move_pages(from, to, kBytes);
  HZ3_REQUIRE(errno == kMarkedErrno);
  HZ3_REQUIRE(moved == HZ3_OS_TARGET_LOST || (moved == HZ3_OS_NOT_MOVED && IsMapped(to, kBytes)));
  HZ3_REQUIRE(std::count(from, from + kBytes, 7) == static_cast<ptrdiff_t>(kBytes));
  _exit(0);
}

TEST(OsDeathTest, AMoveThatLosesItsTargetSaysSo) {
  EXPECT_EXIT(MoveBeyondTheLimit(), testing::ExitedWithCode(0), "");
}
#endif

[[noreturn]] void DrawWithoutTheKernel() {
  hz3_test::RefuseCall(SYS_getrandom);
  errno = kMarkedErrno;
  std::vector<uint64_t> drawn;
  for (int i = 0; i < 100; i++) drawn.push_back(hz3_os_random());
  HZ3_REQUIRE(errno == kMarkedErrno);
  std::sort(drawn.begin(), drawn.end());
  HZ3_REQUIRE(std::unique(drawn.begin(), drawn.end()) - drawn.begin() > 90);  // the clock goes on
  _exit(0);
}

TEST(OsDeathTest, EarlyAtBootTheClockIsDrawnFrom) { EXPECT_EXIT(DrawWithoutTheKernel(), testing::ExitedWithCode(0), ""); }

TEST_F(Os, RandomNumbersDiffer) {
  uint64_t first = hz3_os_random(), second = hz3_os_random();
  EXPECT_NE(first, second);
  EXPECT_NE(first >> 32, second >> 32);
}

TEST_F(Os, ClockGoesForward) {
  uint64_t start = hz3_os_now_ms();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  uint64_t passed = hz3_os_now_ms() - start;
  EXPECT_GE(passed, 20u);  // the coarse clock lags by up to a tick of the kernel
  EXPECT_LE(passed, 10000u);
}

TEST_F(Os, ResidentIsWhatWasTouchedAndIsMapped) {
  const size_t kPage = hz3_os_page_bytes();
  char *memory = static_cast<char *>(hz3_os_map(nullptr, 2 * kPage));
  hz3_os_advise_huge(memory, 2 * kPage, false);
  memory[kPage] = 1;
  EXPECT_FALSE(hz3_os_is_resident(memory));
  EXPECT_TRUE(hz3_os_is_resident(memory + kPage));
  EXPECT_EQ(hz3_os_resident_bytes(memory, 2 * kPage), kPage);
  EXPECT_TRUE(hz3_os_purge(memory + kPage, kPage));
  EXPECT_FALSE(hz3_os_is_resident(memory + kPage));
  EXPECT_TRUE(hz3_os_unmap(memory, 2 * kPage));
  EXPECT_FALSE(hz3_os_is_resident(memory));
}

constexpr size_t kCleared = 512 * 1024;

// Memory of which every other page was written.
char *Striped() {
  const size_t kPage = hz3_os_page_bytes();
  char *memory = static_cast<char *>(hz3_os_map(nullptr, kCleared));
  hz3_os_advise_huge(memory, kCleared, false);
  for (size_t at = 0; at < kCleared; at += 2 * kPage) memset(memory + at, 1, kPage);
  return memory;
}

// Clears such memory; whether it has as much as before.
bool StaysStriped(size_t bytes = kCleared) {
  char *memory = Striped();
  hz3_os_clear(memory, bytes);
  bool stays = hz3_os_resident_bytes(memory, kCleared) == kCleared / 2;
  for (size_t at = 0; at < bytes; at++) {
    if (memory[at] != 0) ADD_FAILURE() << at;
  }
  EXPECT_TRUE(hz3_os_unmap(memory, kCleared));
  return stays;
}

TEST_F(Os, ClearedMemoryIsAsResidentAsItWas) {
  for (int i = 0; i < 16 && !StaysStriped(); i++) continue;  // whatever was cleared before
  for (int i = 0; i < 40; i++) {
    EXPECT_TRUE(StaysStriped()) << i;
    EXPECT_TRUE(StaysStriped(kCleared - 1)) << i;
  }
  EXPECT_FALSE(StaysStriped(kCleared / 2 - 1)) << "so little is not looked at";
}

TEST_F(Os, WhereAllIsThereClearingSeldomLooks) {
  for (int i = 0; i < 16 && !StaysStriped(); i++) continue;  // whatever was cleared before
  char *memory = static_cast<char *>(hz3_os_map(nullptr, kCleared));
  memset(memory, 1, kCleared);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 17; i++) hz3_os_clear(memory, kCleared);
    int first = 1;
    while (first < 100 && !StaysStriped()) first++;
    EXPECT_EQ(first, 16) << round;
  }
  EXPECT_TRUE(hz3_os_unmap(memory, kCleared));
}

TEST_F(Os, WhatIsLockedOrLiesUnevenlyIsCleared) {
  for (int i = 0; i < 16 && !StaysStriped(); i++) continue;
  char *memory = Striped();
  bool is_locked = syscall(SYS_mlock, memory, kCleared / 2) == 0;  // not by a sanitizer, which does nothing
  memset(memory, 1, kCleared / 2);
  errno = kMarkedErrno;  // TearDown sees that it stays
  hz3_os_clear(memory, kCleared);
  for (size_t at = 0; at < kCleared; at++) ASSERT_EQ(memory[at], 0) << at << (is_locked ? ", locked" : "");
  int kept = errno;
  syscall(SYS_munlock, memory, kCleared / 2);
  errno = kept;
  memset(memory, 1, kCleared);
  hz3_os_clear(memory + 16, kCleared - 32);
  for (size_t at = 0; at < kCleared; at++) ASSERT_EQ(memory[at], at < 16 || at >= kCleared - 16) << at;
  EXPECT_TRUE(hz3_os_unmap(memory, kCleared));
}

TEST_F(Os, ThreadTimePassesWithWorkOnly) {
  uint64_t start = hz3_os_thread_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LT(hz3_os_thread_ns() - start, 25000000u) << "asleep";
  start = hz3_os_thread_ns();
  for (uint64_t began = hz3_os_now_ms(); hz3_os_thread_ns() - start < 2000000;)
    ASSERT_LT(hz3_os_now_ms() - began, 60000u) << "at work";
}

TEST_F(Os, CountsTheCpusOfItsAffinity) {
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof mask, &mask), 0);
  EXPECT_EQ(hz3_os_cpu_count(), static_cast<unsigned>(CPU_COUNT(&mask)));
  // Each has a number of its own, whichever they are.
  std::set<unsigned> numbers;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    numbers.insert(hz3_os_cpu());
  }
  EXPECT_EQ(numbers.size(), static_cast<size_t>(CPU_COUNT(&mask)));
  EXPECT_EQ(*numbers.rbegin(), numbers.size() - 1);
  EXPECT_EQ(hz3_os_cpu_count(), 1u);  // of the last CPU alone
  EXPECT_EQ(hz3_os_cpu(), 0u);
  ASSERT_EQ(sched_setaffinity(0, sizeof mask, &mask), 0);
  EXPECT_EQ(hz3_os_cpu_count(), numbers.size());
}

TEST_F(Os, FutexWaitsForWakeOrChange) {
  uint32_t word = 1;
  hz3_os_futex_wait(&word, 0);  // different already: returns at once
  std::atomic<bool> is_up{false};
  std::atomic<int> returns{0};
  std::thread sleeper([&] {
    is_up = true;
    for (; __atomic_load_n(&word, __ATOMIC_ACQUIRE) == 1; returns++) hz3_os_futex_wait(&word, 1);
  });
  while (!is_up) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(returns, 3) << "it may return without cause, but has to wait";
  __atomic_store_n(&word, 2, __ATOMIC_RELEASE);
  hz3_os_futex_wake_one(&word);
  sleeper.join();
}

}  // namespace
