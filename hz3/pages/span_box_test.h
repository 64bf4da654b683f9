// SPDX-License-Identifier: Apache-2.0
// What it is: the tests that small and medium have in common, one run per size class.
// Called by: small_test.cc and medium_test.cc, which define kBox and say which classes.
#ifndef HZ3_PAGES_SPAN_BOX_TEST_H_
#define HZ3_PAGES_SPAN_BOX_TEST_H_

#include <gtest/gtest.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "hz3/base/os.h"
#include "hz3/base/size_class.h"
#include "hz3/config.h"
#include "hz3/pages/pages.h"
#include "hz3/pages/pages_internal.h"
#include "hz3/pages/span_store.h"
#include "hz3/pages/tag_map.h"

struct SpanBox {
  size_t (*fetch)(unsigned home, unsigned size_class, void **out, size_t count);
  void (*release)(unsigned size_class, void **objects, size_t count);
  bool (*purge)(unsigned size_class);
  size_t (*purge_sparse)(unsigned size_class, uint32_t now_ms, size_t most);
  hz3_class_use (*use)(unsigned size_class);
  void (*fork_prepare)();
  void (*fork_release)();
  unsigned other_class;  // of the same box
};
extern const SpanBox kBox;

// One size class; every test ends with all objects back and no span held.
class SpanBoxTest : public testing::TestWithParam<unsigned> {
 protected:
  SpanBoxTest() : c_(GetParam()), bytes_(hz3_size_classes[c_].bytes), per_span_(hz3_size_classes[c_].objects) {}
  void TearDown() override {
    ReleaseAll();
    EXPECT_EQ(kBox.use(c_).out, 0u);
    EXPECT_EQ(kBox.use(c_).spans, 0u);
    hz3_pages_stats stats;
    hz3_pages_get_stats(&stats);
    EXPECT_EQ(stats.free_bytes + stats.kept_bytes, stats.mapped_bytes) << "a slice was lost";
    hz3_pages_trim(true);
  }

  // Exactly `count` objects, however many calls that takes.
  std::vector<void *> Fetch(size_t count, unsigned home = 0) {
    std::vector<void *> objects(count);
    for (size_t got = 0; got < count;) {
      size_t more = kBox.fetch(home, c_, &objects[got], count - got);
      if (more == 0 || more > count - got) {
        ADD_FAILURE() << "fetch of " << count - got << " gave " << more;
        objects.resize(got);
        break;
      }
      got += more;
    }
    live_.insert(objects.begin(), objects.end());
    return objects;
  }
  void Release(std::vector<void *> objects) {
    for (void *object : objects) live_.erase(object);
    if (!objects.empty()) kBox.release(c_, objects.data(), objects.size());
  }
  void ReleaseAll() { Release(std::vector<void *>(live_.begin(), live_.end())); }
  std::string FatalLine(const char *what, bool has_size = true) const {
    std::string size = " in a block of " + std::to_string(bytes_) + " bytes";
    return std::string("^hz3: fatal: ") + what + ": pointer 0x[0-9a-f]+" + (has_size ? size : "") + "\n$";
  }
  char *BaseOf(void *object) const { return hz3_pages_span_of(object)->base; }
  std::map<hz3_span *, std::vector<void *>> BySpan() const {
    std::map<hz3_span *, std::vector<void *>> spans;
    for (void *object : live_) spans[hz3_pages_span_of(object)].push_back(object);
    return spans;
  }
  // How many times as large as the smallest span the largest one is: no more than 256 KiB, for 64 objects.
  size_t MostTimes() const {
    size_t slices = hz3_size_classes[c_].slices, times = 1;
    for (; !HZ3_CHECKED && (times + 1) * slices <= 4 && times * per_span_ < 64; times++)
      if (c_ > HZ3_SMALL_CLASS_LAST && (times + 1) * per_span_ > 64) break;
    return times;
  }

  static void EndWanting() { hz3_pages_note_wanted(NowMs() - HZ3_SOON_MS); }
  // More dirty slices than may stay, and no span was wanted lately. Address space only: nothing is touched. Another thread may end it at once
  // by using a slice that was purged.
  static void StartGivingBack() {
    for (size_t count = 16; count <= 4096 && !hz3_pages_is_giving_back(); count *= 2) {
      std::vector<hz3_span *> spans;
      for (size_t i = 0; i < count; i++) spans.push_back(hz3_pages_alloc_span(HZ3_CLASS_COUNT - 1, 0, 1));
      for (hz3_span *span : spans) hz3_pages_free_span(span);
    }
    hz3_lock_acquire(&hz3_pages.lock);
    hz3_pages.retention = HZ3_RETENTION_INIT;  // or hollow spans wait: here all has come back before
    hz3_lock_release(&hz3_pages.lock);
    hz3_pages_note_coming_back(false);
    EndWanting();
  }
  // Another object comes back once all that is hollow has been so for long enough, whether or not anybody had seen it yet.
  void ReleaseLater(void *object) {
    for (const auto &span : BySpan()) span.first->marked_ms = span.first->was_purged ? span.first->marked_ms : NowMs() - HZ3_SOON_MS;
    Release({object});
  }
  // No object of the class is left in its spans.
  void FillSpans(unsigned home = 0) {
    while (kBox.use(c_).out < kBox.use(c_).objects) Fetch(1, home);
  }
  // The store sees that what it hands out comes back at once, for so long that no span waits for what it handed out before, but no longer than
  // any drains: what was seen last is a moment ago then. All spans are full, before and after: a quarter of each is no scrap, which might wait.
  void ComeAndGo() {
    const std::map<hz3_span *, std::vector<void *>> spans = BySpan();
    auto drains = [](const auto &span) { return IsDraining(span.second.front()); };
    for (size_t round = 0; round < per_span_ / 4 + 16 && std::any_of(spans.begin(), spans.end(), drains); round++) {
      for (const auto &span : spans) {
        const size_t some = (span.second.size() + 3) / 4;
        Release({span.second.begin(), span.second.begin() + static_cast<ptrdiff_t>(some)});
        Fetch(some, hz3_pages_home_of(span.second.front()));
      }
    }
  }
  size_t SpanBytes() const { return hz3_size_classes[c_].slices * HZ3_SLICE_BYTES; }
  // As two ticks would that are a second apart: the first one only marks.
  size_t PurgeSparse(size_t most) {
    size_t done = kBox.purge_sparse(c_, ticks_ms_, most);
    ticks_ms_ += 1000;
    return done + kBox.purge_sparse(c_, ticks_ms_, most - done);
  }
  static bool IsDraining(void *object) { return hz3_tag_of(object) >= HZ3_TAG_DRAIN; }
  static uint32_t NowMs() { return static_cast<uint32_t>(hz3_os_now_ms()); }
  static bool IsResident(char *page) {
    unsigned char in_core;
    EXPECT_EQ(mincore(page, hz3_os_page_bytes(), &in_core), 0);
    return in_core & 1;
  }

  uint32_t ticks_ms_ = 1;
  const unsigned c_;
  const size_t bytes_, per_span_;
  std::unordered_set<void *> live_;
};

TEST_P(SpanBoxTest, ObjectsAreApartAlignedAndInTaggedSpans) {
  size_t count = 2 * per_span_ + per_span_ / 2 + 1;
  std::vector<void *> objects = Fetch(count);
  EXPECT_EQ(kBox.use(c_).out, count);
  EXPECT_EQ(kBox.use(c_).spans, (count + per_span_ - 1) / per_span_);
  size_t align = bytes_ & -bytes_;
  for (void *object : objects) {
    ASSERT_EQ(reinterpret_cast<uintptr_t>(object) % align, 0u);
    ASSERT_EQ(hz3_tag_of(object), (c_ <= HZ3_TABLE_CLASS_LAST ? intptr_t{c_} : -intptr_t{c_}) * 32);
    hz3_span *span = hz3_pages_span_of(object);
    ASSERT_EQ(span->size_class, c_);
    ASSERT_EQ((static_cast<char *>(object) - span->base) % static_cast<ptrdiff_t>(bytes_), 0);
    ASSERT_EQ(hz3_pages_span_of(static_cast<char *>(object) + bytes_ - 1), span);
  }
  std::sort(objects.begin(), objects.end());
  for (size_t i = 1; i < objects.size(); i++)
    ASSERT_LE(static_cast<char *>(objects[i - 1]) + bytes_, static_cast<char *>(objects[i]));
}

// Of a store with an eighth of its room free, spans drain once so much came back to them that they are on another list.
// While that empties none, they drain half of the time: it is tried again and again.
TEST_P(SpanBoxTest, SpansWithRoomDrainNowAndThenIfInVain) {
  usleep(2 * HZ3_SWING_MS * 1000);  // what other tests had come and go is over, so all drain, until it comes and goes here
  std::vector<void *> objects = Fetch(8 * per_span_);
  std::shuffle(objects.begin(), objects.end(), std::mt19937(1));
  auto is_any_draining = [&] { return std::any_of(objects.begin(), objects.end(), IsDraining); };
  const uint32_t start = NowMs();
  ComeAndGo();
  auto release_some = [&](size_t count) {
    Release(std::vector<void *>(objects.end() - static_cast<ptrdiff_t>(count), objects.end()));
    objects.resize(objects.size() - count);
  };
  auto exchange_until = [&](bool draining) {
    for (uint32_t start = NowMs(); is_any_draining() != draining && NowMs() - start < 10 * HZ3_SWING_MS;) Release(Fetch(per_span_));
    return is_any_draining() == draining;
  };
  release_some(per_span_ - 1);
  const bool is_any_draining_before = is_any_draining();
  release_some(3 * per_span_);
  const bool never_drains = HZ3_CHECKED || bytes_ > HZ3_SLICE_BYTES / 2;
  if (!never_drains && NowMs() - start >= HZ3_SWING_MS) GTEST_SKIP() << "the machine is too slow: that all comes and goes is over";
  EXPECT_FALSE(is_any_draining_before) << "not yet an eighth";
  if (never_drains) {
    for (int i = 0; i < 2000; i++) Release(Fetch(per_span_));
    EXPECT_FALSE(is_any_draining());
    return;
  }
  EXPECT_TRUE(exchange_until(true));
  for (void *object : objects) EXPECT_EQ(hz3_tag_class(hz3_tag_of(object)), c_);
  EXPECT_TRUE(exchange_until(false));
  EXPECT_TRUE(exchange_until(true));
}

// Full spans of a class of which the oldest come back first drain. Not while what comes back has just been handed out, or does so in no order.
TEST_P(SpanBoxTest, FullSpansDrainWhileTheOldestComeBackFirst) {
  usleep(2 * HZ3_SWING_MS * 1000);
  std::deque<void *> queue;
  auto push = [&](size_t count) {
    for (; count > 0; count--) queue.push_back(Fetch(1).front());
  };
  auto pop = [&](size_t count) {
    Release({queue.begin(), queue.begin() + static_cast<ptrdiff_t>(count)});
    queue.erase(queue.begin(), queue.begin() + static_cast<ptrdiff_t>(count));
  };
  const size_t some = per_span_ / 4 + 1;
  auto move_on = [&] {
    pop(some);
    push(some);
  };
  // With few spans there is room, and a batch is all there is: this tells nothing.
  for (int batch = 0; batch < 4; batch++) {
    push(2 * per_span_);
    pop(2 * per_span_);
  }
  while (queue.size() < 8 * per_span_) {
    push(2 * some);
    pop(some);
  }
  auto fill = [&] {
    while (kBox.use(c_).out < kBox.use(c_).objects) push(1);  // all are full
  };
  fill();
  auto draining = [&] { return static_cast<size_t>(std::count_if(queue.begin(), queue.end(), IsDraining)); };
  if (HZ3_CHECKED || c_ > HZ3_SMALL_CLASS_LAST) {
    for (size_t i = 0; i < 20; i++) move_on();
    EXPECT_EQ(draining(), 0u);
    return;
  }
  auto turn_over = [&] {
    for (size_t moved = 0; moved < 2 * queue.size(); moved += some) move_on();
  };
  EXPECT_GE(draining(), queue.size() / 3) << "all but what is of the time when there were few spans";
  const size_t one_span = MostTimes() * per_span_;
  turn_over();
  EXPECT_GT(draining() + one_span, queue.size()) << "all but what is of the span that is being filled";
  pop(queue.size());
  push(8 * one_span);
  fill();
  ComeAndGo();
  EXPECT_EQ(draining(), 0u);
  usleep(2 * HZ3_SWING_MS * 1000);
  turn_over();
  EXPECT_GT(draining() + one_span, queue.size()) << "again";
  std::mt19937 random(c_);
  for (int i = 0; i < 2000 && draining() >= queue.size() / 2; i++) {
    std::shuffle(queue.begin(), queue.end(), random);
    move_on();
  }
  EXPECT_LT(draining(), queue.size() / 2) << "at random";
}

// The few that came back to spans wait, where the oldest come back first, until an eighth of the room is free; then they are first again.
TEST_P(SpanBoxTest, ScrapsWaitWhileTheOldestComeBackFirst) {
  if (HZ3_CHECKED || c_ > HZ3_SMALL_CLASS_LAST) GTEST_SKIP() << "never in order";
  usleep(2 * HZ3_SWING_MS * 1000);
  std::vector<void *> queue = Fetch(16 * per_span_);
  const size_t some = per_span_ / 4 + 1;
  for (size_t moved = 0; moved < 4 * queue.size(); moved += some) {
    Release({queue.begin(), queue.begin() + static_cast<ptrdiff_t>(some)});
    queue.erase(queue.begin(), queue.begin() + static_cast<ptrdiff_t>(some));
    for (size_t i = 0; i < some; i++) queue.push_back(Fetch(1).front());
  }
  auto start_with_full_spans = [&] {
    ReleaseAll();
    Fetch(16 * per_span_);
    FillSpans();
  };
  start_with_full_spans();
  const size_t one_span = hz3_pages_span_of(Fetch(1).front())->objects;
  Fetch(one_span - 1);
  const hz3_span *nearly_full = hz3_pages_span_of(Fetch(one_span - 1).front());
  EXPECT_EQ(hz3_pages_span_of(Fetch(1).front()), nearly_full) << "the rest of a span is no scrap";
  const std::map<hz3_span *, std::vector<void *>> spans = BySpan();
  auto is_scrap = [&spans](void *object) { return spans.count(hz3_pages_span_of(object)) != 0; };
  // What is fetched instead goes back as a whole.
  auto next = [&] {
    void *object = Fetch(1).front();
    Release({object});
    return object;
  };
  size_t released = 0;
  for (size_t i = 0; (released + 1) * 8 < kBox.use(c_).objects; i++) {
    for (const auto &span : spans) {
      if (i >= (span.second.size() - 1) / 4 || (released + 1) * 8 >= kBox.use(c_).objects) continue;
      Release({span.second[i]});
      released++;
    }
    ASSERT_LT(i, per_span_ * MostTimes());
  }
  EXPECT_FALSE(is_scrap(next()));
  Release({spans.begin()->second.back()});
  EXPECT_TRUE(is_scrap(next())) << "an eighth";
  start_with_full_spans();
  ComeAndGo();
  void *scrap = *live_.begin();
  Release({scrap});
  EXPECT_EQ(next(), scrap) << "in no order";
}

// What is fetched in a row and comes back in a row is a batch, at the second time. Not what others are fetched in between.
TEST_P(SpanBoxTest, FullSpansDrainUntilTheSecondBatch) {
  if (HZ3_CHECKED || c_ > HZ3_SMALL_CLASS_LAST) GTEST_SKIP() << "never drains while full";
  usleep(2 * HZ3_SWING_MS * 1000);
  std::vector<void *> backlog = Fetch(8 * per_span_);
  // Whether a span that is full again drains, while all others are full.
  auto is_draining = [&] {
    Release({backlog.back()});
    backlog.back() = Fetch(1).front();
    return IsDraining(backlog.back());
  };
  auto batch = [&](size_t others) {
    std::vector<void *> objects = Fetch(backlog.size());
    const bool is_draining_while_full = is_draining();
    for (auto oldest = objects.begin(); oldest != objects.end(); oldest += static_cast<ptrdiff_t>(per_span_)) {
      Release({oldest, oldest + static_cast<ptrdiff_t>(per_span_)});
      for (void *object : Fetch(others)) backlog.push_back(object);
    }
    return is_draining_while_full;
  };
  const uint32_t start = NowMs();
  for (int i = 0; i < 2; i++) EXPECT_TRUE(batch(per_span_)) << "others are fetched in between";
  for (int i = 0; i < 2; i++) EXPECT_TRUE(batch(0));
  const bool after_two = batch(0);
  if (NowMs() - start < HZ3_SWING_MS) {
    EXPECT_FALSE(after_two);
  }
}

// Lists are only looked at where they may change: after any release, in any order and portion, they are right.
TEST_P(SpanBoxTest, SpansAreOnTheListOfTheirRoom) {
  std::vector<void *> objects = Fetch(3 * per_span_ + per_span_ / 2);
  std::mt19937 random(c_);
  std::shuffle(objects.begin(), objects.end(), random);
  while (!objects.empty()) {
    for (void *object : objects) {
      hz3_span *span = hz3_pages_span_of(object);
      size_t room = per_span_ - hz3_span_objects_out(span);
      size_t list = room == 0 ? size_t{HZ3_SPAN_NO_LIST} : 1 + size_t{room * 4 >= per_span_} + size_t{room * 2 >= per_span_} + size_t{room * 4 >= per_span_ * 3};
      if (list == 1) list = 0;  // it was full
      if (list == 4) list = span->was_purged ? 6 : per_span_ - room <= 4 ? 5 : 4;
      ASSERT_EQ(size_t{span->list}, list) << room << " of " << per_span_;
      if (list >= 4 && list <= 6) {
        ASSERT_EQ(span->sample, HZ3_SPAN_NO_SAMPLE) << "its time is used for something else";
      }
    }
    size_t portion = std::min<size_t>(objects.size(), 1 + random() % (1 + per_span_ / 8));
    Release({objects.end() - static_cast<ptrdiff_t>(portion), objects.end()});
    objects.resize(objects.size() - portion);
  }
}

TEST_P(SpanBoxTest, FreshObjectsComeLowestLast) {
  std::vector<void *> objects = Fetch(std::min<size_t>(per_span_, 20));
  EXPECT_EQ(objects.back(), *std::min_element(objects.begin(), objects.end()));
  if (bytes_ >= 64) {
    EXPECT_TRUE(std::is_sorted(objects.rbegin(), objects.rend()));
  }
}

// Whoever walks through many blocks in the order in which they were asked for walks through memory in order.
TEST_P(SpanBoxTest, ManyFreshObjectsComeInOrder) {
  if (per_span_ <= 32) GTEST_SKIP() << "its spans hold few";
  std::vector<void *> objects = Fetch(per_span_);
  EXPECT_TRUE(std::is_sorted(objects.rbegin(), objects.rend()));
}

// A few small blocks asked for one after the other may go to two threads: they shall not share a cache line.
TEST_P(SpanBoxTest, FewFreshObjectsInARowAreInDifferentLines) {
  if (64 % bytes_ != 0) GTEST_SKIP() << "its blocks lie across lines";
  std::vector<void *> objects = Fetch(std::min<size_t>(per_span_, 32));
  for (size_t i = 1; i < objects.size(); i++)
    EXPECT_NE(reinterpret_cast<uintptr_t>(objects[i - 1]) / 64, reinterpret_cast<uintptr_t>(objects[i]) / 64) << i;
}

TEST_P(SpanBoxTest, FetchNeverGivesMoreThanAsked) {
  std::vector<void *> objects(per_span_ + 8, this);
  size_t got = kBox.fetch(0, c_, objects.data(), 1);
  ASSERT_EQ(got, 1u);
  EXPECT_EQ(objects[1], this);
  live_.insert(objects[0]);
}

TEST_P(SpanBoxTest, EverythingComesBackInAnyOrder) {
  std::mt19937 random(c_);
  for (int round = 0; round < 3; round++) {
    std::vector<void *> objects = Fetch(3 * per_span_);
    std::shuffle(objects.begin(), objects.end(), random);
    std::vector<void *> half(objects.begin(), objects.begin() + static_cast<ptrdiff_t>(objects.size() / 2));
    Release(half);
    std::vector<void *> again = Fetch(half.size());
    std::sort(half.begin(), half.end());
    std::sort(again.begin(), again.end());
    // No new span is opened while there is room in the old ones.
    EXPECT_LE(kBox.use(c_).spans, 3u);
    ReleaseAll();
    EXPECT_EQ(kBox.use(c_).spans, 0u);
  }
}

TEST_P(SpanBoxTest, FullestSpanIsServedFirst) {
  if (per_span_ < 8) GTEST_SKIP() << "three degrees of fullness need eight objects";
  std::vector<void *> spans[3];
  for (auto &objects : spans) objects = Fetch(per_span_);
  ASSERT_EQ(kBox.use(c_).spans, 3u);
  // Freed: most of the first, about a third of the second, one of the third.
  auto release_some = [&](std::vector<void *> &objects, size_t count) {
    Release(std::vector<void *>(objects.begin(), objects.begin() + static_cast<ptrdiff_t>(count)));
    objects.erase(objects.begin(), objects.begin() + static_cast<ptrdiff_t>(count));
  };
  const size_t first = per_span_ - 1, second = (per_span_ * 3 + 7) / 8, third = 1;
  char *bases[3] = {BaseOf(spans[0].back()), BaseOf(spans[1].back()), BaseOf(spans[2].back())};
  release_some(spans[0], first);
  release_some(spans[1], second);
  release_some(spans[2], third);
  EXPECT_EQ(BaseOf(Fetch(third).front()), bases[2]);
  for (void *object : Fetch(second)) EXPECT_EQ(BaseOf(object), bases[1]);
  for (void *object : Fetch(first)) EXPECT_EQ(BaseOf(object), bases[0]);
  EXPECT_EQ(kBox.use(c_).spans, 3u);
}

// What came back and what is fresh, of one span after the other.
TEST_P(SpanBoxTest, ObjectsOfSeveralSpansComeInOrder) {
  if (per_span_ <= 32) GTEST_SKIP() << "its spans hold few";
  std::vector<void *> objects = Fetch(per_span_ + per_span_ / 2);
  Release(std::vector<void *>(objects.begin(), objects.begin() + 10));  // the highest of the first span
  std::vector<void *> again(20);
  again.resize(kBox.fetch(0, c_, again.data(), again.size()));
  live_.insert(again.begin(), again.end());
  ASSERT_EQ(again.size(), 20u);
  EXPECT_EQ(BaseOf(again[0]), BaseOf(objects.back())) << "the emptier span comes second";
  for (size_t i = 1; i < again.size(); i++) {
    if (BaseOf(again[i - 1]) == BaseOf(again[i]) && bytes_ >= 64) {
      EXPECT_GT(again[i - 1], again[i]) << i;
    }
  }
  EXPECT_EQ(BaseOf(again[10]), BaseOf(objects[0]));
  EXPECT_EQ(BaseOf(again[9]), BaseOf(objects.back()));
}

// Without access rights, any touch of an object's memory ends the test.
TEST_P(SpanBoxTest, ObjectMemoryIsNeverTouched) {
  std::vector<void *> objects = Fetch(per_span_);
  char *base = BaseOf(objects[0]);
  size_t span_bytes = SpanBytes();
  ASSERT_EQ(mprotect(base, span_bytes, PROT_NONE), 0);
  void *last = objects.back();
  objects.pop_back();
  if (!objects.empty()) {
    Release(objects);
    EXPECT_EQ(BaseOf(Fetch(per_span_ - 1).front()), base);
  }
  EXPECT_EQ(BaseOf(last), base);
  ASSERT_EQ(mprotect(base, span_bytes, PROT_READ | PROT_WRITE), 0);
}

// None exceeds the smallest by more than a fourth of what the class had before.
TEST_P(SpanBoxTest, SpansGrowWithTheirClass) {
  std::set<hz3_span *> seen;
  size_t most = 0, room = 0;
  while (room < 24 * per_span_) {
    hz3_span *span = hz3_pages_span_of(Fetch(1)[0]);
    if (!seen.insert(span).second) continue;
    size_t times = span->slices / hz3_size_classes[c_].slices;
    EXPECT_EQ(span->slices, times * hz3_size_classes[c_].slices);
    EXPECT_EQ(span->objects, times * per_span_);
    EXPECT_LE(span->objects, per_span_ + room / 4);
    most = std::max(most, times);
    room += span->objects;
    Fetch(span->objects - 1u);
    EXPECT_EQ(BySpan()[span].size(), span->objects) << "all of one span before the next";
    EXPECT_EQ(kBox.use(c_).objects, room);
    EXPECT_EQ(kBox.use(c_).spans, seen.size());
  }
  EXPECT_EQ(most, MostTimes());
  std::vector<void *> objects(live_.begin(), live_.end());
  std::sort(objects.begin(), objects.end());
  for (size_t i = 1; i < objects.size(); i++) ASSERT_LE(static_cast<char *>(objects[i - 1]) + bytes_, static_cast<char *>(objects[i]));
  for (void *object : objects) ASSERT_EQ(reinterpret_cast<uintptr_t>(object) % (bytes_ & -bytes_), 0u);
  std::shuffle(objects.begin(), objects.end(), std::mt19937(1));
  Release(objects);
  EXPECT_EQ(kBox.use(c_).objects, 0u);
}

TEST_P(SpanBoxTest, LargeSpansGiveTheirPagesBack) {
  if (MostTimes() == 1 || MostTimes() * per_span_ < 8) GTEST_SKIP() << "spans of this class do not grow, or have too few objects to be hollow";
  for (void *object : Fetch(24 * per_span_)) memset(object, 0x5a, bytes_);
  for (int i = 0; i < 100; i++) hz3_pages_purge_idle();
  StartGivingBack();
  size_t looked_at = 0;
  auto spans = BySpan();
  std::vector<void *> others = spans.begin()->second;
  spans.erase(spans.begin());
  for (auto &[span, objects] : spans) Release({objects.begin() + 1, objects.end()});
  for (size_t i = 0; i < 4 && i < others.size(); i++) ReleaseLater(others[i]);
  for (auto &[span, objects] : spans) {
    char *kept = static_cast<char *>(objects[0]), *base = span->base;
    if (span->slices == hz3_size_classes[c_].slices) continue;
    looked_at++;
    for (char *at = base; at < base + span->slices * HZ3_SLICE_BYTES; at += hz3_os_page_bytes())
      EXPECT_EQ(IsResident(at), at + hz3_os_page_bytes() > kept && at < kept + bytes_);
  }
  EXPECT_GT(looked_at, 0u);
}

TEST_P(SpanBoxTest, HollowSpansGiveTheirPagesBack) {
  if (per_span_ < 4) GTEST_SKIP() << "a span of so few objects is never hollow";
  if (HZ3_CHECKED) GTEST_SKIP() << "the pattern in free blocks stays";
  const size_t kSpans = 4, page = hz3_os_page_bytes();
  std::vector<void *> objects = Fetch(kSpans * per_span_), others = Fetch(per_span_), kept;
  for (void *object : objects) memset(object, 0x5a, bytes_);
  std::sort(objects.begin(), objects.end());
  for (size_t span = kSpans; span-- > 0;) {
    auto at = objects.begin() + static_cast<ptrdiff_t>(span * per_span_ + per_span_ / 3);
    kept.push_back(*at);
    objects.erase(at);
  }
  // All spans shrink together, each in its own order.
  for (size_t span = 0; span < kSpans; span++) {
    auto first = objects.begin() + static_cast<ptrdiff_t>(span * (per_span_ - 1));
    std::shuffle(first, first + static_cast<ptrdiff_t>(per_span_ - 1), std::mt19937(static_cast<unsigned>(span)));
  }
  std::vector<void *> in_turn;
  for (size_t i = 0; i < per_span_ - 1; i++)
    for (size_t span = 0; span < kSpans; span++) in_turn.push_back(objects[span * (per_span_ - 1) + i]);
  for (int i = 0; i < 100; i++) hz3_pages_purge_idle();  // forgets what other tests have purged within
  StartGivingBack();
  EXPECT_TRUE(hz3_pages_is_giving_back());
  const uint32_t before = NowMs();
  for (void *object : in_turn) Release({object});
  ReleaseLater(others[0]);
  for (void *object : kept) {
    char *block = static_cast<char *>(object), *base = BaseOf(object);
    EXPECT_TRUE(hz3_pages_span_of(object)->was_purged);
    EXPECT_LE(hz3_pages_span_of(object)->marked_ms - before, NowMs() - before);
    for (size_t i = 0; i < bytes_; i++) ASSERT_EQ(block[i], 0x5a);
    for (char *at = base; at < base + SpanBytes(); at += page)
      EXPECT_EQ(IsResident(at), at + page > block && at < block + bytes_) << (at - base) / static_cast<ptrdiff_t>(page);
  }
  Fetch(kBox.use(c_).objects - kBox.use(c_).out);
  EXPECT_EQ(kBox.use(c_).spans, kSpans + 1) << "their objects are served again";
  for (void *object : kept) EXPECT_FALSE(hz3_pages_span_of(object)->was_purged) << "it is in use again";
  EXPECT_TRUE(hz3_pages_are_hollow_purges_early() || NowMs() - before > 1000) << "or the machine stood still";
}

// What is purged within a hollow span may have to come back, page by page: not for a span of a class that does not shrink, nor while
// no memory is given back, nor where the few objects out are more than a quarter of all.
TEST_P(SpanBoxTest, HollowSpansKeepTheirPagesWhereTheyMayBeOfUse) {
  if (HZ3_CHECKED || per_span_ < 6) GTEST_SKIP() << "no span is hollow";
  struct {
    size_t spans, shrunk, kept;
    bool is_giving_back;
  } const kLoads[] = {{4, 1, 1, true}, {1, 1, 1, false}, {2, 2, per_span_ < 16 ? per_span_ / 4 + 1 : 5, true}};
  for (auto [spans, shrunk, kept, is_giving_back] : kLoads) {
    std::vector<void *> all = Fetch(spans * per_span_), objects;
    std::sort(all.begin(), all.end());
    for (size_t i = 0; i < shrunk * per_span_; i++)
      if (i % per_span_ >= kept) objects.push_back(all[i]);
    for (void *object : objects) memset(object, 1, bytes_);
    hz3_pages_purge_idle();
    if (is_giving_back) StartGivingBack();
    EXPECT_EQ(hz3_pages_is_giving_back(), is_giving_back);
    for (void *object : objects) Release({object});
    char *freed = BaseOf(objects.back()) + hz3_round_down(static_cast<size_t>(static_cast<char *>(objects.back()) - BaseOf(objects.back())), hz3_os_page_bytes());
    EXPECT_TRUE(IsResident(freed)) << spans << " spans, " << kept << " objects out";
    EXPECT_FALSE(hz3_pages_span_of(objects.back())->was_purged);
    ReleaseAll();
    hz3_pages_trim(true);
  }
}

TEST_P(SpanBoxTest, FourObjectsOutIsHollow) {
  if (HZ3_CHECKED || per_span_ < 16) GTEST_SKIP() << "no span is hollow, or only with fewer";
  std::vector<void *> objects = Fetch(2 * per_span_), others = Fetch(per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  std::sort(objects.begin(), objects.end());
  StartGivingBack();
  EXPECT_TRUE(hz3_pages_is_giving_back());
  hz3_span *const spans[] = {hz3_pages_span_of(objects[0]), hz3_pages_span_of(objects[per_span_])};
  for (size_t i = 4; i < per_span_; i++) Release({objects[i]});
  ReleaseLater(others[0]);
  EXPECT_FALSE(spans[0]->was_purged) << "its class does not shrink";
  for (size_t i = per_span_ + 5; i < objects.size(); i++) Release({objects[i]});
  ReleaseLater(others[1]);
  EXPECT_TRUE(spans[0]->was_purged);
  EXPECT_FALSE(spans[1]->was_purged) << "more are out";
  Release({objects[per_span_ + 4]});
  ReleaseLater(others[2]);
  for (hz3_span *span : spans) {
    EXPECT_TRUE(span->was_purged);
    EXPECT_FALSE(IsResident(span->base + SpanBytes() - 3 * hz3_os_page_bytes()));
  }
}

// Most will be free in a moment. Those that are not go with a release after the last span was wanted.
TEST_P(SpanBoxTest, HollowSpansWaitWhileSpansAreWanted) {
  if (HZ3_CHECKED || per_span_ < 4) GTEST_SKIP() << "the pattern in free blocks stays, or no span is hollow";
  const size_t kSpans = 4;
  std::vector<void *> objects = Fetch(kSpans * per_span_), kept;
  for (void *object : objects) memset(object, 1, bytes_);
  std::sort(objects.begin(), objects.end());
  auto purged = [&kept] { return std::count_if(kept.begin(), kept.end(), [](void *object) { return hz3_pages_span_of(object)->was_purged; }); };
  StartGivingBack();
  hz3_pages_note_wanted(NowMs() + 60 * 1000);  // however long the thread is held up
  for (size_t i = 0; i < (kSpans - 1) * per_span_; i++) {
    if (i % per_span_ == 0) kept.push_back(objects[i]);
    else Release({objects[i]});
  }
  EXPECT_TRUE(hz3_pages_is_giving_back());
  EXPECT_EQ(purged(), 0);
  for (void *object : kept) EXPECT_TRUE(IsResident(BaseOf(object) + SpanBytes() - 2 * hz3_os_page_bytes()));
  EndWanting();
  ReleaseLater(objects.back());
  EXPECT_EQ(purged(), static_cast<ptrdiff_t>(kSpans - 1));
  for (void *object : kept) EXPECT_FALSE(IsResident(BaseOf(object) + SpanBytes() - 2 * hz3_os_page_bytes()));
}

// Since somebody first saw that they are hollow. Who read the clock before others did sees them in the future.
TEST_P(SpanBoxTest, HollowSpansWaitForAMoment) {
  if (HZ3_CHECKED || per_span_ < 6) GTEST_SKIP() << "the pattern in free blocks stays, or no span is hollow";
  std::vector<void *> objects = Fetch(3 * per_span_);
  std::sort(objects.begin(), objects.end());
  hz3_span *span = hz3_pages_span_of(objects[0]), *other = hz3_pages_span_of(objects[per_span_]);
  StartGivingBack();
  Release({objects.begin() + 1, objects.begin() + static_cast<ptrdiff_t>(2 * per_span_ - 1)});
  EXPECT_FALSE(span->was_purged || other->was_purged);
  const uint32_t now = NowMs();
  EXPECT_LE(now - span->marked_ms, 1000u) << "it was seen";
  span->marked_ms = other->marked_ms = now + 30 * 1000;
  Release({objects[2 * per_span_]});
  EXPECT_FALSE(span->was_purged || other->was_purged);
  span->marked_ms = other->marked_ms = NowMs() - HZ3_SOON_MS;
  Release({objects[2 * per_span_ + 1]});
  EXPECT_TRUE(span->was_purged && other->was_purged);
}

// But not what a span with room still has.
TEST_P(SpanBoxTest, SpansThatAreFetchedAreWanted) {
  StartGivingBack();
  for (int round = 0; round < 3; round++) {  // the store may keep the one that came back a moment ago
    EndWanting();
    const uint32_t before = NowMs();
    EXPECT_TRUE(hz3_pages_are_hollow_due(before));
    Fetch(1);
    EXPECT_FALSE(hz3_pages_are_hollow_due(before)) << round;
    EndWanting();
    if (per_span_ > 1) Fetch(1);
    EXPECT_TRUE(hz3_pages_are_hollow_due(NowMs()));
    ReleaseAll();
  }
}

// First, and whether or not memory is being given back; what was sparse before has been so since then.
TEST_P(SpanBoxTest, HollowSpansGiveTheirPagesBackToTicks) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  std::vector<void *> objects = Fetch(3 * per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  std::sort(objects.begin(), objects.end());
  auto at = [&](size_t span, size_t object) { return objects.begin() + static_cast<ptrdiff_t>(span * per_span_ + object); };
  auto purged = [&] {
    std::vector<bool> were;
    for (size_t span = 0; span < 3; span++) were.push_back(hz3_pages_span_of(*at(span, 0))->was_purged);
    return were;
  };
  const size_t sparse = per_span_ / 5;
  hz3_pages_note_wanted(NowMs() + 60 * 1000);
  hz3_pages_span_of(*at(1, 0))->sampled_at = 1;  // what a span that was full may have left there
  Release({at(0, sparse), at(1, 0)});
  Release({at(1, 1), at(2, 0)});
  EXPECT_EQ(kBox.purge_sparse(c_, 2000, 2), 0u) << "nobody has seen them before";
  Release({at(2, sparse), objects.end()});
  Release({at(0, 1), at(0, sparse)});
  EXPECT_EQ(kBox.purge_sparse(c_, 3000, 1), 1u);
  EXPECT_EQ(purged(), (std::vector{false, true, false})) << "in the order in which they were seen";
  EXPECT_EQ(kBox.purge_sparse(c_, 3000, 2), 1u);
  EXPECT_EQ(purged(), (std::vector{true, true, false}));
  EXPECT_EQ(kBox.purge_sparse(c_, 4000, 2), 1u) << "it was seen behind those";
  EXPECT_EQ(purged(), (std::vector{true, true, true}));
  EndWanting();
}

// Of what is released at once no more than a caller can wait for.
TEST_P(SpanBoxTest, SomeHollowSpansAtATimeGiveTheirPagesBack) {
  constexpr size_t kSpans = 40, kMost = 16;
  if (HZ3_CHECKED || per_span_ != 64) GTEST_SKIP() << "one class will do";
  std::vector<void *> objects = Fetch(kSpans * per_span_), others = Fetch(per_span_), most, more;
  std::sort(objects.begin(), objects.end());
  for (size_t i = 0; i < objects.size(); i++) {
    if (i % per_span_ >= 10) most.push_back(objects[i]);
    else if (i % per_span_ >= 4) more.push_back(objects[i]);
  }
  Release(most);
  StartGivingBack();
  Release(more);
  auto purged = [&] {
    size_t count = 0;
    for (size_t i = 0; i < objects.size(); i += per_span_) count += hz3_pages_span_of(objects[i + 3])->was_purged;
    return count;
  };
  auto release_and_see = [&](size_t left, const char *why) {
    ReleaseLater(others.back());
    others.pop_back();
    EXPECT_EQ(purged(), left) << why;
  };
  release_and_see(kMost, "so many at a time");
  EXPECT_TRUE(hz3_pages_span_of(objects[3])->was_purged) << "which was hollow first";
  release_and_see(2 * kMost, "more with the next release");
  release_and_see(kSpans, "and the others");
  for (size_t i = 0; i < objects.size(); i += per_span_) Release({objects[i], objects[i + 1], objects[i + 2]});
  EXPECT_EQ(purged(), 0u) << "one is left";
  release_and_see(kMost, "so they go once more");
  release_and_see(2 * kMost, "some at a time");
  release_and_see(kSpans, "and the others");
}

// Spans of which less than a quarter is out, as many as may, and each again only when half of that came back; fetches take others first.
TEST_P(SpanBoxTest, SparseSpansGiveTheirPagesBackToTicks) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  const size_t kSpans = 3, kept = per_span_ / 5;
  auto sparse = [this](size_t most) { return PurgeSparse(most); };
  std::vector<void *> objects = Fetch(kSpans * per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  std::sort(objects.begin(), objects.end());
  EXPECT_EQ(sparse(100), 0u) << "no span has room";
  for (size_t span = 0; span < kSpans; span++) {
    auto first = objects.begin() + static_cast<ptrdiff_t>(span * per_span_);
    Release({first + static_cast<ptrdiff_t>(kept), first + static_cast<ptrdiff_t>(per_span_)});
    EXPECT_TRUE(IsResident(BaseOf(*first) + SpanBytes() - 3 * hz3_os_page_bytes()));
  }
  EXPECT_EQ(sparse(2), 2u);
  char *unpurged = nullptr;
  for (size_t span = 0; span < kSpans; span++) {
    char *base = BaseOf(objects[span * per_span_]);
    if (IsResident(base + SpanBytes() - 3 * hz3_os_page_bytes())) unpurged = base;
  }
  ASSERT_NE(unpurged, nullptr) << "one is left";
  void *taken = Fetch(1)[0];
  EXPECT_EQ(BaseOf(taken), unpurged) << "whose pages are there comes first";
  Release({taken});
  EXPECT_EQ(sparse(100), 1u);
  EXPECT_EQ(sparse(100), 0u);
  Release({objects[0]});
  EXPECT_EQ(sparse(100), 0u) << "one object is not half of them";
  if (kept < 11) return;  // hollow before half of them is back
  Release({objects.begin() + 1, objects.begin() + static_cast<ptrdiff_t>((kept + 1) / 2)});
  EXPECT_EQ(sparse(100), 1u);
}

// However few are left then, and however many come back at once.
TEST_P(SpanBoxTest, SparseSpansGiveTheirPagesBackAgainWhenTheyAreHollow) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  for (size_t kept : {size_t{6}, per_span_ / 5}) {
    for (size_t left : {2, 4}) {
      std::vector<void *> objects = Fetch(per_span_), hollow = Fetch(per_span_), others = Fetch(per_span_);
      for (void *object : objects) memset(object, 1, bytes_);
      std::sort(objects.begin(), objects.end());
      auto at = [&objects](size_t i) { return objects.begin() + static_cast<ptrdiff_t>(i); };
      Release({hollow.begin() + 1, hollow.end()});  // or the class would not shrink
      Release({at(kept), objects.end()});
      EXPECT_EQ(PurgeSparse(2), 2u);
      memset(objects[kept - 1], 1, bytes_);
      StartGivingBack();
      const uint32_t before = NowMs();
      Release({at(left), at(kept)});
      ReleaseLater(others[0]);
      EXPECT_LE(hz3_pages_span_of(objects[0])->marked_ms - before, NowMs() - before) << left << " of " << kept;
      char *base = BaseOf(objects[0]), *end_of_left = static_cast<char *>(objects[left - 1]) + bytes_;
      char *last = base + hz3_round_down(static_cast<size_t>(static_cast<char *>(objects[kept - 1]) - base), hz3_os_page_bytes());
      EXPECT_FALSE(last >= end_of_left && IsResident(last)) << left << " of " << kept;
      ReleaseAll();
    }
  }
}

// The time counts from the first tick that finds a span sparse, and anew once something was fetched from it.
TEST_P(SpanBoxTest, SparseSpansWaitForASecond) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  std::vector<void *> objects = Fetch(per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  Release({objects.begin() + static_cast<ptrdiff_t>(per_span_ / 5), objects.end()});
  auto sparse_at = [this](uint32_t ms) { return kBox.purge_sparse(c_, ms, 100); };
  const uint32_t start = UINT32_MAX - 500;  // the clock may turn over
  EXPECT_EQ(sparse_at(start), 0u);
  EXPECT_EQ(sparse_at(start + 999), 0u);
  EXPECT_EQ(sparse_at(start - 1), 0u) << "what a tick that was held up read before";
  Release(Fetch(1));
  EXPECT_EQ(sparse_at(start + 1000), 0u) << "it is in use";
  EXPECT_EQ(sparse_at(start + 1999), 0u);
  EXPECT_EQ(sparse_at(start + 2000), 1u);
}

TEST_P(SpanBoxTest, SparseSpansAreDueHoweverLongNobodyLooks) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  std::vector<void *> objects = Fetch(per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  Release({objects.begin() + static_cast<ptrdiff_t>(per_span_ / 5), objects.end()});
  EXPECT_EQ(kBox.purge_sparse(c_, 1, 100), 0u);
  EXPECT_EQ(kBox.purge_sparse(c_, 1 + 3000000000u, 100), 1u) << "35 days";
}

// Half of the objects, and what was never handed out, whatever the order in which they went: no page stays but those of live objects.
TEST_P(SpanBoxTest, PurgeGivesBackEveryPageBetweenObjects) {
  if (HZ3_CHECKED) GTEST_SKIP() << "the pattern in free blocks stays";
  const size_t page = hz3_os_page_bytes(), span_bytes = SpanBytes();
  std::vector<void *> dirty = Fetch(5 * per_span_);
  for (void *object : dirty) memset(object, 0xa5, bytes_);
  ReleaseAll();
  std::vector<void *> objects = Fetch(4 * per_span_ + per_span_ / 2);
  for (void *object : objects) memset(object, 0x5a, bytes_);
  std::mt19937 random(c_);
  std::sort(objects.begin(), objects.end());
  std::set<char *> pages, spans, full;
  std::vector<void *> gone;
  for (size_t i = 0; i < objects.size(); i++) {  // runs of small objects, so that there are whole pages between them
    if (i % std::max<size_t>(1, 2 * page / bytes_) == 0 && random() % 2 == 0)
      for (size_t j = i; j < std::min(objects.size(), i + std::max<size_t>(1, 2 * page / bytes_)); j++) gone.push_back(objects[j]);
  }
  std::shuffle(gone.begin(), gone.end(), random);
  for (void *object : gone) Release({object});
  for (void *object : live_) {
    char *block = static_cast<char *>(object);
    hz3_span *span = hz3_pages_span_of(object);
    if (span->list == HZ3_SPAN_NO_LIST) full.insert(span->base);
    spans.insert(span->base);
    for (char *at = span->base; at < span->base + span_bytes; at += page)
      if (at + page > block && at < block + bytes_) pages.insert(at);
  }
  bool any = std::any_of(spans.begin(), spans.end(), [&](char *base) {
    for (char *at = base; at < base + span_bytes; at += page)
      if (full.count(base) == 0 && IsResident(at) && pages.count(at) == 0) return true;
    return false;
  });
  EXPECT_EQ(kBox.purge(c_), any);
  for (char *base : spans)
    for (char *at = base; full.count(base) == 0 && at < base + span_bytes; at += page) EXPECT_EQ(IsResident(at), pages.count(at) == 1);
  for (void *object : live_)
    for (size_t i = 0; i < bytes_; i++) ASSERT_EQ(static_cast<char *>(object)[i], 0x5a);
  EXPECT_FALSE(kBox.purge(c_)) << "nothing came back since";
  size_t held = kBox.use(c_).spans, room = held * per_span_ - live_.size();
  EXPECT_EQ(Fetch(room).size(), room) << "their objects are served again";
  EXPECT_EQ(kBox.use(c_).spans, held);
}

// A huge page makes resident what was never handed out.
TEST_P(SpanBoxTest, PurgeGivesBackWhatNobodyUsedIfItIsThere) {
  if (HZ3_CHECKED || per_span_ < 4) GTEST_SKIP() << "no room behind what is carved, or memory without access";
  const size_t page = hz3_os_page_bytes();
  std::vector<void *> objects = Fetch(2);
  hz3_span *span = hz3_pages_span_of(objects[0]);
  ASSERT_TRUE(span->is_clean);
  char *last = span->base + span->slices * HZ3_SLICE_BYTES - page;
  hz3_pages_purge_idle();  // there is none: the span is not purged as hollow before
  Release({objects[0]});
  last[0] = 0;  // as the kernel does
  EXPECT_TRUE(kBox.purge(c_));
  EXPECT_FALSE(IsResident(last));
}

// An object that comes back makes its span worth another purge, and only that; what is live and what comes again is no reason.
TEST_P(SpanBoxTest, PurgeSaysWhetherThereWasAnything) {
  if (HZ3_CHECKED || per_span_ < 4) GTEST_SKIP() << "no spans with some objects out, or a pattern that stays";
  EXPECT_FALSE(kBox.purge(c_)) << "there is no span";
  std::vector<void *> objects = Fetch(3 * per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  std::sort(objects.begin(), objects.end());
  EXPECT_FALSE(kBox.purge(c_)) << "there is no room";
  const size_t kept = per_span_ / 4 + 1;  // more than in a hollow span
  for (size_t span = 0; span < 3; span++) {
    auto first = objects.begin() + static_cast<ptrdiff_t>(span * per_span_);
    Release({first + static_cast<ptrdiff_t>(kept), first + static_cast<ptrdiff_t>(per_span_)});
  }
  EXPECT_TRUE(kBox.purge(c_));
  EXPECT_FALSE(kBox.purge(c_));
  std::vector<void *> again = Fetch(per_span_ - kept);
  EXPECT_FALSE(kBox.purge(c_));
  Release(again);
  EXPECT_TRUE(kBox.purge(c_));
  EXPECT_FALSE(kBox.purge(c_));
  hz3_pages_purge_idle();
  StartGivingBack();
  EXPECT_TRUE(hz3_pages_is_giving_back()) << "no purge that was asked for is too early";
}

// Of two spans on one list the first to be looked at has a page to give, the other none.
TEST_P(SpanBoxTest, PurgeSaysThatThereWasSomethingInAnyOfTheSpans) {
  const size_t page = hz3_os_page_bytes(), count = (2 * page - 1) / bytes_ + 1;  // so many objects cover a page
  if (HZ3_CHECKED || bytes_ >= page || count * 4 >= per_span_) GTEST_SKIP() << "no page is less than a quarter of a span";
  std::vector<void *> objects = Fetch(2 * per_span_);
  std::sort(objects.begin(), objects.end());
  auto second = objects.begin() + static_cast<ptrdiff_t>(per_span_);
  Release({objects.begin(), objects.begin() + static_cast<ptrdiff_t>(count)});
  Release({*second});
  EXPECT_EQ(hz3_pages_span_of(objects.back())->list, hz3_pages_span_of(*(second - 1))->list);
  EXPECT_TRUE(kBox.purge(c_));
  EXPECT_FALSE(kBox.purge(c_));
}

// Also those that stand behind one that a tick has purged, to which something came back since.
TEST_P(SpanBoxTest, PurgeGivesEverySpanItsTurn) {
  if (HZ3_CHECKED || per_span_ < 32) GTEST_SKIP() << "the pattern in free blocks stays, or what is sparse is hollow";
  const size_t kept = per_span_ / 5, span_bytes = SpanBytes();
  std::vector<void *> objects = Fetch(2 * per_span_);
  for (void *object : objects) memset(object, 1, bytes_);
  std::sort(objects.begin(), objects.end());
  for (size_t span = 0; span < 2; span++) {
    auto first = objects.begin() + static_cast<ptrdiff_t>(span * per_span_);
    Release({first + static_cast<ptrdiff_t>(kept), first + static_cast<ptrdiff_t>(per_span_)});
  }
  EXPECT_EQ(PurgeSparse(1), 1u);
  Release({objects[hz3_pages_span_of(objects[0])->was_purged ? 0 : per_span_]});
  EXPECT_TRUE(kBox.purge(c_));
  for (size_t span = 0; span < 2; span++) EXPECT_FALSE(IsResident(BaseOf(objects[span * per_span_ + 1]) + span_bytes - 3 * hz3_os_page_bytes()));
  EXPECT_FALSE(kBox.purge(c_));
}

// Memory that the user has locked stays, and keeps nothing else; once it is unlocked, the next purge takes it.
TEST_P(SpanBoxTest, PurgeGoesOnWhereMemoryIsLocked) {
  const size_t page = hz3_os_page_bytes();
  if (HZ3_CHECKED || per_span_ < 4 || bytes_ < 2 * page) GTEST_SKIP() << "no page of an object's own";
  std::vector<void *> objects = Fetch(4);
  std::sort(objects.begin(), objects.end());
  for (void *object : objects) memset(object, 1, bytes_);
  auto whole_page = [page](void *object) {
    return reinterpret_cast<char *>(hz3_round_up(reinterpret_cast<uintptr_t>(object), page));
  };
  char *locked = whole_page(objects[0]), *other = whole_page(objects[2]);
  // The call itself: ThreadSanitizer's function does nothing.
  if (syscall(SYS_mlock, locked, page) != 0) GTEST_SKIP() << "locking is not allowed";
  Release({objects[0], objects[2]});
  EXPECT_TRUE(kBox.purge(c_));
  EXPECT_TRUE(IsResident(locked));
  EXPECT_FALSE(IsResident(other));
  ASSERT_EQ(syscall(SYS_munlock, locked, page), 0);
  EXPECT_TRUE(kBox.purge(c_));
  EXPECT_FALSE(IsResident(locked));
  EXPECT_FALSE(kBox.purge(c_));
}

// What one thread holds stays as it is, while another one purges all the time, and a third one as well.
TEST_P(SpanBoxTest, PurgeWorksWhileOthersDo) {
  const size_t kMost = std::max<size_t>(2, std::min<size_t>(2 * per_span_, 2 * HZ3_MIB / bytes_));
  std::atomic<bool> stop{false};
  std::atomic<int> spoiled{0};
  std::mutex left_lock;
  std::vector<std::thread> threads, purgers;
  for (int t = 0; t < 2; t++) purgers.emplace_back([&] { while (!stop) kBox.purge(c_); });
  for (unsigned t = 1; t <= 2; t++) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<void *> held, batch(kMost);
      for (int round = 0; round < 60; round++) {
        size_t got = held.size() > kMost ? 0 : kBox.fetch(t % 2, c_, batch.data(), 1 + random() % kMost);
        for (size_t i = 0; i < got; i++) {
          memset(batch[i], static_cast<int>(t), bytes_);
          held.push_back(batch[i]);
        }
        std::shuffle(held.begin(), held.end(), random);
        size_t kept = random() % (held.size() + 1);
        for (size_t i = kept; i < held.size(); i++) {
          const char *block = static_cast<char *>(held[i]);
          if (block[0] != static_cast<char>(t) || memcmp(block, block + 1, bytes_ - 1) != 0) spoiled++;
        }
        if (kept < held.size()) kBox.release(c_, &held[kept], held.size() - kept);
        held.resize(kept);
      }
      std::lock_guard<std::mutex> guard(left_lock);
      live_.insert(held.begin(), held.end());
    });
  }
  for (std::thread &thread : threads) thread.join();
  stop = true;
  for (std::thread &thread : purgers) thread.join();
  EXPECT_EQ(spoiled, 0);
  EXPECT_EQ(kBox.use(c_).out, live_.size());
}

TEST_P(SpanBoxTest, ThreadsGetEveryObjectOnce) {
  const int kThreads = 3, kRounds = 150;
  const size_t kBatch = std::max<size_t>(1, std::min<size_t>(61, 4 * HZ3_MIB / bytes_ / 16));
  std::atomic<int> doubled{0}, lost{0};
  std::mutex pool_lock;
  std::vector<void *> pool;  // objects that another thread gives back
  auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<void *> batch(kBatch);
    for (int i = 0; i < kRounds; i++) {
      size_t got = kBox.fetch(seed % 2, c_, batch.data(), 1 + random() % kBatch);
      for (size_t j = 0; j < got; j++)
        if (__atomic_exchange_n(static_cast<int *>(batch[j]), 1, __ATOMIC_RELAXED) == 1) doubled++;
      std::vector<void *> back;
      bool all = random() % 8 == 0;  // spans become hollow, and free
      if (all) StartGivingBack();
      {
        std::lock_guard<std::mutex> guard(pool_lock);
        pool.insert(pool.end(), batch.begin(), batch.begin() + static_cast<ptrdiff_t>(got));
        std::shuffle(pool.begin(), pool.end(), random);
        for (size_t count = all ? pool.size() : random() % (2 * kBatch); count > 0 && !pool.empty(); count--) {
          back.push_back(pool.back());
          pool.pop_back();
        }
      }
      for (void *object : back)
        if (__atomic_exchange_n(static_cast<int *>(object), 0, __ATOMIC_RELAXED) != 1) lost++;
      if (!back.empty()) kBox.release(c_, back.data(), back.size());
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < kThreads; t++) threads.emplace_back(work, t);
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(doubled, 0);
  EXPECT_EQ(lost, 0) << "what a thread wrote into its object";
  EXPECT_EQ(kBox.use(c_).out, pool.size());
  for (void *object : pool) *static_cast<int *>(object) = 0;
  live_.insert(pool.begin(), pool.end());
}

TEST_P(SpanBoxTest, ForkLocksOutOthers) {
  kBox.fork_prepare();
  void *object = nullptr;
  size_t got = 0;
  std::thread other([&] { got = kBox.fetch(0, c_, &object, 1); });
  kBox.fork_release();
  other.join();
  ASSERT_EQ(got, 1u);
  live_.insert(object);
}

// Free spans that stay with a class.
class SpanBoxKeepTest : public SpanBoxTest {
 protected:
  void SetUp() override {
    if (HZ3_CHECKED) GTEST_SKIP() << "none stay";
    ASSERT_TRUE(LearnToKeep());
  }
  // Has the class want kKept spans right after they left it, once it was forgotten what it wanted before; whether so many are kept then.
  // Tried again where this thread was held up.
  bool LearnToKeep() {
    for (int i = 0; i < 20; i++) {
      usleep((HZ3_SWING_MS + 10) * 1000);
      hz3_pages_purge_idle();
      hz3_pages_trim(true);
      std::vector<void *> objects(kKept * per_span_);
      for (int round = 0; round < 2; round++) {
        for (size_t got = 0; got < objects.size();) got += kBox.fetch(0, c_, &objects[got], objects.size() - got);
        kBox.release(c_, objects.data(), objects.size());
      }
      if (UsedBytes() == kKept * SpanBytes()) return true;
    }
    return false;
  }

  // In spans, kept ones too.
  static size_t UsedBytes() {
    hz3_pages_stats stats;
    hz3_pages_get_stats(&stats);
    return stats.mapped_bytes - stats.free_bytes;
  }

  static constexpr size_t kKept = HZ3_RETAIN_MIN_BYTES < 1024 * 1024 ? 1 : 3;
};

// Of a class that wanted so many spans again at once, so many free ones stay with it, lowest first.
TEST_P(SpanBoxKeepTest, FreeSpansStayWhereTheyAreWantedAgain) {
  hz3_pages_stats stats;
  hz3_pages_get_stats(&stats);
  EXPECT_EQ(stats.kept_bytes, kKept * SpanBytes());
  EXPECT_EQ(kBox.use(c_).spans, 0u);
  char *last = nullptr;
  for (size_t i = 0; i < kKept; i++) {
    char *base = BaseOf(Fetch(per_span_).back());
    EXPECT_GT(base, last);
    last = base;
  }
  EXPECT_EQ(kBox.use(c_).spans, kKept);
  EXPECT_EQ(UsedBytes(), kKept * SpanBytes());
}

TEST_P(SpanBoxKeepTest, NoMoreFreeSpansStayThanWereWantedAgain) {
  Fetch((kKept + 1) * per_span_);
  ReleaseAll();
  EXPECT_LE(UsedBytes(), kKept * SpanBytes());
}

TEST_P(SpanBoxKeepTest, OthersGetKeptSpansBeforeMemoryThatIsNotThere) {
  hz3_pages_stats stats;
  hz3_pages_get_stats(&stats);
  ASSERT_EQ(stats.dirty_bytes, 0u) << "all that was ever used is kept";
  hz3_span *other = hz3_pages_alloc_span(kBox.other_class, 0, 1);
  EXPECT_EQ(UsedBytes(), other->slices * HZ3_SLICE_BYTES);
  EXPECT_FALSE(other->is_clean);
  hz3_pages_free_span(other);
}

// Or two threads side by side would take from each other what both are about to want. Medium blocks have one home.
TEST_P(SpanBoxKeepTest, AnotherHomeGetsKeptSpansOnceTheClassStopped) {
  const bool has_homes = c_ <= HZ3_SMALL_CLASS_LAST;
  hz3_span *others[2];
  for (int tries = 1;; tries++) {  // again where this thread was held up
    others[0] = hz3_pages_alloc_span(kBox.other_class, 1, 1);
    if (!has_homes || tries == 20 || UsedBytes() > others[0]->slices * HZ3_SLICE_BYTES) break;
    hz3_pages_free_span(others[0]);
    ASSERT_TRUE(LearnToKeep());
  }
  const size_t other_bytes = others[0]->slices * HZ3_SLICE_BYTES;
  EXPECT_EQ(UsedBytes(), other_bytes + (has_homes ? kKept * SpanBytes() : 0));
  EXPECT_EQ(others[0]->is_clean, has_homes);
  usleep((HZ3_SWING_MS + 10) * 1000);
  others[1] = hz3_pages_alloc_span(kBox.other_class, 1, 1);
  EXPECT_EQ(UsedBytes(), 2 * other_bytes);
  for (hz3_span *other : others) hz3_pages_free_span(other);
}

TEST_P(SpanBoxKeepTest, TicksFreeKeptSpansThatNobodyNeeded) {
  hz3_pages_purge_idle();  // they may have been needed a moment before
  hz3_pages_purge_idle();
  EXPECT_EQ(UsedBytes(), 0u);
}

TEST_P(SpanBoxKeepTest, TicksFreeKeptSpansOnceTheClassStopped) {
  usleep((HZ3_SWING_MS + 10) * 1000);
  hz3_pages_purge_idle();
  EXPECT_EQ(UsedBytes(), 0u);
  Fetch(kKept * per_span_);
  ReleaseAll();
  EXPECT_EQ(UsedBytes(), 0u) << "it was forgotten how many were wanted";
}

TEST_P(SpanBoxKeepTest, TrimFreesKeptSpans) {
  hz3_pages_trim(false);
  EXPECT_EQ(UsedBytes(), 0u);
}

TEST_P(SpanBoxKeepTest, ABlockOfAKeptSpanIsFreedOnce) {
  std::vector<void *> objects = Fetch(1);
  ReleaseAll();
  ASSERT_EQ(UsedBytes(), kKept * SpanBytes());
  EXPECT_EXIT(kBox.release(c_, objects.data(), 1), testing::KilledBySignal(SIGABRT), FatalLine("double free"));
}

using SpanBoxDeathTest = SpanBoxTest;

TEST_P(SpanBoxDeathTest, DoubleFreeIsFatal) {
  std::vector<void *> objects = Fetch(2);
  if (hz3_pages_span_of(objects[0]) != hz3_pages_span_of(objects[1])) {
    // Alone in its span: after the first free the span is gone, and the block nobody's.
    EXPECT_DEATH({ Release({objects[0]}); kBox.release(c_, &objects[0], 1); },
                 FatalLine("free of a pointer that this allocator did not return", false));
    return;
  }
  EXPECT_DEATH({ Release({objects[0]}); kBox.release(c_, &objects[0], 1); }, FatalLine("double free"));
  void *twice[] = {objects[1], objects[1]};
  EXPECT_DEATH(kBox.release(c_, twice, 2), FatalLine("double free"));
}

TEST_P(SpanBoxDeathTest, PointerIntoABlockIsFatal) {
  char *object = static_cast<char *>(Fetch(1)[0]);
  for (size_t offset : {size_t{1}, size_t{8}, bytes_ / 2, bytes_ - 1}) {
    void *inside = object + offset;
    EXPECT_DEATH(kBox.release(c_, &inside, 1), FatalLine("free of a pointer into the middle of a block"));
  }
}

TEST_P(SpanBoxDeathTest, BlockNeverHandedOutIsFatal) {
  if (per_span_ == 1) GTEST_SKIP() << "a span of one object has no other";
  void *next = static_cast<char *>(Fetch(1)[0]) + bytes_;
  EXPECT_DEATH(kBox.release(c_, &next, 1), FatalLine("free of a pointer into the middle of a block"));
}

TEST_P(SpanBoxDeathTest, TailOfTheSpanIsFatal) {
  std::vector<void *> objects = Fetch(per_span_);
  size_t span_bytes = SpanBytes();
  if (per_span_ * bytes_ == span_bytes) GTEST_SKIP() << "no tail";
  void *tail = BaseOf(objects[0]) + per_span_ * bytes_;
  EXPECT_DEATH(kBox.release(c_, &tail, 1), FatalLine("free of a pointer into the middle of a block"));
}

// Many that follow each other in memory, or lie near each other, are marked a word of the bitmap at a time.
TEST_P(SpanBoxDeathTest, OneBadPointerAmongManyIsFatal) {
  const size_t kCount = 32, kBad = 25;
  if (per_span_ <= kCount) GTEST_SKIP() << "a span has no more objects";
  std::vector<void *> upwards = Fetch(kCount);
  std::sort(upwards.begin(), upwards.end());
  const std::vector<void *> downwards(upwards.rbegin(), upwards.rend());
  void *never_handed_out = static_cast<char *>(upwards.back()) + bytes_;
  for (const std::vector<void *> &objects : {upwards, downwards}) {
    auto released_with = [&](void *bad) {
      std::vector<void *> many = objects;
      many[kBad] = bad;
      kBox.release(c_, many.data(), many.size());
    };
    EXPECT_DEATH(released_with(objects[kBad - 5]), FatalLine("double free"));
    EXPECT_DEATH(released_with(objects[kBad + 5]), FatalLine("double free"));
    EXPECT_DEATH(released_with(static_cast<char *>(objects[kBad]) + 8), FatalLine("free of a pointer into the middle of a block"));
    EXPECT_DEATH(released_with(never_handed_out), FatalLine("free of a pointer into the middle of a block"));
  }
}

TEST_P(SpanBoxDeathTest, ForeignPointerIsFatal) {
  std::string line = FatalLine("free of a pointer that this allocator did not return", false);
  int on_stack;
  void *foreign = &on_stack;
  EXPECT_DEATH(kBox.release(c_, &foreign, 1), line);
  foreign = nullptr;
  EXPECT_DEATH(kBox.release(c_, &foreign, 1), line);
  void *object = Fetch(1)[0];
  unsigned wrong = c_ == kBox.other_class ? c_ + 1 : kBox.other_class;
  EXPECT_DEATH(kBox.release(wrong, &object, 1), line);
}

inline std::string ClassName(const testing::TestParamInfo<unsigned> &info) {
  return std::to_string(hz3_size_classes[info.param].bytes);
}

#endif  // HZ3_PAGES_SPAN_BOX_TEST_H_
