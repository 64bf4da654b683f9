// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the small box: the common ones for every class, and its out-of-line bitmaps.
#include "hz3/small/small.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "hz3/base/metadata.h"
#include "hz3/base/refuse_test.h"
#include "hz3/pages/span_box_test.h"

const SpanBox kBox = {hz3_small_fetch, hz3_small_release,      hz3_small_purge,        hz3_small_purge_sparse, hz3_small_use,
                      hz3_small_fork_prepare, hz3_small_fork_release, 1};

INSTANTIATE_TEST_SUITE_P(Small, SpanBoxTest, testing::Range(1u, HZ3_SMALL_CLASS_LAST + 1u), ClassName);
// Death and waiting are slow, and the code the same for all: the smallest, one with a tail, one off the powers of two, the biggest.
INSTANTIATE_TEST_SUITE_P(Small, SpanBoxDeathTest, testing::Values(1u, 3u, 33u, unsigned{HZ3_SMALL_CLASS_LAST}), ClassName);
INSTANTIATE_TEST_SUITE_P(Small, SpanBoxKeepTest, testing::Values(1u, 3u, 33u, unsigned{HZ3_SMALL_CLASS_LAST}), ClassName);

// What becomes of spans that another home has room in. Each waits a while.
class SmallHomesTest : public SpanBoxTest {
 protected:
  static void EndSwings() { usleep((HZ3_SWING_MS + 10) * 1000); }
};
INSTANTIATE_TEST_SUITE_P(Small, SmallHomesTest, testing::Values(1u, 3u, 33u, unsigned{HZ3_SMALL_CLASS_LAST}), ClassName);

// What one thread frees and another one asks for does not bring them together in one span.
TEST_P(SpanBoxTest, HomesHaveSpansOfTheirOwn) {
  if (per_span_ < 2) GTEST_SKIP() << "spans of one object are never shared";
  const unsigned kHomes[] = {1, HZ3_SPAN_HOMES - 1};
  std::mt19937 random(c_);
  std::map<char *, unsigned> home_of;
  std::vector<void *> objects[2];  // but one of each span, which then stays
  auto fetch = [&](int i, size_t count) {
    for (void *object : Fetch(count, kHomes[i])) {
      auto [span, is_first] = home_of.insert({BaseOf(object), kHomes[i]});
      EXPECT_EQ(span->second, kHomes[i]);
      if (!is_first) objects[i].push_back(object);
    }
  };
  for (int i : {0, 1}) fetch(i, 2 * per_span_);
  for (int round = 0; round < 20; round++) {
    size_t portion = 1 + random() % objects[0].size();
    for (auto &own : objects) {
      std::shuffle(own.begin(), own.end(), random);
      Release({own.end() - static_cast<ptrdiff_t>(portion), own.end()});
      own.resize(own.size() - portion);
    }
    for (int i : {1, 0}) fetch(i, portion);
  }
  EXPECT_EQ(kBox.use(c_).spans, 4u);
}

// Threads of four homes free what others got, in bursts, so that spans run empty and move. For tsan: whoever finds a span in its home
// goes on where the home before left it.
TEST(SmallThreads, SpansMoveBetweenHomes) {
  enum { kThreads = 4, kSlots = 3000, kClass = 33 };
  static std::atomic<void *> table[kSlots];
  std::vector<std::thread> threads;
  for (unsigned home = 0; home < kThreads; home++) {
    threads.emplace_back([home] {
      std::mt19937 random(home);
      auto take = [&](void *fresh, size_t slots) { return table[random() % slots].exchange(fresh); };
      for (int round = 0; round < 4000; round++) {
        void *batch[60], *gone[100];
        size_t got = hz3_small_fetch(home, kClass, batch, 1 + random() % 60), count = 0;
        for (size_t i = 0; i < got; i++) {
          if (void *old = take(batch[i], round / 500 % 2 ? kSlots / 8 : kSlots)) gone[count++] = old;
        }
        for (int i = 0; i < 40 && round / 250 % 2; i++) {
          if (void *old = take(nullptr, kSlots)) gone[count++] = old;
        }
        hz3_small_release(kClass, gone, count);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (auto &slot : table) {
    void *object = slot.exchange(nullptr);
    if (object != nullptr) hz3_small_release(kClass, &object, 1);
  }
  EXPECT_EQ(hz3_small_use(kClass).out, 0u);
  EXPECT_EQ(hz3_small_use(kClass).spans, 0u);
}

// Those who grow side by side do not take from each other what they are carving, but what lies behind it.
TEST_P(SmallHomesTest, ASpanThatIsBeingCarvedStaysWithItsHome) {
  std::vector<void *> carved = Fetch(per_span_, 1), being_carved = Fetch(per_span_ - 1, 1);
  char *first = BaseOf(carved[0]), *second = BaseOf(being_carved[0]);
  EXPECT_NE(BaseOf(Fetch(1, 2)[0]), second);
  EXPECT_EQ(kBox.use(c_).spans, 3u);
  Fetch(per_span_ - 1, 2);  // the rest of the third
  carved.pop_back();
  Release(carved);
  being_carved.pop_back();
  Release(being_carved);
  EndSwings();
  EXPECT_EQ(BaseOf(Fetch(1, 2)[0]), first);
  EXPECT_EQ(kBox.use(c_).spans, 3u);
}

// What was purged within costs page faults.
TEST_P(SmallHomesTest, AnotherHomeTakesWhatWasPurgedLast) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  std::vector<void *> purged = Fetch(per_span_), other = Fetch(per_span_);
  for (void *object : purged) memset(object, 1, bytes_);
  Release({purged.begin() + static_cast<ptrdiff_t>(per_span_ / 5), purged.end()});
  Release({other.begin() + static_cast<ptrdiff_t>(per_span_ / 2), other.end()});
  ASSERT_EQ(kBox.purge_sparse(c_, 1, 100), 0u);
  ASSERT_EQ(kBox.purge_sparse(c_, 1001, 100), 1u);
  EndSwings();
  EXPECT_EQ(BaseOf(Fetch(1, 1)[0]), BaseOf(other[0]));
  EXPECT_EQ(BaseOf(Fetch(1, 2)[0]), BaseOf(purged[0]));
}

// But for the one that each home is carving: those who grow side by side would take it from each other.
TEST_P(SmallHomesTest, ThereIsNoNewSpanWhileAnotherHomeHasRoom) {
  std::vector<void *> objects = Fetch(2 * per_span_, 3);
  objects.resize(per_span_ + per_span_ / 2);
  Release(objects);
  EndSwings();
  EXPECT_EQ(Fetch(per_span_ + per_span_ / 2, 5).size(), objects.size());
  EXPECT_EQ(kBox.use(c_).spans, 2u);
}

// It wants them back for its next batch. Tried again where this thread was held up between two batches.
TEST_P(SmallHomesTest, SpansOfAHomeThatSwingsStay) {
  bool stayed = false;
  for (int round = 0; round < 20 && !stayed; round++) {
    ReleaseAll();
    hz3_pages_trim(true);  // or the other home had memory of its own
    std::vector<void *> objects = Fetch(3 * per_span_, 6);
    Release({objects.begin(), objects.begin() + static_cast<ptrdiff_t>(2 * per_span_)});
    Fetch(1, 6);
    Release({objects.begin() + static_cast<ptrdiff_t>(2 * per_span_ + 1), objects.end()});
    stayed = BaseOf(Fetch(1, 7)[0]) != BaseOf(objects[2 * per_span_]);
  }
  EXPECT_TRUE(stayed);
}

// For a few objects each, every refill would take one, and in the end all of them were in the wrong home.
TEST_P(SpanBoxTest, AnotherHomeLeavesWhatIsNearlyFull) {
  if (per_span_ < 8) GTEST_SKIP() << "one object is more than an eighth";
  // Or what is nearly full waits in its own home, too: there may have been a test in which what this home had came back in order.
  Fetch(8 * per_span_, 3);
  FillSpans(3);
  ComeAndGo();
  ReleaseAll();
  hz3_pages_trim(true);
  std::vector<void *> objects = Fetch(2 * per_span_, 3);
  Release({objects[0], objects[per_span_]});
  char *fresh = BaseOf(Fetch(per_span_, 5)[0]);
  EXPECT_TRUE(fresh != BaseOf(objects[0]) && fresh != BaseOf(objects[per_span_]));
  EXPECT_EQ(kBox.use(c_).spans, 3u);
  Fetch(2, 3);
  EXPECT_EQ(kBox.use(c_).spans, 3u) << "of its own home";
}

TEST_P(SpanBoxTest, WholeSpansComeBackToTheirHome) {
  std::set<char *> of_home[2];
  for (int round = 0; round < 2; round++) {
    for (unsigned home : {0, 1}) {
      for (void *object : Fetch(2 * per_span_, home)) {
        if (round == 0) of_home[home].insert(BaseOf(object));
        else EXPECT_EQ(of_home[home].count(BaseOf(object)), 1u);
      }
    }
    ReleaseAll();
    EXPECT_EQ(kBox.use(c_).spans, 0u);
  }
}

TEST_P(SpanBoxTest, OneReleaseServesAllHomes) {
  std::vector<void *> objects;
  for (unsigned home = 0; home < HZ3_SPAN_HOMES; home++) {
    std::vector<void *> own = Fetch(per_span_, home);
    objects.insert(objects.end(), own.begin(), own.end());
  }
  EXPECT_EQ(kBox.use(c_).spans, size_t{HZ3_SPAN_HOMES});
  std::shuffle(objects.begin(), objects.end(), std::mt19937(c_));
  size_t half = objects.size() / 2;
  Release({objects.begin(), objects.begin() + static_cast<ptrdiff_t>(half)});
  EXPECT_EQ(kBox.use(c_).out, objects.size() - half);
  Release({objects.begin() + static_cast<ptrdiff_t>(half), objects.end()});
  EXPECT_EQ(kBox.use(c_).spans, 0u);
}

namespace {

#if !defined(__SANITIZE_THREAD__)  // its runtime needs memory for each place that is an atomic for the first time
[[noreturn]] void FetchWithoutMemory() {
  const unsigned c = 2;
  void *object;
  HZ3_REQUIRE(hz3_small_fetch(1, c, &object, 1) == 1);
  hz3_test::RefuseCall(SYS_mmap);
  while (hz3_pages_alloc_span(c, 0, 1) != nullptr) continue;
  size_t got = 1;
  while (hz3_small_fetch(2, c, &object, 1) == 1) got++;
  HZ3_REQUIRE(got == hz3_size_classes[c].objects);
  _exit(0);
}

TEST(SmallDeathTest, WithoutMemoryOthersSpansServe) {
  EXPECT_EXIT(FetchWithoutMemory(), testing::ExitedWithCode(0), "");
}

// Spans to which little came back are left alone where the oldest come back first; not where there is nothing else.
[[noreturn]] void FetchScrapsWithoutMemory() {
  const unsigned c = hz3_size_class_of(512);
  std::deque<void *> queue;
  auto push = [&] {
    void *object;
    HZ3_REQUIRE(hz3_small_fetch(0, c, &object, 1) == 1);
    queue.push_back(object);
  };
  auto is_full = [&] { return hz3_small_use(c).out == hz3_small_use(c).objects; };
  auto pop = [&] {
    void *object = queue.front();
    hz3_small_release(c, &object, 1);
    queue.pop_front();
    return object;
  };
  while (queue.size() < size_t{16} * hz3_size_classes[c].objects) push();
  for (size_t moved = 0; moved < 4 * queue.size(); moved++) {
    pop();
    push();
  }
  for (size_t count = queue.size(); count > 0; count--) pop();
  while (queue.size() < size_t{16} * hz3_size_classes[c].objects || !is_full()) push();
  const void *scrap = pop();
  push();
  HZ3_REQUIRE(hz3_pages_span_of(queue.back()) != hz3_pages_span_of(scrap));
  hz3_test::RefuseCall(SYS_mmap);
  while (hz3_pages_alloc_span(c, 0, 1) != nullptr) continue;
  while (!is_full()) push();
  HZ3_REQUIRE(std::count(queue.begin(), queue.end(), scrap) == 1);
  void *object;
  HZ3_REQUIRE(hz3_small_fetch(0, c, &object, 1) == 0);
  _exit(0);
}

TEST(SmallDeathTest, WithoutMemoryScrapsServe) {
  if (HZ3_CHECKED) GTEST_SKIP() << "never in order";
  EXPECT_EXIT(FetchScrapsWithoutMemory(), testing::ExitedWithCode(0), "");
}
#endif

// Without memory for the bitmap of a span its slices stay free.
[[noreturn]] void FetchWithoutABitmap() {
  const unsigned c = 2;
  const size_t bitmap_bytes = hz3_size_classes[c].objects / 8;
  auto free_bytes = [] {
    hz3_pages_stats stats;
    hz3_pages_get_stats(&stats);
    return stats.free_bytes;
  };
  void *object;
  HZ3_REQUIRE(hz3_small_fetch(0, c + 1, &object, 1) == 1);
  hz3_test::RefuseCall(SYS_mmap);
  while (hz3_metadata_alloc_bitmap(bitmap_bytes) != nullptr) continue;
  const size_t before = free_bytes();
  HZ3_REQUIRE(before > 0);
  for (int i = 0; i < 100; i++) HZ3_REQUIRE(hz3_small_fetch(0, c, &object, 1) == 0);
  HZ3_REQUIRE(free_bytes() == before);
  _exit(0);
}

TEST(SmallDeathTest, WithoutABitmapNoSliceIsLost) { EXPECT_EXIT(FetchWithoutABitmap(), testing::ExitedWithCode(0), ""); }

TEST(SmallTest, BitmapsOfRetiredSpansAreRecycled) {
  std::vector<void *> objects(2048);
  size_t before = 0;
  for (int round = 0; round < 50; round++) {
    size_t got = hz3_small_fetch(0, 2, objects.data(), objects.size());
    ASSERT_EQ(got, objects.size());
    hz3_small_release(2, objects.data(), got);
    ASSERT_EQ(hz3_small_use(2).spans, 0u);
    if (round == 0) before = hz3_metadata_bytes();
  }
  EXPECT_EQ(hz3_metadata_bytes(), before);
}

}  // namespace
