// SPDX-License-Identifier: Apache-2.0
// What it is: tests of magazines and the depot: pools, stacks, low water, limits, and that threads neither lose nor
//   double a magazine.
#include "hz3/remote/remote.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "hz3/base/os.h"
#include "hz3/base/pinned_test.h"
#include "hz3/base/refuse_test.h"
#include "hz3/base/size_class.h"
#include "hz3/config.h"
#include "hz3/remote/stack.h"

namespace {

using hz3_test::Cpus;
using hz3_test::Pinned;

// A class that no other test of this process uses.
unsigned FreshClass() {
  static unsigned next = 10;
  return next++;
}

hz3_magazine *NewMagazine(unsigned level = 0) {
  uint32_t count;
  hz3_magazine *magazine = hz3_magazine_alloc(level, 1, &count);
  EXPECT_NE(magazine, nullptr);
  EXPECT_EQ(count, 1u);
  return magazine;
}

std::vector<hz3_magazine *> PopAll(unsigned c) {
  std::vector<hz3_magazine *> all;
  for (hz3_magazine *magazine; (magazine = hz3_depot_take_any(c)) != nullptr;) all.push_back(magazine);
  return all;
}

void FreeAll(const std::vector<hz3_magazine *> &magazines) {
  for (hz3_magazine *magazine : magazines) {
    magazine->count = 0;
    hz3_magazine_free(magazine, magazine, 1);
  }
}

class Remote : public testing::Test {
 protected:
  static void SetUpTestSuite() { hz3_remote_init(hz3_os_cpu_count()); }
};

TEST_F(Remote, CapacitiesFillTheirUnits) {
  for (unsigned level = 0; level < HZ3_MAGAZINE_LEVELS; level++)
    EXPECT_EQ(sizeof(hz3_magazine) + hz3_magazine_capacity(level) * sizeof(void *), size_t{512} << level);
}

TEST_F(Remote, MagazinesAreApartAndKnowTheirIndex) {
  std::set<char *> starts;
  std::vector<hz3_magazine *> all;
  for (unsigned level = 0; level < HZ3_MAGAZINE_LEVELS; level++) {
    for (int i = 0; i < 300; i++) {
      hz3_magazine *magazine = NewMagazine(level);
      EXPECT_EQ(magazine->level, level);
      EXPECT_EQ(magazine->count, 0u);
      EXPECT_NE(magazine->index, 0u);
      EXPECT_EQ(hz3_magazine_at(magazine->index), magazine);
      EXPECT_EQ(hz3_magazine_of_slots(magazine->slots), magazine);
      for (size_t s = 0; s < hz3_magazine_capacity(level); s++) magazine->slots[s] = this;
      char *start = reinterpret_cast<char *>(magazine);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(start) % 512, 0u);
      auto next = starts.lower_bound(start);
      EXPECT_TRUE(next == starts.end() || *next >= start + (size_t{512} << level));
      starts.insert(start);
      all.push_back(magazine);
    }
  }
  for (hz3_magazine *magazine : all) {
    EXPECT_EQ(hz3_magazine_at(magazine->index), magazine);
    EXPECT_EQ(magazine->count, 0u) << "overwritten by a neighbour";
    for (size_t s = 0; s < hz3_magazine_capacity(magazine->level); s++) magazine->slots[s] = nullptr;
  }
  FreeAll(all);
}

TEST_F(Remote, PoolsHandOutWhatCameBackInChains) {
  const uint32_t kCount = 6;
  std::set<hz3_magazine *> freed;
  hz3_magazine *first = NewMagazine(1), *last = first;
  freed.insert(first);
  for (uint32_t i = 1; i < kCount; i++) {
    hz3_magazine *next = NewMagazine(1);
    last->next = next->index;
    last = next;
    freed.insert(next);
  }
  hz3_magazine_free(first, last, kCount);
  uint32_t got = 0, count;
  while (got < kCount) {
    hz3_magazine *chain = hz3_magazine_alloc(1, 4, &count);
    ASSERT_NE(chain, nullptr);
    ASSERT_GE(count, 1u);
    ASSERT_LE(count, 4u);
    for (uint32_t i = 0; i < count; i++) {
      freed.erase(chain);
      if (i + 1 < count) chain = hz3_magazine_at(chain->next);
    }
    got += count;
  }
  EXPECT_TRUE(freed.empty());
}

size_t Shards() { return (Cpus().size() + HZ3_CPUS_PER_SHARD - 1) / HZ3_CPUS_PER_SHARD; }

// What as many refills, or whatever else asks, would get as there are other shards than one's own, which are asked one at a time.
hz3_magazine *Pop(unsigned c, hz3_magazine *(*ask)(unsigned) = hz3_depot_pop) {
  hz3_magazine *magazine = nullptr;
  for (size_t tries = 0; magazine == nullptr && tries < std::max<size_t>(Shards() - 1, 1); tries++) magazine = ask(c);
  return magazine;
}

// A magazine with this share of HZ3_COOL_BYTES; the objects are never looked at.
hz3_magazine *MagazineOf(unsigned c, double share) {
  hz3_magazine *magazine = NewMagazine(HZ3_MAGAZINE_LEVELS - 1);
  magazine->count = static_cast<uint16_t>(share * HZ3_COOL_BYTES / hz3_size_classes[c].bytes + 1);
  return magazine;
}

bool PushFromElsewhere(unsigned c, hz3_magazine *magazine, size_t limit = SIZE_MAX) {
  Pinned elsewhere(1);
  return hz3_depot_push(c, magazine, limit, 0);
}

uint32_t TakeLowWater(unsigned c) {
  uint32_t unused[HZ3_CLASS_COUNT];
  hz3_depot_take_low_water(unused);
  return unused[c];
}

class RemoteCpus : public Remote {
 protected:
  void SetUp() override {
    if (Cpus().size() < 2) GTEST_SKIP() << "there is no other CPU";
  }
};

TEST_F(Remote, DepotRefusesBeyondTheLimit) {
  Pinned pinned;
  unsigned c = hz3_size_class_of(4096);
  hz3_magazine *a = NewMagazine(), *b = NewMagazine();
  EXPECT_FALSE(hz3_depot_push(c, a, 0, 0));
  EXPECT_TRUE(hz3_depot_push(c, a, 1, 0));
  EXPECT_FALSE(hz3_depot_push(c, b, 1, 0));
  EXPECT_EQ(PopAll(c), std::vector<hz3_magazine *>({a}));
  FreeAll({a, b});
}

TEST_F(Remote, EachShardTakesItsShareOfTheLimit) {
  Pinned pinned;
  const size_t shards = Shards();
  unsigned c = hz3_size_class_of(4096);
  std::vector<hz3_magazine *> all;
  for (size_t i = 0; i < 4; i++) {
    all.push_back(NewMagazine());
    EXPECT_EQ(hz3_depot_push(c, all.back(), 3 * shards, 0), i < 3);
  }
  PopAll(c);
  FreeAll(all);
}

TEST_F(Remote, BeyondTheLimitIsRefusedOnceEnoughIsWarm) {
  Pinned pinned;
  unsigned c = hz3_size_class_of(2048);
  hz3_magazine *a = MagazineOf(c, 1.5), *b = MagazineOf(c, 0.6), *d = MagazineOf(c, 0.1);
  EXPECT_TRUE(hz3_depot_push(c, a, 0, 2 * HZ3_COOL_BYTES));
  EXPECT_TRUE(hz3_depot_push(c, b, 0, 2 * HZ3_COOL_BYTES)) << "three quarters of the most were there";
  EXPECT_FALSE(hz3_depot_push(c, d, 0, 2 * HZ3_COOL_BYTES));
  EXPECT_FALSE(hz3_depot_push(c, d, 2, 2 * HZ3_COOL_BYTES));
  EXPECT_TRUE(hz3_depot_push(c, d, 1000, 0));
  FreeAll(PopAll(c));
}

TEST_F(Remote, OwnMagazinesAreLastInFirstOut) {
  Pinned pinned;
  unsigned c = FreshClass();
  EXPECT_EQ(hz3_depot_pop(c), nullptr);
  hz3_magazine *a = NewMagazine(), *b = NewMagazine();
  a->count = 3;
  b->count = 5;
  EXPECT_TRUE(hz3_depot_push(c, a, 1000, 0));
  EXPECT_TRUE(hz3_depot_push(c, b, 1000, 0));
  EXPECT_EQ(hz3_depot_objects(c), 8u);
  EXPECT_EQ(hz3_depot_objects(c + 1), 0u);
  std::vector<hz3_magazine *> all;
  for (hz3_magazine *magazine; (magazine = hz3_depot_pop(c)) != nullptr;) all.push_back(magazine);
  EXPECT_EQ(all, std::vector<hz3_magazine *>({b, a}));
  EXPECT_EQ(hz3_depot_objects(c), 0u);
  EXPECT_EQ(hz3_depot_take_any(c), nullptr);
  FreeAll(all);
}

TEST_F(RemoteCpus, OthersMagazinesCoolAndAreFirstInFirstOut) {
  Pinned pinned;
  unsigned c = FreshClass();
  hz3_magazine *all[5];
  for (int i = 0; i < 3; i++) ASSERT_TRUE(PushFromElsewhere(c, all[i] = MagazineOf(c, 0.3)));
  EXPECT_EQ(Pop(c), nullptr) << "0.9 of what has to be pushed first";
  for (int i = 3; i < 5; i++) ASSERT_TRUE(PushFromElsewhere(c, all[i] = MagazineOf(c, 0.3)));
  for (hz3_magazine *oldest : all) EXPECT_EQ(Pop(c), oldest);
  EXPECT_EQ(Pop(c), nullptr);
  FreeAll({all, all + 5});
}

// What has left its CPU's cache is as much in the depot as the rest: for the limit, for statistics, and for ticks.
TEST_F(RemoteCpus, WhatHasCooledCounts) {
  if (HZ3_CPUS_PER_SHARD < 2) GTEST_SKIP() << "the other CPU is of another shard";
  Pinned pinned;
  unsigned c = hz3_size_class_of(4096);
  hz3_magazine *all[3];
  for (hz3_magazine *&magazine : all) ASSERT_TRUE(PushFromElsewhere(c, magazine = MagazineOf(c, 0.5)));
  EXPECT_EQ(Pop(c), all[0]);  // the other two are cool now
  EXPECT_EQ(hz3_depot_objects(c), 2u * all[0]->count);
  TakeLowWater(c);
  EXPECT_EQ(TakeLowWater(c), 2u);
  const size_t shards = Shards();
  ASSERT_FALSE(hz3_depot_push(c, all[0], 2 * shards, 0));
  EXPECT_TRUE(hz3_depot_push(c, all[0], 3 * shards, 0));
  EXPECT_EQ(PopAll(c).size(), 3u);
  FreeAll({all, all + 3});
}

TEST_F(RemoteCpus, OneOfOnesOwnComesBeforeWhatHasCooled) {
  Pinned pinned;
  unsigned c = FreshClass();
  hz3_magazine *a = MagazineOf(c, 1), *b = MagazineOf(c, 1), *own = MagazineOf(c, 0.1);
  ASSERT_TRUE(PushFromElsewhere(c, a));
  ASSERT_TRUE(PushFromElsewhere(c, b));
  EXPECT_EQ(Pop(c), a);
  ASSERT_TRUE(hz3_depot_push(c, own, 1000, 0));
  EXPECT_EQ(Pop(c), own);
  EXPECT_EQ(Pop(c), b);
  FreeAll({a, b, own});
}

// Two threads that need nothing of each other do not get each other's, in whatever order they push and pop.
TEST_F(RemoteCpus, EachGetsItsOwnBack) {
  Pinned pinned;
  unsigned c = FreshClass();
  hz3_magazine *a = NewMagazine(), *b = NewMagazine(), *other = NewMagazine();
  ASSERT_TRUE(hz3_depot_push(c, a, 1000, 0));
  ASSERT_TRUE(hz3_depot_push(c, b, 1000, 0));
  ASSERT_TRUE(PushFromElsewhere(c, other));
  EXPECT_EQ(Pop(c), b);
  EXPECT_EQ(Pop(c), a);
  EXPECT_EQ(Pop(c), nullptr);
  EXPECT_EQ(PopAll(c), std::vector<hz3_magazine *>({other}));
  FreeAll({a, b, other});
}

// However much of it there is: the other one will ask for it again.
TEST_F(RemoteCpus, WhatAThreadAllocatedItselfLetsNothingCool) {
  Pinned pinned;
  unsigned c = FreshClass();
  hz3_magazine *own = MagazineOf(c, 3), *passed_on = MagazineOf(c, 1);
  {
    Pinned elsewhere(1);
    ASSERT_TRUE(hz3_depot_push_own(c, own, 1));
  }
  EXPECT_EQ(Pop(c), nullptr);
  TakeLowWater(c);
  EXPECT_EQ(TakeLowWater(c), 1u) << "ticks see it";
  ASSERT_TRUE(PushFromElsewhere(c, passed_on));
  EXPECT_EQ(Pop(c), own) << "with what lies above it, it cools";
  EXPECT_EQ(Pop(c), passed_on);
  FreeAll({own, passed_on});
}

TEST_F(RemoteCpus, EachMayKeepALittleOfSmallObjects) {
  Pinned pinned;
  for (size_t bytes : {32, 512}) {
    unsigned c = hz3_size_class_of(bytes);
    auto magazine = [&] {
      hz3_magazine *half = NewMagazine(HZ3_MAGAZINE_LEVELS - 1);
      half->count = static_cast<uint16_t>(HZ3_MAGAZINE_BYTES / 2 / bytes);
      return half;
    };
    std::vector<hz3_magazine *> all = {magazine(), magazine(), magazine()}, others = {magazine(), magazine(), magazine()};
    for (size_t i = 0; i < 3; i++) EXPECT_EQ(PushFromElsewhere(c, others[i], 0), bytes == 32 && i < 2);
    for (size_t i = 0; i < 3; i++) EXPECT_EQ(hz3_depot_push(c, all[i], 0, 0), bytes == 32 && i < 2);
    PopAll(c);
    FreeAll(all);
    FreeAll(others);
  }
}

TEST_F(RemoteCpus, WhatHasCooledAnywhereIsFound) {
  Pinned pinned;
  unsigned c = FreshClass();
  for (size_t cpu = 1; cpu < Cpus().size(); cpu++) {
    hz3_magazine *cooled = MagazineOf(c, 1);
    {
      Pinned elsewhere(cpu);
      ASSERT_TRUE(hz3_depot_push(c, cooled, 1000, 0));
    }
    EXPECT_EQ(Pop(c), cooled) << "of CPU " << cpu;
    FreeAll({cooled});
  }
}

// Or one CPU's would stay for good that other threads have come to need no more.
TEST_F(RemoteCpus, TheOneWithMostIsDrainedFirst) {
  if (HZ3_CPUS_PER_SHARD < 2) GTEST_SKIP() << "the other CPU is of another shard";
  Pinned pinned;
  unsigned c = FreshClass();
  hz3_magazine *own = NewMagazine(), *first = NewMagazine(), *second = NewMagazine();
  ASSERT_TRUE(hz3_depot_push(c, own, 1000, 0));
  ASSERT_TRUE(PushFromElsewhere(c, first));
  ASSERT_TRUE(PushFromElsewhere(c, second));
  EXPECT_EQ(hz3_depot_take_any(c), second);
  EXPECT_EQ(PopAll(c), std::vector<hz3_magazine *>({own, first}));
  FreeAll({own, first, second});
}

// Who has too much itself gives of its own, or of what has cooled in any shard, of which one other is asked at a time. What another CPU
// has just put down mostly is that one's.
TEST_F(RemoteCpus, WhatGoesAlongIsOfThisCpuOrCool) {
  Pinned pinned;
  unsigned c = FreshClass();
  hz3_magazine *oldest = MagazineOf(c, 1), *cool = MagazineOf(c, 0.1), *warm = NewMagazine(), *own = NewMagazine();
  ASSERT_TRUE(PushFromElsewhere(c, oldest));
  ASSERT_TRUE(PushFromElsewhere(c, cool));
  ASSERT_EQ(Pop(c), oldest);  // and the other one is cool
  ASSERT_TRUE(PushFromElsewhere(c, warm));
  ASSERT_TRUE(hz3_depot_push(c, own, 1000, 0));
  EXPECT_EQ(Pop(c, hz3_depot_take_own), own);
  EXPECT_EQ(Pop(c, hz3_depot_take_own), cool);
  EXPECT_EQ(Pop(c, hz3_depot_take_own), nullptr);
  EXPECT_EQ(PopAll(c), std::vector<hz3_magazine *>({warm}));
  FreeAll({oldest, cool, warm, own});
}

TEST_F(RemoteCpus, EmptyMagazinesComeBackToTheCpuThatHadThem) {
  Pinned pinned;
  hz3_magazine *own = NewMagazine(3), *other = NewMagazine(3);
  FreeAll({own});
  {
    Pinned elsewhere(1);
    FreeAll({other});
    EXPECT_EQ(NewMagazine(3), other);
  }
  EXPECT_EQ(NewMagazine(3), own);
  FreeAll({own, other});
}

// Wherever it is, and whatever other sizes come from elsewhere: or a CPU that always empties what two others fill would make new ones for ever.
TEST_F(RemoteCpus, WhoUsesMagazinesOfTwoSizesMakesNoMoreOfThemInTheEnd) {
  auto rounds = [](int count) {
    std::set<hz3_magazine *> used;
    for (int i = 0; i < count; i++) {
      for (unsigned level : {4, 5}) {
        hz3_magazine *magazine = NewMagazine(level);
        used.insert(magazine);
        Pinned elsewhere(level == 4 ? 1 : Cpus().size() / 2);
        FreeAll({magazine});
      }
    }
    return used;
  };
  Pinned pinned;
  rounds(400);
  EXPECT_LT(rounds(400).size(), 400u);
}

TEST_F(RemoteCpus, InTheEndNoMagazineIsMadeWhileAnotherCpuHasAnEmptyOne) {
  Pinned pinned;
  hz3_magazine *others[HZ3_STACK_MAX / 8];
  for (hz3_magazine *&magazine : others) magazine = NewMagazine(2);
  std::set<hz3_magazine *> known(std::begin(others), std::end(others));
  {
    Pinned elsewhere(Cpus().size() - 1);  // asked last
    FreeAll({std::begin(others), std::end(others)});
  }
  std::vector<hz3_magazine *> all;
  while (!known.empty() && all.size() < 10000) {
    all.push_back(NewMagazine(2));
    known.erase(all.back());
  }
  EXPECT_TRUE(known.empty());
  FreeAll(all);
}

// Of what other CPUs have put down, none counts.
TEST_F(RemoteCpus, OwnMagazinesAreLimitedForEachCpu) {
  Pinned pinned;
  unsigned c = FreshClass();
  std::vector<hz3_magazine *> all;
  for (int i = 0; i < 5; i++) all.push_back(NewMagazine());
  for (int i = 0; i < 2; i++) ASSERT_TRUE(PushFromElsewhere(c, all[static_cast<size_t>(i)]));
  EXPECT_FALSE(hz3_depot_push_own(c, all[2], 0));
  EXPECT_TRUE(hz3_depot_push_own(c, all[2], 2));
  EXPECT_TRUE(hz3_depot_push_own(c, all[3], 2));
  EXPECT_FALSE(hz3_depot_push_own(c, all[4], 2));
  EXPECT_EQ(hz3_depot_pop(c), all[3]);
  EXPECT_EQ(PopAll(c).size(), 3u);
  FreeAll(all);
}

// Magazines of few bytes are turned over before their stack cannot count them any more.
TEST_F(RemoteCpus, AHighStackIsTurnedOver) {
  Pinned pinned;
  unsigned c = FreshClass();
  std::vector<hz3_magazine *> all;
  for (int i = 0; i < HZ3_STACK_MAX / 2 + 1; i++) {
    EXPECT_EQ(Pop(c), nullptr);
    all.push_back(NewMagazine());
    ASSERT_TRUE(PushFromElsewhere(c, all.back()));
  }
  EXPECT_EQ(Pop(c), all[0]);
  EXPECT_EQ(PopAll(c).size(), all.size() - 1);
  FreeAll(all);
}

TEST_F(Remote, FullStackRefusesAndChangesNothing) {
  hz3_stack stack = {};
  std::vector<hz3_magazine *> all;
  for (int i = 0; i < HZ3_STACK_MAX; i++) {
    all.push_back(NewMagazine());
    ASSERT_TRUE(hz3_stack_push(&stack, all.back(), all.back(), 1, false));
  }
  hz3_magazine *extra = NewMagazine();
  uint64_t word = stack.word;
  EXPECT_FALSE(hz3_stack_push(&stack, extra, extra, 1, false));
  EXPECT_EQ(stack.word, word);
  EXPECT_TRUE(hz3_stack_push(&stack, extra, extra, 1, true)) << "a pool takes more than it can count";
  EXPECT_EQ(hz3_stack_height(stack.word), unsigned{HZ3_STACK_MAX});
  all.push_back(extra);
  uint32_t count;
  for (size_t i = all.size(); i-- > 0;) {
    ASSERT_EQ(hz3_stack_pop(&stack, 1, &count), all[i]);
    ASSERT_EQ(count, 1u);
  }
  EXPECT_EQ(hz3_stack_pop(&stack, 1, &count), nullptr);
  EXPECT_EQ(hz3_stack_height(stack.word), 0u);
  FreeAll(all);
}

// Magazines linked from the first to the last.
std::vector<hz3_magazine *> Chain(uint32_t count) {
  std::vector<hz3_magazine *> chain;
  for (uint32_t i = 0; i < count; i++) {
    chain.push_back(NewMagazine());
    if (i > 0) chain[i - 1]->next = chain[i]->index;
  }
  return chain;
}

// The count of a stack is what limits, statistics and ticks go by.
TEST_F(Remote, AStackKnowsHowManyItHolds) {
  hz3_stack stack = {};
  auto height = [&stack] { return hz3_stack_height(stack.word); };
  uint32_t count = 0;
  std::vector<hz3_magazine *> three = Chain(3), two = Chain(2), most = Chain(HZ3_STACK_MAX);
  ASSERT_TRUE(hz3_stack_push(&stack, three[0], three[2], 3, false));
  EXPECT_EQ(height(), 3u);
  ASSERT_TRUE(hz3_stack_push(&stack, two[0], two[1], 2, false));
  EXPECT_EQ(height(), 5u);
  EXPECT_EQ(hz3_stack_pop(&stack, 4, &count), two[0]);
  EXPECT_EQ(count, 4u);
  EXPECT_EQ(height(), 1u);
  EXPECT_EQ(hz3_stack_pop(&stack, 4, &count), three[2]);
  EXPECT_EQ(count, 1u) << "there was one only";
  EXPECT_EQ(height(), 0u);
  ASSERT_TRUE(hz3_stack_push(&stack, three[0], three[2], 3, false));
  EXPECT_FALSE(hz3_stack_push(&stack, most.front(), most.back(), HZ3_STACK_MAX, false));
  EXPECT_EQ(height(), 3u);
  stack.low_water = 3;
  EXPECT_EQ(hz3_stack_take_all(&stack), three[0]);
  EXPECT_EQ(height(), 0u);
  EXPECT_EQ(stack.low_water, 0u) << "all were needed";
  // Beyond what it can count it is a lower bound, from which nothing spills into the version or wraps.
  ASSERT_TRUE(hz3_stack_push(&stack, two[0], two[1], 2, true));
  ASSERT_TRUE(hz3_stack_push(&stack, most.front(), most.back(), HZ3_STACK_MAX, true));
  EXPECT_EQ(height(), unsigned{HZ3_STACK_MAX});
  uint64_t version = stack.word >> (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS);
  EXPECT_EQ(hz3_stack_pop(&stack, HZ3_STACK_MAX, &count), most.front());
  EXPECT_EQ(height(), 0u);
  EXPECT_EQ(hz3_stack_pop(&stack, 2, &count), two[0]);
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(height(), 0u);
  EXPECT_EQ(stack.word >> (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS), version + 2);
  for (auto &chain : {three, two, most}) FreeAll(chain);
}

// What is refused because its stack cannot count any more is not there: nor do its bytes count as something that cools.
TEST_F(Remote, WhatAFullStackRefusesDoesNotCool) {
  Pinned pinned;
  unsigned c = FreshClass(), other = hz3_size_class_of(2048);
  std::vector<hz3_magazine *> all = Chain(HZ3_STACK_MAX);
  for (hz3_magazine *magazine : all) ASSERT_TRUE(hz3_depot_push(c, magazine, SIZE_MAX, 0));
  hz3_magazine *refused = MagazineOf(c, 2.5), *cools = MagazineOf(other, 0.1);
  EXPECT_FALSE(hz3_depot_push(c, refused, SIZE_MAX, 0));
  EXPECT_TRUE(hz3_depot_push(other, cools, 0, 2 * HZ3_COOL_BYTES));
  PopAll(c);
  PopAll(other);
  FreeAll(all);
  FreeAll({refused, cools});
}

TEST_F(Remote, EveryChangeAdvancesTheVersion) {
  hz3_stack stack = {};
  hz3_magazine *magazine = NewMagazine();
  std::set<uint64_t> words;
  for (int i = 0; i < 100; i++) {
    uint32_t count;
    hz3_stack_push(&stack, magazine, magazine, 1, false);
    EXPECT_TRUE(words.insert(stack.word).second);
    ASSERT_EQ(hz3_stack_pop(&stack, 1, &count), magazine);
    EXPECT_TRUE(words.insert(stack.word).second);
  }
  // The version wraps without spilling into index and height.
  uint64_t last_version = ~uint64_t{0} << (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS);
  uint64_t wrapped = hz3_stack_next_word(last_version, 5, 6);
  EXPECT_EQ(hz3_stack_index(wrapped), 5u);
  EXPECT_EQ(hz3_stack_height(wrapped), 6u);
  EXPECT_EQ(wrapped >> (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS), 0u);
  FreeAll({magazine});
}

TEST_F(Remote, LowWaterIsWhatNobodyNeeded) {
  Pinned pinned;
  unsigned c = FreshClass();
  std::vector<hz3_magazine *> taken;
  for (int i = 0; i < 10; i++) ASSERT_TRUE(hz3_depot_push(c, MagazineOf(c, 0.001), 1000, 0));
  TakeLowWater(c);
  EXPECT_EQ(TakeLowWater(c), 10u) << "nothing was popped since the mark";
  for (int i = 0; i < 4; i++) taken.push_back(hz3_depot_take_any(c));
  for (hz3_magazine *magazine : taken) ASSERT_TRUE(hz3_depot_push(c, magazine, 1000, 0));
  EXPECT_EQ(TakeLowWater(c), 6u);
  EXPECT_EQ(TakeLowWater(c), 10u) << "the mark was set anew";
  FreeAll(PopAll(c));
  TakeLowWater(c);
  EXPECT_EQ(TakeLowWater(c), 0u);
}

// Every magazine carries its owner: a second one at the same time is caught by the exchange.
TEST_F(Remote, ThreadsNeitherLoseNorDouble) {
  const int kThreads = 4, kRounds = 20000;
  unsigned c = hz3_size_class_of(16384);  // 254 of them in a magazine are enough to turn the depot over
  std::atomic<int> doubled{0};
  std::vector<std::thread> threads;
  auto own = [&](hz3_magazine *magazine) {
    if (__atomic_exchange_n(&magazine->slots[1], magazine, __ATOMIC_RELAXED) != nullptr) doubled++;
  };
  auto disown = [](hz3_magazine *magazine) {
    __atomic_store_n(&magazine->slots[1], static_cast<void *>(nullptr), __ATOMIC_RELAXED);
  };
  for (unsigned t = 0; t < kThreads; t++) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<hz3_magazine *> held;
      for (int i = 0; i < kRounds; i++) {
        unsigned choice = random() % 4;  // new, pop, free, push
        hz3_magazine *magazine = nullptr;
        uint32_t count;
        if (choice == 0 && held.size() < 8 && (magazine = hz3_magazine_alloc(2, 1, &count)) != nullptr) {
          own(magazine);
          held.push_back(magazine);
        } else if (choice == 1 && (magazine = hz3_depot_pop(c)) != nullptr) {
          own(magazine);
          if (magazine->slots[0] != magazine) doubled++;
          held.push_back(magazine);
        } else if (!held.empty()) {
          magazine = held.back();
          held.pop_back();
          magazine->slots[0] = magazine;
          magazine->count = 254;
          disown(magazine);
          if (choice == 3 && hz3_depot_push(c, magazine, 1000, 0)) continue;
          magazine->count = 0;
          hz3_magazine_free(magazine, magazine, 1);
        }
      }
      for (hz3_magazine *magazine : held) {
        disown(magazine);
        hz3_magazine_free(magazine, magazine, 1);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(doubled, 0);
  std::vector<hz3_magazine *> left = PopAll(c);
  EXPECT_EQ(std::set<hz3_magazine *>(left.begin(), left.end()).size(), left.size());
  FreeAll(left);
}

// A fixed set of magazines goes round between threads; at the end it is the same set.
TEST_F(Remote, TheSameMagazinesComeOutAgain) {
  const int kThreads = 4, kMagazines = 64;
  unsigned c = FreshClass();
  std::set<hz3_magazine *> before;
  for (int i = 0; i < kMagazines; i++) before.insert(NewMagazine());
  for (hz3_magazine *magazine : before) ASSERT_TRUE(hz3_depot_push(c, magazine, 1000, 0));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([c] {
      for (int i = 0; i < 20000; i++) {
        hz3_magazine *first = hz3_depot_pop(c), *second = hz3_depot_pop(c);
        if (first != nullptr) hz3_depot_push(c, first, 1000, 0);
        if (second != nullptr) hz3_depot_push(c, second, 1000, 0);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  std::vector<hz3_magazine *> after = PopAll(c);
  EXPECT_EQ(after.size(), before.size());
  EXPECT_EQ(std::set<hz3_magazine *>(after.begin(), after.end()), before);
  FreeAll(after);
}

TEST_F(Remote, ForkLocksOutCarving) {
  hz3_remote_fork_prepare();
  hz3_magazine *magazine = nullptr;
  uint32_t count = 0;
  std::thread other([&] { magazine = hz3_magazine_alloc(2, 1, &count); });
  hz3_remote_fork_release();
  other.join();
  ASSERT_NE(magazine, nullptr);
  FreeAll({magazine});
}

#if !defined(__SANITIZE_THREAD__)  // its runtime takes locks of its own
[[noreturn]] void AllocWhileAForkHoldsTheLock() {
  hz3_remote_fork_prepare();
  HZ3_REQUIRE(hz3_test::WaitsForALock([] {
    for (uint32_t count; hz3_magazine_alloc(4, 1, &count) != nullptr && count > 0;) {
    }
  }));
  _exit(0);
}

// In a process in which no CPU has made any.
void MakeOnesOwnFirst() {
  hz3_remote_init(hz3_os_cpu_count());
  Pinned pinned;
  std::set<hz3_magazine *> others;
  {
    Pinned elsewhere(1);
    while (others.size() < 8) others.insert(NewMagazine());
    FreeAll({others.begin(), others.end()});
  }
  int made = 0;
  while (others.count(NewMagazine()) == 0 && made < 10000) made++;
  fprintf(stderr, "%d were made first\n", made);
  exit(made > 100 && made < 1000 ? 0 : 1);
}
TEST(RemoteDeathTest, ACpuMakesSomeMagazinesBeforeItTakesThoseOfOthers) {
  if (Cpus().size() < 2) GTEST_SKIP() << "there is no other CPU";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(MakeOnesOwnFirst(), testing::ExitedWithCode(0), "");
}

TEST(RemoteDeathTest, ForkHoldsTheLock) { EXPECT_EXIT(AllocWhileAForkHoldsTheLock(), testing::ExitedWithCode(0), ""); }
#endif

}  // namespace
