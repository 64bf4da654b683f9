// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the futex mutex: exclusion, sleeping and waking, ownership, ranks, fork.
#include "hz3/base/lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

uintptr_t Holder(const hz3_lock &lock) { return __atomic_load_n(&lock.holder, __ATOMIC_RELAXED); }

void SleepMs(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Returns once a waiter has announced itself in the lock word.
void AwaitWaiter(const hz3_lock &lock) {
  while ((Holder(lock) & 1) == 0) SleepMs(1);
}

TEST(Lock, ExcludesUnderContention) {
  static hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_PAGES);
  const int kThreads = 4, kRounds = 20000;
  int counter = 0;  // plain: only the lock protects it
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; i++) {
        hz3_lock_acquire(&lock);
        counter++;
        if (i % 1000 == 0) std::this_thread::yield();  // lets others pile up behind the lock
        hz3_lock_release(&lock);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(counter, kThreads * kRounds);
  EXPECT_EQ(Holder(lock), 0u);
}

TEST(Lock, WaiterSleepsAndIsWoken) {
  hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_LARGE);
  std::atomic<bool> entered{false};
  hz3_lock_acquire(&lock);
  std::thread waiter([&] {
    hz3_lock_acquire(&lock);
    entered = true;
    hz3_lock_release(&lock);
  });
  AwaitWaiter(lock);
  EXPECT_FALSE(entered);
  hz3_lock_release(&lock);
  waiter.join();
  EXPECT_TRUE(entered);
  EXPECT_EQ(Holder(lock), 0u);
}

TEST(Lock, AllOfSeveralSleepersAreWoken) {
  hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_LARGE);
  hz3_lock_acquire(&lock);
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 5; i++) {
    sleepers.emplace_back([&] {
      hz3_lock_acquire(&lock);
      hz3_lock_release(&lock);
    });
  }
  AwaitWaiter(lock);
  SleepMs(10);
  hz3_lock_release(&lock);
  for (std::thread &sleeper : sleepers) sleeper.join();
  EXPECT_EQ(Holder(lock), 0u);
}

TEST(Lock, KnowsItsOwner) {
  hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_LARGE);
  EXPECT_FALSE(hz3_lock_is_mine(&lock));
  hz3_lock_acquire(&lock);
  EXPECT_TRUE(hz3_lock_is_mine(&lock));
  std::thread([&] { EXPECT_FALSE(hz3_lock_is_mine(&lock)); }).join();
  hz3_lock_release(&lock);
  EXPECT_FALSE(hz3_lock_is_mine(&lock));
}

#ifndef NDEBUG
TEST(Lock, RisingRanksMayBeHeldTogether) {
  hz3_lock low = HZ3_LOCK_INIT(HZ3_RANK_HEAPS), high = HZ3_LOCK_INIT(HZ3_RANK_METADATA);
  hz3_lock_acquire(&low);
  hz3_lock_acquire(&high);
  hz3_lock_release(&low);  // any order of release
  hz3_lock_release(&high);
  hz3_lock_acquire(&low);
  hz3_lock_release(&low);
}

TEST(LockDeathTest, FallingRankIsFatal) {
  hz3_lock low = HZ3_LOCK_INIT(HZ3_RANK_CLASS), high = HZ3_LOCK_INIT(HZ3_RANK_PAGES);
  hz3_lock_acquire(&high);
  EXPECT_DEATH(hz3_lock_acquire(&low), "^hz3: fatal: internal check failed: .*rank.* at hz3/base/lock\\.c:[0-9]+\n$");
  hz3_lock_release(&high);
}

TEST(LockDeathTest, SecondLockOfOneRankIsFatal) {
  hz3_lock first = HZ3_LOCK_INIT(HZ3_RANK_CLASS), second = HZ3_LOCK_INIT(HZ3_RANK_CLASS);
  hz3_lock_acquire(&first);
  EXPECT_DEATH(hz3_lock_acquire(&second), "internal check failed");
  EXPECT_DEATH(hz3_lock_acquire(&first), "internal check failed");  // itself: a deadlock in release builds
  hz3_lock_release(&first);
}
#endif

TEST(Lock, ForkTakesManyOfOneRankInAnyOrder) {
  hz3_lock locks[3] = {HZ3_LOCK_INIT(HZ3_RANK_CLASS), HZ3_LOCK_INIT(HZ3_RANK_CLASS), HZ3_LOCK_INIT(HZ3_RANK_HEAPS)};
  for (hz3_lock &lock : locks) hz3_lock_acquire_for_fork(&lock);
  for (hz3_lock &lock : locks) EXPECT_NE(Holder(lock), 0u);
  for (hz3_lock &lock : locks) hz3_lock_release_for_fork(&lock);
  for (hz3_lock &lock : locks) EXPECT_EQ(Holder(lock), 0u);
}

// A signal handler forks in the middle of the section: fork neither waits for it nor ends it.
TEST(Lock, ForkLeavesTheInterruptedSectionItsLock) {
  hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_CLASS);
  hz3_lock_acquire(&lock);
  hz3_lock_acquire_for_fork(&lock);
  hz3_lock_release_for_fork(&lock);
  EXPECT_NE(Holder(lock), 0u);
  EXPECT_TRUE(hz3_lock_is_mine(&lock));
  hz3_lock_release(&lock);
  EXPECT_EQ(Holder(lock), 0u);
}

// Fork handlers of others, which run meanwhile, may allocate: what they take and leave stays fork's.
TEST(Lock, NothingIsTakenOrLeftWhileForkHoldsAll) {
  hz3_lock low = HZ3_LOCK_INIT(HZ3_RANK_CLASS), high = HZ3_LOCK_INIT(HZ3_RANK_PAGES);
  for (hz3_lock *lock : {&low, &high}) hz3_lock_acquire_for_fork(lock);
  hz3_lock_set_forking(true);
  for (hz3_lock *lock : {&high, &low}) {
    hz3_lock_acquire(lock);
    EXPECT_FALSE(hz3_lock_is_mine(lock));
    hz3_lock_release(lock);
    EXPECT_NE(Holder(*lock), 0u);
  }
  hz3_lock_set_forking(false);
  for (hz3_lock *lock : {&low, &high}) {
    hz3_lock_release_for_fork(lock);
    EXPECT_EQ(Holder(*lock), 0u);
    hz3_lock_acquire(lock);
    EXPECT_TRUE(hz3_lock_is_mine(lock)) << "as before";
    hz3_lock_release(lock);
  }
}

// And at any instruction: the lock is never held by nobody.
hz3_lock interrupted_lock = HZ3_LOCK_INIT(HZ3_RANK_CLASS);
volatile sig_atomic_t interruptions;

void ForkInHandler(int) {
  hz3_lock_acquire_for_fork(&interrupted_lock);
  hz3_lock_release_for_fork(&interrupted_lock);
  interruptions = interruptions + 1;
}

TEST(Lock, ForkInterruptsAnyInstruction) {
  signal(SIGALRM, ForkInHandler);
  const itimerval every = {{0, 100}, {0, 100}}, never = {};
  setitimer(ITIMER_REAL, &every, nullptr);
  while (interruptions < 500) {
    hz3_lock_acquire(&interrupted_lock);
    hz3_lock_release(&interrupted_lock);
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  signal(SIGALRM, SIG_DFL);
  EXPECT_EQ(Holder(interrupted_lock), 0u);
}

TEST(Lock, ForkWaitsForOthersAndWakesThem) {
  hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_CLASS);
  std::atomic<bool> held{false}, forking{false}, entered{false};
  std::thread other([&] {
    hz3_lock_acquire(&lock);
    held = true;
    AwaitWaiter(lock);
    hz3_lock_release(&lock);
    while (!forking) SleepMs(1);
    hz3_lock_acquire(&lock);
    entered = true;
    hz3_lock_release(&lock);
  });
  while (!held) SleepMs(1);
  hz3_lock_acquire_for_fork(&lock);
  forking = true;
  EXPECT_FALSE(hz3_lock_is_mine(&lock)) << "fork's own hold must not look like an interrupted section";
  AwaitWaiter(lock);
  EXPECT_FALSE(entered);
  hz3_lock_release_for_fork(&lock);
  other.join();
  EXPECT_TRUE(entered);
}

}  // namespace
