// SPDX-License-Identifier: Apache-2.0
// What it is: tests of spans, tags, the page map, purging and retention.
#include "hz3/pages/pages.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
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
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hz3/base/os.h"
#include "hz3/base/refuse_test.h"
#include "hz3/base/size_class.h"
#include "hz3/config.h"
#include "hz3/pages/object_map.h"
#include "hz3/pages/tag_map.h"
#include "hz3/pages/page_map.h"
#include "hz3/pages/pages_internal.h"
#include "hz3/pages/span_heap.h"
#include "hz3/pages/span_store.h"

namespace {

enum { kTagPerClass = 32 };
const unsigned kSliceClass = 72;    // one object of one slice
const unsigned kSixteenClass = 88;  // one object of 16 slices

const hz3_size_class &Class(unsigned c) { return hz3_size_classes[c]; }
size_t SpanBytes(const hz3_span *span) { return span->slices * HZ3_SLICE_BYTES; }

hz3_pages_stats Stats() {
  hz3_pages_stats stats;
  hz3_pages_get_stats(&stats);
  return stats;
}

// Bytes of the range that are backed by memory.
size_t ResidentBytes(void *start, size_t bytes) {
  std::vector<unsigned char> pages(bytes / hz3_os_page_bytes());
  EXPECT_EQ(mincore(start, bytes, pages.data()), 0);
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; })) * hz3_os_page_bytes();
}

bool IsZero(const char *memory, size_t bytes) {
  return std::all_of(memory, memory + bytes, [](char c) { return c == 0; });
}

bool IsMapped(void *start) {
  unsigned char page;
  return mincore(start, 1, &page) == 0;
}

// What is known of huge pages: otherwise it is for the machine to say, and it may say this now and that then.
void KnowHugePages(bool are_dear) {
  hz3_pages.huge_dear_until_ms = are_dear ? hz3_os_now_ms() + 1000 * 1000 : 0;
  hz3_pages.huge_pause_ms = 0;
  hz3_pages.huge_use = {};
}

constexpr size_t kWitnessBytes = 64 * HZ3_MIB;  // so much asked for, a witness is due
constexpr unsigned kSparse = 2;  // witnesses that were hardly written: no huge pages any more

// As after a big purge: what exceeds the limit goes at once.
void NothingWaits() {
  hz3_pages.retention.last_purge_ms = hz3_os_now_ms();
  hz3_pages.retention.recent_bytes = 8 * HZ3_RETAIN_MIN_BYTES;
}

// With the clock at rest, however slow the machine is: `set` gets the time that `result` will see.
template <typename Set, typename Result>
auto AtOneTime(Set set, Result result) {
  for (;;) {
    uint64_t now = hz3_os_now_ms();
    set(now);
    auto answer = result();
    if (hz3_os_now_ms() == now) return answer;
  }
}

hz3_chunk *ChunkOf(hz3_span *span) {
  return reinterpret_cast<hz3_chunk *>(reinterpret_cast<char *>(span - span->first_slice) - offsetof(hz3_chunk, spans));
}

class Pages : public testing::Test {
 protected:
  // Every test starts and ends with no memory at all.
  void SetUp() override {
    ASSERT_EQ(Stats().chunks, 0u);
    hz3_pages.retention = HZ3_RETENTION_INIT;
    KnowHugePages(false);
    memset(hz3_pages.has_opened, 0, sizeof hz3_pages.has_opened);
    hz3_pages.has_homes = false;
  }
  void TearDown() override {
    for (hz3_span *span : live_) hz3_pages_free_span(span);
    hz3_pages_trim(true);
    EXPECT_EQ(Stats().chunks, 0u);
  }
  hz3_span *Alloc(unsigned c, unsigned home = 0, unsigned times = 1) {
    hz3_span *span = hz3_pages_alloc_span(c, home, times);
    EXPECT_NE(span, nullptr);
    live_.insert(span);
    return span;
  }
  void Free(hz3_span *span) {
    live_.erase(span);
    hz3_pages_free_span(span);
  }
  const std::set<hz3_span *> &Live() const { return live_; }

 private:
  std::set<hz3_span *> live_;
};


TEST_F(Pages, EveryClassGetsAnAlignedTaggedSpan) {
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    hz3_span *span = Alloc(c);
    char *base = span->base;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(base) % (Class(c).align_slices * HZ3_SLICE_BYTES), 0u) << "class " << c;
    EXPECT_EQ(span->size_class, c);
    EXPECT_EQ(span->slices, Class(c).slices);
    EXPECT_EQ(span->carved, 0u);
    EXPECT_EQ(span->settle_out, 0u);
    EXPECT_EQ(span->until_settle, 0);
    for (size_t at = 0; at < SpanBytes(span); at += HZ3_SLICE_BYTES / 2) {
      EXPECT_EQ(hz3_pages_span_of(base + at), span);
      EXPECT_EQ(hz3_tag_of(base + at), (c <= HZ3_TABLE_CLASS_LAST ? intptr_t{c} : -intptr_t{c}) * kTagPerClass);
    }
    EXPECT_EQ(hz3_pages_span_of(base + SpanBytes(span) - 1), span);
    EXPECT_NE(hz3_pages_span_of(base - 1), span);
    EXPECT_NE(hz3_pages_span_of(base + SpanBytes(span)), span);
    memset(base, 1, SpanBytes(span));
    Free(span);
    for (size_t at = 0; at < Class(c).slices * HZ3_SLICE_BYTES; at += HZ3_SLICE_BYTES) {
      EXPECT_EQ(hz3_pages_span_of(base + at), nullptr);
      EXPECT_EQ(hz3_tag_of(base + at), 0);
    }
  }
  EXPECT_EQ(Stats().free_bytes, Stats().mapped_bytes);
}

TEST_F(Pages, ForeignPointersHaveNoSpanAndNoTag) {
  Alloc(1);
  int on_stack = 0;
  static int global = 0;
  for (const void *pointer : {static_cast<const void *>(nullptr), static_cast<const void *>(&on_stack),
                              static_cast<const void *>(&global), reinterpret_cast<const void *>(uintptr_t{1} << 46),
                              reinterpret_cast<const void *>(uintptr_t{1} << 47), reinterpret_cast<const void *>(~uintptr_t{0})}) {
    EXPECT_EQ(hz3_pages_span_of(pointer), nullptr) << pointer;
    EXPECT_EQ(hz3_tag_of(pointer), 0) << pointer;
    EXPECT_EQ(hz3_page_map_large_of(pointer), nullptr) << pointer;
  }
}

TEST_F(Pages, FreeNeighboursServeBiggerSpans) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  ASSERT_EQ(Stats().chunks, 1u);
  ASSERT_EQ(Stats().free_bytes, 0u);
  std::shuffle(spans.begin(), spans.end(), std::mt19937(1));
  for (hz3_span *span : spans) Free(span);
  for (int i = 0; i < HZ3_CHUNK_SLICES / 16; i++) Alloc(kSixteenClass);
  EXPECT_EQ(Stats().chunks, 1u);
  EXPECT_EQ(Stats().free_bytes, 0u);
}

TEST_F(Pages, ASpanIsPutWhereItJustFits) {
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    std::vector<hz3_span *> spans;
    for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
    ASSERT_EQ(Stats().chunks, 1u);
    std::sort(spans.begin(), spans.end(), [](hz3_span *a, hz3_span *b) { return a->first_slice < b->first_slice; });
    const size_t count = Class(c).slices, first = (HZ3_CHUNK_SLICES - count) / Class(c).align_slices * Class(c).align_slices;
    char *base = spans[first]->base;
    for (size_t i = 0; i < count; i++) Free(spans[first + i]);
    spans.erase(spans.begin() + static_cast<ptrdiff_t>(first), spans.begin() + static_cast<ptrdiff_t>(first + count));
    spans.push_back(Alloc(c));
    EXPECT_EQ(spans.back()->base, base) << count << " slices";
    for (hz3_span *span : spans) Free(span);
    hz3_pages_trim(true);
  }
}

TEST_F(Pages, TheTightestChunkIsTaken) {
  hz3_span *first[4], *second[4];
  for (hz3_span *&span : first) span = Alloc(kSixteenClass);
  for (hz3_span *&span : second) span = Alloc(kSixteenClass);
  ASSERT_EQ(Stats().chunks, 2u);
  char *hole = first[1]->base;
  Free(first[1]);
  Free(second[2]);
  Free(second[3]);
  EXPECT_EQ(Alloc(kSixteenClass)->base, hole) << "the run of 32 slices should stay whole";
}

TEST_F(Pages, DirtyMemoryIsReusedFirst) {
  hz3_span *span = Alloc(kSliceClass);
  char *base = span->base;
  EXPECT_TRUE(span->is_clean);
  hz3_span *keep = Alloc(kSliceClass);
  Free(keep);
  Free(span);
  span = Alloc(kSliceClass);
  EXPECT_FALSE(span->is_clean);
  hz3_span *next = Alloc(kSliceClass);
  EXPECT_FALSE(next->is_clean);
  EXPECT_TRUE(span->base == base || next->base == base);
  EXPECT_TRUE(Alloc(kSliceClass)->is_clean);
}

TEST_F(Pages, OneDirtySliceIsReusedBeforeACleanOneBelowIt) {
  hz3_span *low = Alloc(kSliceClass);
  Alloc(kSliceClass);
  hz3_span *high = Alloc(kSliceClass);
  char *base = high->base;
  ASSERT_LT(low->base, base);
  Free(low);
  hz3_pages_trim(false);
  Free(high);
  EXPECT_EQ(Alloc(kSliceClass)->base, base);
}

TEST_F(Pages, MemoryIsOfTheHomeThatUsedItLast) {
  hz3_span *span = Alloc(kSliceClass, 1);
  char *base = span->base;
  Free(span);
  span = Alloc(kSliceClass, 2);
  ASSERT_EQ(span->base, base);
  Free(span);
  EXPECT_EQ(hz3_pages_alloc_span_at_home(kSliceClass, 1, 1), nullptr);
  span = hz3_pages_alloc_span_at_home(kSliceClass, 2, 1);
  ASSERT_NE(span, nullptr);
  hz3_pages_free_span(span);
}

TEST_F(Pages, MemoryStaysWithItsHome) {
  EXPECT_EQ(hz3_pages_alloc_span_at_home(kSliceClass, 1, 1), nullptr) << "there is none";
  std::vector<hz3_span *> spans[3];
  for (int i = 0; i < 4; i++) spans[1 + i % 2].push_back(Alloc(kSliceClass, static_cast<unsigned>(1 + i % 2)));
  std::set<char *> of_home[3];
  for (int home : {1, 2}) {
    for (hz3_span *span : spans[home]) {
      of_home[home].insert(span->base);
      Free(span);
    }
  }
  EXPECT_EQ(hz3_pages_alloc_span_at_home(kSliceClass, 3, 1), nullptr);
  for (int i = 0; i < 2; i++) EXPECT_EQ(of_home[2].count(Alloc(kSliceClass, 2)->base), 1u);
  EXPECT_EQ(hz3_pages_alloc_span_at_home(kSliceClass, 2, 1), nullptr) << "all of it is in use";
  hz3_span *other = Alloc(kSliceClass, 2);
  EXPECT_EQ(of_home[1].count(other->base), 1u) << "rather another home's than a page fault";
  char *base = other->base;
  Free(other);
  other = hz3_pages_alloc_span_at_home(kSliceClass, 2, 1);
  ASSERT_NE(other, nullptr) << "it is this home's now";
  EXPECT_EQ(other->base, base);
  hz3_pages_free_span(other);
  hz3_pages_trim(false);
  EXPECT_EQ(hz3_pages_alloc_span_at_home(kSliceClass, 2, 1), nullptr) << "what was given back is nobody's";
}

TEST_F(Pages, SeveralTimesAsLargeUnlessThatTakesFreshMemory) {
  if (HZ3_CHECKED) GTEST_SKIP() << "all spans of a class are of one size";
  hz3_span *large = Alloc(kSliceClass, 0, 4);
  EXPECT_EQ(large->slices, 4);
  EXPECT_EQ(large->objects, 4 * Class(kSliceClass).objects);
  char *base = large->base;
  for (int i = 0; i < 4; i++) EXPECT_EQ(hz3_pages_span_of(base + i * HZ3_SLICE_BYTES), large);
  Free(large);
  std::vector<hz3_span *> in_order;
  for (int i = 0; i < 4; i++) in_order.push_back(Alloc(kSliceClass));
  for (int i = 0; i < 4; i += 2) Free(in_order[static_cast<size_t>(i)]);
  hz3_span *span = Alloc(kSliceClass, 0, 2);
  EXPECT_EQ(span->slices, 1) << "of the two slices that were used already none are neighbours";
  EXPECT_FALSE(span->is_clean);
  Free(in_order[1]);
  span = Alloc(kSliceClass, 0, 2);
  EXPECT_EQ(span->slices, 2);
  EXPECT_FALSE(span->is_clean);
  EXPECT_EQ(Alloc(kSliceClass, 0, 3)->slices, 3) << "there is only fresh memory";
}

TEST_F(Pages, AChunkThatWasUnmappedLeavesNoHomesBehind) {
  hz3_span *span = Alloc(kSliceClass, 2);
  hz3_chunk *chunk = ChunkOf(span);
  Free(span);
  ASSERT_NE(chunk->used_by[2], 0u);
  hz3_pages_trim(true);
  ASSERT_EQ(ChunkOf(Alloc(kSliceClass, 1)), chunk) << "the descriptor is used again";
  for (uint64_t slices : chunk->used_by) EXPECT_EQ(slices, 0u);
}

TEST_F(Pages, TrimPurgesToZeroAndKeepsTheMapping) {
  hz3_span *span = Alloc(kSliceClass);
  char *base = span->base;
  memset(base, 1, SpanBytes(span));
  Free(span);
  EXPECT_EQ(Stats().dirty_bytes, HZ3_SLICE_BYTES);
  EXPECT_TRUE(hz3_pages_trim(false));
  EXPECT_EQ(Stats().dirty_bytes, 0u);
  EXPECT_EQ(Stats().chunks, 1u);
  EXPECT_FALSE(hz3_pages_trim(false)) << "nothing is left to give";
  EXPECT_TRUE(IsZero(base, HZ3_SLICE_BYTES));
  EXPECT_TRUE(Alloc(kSliceClass)->is_clean);
}

TEST_F(Pages, PurgeGivesResidentMemoryBack) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < 12; i++) spans.push_back(Alloc(kSixteenClass));
  std::vector<char *> bases;
  for (hz3_span *span : spans) {
    bases.push_back(span->base);
    if (bases.size() == 1) {  // later ones may share a huge page with one before
      EXPECT_EQ(ResidentBytes(bases.back(), HZ3_MIB), 0u);
    }
    memset(bases.back(), 1, HZ3_MIB);
    EXPECT_EQ(ResidentBytes(bases.back(), HZ3_MIB), HZ3_MIB);
  }
  hz3_span *kept = spans.back();
  spans.pop_back();
  for (hz3_span *span : spans) Free(span);
  hz3_pages_trim(false);
  for (char *base : bases) EXPECT_EQ(ResidentBytes(base, HZ3_MIB), base == kept->base ? HZ3_MIB : 0u);
}

TEST_F(Pages, DirtyFreeMemoryIsPurgedBelowTheLimit) {
  NothingWaits();
  std::vector<hz3_span *> spans;
  const size_t kLimit = HZ3_RETAIN_MIN_BYTES;
  for (size_t bytes = 0; bytes < kLimit + 2 * HZ3_MIB; bytes += HZ3_SLICE_BYTES) spans.push_back(Alloc(kSliceClass));
  size_t last = 0, purges = 0, purges_before = Stats().purges;
  for (hz3_span *span : spans) {
    Free(span);
    size_t dirty = Stats().dirty_bytes;
    EXPECT_LE(dirty, kLimit);
    if (dirty < last) {
      // Half a chunk or a whole one goes at once, so more than a quarter may go.
      EXPECT_EQ(last, kLimit);
      EXPECT_LE(dirty, kLimit / 4 * 3);
      purges++;
    }
    last = dirty;
  }
  EXPECT_GE(purges, 1u);
  EXPECT_GE(Stats().purges, purges_before + purges);
}

// A load that comes back at once finds its memory; the next span that goes after a while takes the excess along.
TEST_F(Pages, WhatExceedsTheLimitWaitsForAMoment) {
  const size_t kBytes = HZ3_RETAIN_MIN_BYTES * 4;
  std::vector<hz3_span *> spans;
  for (size_t bytes = 0; bytes < kBytes; bytes += HZ3_SLICE_BYTES) spans.push_back(Alloc(kSliceClass));
  hz3_span *last = Alloc(kSliceClass);
  hz3_pages_set_giving_back(false);
  for (hz3_span *span : spans) {
    hz3_pages.retention.excess_since_ms = hz3_os_now_ms();  // however slow the machine is
    Free(span);
  }
  EXPECT_EQ(Stats().dirty_bytes, kBytes);
  EXPECT_FALSE(hz3_pages_is_giving_back());
  hz3_pages.retention.excess_since_ms -= 1000;
  Free(last);
  EXPECT_LT(Stats().dirty_bytes, kBytes);
  EXPECT_TRUE(hz3_pages_is_giving_back());
}

// Where each chunk has little to give, several give, so that the next spans to go do not call the kernel one by one.
TEST_F(Pages, SomeMoreThanTheExcessIsPurged) {
  NothingWaits();
  constexpr size_t kSlices = HZ3_RETAIN_MIN_BYTES / HZ3_SLICE_BYTES;
  std::vector<hz3_span *> scattered;
  for (size_t i = 0; i < (kSlices + 1) * HZ3_CHUNK_SLICES; i++) {
    hz3_span *span = Alloc(kSliceClass);
    if (span->first_slice == 1) scattered.push_back(span);
  }
  ASSERT_GT(scattered.size(), kSlices);
  for (size_t i = 0; i < kSlices; i++) Free(scattered[i]);
  EXPECT_EQ(Stats().dirty_bytes, size_t{HZ3_RETAIN_MIN_BYTES});
  Free(scattered[kSlices]);
  EXPECT_EQ(Stats().dirty_bytes, size_t{HZ3_RETAIN_MIN_BYTES} / 4 * 3);
}

// What is free as half of a chunk keeps its huge page, so it goes before what has been dirty longer.
TEST_F(Pages, HalvesOfChunksGoFirst) {
  if (HZ3_RETAIN_MIN_BYTES < HZ3_CHUNK_BYTES) GTEST_SKIP() << "too little is retained";
  std::vector<hz3_span *> old, recent;
  for (int i = 0; i < HZ3_CHUNK_SLICES; i++) old.push_back(Alloc(kSliceClass));
  for (int i = 0; i < HZ3_CHUNK_SLICES; i++) recent.push_back(Alloc(kSliceClass));
  for (int i = 0; i < HZ3_CHUNK_SLICES; i += 4) Free(old[static_cast<size_t>(i)]);
  for (int i = HZ3_CHUNK_SLICES / 2 - 1; i < HZ3_CHUNK_SLICES; i++) Free(recent[static_cast<size_t>(i)]);
  hz3_pages_purge_to(Stats().dirty_bytes - 1);
  EXPECT_EQ(Stats().dirty_bytes, (HZ3_CHUNK_SLICES / 4 + 1) * HZ3_SLICE_BYTES) << "a half of the recent chunk, nothing else";
  hz3_pages_purge_to(0);
  EXPECT_EQ(Stats().dirty_bytes, 0u);
}

// The second chunk asks for huge pages if the first was used up at once; nothing of that is touched here.
TEST_F(Pages, FastGrowthAsksForHugePagesEarlier) {
  for (bool is_fast : {false, true}) {
    std::vector<hz3_span *> spans;
    for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
    const uint64_t now = hz3_os_now_ms();
    hz3_pages.grown_ms = now - (is_fast ? 1 : HZ3_FAST_GROWTH_MS + 1);
    spans.push_back(Alloc(kSliceClass));
    EXPECT_GE(hz3_pages.grown_ms, now) << "the next growth is fast after this one";
    EXPECT_EQ(ChunkOf(spans.front())->huge, 0u);
    EXPECT_EQ(ChunkOf(spans.back())->huge, is_fast ? ~uint64_t{0} : 0u);
    for (hz3_span *span : spans) Free(span);
    hz3_pages_trim(true);
  }
}

// Where each of several homes opens a span of each class, most of that memory may never be used.
TEST_F(Pages, FirstSpansOfManyHomesAskForNoHugePages) {
  for (unsigned i = 0; i < 2 * HZ3_CHUNK_SLICES; i++) Alloc(1);
  EXPECT_EQ(ChunkOf(Alloc(2))->huge, ~uint64_t{0}) << "one home has all there is";
  for (unsigned i = 1; i < HZ3_CHUNK_SLICES; i++) Alloc(2);
  for (unsigned home = 1; home < HZ3_SPAN_HOMES; home++) {
    for (unsigned c = 3; c <= HZ3_SMALL_CLASS_LAST; c++) EXPECT_EQ(ChunkOf(Alloc(c, home))->huge, 0u);
  }
  size_t chunks = Stats().chunks;
  hz3_span *span = Alloc(3, 1);
  while (Stats().chunks == chunks) span = Alloc(3, 1);
  EXPECT_EQ(ChunkOf(span)->huge, ~uint64_t{0}) << "a class that grows";
}

TEST_F(Pages, DearHugePagesAreNotAskedFor) {
  const uint64_t all = ~uint64_t{0};
  KnowHugePages(true);
  std::vector<hz3_span *> spans;
  auto grow = [&] {
    for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
    return ChunkOf(spans.back())->huge;
  };
  for (int i = 0; i <= HZ3_SMALL_PAGE_CHUNKS; i++) EXPECT_EQ(grow(), 0u);
  std::vector<hz3_chunk *> dear = {ChunkOf(spans.front()), ChunkOf(spans.back())};
  KnowHugePages(false);
  EXPECT_EQ(grow(), all);
  KnowHugePages(true);
  while (!spans.empty()) {
    Free(spans.back());
    spans.pop_back();
  }
  hz3_pages_purge_to(0);
  for (hz3_chunk *chunk : dear) EXPECT_EQ(chunk->huge, 0u) << "nor when their halves are purged";
}

// What the kernel notes of the mapping there: "hg" where huge pages are asked for, "nh" where small ones are.
std::string AdviceAt(const void *address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_there = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t from, to;
    if (sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      is_there = from <= reinterpret_cast<uintptr_t>(address) && reinterpret_cast<uintptr_t>(address) < to;
    }
    if (!is_there || line.compare(0, 8, "VmFlags:") != 0) continue;
    return line.find(" hg") != std::string::npos ? "hg" : line.find(" nh") != std::string::npos ? "nh" : "";
  }
  return "no mapping";
}

// What becomes of the first chunk when there is no room in what it has offered.
class FirstChunk : public Pages {
 protected:
  // Takes so many slices and touches every page of a part of each.
  hz3_span *Take(int slices, size_t bytes) {
    hz3_span *span = nullptr;
    for (int i = 0; i < slices; i++) {
      span = AllocAtOnce();
      if (span->first_slice == 0) hz3_os_advise_huge(span->base, HZ3_CHUNK_BYTES, false);  // where the kernel gives them unasked
      memset(span->base, 1, bytes);
    }
    return span;
  }
  hz3_span *AllocAtOnce() {
    hz3_pages.grown_ms = hz3_os_now_ms();
    return Alloc(kSliceClass);
  }
  static void Wait() { hz3_pages.grown_ms -= HZ3_FAST_GROWTH_MS + 1; }
};

TEST_F(FirstChunk, GoesOnWithAHugePageWhereItWasFilledAtOnce) {
  hz3_chunk *first = ChunkOf(Take(HZ3_OFFERED_SLICES, HZ3_SLICE_BYTES));
  hz3_span *span = AllocAtOnce();
  if (HZ3_CHECKED) {
    EXPECT_EQ(span->first_slice, HZ3_OFFERED_SLICES) << "it has access to no more than it uses";
    return;
  }
  EXPECT_EQ(span->first_slice, HZ3_CHUNK_SLICES / 2);
  EXPECT_EQ(first->huge, HZ3_HIGH_HALF);
  EXPECT_EQ(AdviceAt(span->base), "hg");
  EXPECT_EQ(Stats().free_bytes, (HZ3_CHUNK_SLICES - HZ3_OFFERED_SLICES - 1) * HZ3_SLICE_BYTES) << "with what is held back";
  span = Take(HZ3_CHUNK_SLICES / 2, HZ3_SLICE_BYTES);
  EXPECT_NE(ChunkOf(span), first) << "it goes on growing fast";
  EXPECT_EQ(ChunkOf(span)->huge, ~uint64_t{0});
  Take(HZ3_CHUNK_SLICES - 1, HZ3_SLICE_BYTES);
  Wait();
  EXPECT_EQ(Alloc(kSliceClass)->base, first->base + HZ3_OFFERED_SLICES * HZ3_SLICE_BYTES) << "what it held back";
}

TEST_F(FirstChunk, IsFilledByLittleMoreThanAThird) {
  if (HZ3_CHECKED) GTEST_SKIP() << "it is used up first";
  Take(HZ3_OFFERED_SLICES, HZ3_SLICE_BYTES / 8 * 3);
  EXPECT_EQ(AllocAtOnce()->first_slice, HZ3_CHUNK_SLICES / 2);
}

TEST_F(FirstChunk, OffersTheNextQuarterWhereItWasNotFilled) {
  EXPECT_EQ(Take(HZ3_OFFERED_SLICES + 1, HZ3_SLICE_BYTES / 4)->first_slice, HZ3_OFFERED_SLICES) << "less than a third";
  EXPECT_EQ(Take(HZ3_CHUNK_SLICES - HZ3_OFFERED_SLICES - 1, 1)->first_slice, HZ3_CHUNK_SLICES - 1);
  EXPECT_EQ(Stats().chunks, 1u);
  EXPECT_EQ(Stats().free_bytes, 0u);
}

TEST_F(FirstChunk, OffersTheNextQuarterWhereItWasFilledSlowly) {
  Take(HZ3_OFFERED_SLICES, HZ3_SLICE_BYTES);
  Wait();
  EXPECT_EQ(Alloc(kSliceClass)->first_slice, HZ3_OFFERED_SLICES);
}

TEST_F(FirstChunk, OffersTheNextQuarterToTheFirstSpanOfOneOfManyHomes) {
  Take(HZ3_OFFERED_SLICES, HZ3_SLICE_BYTES);
  hz3_pages.grown_ms = hz3_os_now_ms();
  EXPECT_EQ(Alloc(1, 1)->first_slice, HZ3_OFFERED_SLICES);
}

TEST_F(FirstChunk, OffersTheNextQuarterWhereHugePagesAreDear) {
  KnowHugePages(true);
  EXPECT_EQ(Take(HZ3_OFFERED_SLICES + 1, HZ3_SLICE_BYTES)->first_slice, HZ3_OFFERED_SLICES);
}

TEST_F(FirstChunk, OffersTheNextQuarterWhereWitnessesWereHardlyWritten) {
  hz3_pages.huge_use.sparse_looks = kSparse;
  EXPECT_EQ(Take(HZ3_OFFERED_SLICES + 1, HZ3_SLICE_BYTES)->first_slice, HZ3_OFFERED_SLICES);
}

// As where the kernel gives huge pages without being asked.
TEST_F(FirstChunk, OffersTheNextQuarterWhereWhatNobodyUsedIsResident) {
  hz3_span *first = Take(HZ3_OFFERED_SLICES, HZ3_SLICE_BYTES);
  if (ChunkOf(first)->closed != 0) GTEST_SKIP() << "nobody has access to it";
  ChunkOf(first)->base[HZ3_OFFERED_SLICES * HZ3_SLICE_BYTES] = 1;
  EXPECT_EQ(AllocAtOnce()->first_slice, HZ3_OFFERED_SLICES);
}

// The half as a whole is gone then: the next chunk it is, and what it held back before another one.
TEST_F(FirstChunk, IsFollowedByTheNextWhereItWasFilledLate) {
  if (HZ3_CHECKED) GTEST_SKIP() << "it is used up first";
  Take(HZ3_CHUNK_SLICES / 2 + 1, 1);
  Take(HZ3_OFFERED_SLICES - 1, HZ3_SLICE_BYTES);
  for (hz3_span *span : Live()) memset(span->base, 1, HZ3_SLICE_BYTES);
  hz3_span *span = AllocAtOnce();
  EXPECT_EQ(Stats().chunks, 2u);
  EXPECT_EQ(ChunkOf(span)->huge, ~uint64_t{0});
}

// They may have become dear since it was decided to go on with one.
TEST_F(FirstChunk, OffersItsHalfWithSmallPagesWhereHugeOnesAreDear) {
  if (HZ3_CHECKED) GTEST_SKIP() << "it has no access to it";
  hz3_chunk *first = ChunkOf(Alloc(kSliceClass));
  KnowHugePages(true);
  EXPECT_TRUE(hz3_first_chunk_offer_huge());
  EXPECT_EQ(first->free & HZ3_HIGH_HALF, HZ3_HIGH_HALF);
  EXPECT_EQ(first->huge, 0u);
}

TEST_F(FirstChunk, OffersItsHalfWithSmallPagesWhereThatIsAWitness) {
  if (HZ3_CHECKED) GTEST_SKIP() << "it has no access to it";
  hz3_chunk *first = ChunkOf(Alloc(kSliceClass));
  hz3_pages.huge_use.asked_bytes = kWitnessBytes;
  EXPECT_TRUE(hz3_first_chunk_offer_huge());
  EXPECT_EQ(hz3_pages.huge_use.witness, first->base + HZ3_HUGE_PAGE_BYTES);
  EXPECT_EQ(first->huge, 0u);
}

void UseWhatIsHeldBack() {
  for (int i = 0; i < HZ3_OFFERED_SLICES; i++) {
    hz3_span *span = hz3_pages_alloc_span(kSliceClass, 0, 1);
    HZ3_REQUIRE(span != nullptr);
    memset(span->base, 1, HZ3_SLICE_BYTES);
  }
  hz3_test::RefuseCall(SYS_mmap);
  int more = 0;
  while (hz3_pages_alloc_span(kSliceClass, 0, 1) != nullptr) more++;
  HZ3_REQUIRE(more == HZ3_CHUNK_SLICES - HZ3_OFFERED_SLICES);
  _exit(0);
}

TEST_F(FirstChunk, HoldsNothingBackWhereThereIsNoOtherMemory) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "its runtime maps memory of its own while the locks are taken";
#endif
  EXPECT_EXIT(UseWhatIsHeldBack(), testing::ExitedWithCode(0), "");
}

char *slow_page;

// Access costs 5 ms, as a huge page does where the host of a virtual machine has to give the memory first.
void GiveAccessSlowly(int) {
  for (uint64_t start = hz3_os_thread_ns(); hz3_os_thread_ns() - start < 5000000;) {
  }
  mprotect(slow_page, hz3_os_page_bytes(), PROT_READ | PROT_WRITE);
}

TEST_F(Pages, TheFirstTouchTellsWhetherHugePagesAreDear) {
  const size_t bytes = 6 * HZ3_HUGE_PAGE_BYTES, page = hz3_os_page_bytes();
  char *start = static_cast<char *>(hz3_os_map_aligned(nullptr, bytes, HZ3_HUGE_PAGE_BYTES));
  hz3_huge_use use = {};
  struct sigaction slowly = {}, before;
  slowly.sa_handler = GiveAccessSlowly;
  ASSERT_EQ(sigaction(SIGSEGV, &slowly, &before), 0);
  slow_page = start;
  auto ask = [&] {
    mprotect(start, page, PROT_NONE);
    return hz3_huge_pages_ask(&use, start, bytes);
  };
  EXPECT_EQ(ask(), HZ3_HUGE_ALL) << "12 MiB: not touched";
  EXPECT_EQ(AdviceAt(start + page), "hg");
  EXPECT_EQ(ask(), HZ3_HUGE_ALL) << "beyond 16, but nothing of the first 12 is in use";
  start[HZ3_HUGE_PAGE_BYTES] = 1;
  use.asked_bytes = 12 * HZ3_MIB;
  EXPECT_EQ(ask(), HZ3_HUGE_ONLY_FIRST) << "beyond 16: the one that was touched";
  EXPECT_EQ(AdviceAt(start), "nh") << "all of it, the first page too";
  for (uint64_t pause = 64; pause <= 2048; pause *= 2) {
    EXPECT_EQ(hz3_pages.huge_pause_ms, std::min<uint64_t>(pause, 1024)) << "twice as long each time";
    EXPECT_FALSE(hz3_huge_pages_pay());
    use = {};
    EXPECT_EQ(ask(), HZ3_HUGE_NONE);
    hz3_pages.huge_dear_until_ms -= hz3_pages.huge_pause_ms;
    EXPECT_TRUE(hz3_huge_pages_pay()) << "as far as is known";
    use.asked_bytes = kWitnessBytes;
    EXPECT_EQ(ask(), HZ3_HUGE_ONLY_FIRST) << "so it is tried at once, witness or not";
  }
  sigaction(SIGSEGV, &before, nullptr);
  hz3_pages.huge_dear_until_ms = 0;
  EXPECT_EQ(hz3_huge_pages_ask(&use, start + bytes - page, page), HZ3_HUGE_ALL) << "a page that is no huge one is cheap";
  EXPECT_EQ(hz3_pages.huge_pause_ms, 0u);
  EXPECT_TRUE(hz3_os_unmap(start, bytes));
}

// What was asked for, with a witness at its start or not.
class Witness : public Pages {
 protected:
  static constexpr size_t kEighth = HZ3_HUGE_PAGE_BYTES / 8, kBytes = 4 * HZ3_HUGE_PAGE_BYTES;
  void TearDown() override {
    for (char *start : mapped_) hz3_os_unmap(start, kBytes);
    Pages::TearDown();
  }
  hz3_huge_answer Ask() {
    mapped_.push_back(static_cast<char *>(hz3_os_map_aligned(nullptr, kBytes, HZ3_HUGE_PAGE_BYTES)));
    use_.last = mapped_.back();  // not in use: nothing is touched to see what it costs
    return hz3_huge_pages_ask(&use_, mapped_.back(), kBytes);
  }
  hz3_huge_answer WriteAndAsk(size_t bytes) {
    memset(mapped_.back(), 1, bytes);
    return Ask();
  }
  hz3_huge_use use_ = {};
  std::vector<char *> mapped_;
};

TEST_F(Witness, IsLeftToSmallPagesEachTimeThatTwiceAsMuchWasAskedFor) {
  std::vector<size_t> with_witness;
  while (use_.asked_bytes < 300 * HZ3_MIB) {
    hz3_huge_answer answer = Ask();
    EXPECT_EQ(AdviceAt(mapped_.back()), answer == HZ3_HUGE_BUT_FIRST ? "nh" : "hg");
    if (answer != HZ3_HUGE_BUT_FIRST) continue;
    EXPECT_EQ(AdviceAt(mapped_.back() + HZ3_HUGE_PAGE_BYTES), "hg");
    with_witness.push_back(use_.asked_bytes / HZ3_MIB);
  }
  EXPECT_EQ(with_witness, (std::vector<size_t>{64, 128, 256}));
  use_.asked_bytes = use_.witness_due_bytes = HZ3_MIB * HZ3_MIB;
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  EXPECT_EQ(use_.witness_due_bytes - use_.asked_bytes, HZ3_KIB * HZ3_MIB) << "or each GiB";
}

TEST_F(Witness, TwiceHardlyWrittenStopsItUntilOneIsWritten) {
  use_.asked_bytes = kWitnessBytes;
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  EXPECT_EQ(WriteAndAsk(kEighth - 1), HZ3_HUGE_ALL) << "an eighth of its pages";
  use_.asked_bytes = use_.witness_due_bytes;
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  EXPECT_EQ(WriteAndAsk(kEighth / 2), HZ3_HUGE_BUT_FIRST) << "that may be chance: at once another one";
  EXPECT_EQ(WriteAndAsk(kEighth), HZ3_HUGE_ALL) << "it was";
  use_.asked_bytes = use_.witness_due_bytes;
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  EXPECT_EQ(WriteAndAsk(1), HZ3_HUGE_BUT_FIRST);
  for (int i = 0; i < 3; i++) {
    EXPECT_EQ(WriteAndAsk(1), HZ3_HUGE_NONE);
    EXPECT_EQ(AdviceAt(mapped_.back()), "nh");
  }
  EXPECT_EQ(WriteAndAsk(kEighth), HZ3_HUGE_ALL);
}

TEST_F(Witness, NotWrittenAtAllOrGoneTellsNothing) {
  use_.sparse_looks = kSparse - 1;
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  char *gone = mapped_.back();
  gone[0] = 1;
  EXPECT_TRUE(hz3_os_unmap(gone, HZ3_HUGE_PAGE_BYTES));
  mapped_.pop_back();
  EXPECT_EQ(Ask(), HZ3_HUGE_BUT_FIRST);
  EXPECT_TRUE(hz3_os_unmap(gone + HZ3_HUGE_PAGE_BYTES, kBytes - HZ3_HUGE_PAGE_BYTES));
  EXPECT_EQ(use_.sparse_looks, kSparse - 1);
}

TEST_F(Witness, IsNoneWhereLessThanAHugePageIsAskedFor) {
  Ask();
  use_.sparse_looks = 1;
  EXPECT_EQ(hz3_huge_pages_ask(&use_, mapped_.back(), HZ3_HUGE_PAGE_BYTES - hz3_os_page_bytes()), HZ3_HUGE_ALL);
  EXPECT_EQ(use_.witness, nullptr);
}

TEST_F(Witness, OfChunksIsTheLowerHalfOfTheLowest) {
  auto grow = [&] {
    for (int i = 1; i < HZ3_CHUNK_SLICES; i++) Alloc(kSliceClass);
    return ChunkOf(Alloc(kSliceClass));
  };
  for (int i = 0; i < HZ3_SMALL_PAGE_CHUNKS; i++) grow();
  hz3_pages.huge_use = {};
  hz3_pages.huge_use.asked_bytes = kWitnessBytes;
  hz3_chunk *chunk = grow();
  EXPECT_EQ(chunk->huge, HZ3_HIGH_HALF);
  EXPECT_EQ(hz3_pages.huge_use.witness, chunk->base);
  hz3_pages.huge_use.sparse_looks = kSparse;
  hz3_pages.huge_use.witness = nullptr;
  chunk = grow();
  EXPECT_EQ(chunk->huge, 0u);
  while (!Live().empty()) Free(*Live().begin());
  hz3_pages_purge_to(0);
  EXPECT_EQ(chunk->huge, 0u) << "nor when it is purged";
}

// Each half of a chunk asks for its huge page until a part of it is purged, and again once it is purged as a whole. The first
// chunks begin to when they are purged.
TEST_F(Pages, HalvesOfChunksAskForEach) {
  const uint64_t low = UINT32_MAX, all = ~uint64_t{0};
  std::vector<hz3_span *> spans;
  for (int i = 0; i < (HZ3_SMALL_PAGE_CHUNKS + 1) * HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  hz3_chunk *first = ChunkOf(spans.front()), *last = ChunkOf(spans.back());
  EXPECT_EQ(first->huge, 0u);
  EXPECT_EQ(last->huge, all);
  std::map<hz3_chunk *, hz3_span *> pins;
  for (hz3_span *span : spans) {
    if (span->first_slice == HZ3_CHUNK_SLICES / 2) pins[ChunkOf(span)] = span;
    else Free(span);
  }
  hz3_pages_purge_to(0);
  EXPECT_EQ(first->huge, low);
  EXPECT_EQ(last->huge, low);
  for (auto &pin : pins) Free(pin.second);
  hz3_pages_purge_to(0);
  EXPECT_EQ(first->huge, all);
  EXPECT_EQ(last->huge, all);
  EXPECT_EQ(Stats().dirty_bytes, 0u);
}

// What went in parts of a half loses its huge page, and gets one again as soon as the half is free as a whole: whatever is there then goes.
class LostHalf : public Pages {
 protected:
  void SetUp() override {
    if (HZ3_RETAIN_MIN_BYTES < HZ3_HUGE_PAGE_BYTES) GTEST_SKIP() << "so much is never kept";
    Pages::SetUp();
  }
  // The first so many slices of a half go while the others are in use, then all but the last one are free, too.
  void Lose(size_t purged) {
    std::vector<hz3_span *> half;
    for (int i = 0; i < (HZ3_SMALL_PAGE_CHUNKS + 1) * HZ3_CHUNK_SLICES; i++) {
      hz3_span *span = Alloc(kSliceClass);
      half.push_back(span);
      if (span->first_slice == 0) half = {span};
    }
    half.resize(HZ3_CHUNK_SLICES / 2);
    chunk_ = ChunkOf(half[0]);
    ASSERT_EQ(chunk_->huge, ~uint64_t{0});
    for (size_t i = 0; i < purged; i++) Free(half[i]);
    hz3_pages_purge_to(0);
    ASSERT_EQ(chunk_->huge, HZ3_HIGH_HALF);
    for (size_t i = purged; i < half.size() - 1; i++) Free(half[i]);
    EXPECT_EQ(chunk_->huge, HZ3_HIGH_HALF);
    last_ = half.back();
    dirty_ = (half.size() - purged) * HZ3_SLICE_BYTES;
  }
  void ExpectLost() {
    EXPECT_EQ(chunk_->huge, HZ3_HIGH_HALF);
    EXPECT_EQ(Stats().dirty_bytes, dirty_);
  }
  hz3_chunk *chunk_;
  hz3_span *last_;
  size_t dirty_;
};

TEST_F(LostHalf, AsksForAHugePageAgainOnceItIsFree) {
  Lose(HZ3_CHUNK_SLICES / 4);
  for (int slice : {0, HZ3_CHUNK_SLICES / 2 - 1}) chunk_->base[slice * HZ3_SLICE_BYTES] = 1;  // clean or not
  Free(last_);
  EXPECT_EQ(chunk_->huge, ~uint64_t{0});
  EXPECT_EQ(Stats().dirty_bytes, 0u);
  EXPECT_EQ(ResidentBytes(chunk_->base, HZ3_HUGE_PAGE_BYTES), 0u);
}

TEST_F(LostHalf, StaysIfMostOfItIsThere) {
  Lose(HZ3_CHUNK_SLICES / 4 - 1);
  Free(last_);
  ExpectLost();
}

TEST_F(LostHalf, StaysUntilOneIsFoundCheap) {
  Lose(HZ3_CHUNK_SLICES / 4);
  hz3_pages.huge_pause_ms = 1;
  Free(last_);
  ExpectLost();
  hz3_pages.huge_pause_ms = 0;
}

TEST_F(LostHalf, StaysIfMappingsMightRunOut) {
  Lose(HZ3_CHUNK_SLICES / 4);
  constexpr size_t kTooMany = 1000;
  uint64_t high = chunk_->huge;
  chunk_->huge = 0;  // so that to ask is one end more
  size_t before = std::exchange(hz3_pages.advice_ends, kTooMany);
  Free(last_);
  EXPECT_EQ(Stats().dirty_bytes, dirty_);
  EXPECT_EQ(chunk_->huge, 0u);
  chunk_->huge = high;
  hz3_pages.advice_ends = before;
}

// A huge page makes resident what nobody used: when a part of one goes, that goes with it.
TEST_F(Pages, CleanSlicesGoWithAPartOfAHugePage) {
  if (HZ3_CHECKED) GTEST_SKIP() << "the first chunk is without access where nobody used it";
  hz3_span *first = Alloc(kSliceClass), *second = Alloc(kSliceClass);
  hz3_chunk *chunk = ChunkOf(first);
  for (uint64_t huge : {uint64_t{0}, ~uint64_t{0}}) {
    char *clean = chunk->base + (HZ3_OFFERED_SLICES - 1) * HZ3_SLICE_BYTES;
    chunk->huge = huge;
    clean[0] = 0;  // as the kernel does
    Free(second);
    hz3_pages_purge_to(0);
    EXPECT_EQ(ResidentBytes(clean, HZ3_SLICE_BYTES) == 0, huge != 0);
    second = Alloc(kSliceClass);
  }
}

// Nobody had used it before it went, so whoever uses it then has not come back for it.
TEST_F(Pages, WhatWasCleanWhenItWentIsNotWantedAgain) {
  if (HZ3_CHECKED) GTEST_SKIP() << "the first chunk is without access where nobody used it";
  unsigned c = 1;
  while (Class(c).align_slices < 2 || Class(c).slices > HZ3_OFFERED_SLICES / 2) c++;
  Alloc(kSliceClass);
  hz3_span *second = Alloc(kSliceClass);
  ChunkOf(second)->huge = ~uint64_t{0};
  Free(second);
  ASSERT_TRUE(hz3_pages_trim(false));
  ASSERT_EQ(Alloc(c)->first_slice, Class(c).align_slices) << "beside the slice that was in use";
  EXPECT_EQ(hz3_pages.retention.limit_bytes, size_t{HZ3_RETAIN_MIN_BYTES});
  EXPECT_EQ(Alloc(kSliceClass)->first_slice, 1);
  EXPECT_EQ(hz3_pages.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + HZ3_SLICE_BYTES);
}

// Of a half of which one slice was ever used: the huge page made the others resident.
TEST_F(Pages, ATrimTakesWhatNobodyUsedOfAHugePage) {
  for (bool is_high : {false, true}) {
    hz3_span *span;
    do span = Alloc(kSliceClass);
    while (Stats().chunks <= HZ3_SMALL_PAGE_CHUNKS || span->first_slice != (is_high ? HZ3_CHUNK_SLICES / 2 : 0));
    hz3_chunk *chunk = ChunkOf(span);
    ASSERT_EQ(chunk->huge, ~uint64_t{0});
    *span->base = 1;
    char *half = chunk->base + (is_high ? HZ3_HUGE_PAGE_BYTES : 0);
    hz3_pages_trim(true);
    EXPECT_LE(ResidentBytes(half, HZ3_HUGE_PAGE_BYTES), size_t{HZ3_SLICE_BYTES});
    EXPECT_EQ(*span->base, 1);
    EXPECT_EQ(Stats().dirty_bytes, 0u);
    EXPECT_EQ(chunk->huge, is_high ? HZ3_LOW_HALF : HZ3_HIGH_HALF) << "or it would be filled again";
    while (!Live().empty()) Free(*Live().begin());
    hz3_pages_trim(true);
  }
}

// What a trim leaves of a heap that was big is that of a small program.
TEST_F(Pages, ATrimThatLeavesFewChunksLeavesThemSmallPages) {
  for (bool was_purged : {false, true}) {
    std::vector<hz3_span *> spans;
    for (int i = 0; i < (HZ3_SMALL_PAGE_CHUNKS + 1) * HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
    hz3_span *kept = spans.back();
    spans.pop_back();
    EXPECT_NE(ChunkOf(kept)->huge, 0u);
    for (hz3_span *span : spans) Free(span);
    if (was_purged) hz3_pages_purge_to(0);
    hz3_pages_trim(true);
    ASSERT_EQ(Stats().chunks, 1u);
    EXPECT_EQ(ChunkOf(kept)->huge, 0u);
    Free(kept);
    hz3_pages_trim(true);
  }
}

// As small programs have: a huge page would be more than they ever use.
TEST_F(Pages, HalvesOfTheFirstChunksAskForNone) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < HZ3_SMALL_PAGE_CHUNKS * HZ3_CHUNK_SLICES; i++) {
    hz3_pages.grown_ms = 0;
    spans.push_back(Alloc(kSliceClass));
  }
  ASSERT_EQ(Stats().chunks, size_t{HZ3_SMALL_PAGE_CHUNKS});
  for (hz3_span *span : spans) Free(span);
  hz3_pages_purge_to(0);
  EXPECT_EQ(Stats().dirty_bytes, 0u);
  for (hz3_span *span : spans) EXPECT_EQ(ChunkOf(span)->huge, 0u);
}

// Where the kernel maps downwards that is the one above it, and where it maps upwards the one below.
TEST_F(Pages, TheNewestChunkIsTheOneBesideOnceTheNewestIsGone) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i <= HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  hz3_chunk *first = ChunkOf(spans.front()), *newest = ChunkOf(spans.back());
  ASSERT_EQ(hz3_pages.newest, newest);
  if (newest->above != first && newest->below != first) GTEST_SKIP() << "something else lies between them";
  Free(spans.back());
  hz3_pages_trim(true);
  EXPECT_EQ(hz3_pages.newest, first);
  EXPECT_TRUE(first->below == nullptr && first->above == nullptr);
}

// Advice that differs from that of a chunk far away makes no mapping more.
TEST_F(Pages, OnlyChunksThatTouchAreNeighbours) {
  hz3_chunk *first = ChunkOf(Alloc(kSliceClass));
  const size_t page = hz3_os_page_bytes();
  void *const between[] = {hz3_os_map(first->base - page, page), hz3_os_map(first->base + HZ3_CHUNK_BYTES, page)};  // or others' are there
  for (void *wall : between) ASSERT_NE(wall, nullptr);
  while (Stats().chunks == 1) Alloc(kSliceClass);
  EXPECT_NE(hz3_pages.newest, first);
  for (hz3_chunk *chunk : {hz3_pages.newest, first}) EXPECT_TRUE(chunk->above == nullptr && chunk->below == nullptr);
  for (void *wall : between) EXPECT_TRUE(hz3_os_unmap(wall, page));
}

// The mappings of the kernel that lie in the range.
size_t MappingsIn(uintptr_t start, uintptr_t end) {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t from = std::stoul(line, nullptr, 16), to = std::stoul(line.substr(line.find('-') + 1), nullptr, 16);
    count += from < end && to > start;
  }
  return count;
}

// Every second chunk has holes: each of them would be a mapping of its own. Only some become one, whatever is purged.
TEST_F(Pages, AdviceMakesFewMappings) {
  constexpr size_t kChunks = 2 * HZ3_CHUNKS_PER_ADVICE_END, kMost = HZ3_ADVICE_ENDS + 2;
  std::map<char *, std::vector<hz3_span *>> chunks;
  for (size_t i = 0; i < kChunks * HZ3_CHUNK_SLICES; i++) {
    hz3_span *span = Alloc(kSliceClass);
    chunks[ChunkOf(span)->base].push_back(span);
  }
  uintptr_t start = reinterpret_cast<uintptr_t>(chunks.begin()->first), end = reinterpret_cast<uintptr_t>(chunks.rbegin()->first) + HZ3_CHUNK_BYTES;
  size_t before = MappingsIn(start, end);
  std::vector<hz3_span *> rest;
  bool has_holes = false;
  for (auto &[base, spans] : chunks) {
    has_holes = !has_holes;
    for (hz3_span *span : spans) {
      if (has_holes && span->first_slice % 4 == 1) Free(span);
      else rest.push_back(span);
    }
  }
  hz3_pages_purge_to(0);
  EXPECT_EQ(Stats().dirty_bytes, 0u) << "all holes are purged";
  EXPECT_LE(hz3_pages.advice_ends, kMost);
  EXPECT_LE(MappingsIn(start, end), before + kMost);
  if (!HZ3_CHECKED) {  // where guards lie between chunks, so that each is a mapping anyway
    EXPECT_GE(hz3_pages.advice_ends, kMost - 1);
    EXPECT_GE(MappingsIn(start, end), before + kMost / 2) << "as many as may";
  }
  for (hz3_span *span : rest) Free(span);
  hz3_pages_purge_to(0);
  EXPECT_EQ(hz3_pages.advice_ends, 0u) << "all ask for huge pages again";
  hz3_pages_trim(true);
  EXPECT_EQ(hz3_pages.advice_ends, 0u);
  EXPECT_EQ(hz3_pages.newest, nullptr);
}

// As after chunks went, by whose number it goes how many ends there may be.
TEST_F(Pages, AdviceThatMakesFewerMappingsMayAlwaysChange) {
  constexpr size_t kTooMany = 1000;
  hz3_chunk *chunk = ChunkOf(Alloc(kSliceClass));
  for (uint64_t others : {uint64_t{0}, ~uint64_t{0}}) {
    chunk->huge = HZ3_LOW_HALF;
    hz3_pages.advice_ends = kTooMany;
    EXPECT_TRUE(hz3_chunk_set_huge_locked(chunk, others));
    EXPECT_EQ(hz3_pages.advice_ends, kTooMany - 1);
    EXPECT_FALSE(hz3_chunk_set_huge_locked(chunk, HZ3_LOW_HALF)) << "it would be one more";
    EXPECT_EQ(hz3_pages.advice_ends, kTooMany - 1);
    EXPECT_EQ(chunk->huge, others);
  }
  chunk->huge = 0;
  hz3_pages.advice_ends = 0;
}

// One more for each chunk, up to a bound: halves that are free as a whole are few.
TEST_F(Pages, AdviceForHugePagesMayMakeMoreMappings) {
  hz3_chunk *chunk = ChunkOf(Alloc(kSliceClass));
  size_t chunks = hz3_pages.chunks;
  auto may = [chunk](uint64_t before, size_t ends) {
    chunk->huge = before;
    hz3_pages.advice_ends = ends;
    return hz3_chunk_set_huge_locked(chunk, HZ3_LOW_HALF);
  };
  EXPECT_FALSE(may(~uint64_t{0}, HZ3_ADVICE_ENDS));
  EXPECT_TRUE(may(0, HZ3_ADVICE_ENDS));
  EXPECT_FALSE(may(0, HZ3_ADVICE_ENDS + 1));
  hz3_pages.chunks = 2 * HZ3_RENEWED_ENDS;
  EXPECT_TRUE(may(0, HZ3_ADVICE_ENDS + HZ3_RENEWED_ENDS - 1));
  EXPECT_FALSE(may(0, HZ3_ADVICE_ENDS + HZ3_RENEWED_ENDS));
  hz3_pages.chunks = chunks;
  chunk->huge = 0;
  hz3_pages.advice_ends = 0;
}

// Whichever of two threads has read the clock first.
TEST_F(Pages, HollowSpansWaitWhileSpansAreWanted) {
  hz3_pages_set_giving_back(true);
  hz3_pages_note_coming_back(false);
  for (uint32_t now : {1000u, 0u, 3u, UINT32_MAX}) {
    hz3_pages_note_wanted(now);
    for (uint32_t later : {0u, 1u, unsigned{HZ3_SOON_MS} - 1}) EXPECT_FALSE(hz3_pages_are_hollow_due(now + later)) << now << " + " << later;
    for (uint32_t later : {unsigned{HZ3_SOON_MS}, 1000u, 1000u * 1000}) EXPECT_TRUE(hz3_pages_are_hollow_due(now + later)) << now << " + " << later;
    EXPECT_FALSE(hz3_pages_are_hollow_due(now - 2));
  }
}

// And while none is given back, or the bound is above its minimum: the load has come back before.
TEST_F(Pages, HollowSpansWaitForALoadThatComesBack) {
  hz3_pages_note_wanted(0);
  hz3_span *const spans[] = {Alloc(kSliceClass), Alloc(kSliceClass), Alloc(kSliceClass)};
  hz3_pages_set_giving_back(true);
  Free(spans[0]);
  EXPECT_TRUE(hz3_pages_are_hollow_due(1000));
  hz3_pages.retention.limit_bytes = HZ3_RETAIN_MIN_BYTES + HZ3_SLICE_BYTES;
  hz3_pages.retention.known_low_bytes = 0;
  Free(spans[1]);
  EXPECT_FALSE(hz3_pages_are_hollow_due(1000));
  hz3_pages.retention.known_low_bytes = SIZE_MAX;
  Free(spans[2]);
  EXPECT_TRUE(hz3_pages_are_hollow_due(1000)) << "but not from as little as this";
  hz3_pages_set_giving_back(false);
  EXPECT_FALSE(hz3_pages_are_hollow_due(1000));
}

// Spans that are used again right after their pages were purged say that ticks came too early, if they are more than a quarter of them.
TEST_F(Pages, TicksSpareHollowSpansAfterEarlyUse) {
  auto gives_back = [this] {
    std::vector<hz3_span *> spans;
    for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
    for (hz3_span *span : spans) Free(span);
    hz3_pages_purge_idle();  // from here on nobody needs them
    hz3_pages_purge_idle();
    return hz3_pages_is_giving_back();
  };
  EXPECT_TRUE(gives_back());
  const auto now = static_cast<uint32_t>(hz3_os_now_ms());
  hz3_pages_note_hollow_use(now - 2000);
  EXPECT_TRUE(gives_back()) << "that was not early";
  hz3_pages_note_hollow_use(now);
  EXPECT_TRUE(hz3_pages_are_hollow_purges_early());
  EXPECT_TRUE(gives_back()) << "one is forgotten soon";
  for (int i = 0; i < 10; i++) hz3_pages_note_hollow_use(now);
  EXPECT_FALSE(gives_back());
  hz3_pages.hollow_regrets = 0;
  for (int i = 0; i < 100; i++) hz3_pages_note_hollow_purge();
  for (int i = 0; i < 20; i++) hz3_pages_note_hollow_use(now);
  EXPECT_FALSE(hz3_pages_are_hollow_purges_early()) << "a fifth";
  for (int i = 0; i < 10; i++) hz3_pages_note_hollow_use(now);
  EXPECT_TRUE(hz3_pages_are_hollow_purges_early());
  int ticks = 0;
  for (; ticks < 100 && hz3_pages_are_hollow_purges_early(); ticks++) hz3_pages_purge_idle();
  EXPECT_GE(ticks, 10);
  EXPECT_LE(ticks, 50);
}

TEST_F(Pages, UseOfAHollowSpanIsEarlyForASecond) {
  auto is_early = [](uint32_t ms) {
    return AtOneTime(
        [ms](uint64_t now) {
          hz3_pages.hollow_purges = hz3_pages.hollow_regrets = 0;
          hz3_pages_note_hollow_use(static_cast<uint32_t>(now) - ms);
        },
        hz3_pages_are_hollow_purges_early);
  };
  EXPECT_TRUE(is_early(1000));
  EXPECT_FALSE(is_early(1001));
}

// A tick, to which all chunks look as if no span had come or gone for long.
void TickWhileUnused() {
  for (hz3_chunk *chunk = hz3_pages.dirty_first; chunk != nullptr; chunk = chunk->dirty_next) chunk->used_tick = hz3_pages.ticks - 100;
  hz3_pages_purge_idle();
}

TEST_F(Pages, TicksGiveHalfOfWhatNobodyNeeded) {
  hz3_pages_purge_idle();
  hz3_span *first = Alloc(kSliceClass), *second = Alloc(kSliceClass);
  Free(first);
  Free(second);
  size_t dirty = Stats().dirty_bytes;
  EXPECT_EQ(dirty, 2 * HZ3_SLICE_BYTES);
  TickWhileUnused();
  EXPECT_EQ(Stats().dirty_bytes, dirty) << "it has only just come";
  Free(Alloc(kSliceClass));
  TickWhileUnused();
  EXPECT_EQ(Stats().dirty_bytes, dirty) << "half of the one that was not needed is none";
  TickWhileUnused();
  EXPECT_LT(Stats().dirty_bytes, dirty);
}

TEST_F(Pages, TicksLeavePartsOfChunksInUse) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  for (int i = 0; i < 4; i++) Free(spans[static_cast<size_t>(i)]);
  const size_t dirty = Stats().dirty_bytes;
  hz3_pages_purge_idle();
  for (int i = 0; i < 10; i++) {
    Free(Alloc(kSliceClass));
    hz3_pages_purge_idle();
  }
  hz3_pages_purge_idle();
  EXPECT_EQ(Stats().dirty_bytes, dirty) << "nobody needed three of the four slices, but they are soon needed";
  hz3_pages_purge_idle();
  EXPECT_LT(Stats().dirty_bytes, dirty);
}

TEST_F(Pages, TicksGiveHalvesOfChunksInUse) {
  if (HZ3_RETAIN_MIN_BYTES < 4 * HZ3_MIB) GTEST_SKIP() << "so much is never kept";
  std::vector<hz3_span *> spans;
  for (int i = 0; i < HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  std::sort(spans.begin(), spans.end(), [](const hz3_span *a, const hz3_span *b) { return a->base < b->base; });
  Free(spans[0]);
  for (size_t i = HZ3_CHUNK_SLICES / 2; i < HZ3_CHUNK_SLICES; i++) Free(spans[i]);
  hz3_pages_purge_idle();
  Free(Alloc(kSliceClass));
  hz3_pages_purge_idle();
  EXPECT_EQ(Stats().dirty_bytes, HZ3_SLICE_BYTES) << "of the lower half one is free";
}

// What is in use goes to the end of the list, or a tick would find nothing else as long as it is.
TEST_F(Pages, TicksFindWhatIsUnusedBehindChunksInUse) {
  constexpr size_t kChunks = 20;
  std::vector<hz3_span *> spans;
  for (size_t i = 0; i < kChunks * HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  std::map<const char *, hz3_span *> one_of_each;
  for (hz3_span *span : spans) one_of_each[reinterpret_cast<const char *>(hz3_round_down(reinterpret_cast<uintptr_t>(span->base), HZ3_CHUNK_BYTES))] = span;
  ASSERT_GE(one_of_each.size(), kChunks);
  for (const auto &[chunk, span] : one_of_each) Free(span);
  const size_t dirty = Stats().dirty_bytes;
  if (dirty < one_of_each.size() * HZ3_SLICE_BYTES) GTEST_SKIP() << "so much is never kept";
  const hz3_chunk *unused = hz3_pages.dirty_last;
  hz3_pages.dirty_low_water = hz3_pages.dirty_slices;
  for (int ticks = 0; ticks < 2; ticks++) {
    for (hz3_chunk *chunk = hz3_pages.dirty_first; chunk != nullptr; chunk = chunk->dirty_next)
      chunk->used_tick = hz3_pages.ticks - (chunk == unused ? 100 : 0);
    hz3_pages_purge_idle();
  }
  EXPECT_FALSE(unused->on_dirty_list);
  EXPECT_EQ(Stats().dirty_bytes, dirty - HZ3_SLICE_BYTES);
}

// Each purge is too early once: not again when the same memory was used and freed, nor for a chunk that was mapped anew.
TEST_F(Pages, WhatWasPurgedIsWantedAgainOnce) {
  hz3_span *span = Alloc(kSliceClass), *other = Alloc(kSliceClass);
  Free(span);
  Free(other);
  hz3_pages_trim(false);
  hz3_pages_set_giving_back(true);
  Free(Alloc(kSliceClass));
  EXPECT_FALSE(hz3_pages_is_giving_back()) << "that was too early";
  EXPECT_EQ(hz3_pages.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + HZ3_SLICE_BYTES);
  Free(Alloc(kSliceClass));
  EXPECT_EQ(hz3_pages.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + HZ3_SLICE_BYTES);
  hz3_pages_trim(true);
  Alloc(kSliceClass);
  EXPECT_EQ(hz3_pages.retention.limit_bytes, HZ3_RETAIN_MIN_BYTES + HZ3_SLICE_BYTES);
}

TEST_F(Pages, LittleIdleMemoryIsNoReasonToPurgeWithinSpans) {
  if (HZ3_RETAIN_MIN_BYTES < 4 * HZ3_MIB) GTEST_SKIP() << "so much is never kept";
  for (size_t slices : {30, 40}) {
    std::vector<hz3_span *> spans;
    for (size_t i = 0; i < slices; i++) spans.push_back(Alloc(kSliceClass));
    for (hz3_span *span : spans) Free(span);
    hz3_pages_purge_idle();
    hz3_pages.hollow_regrets = 0;
    hz3_pages_purge_idle();
    EXPECT_EQ(hz3_pages_is_giving_back(), slices == 40) << "half of " << slices << " slices goes";
    hz3_pages_trim(true);
  }
}

TEST_F(Pages, LockedMemoryStaysDirty) {
  hz3_span *span = Alloc(kSliceClass);
  char *base = span->base;
  // By the system call: the sanitizers turn the function into nothing.
  if (syscall(SYS_mlock, base, HZ3_SLICE_BYTES) != 0) GTEST_SKIP() << "no memory may be locked here";
  memset(base, 1, HZ3_SLICE_BYTES);
  Free(span);
  EXPECT_FALSE(hz3_pages_trim(false)) << "nothing was given back";
  EXPECT_EQ(base[0], 1);
  EXPECT_FALSE(Alloc(kSliceClass)->is_clean) << "what the kernel kept is handed out as zero";
  syscall(SYS_munlock, base, HZ3_SLICE_BYTES);
}

// One locked slice in a half of the chunk that has been dirty longest: everything else goes, and the slice when it can.
TEST_F(Pages, LockedMemoryKeepsNothingElse) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < 3 * HZ3_CHUNK_SLICES; i++) spans.push_back(Alloc(kSliceClass));
  for (hz3_span *span : spans) memset(span->base, 1, HZ3_SLICE_BYTES);
  char *locked = spans[3]->base;
  hz3_chunk *chunk = ChunkOf(spans[3]);
  if (syscall(SYS_mlock, locked, HZ3_SLICE_BYTES) != 0) GTEST_SKIP() << "no memory may be locked here";
  for (hz3_span *span : spans) Free(span);
  bool any = hz3_pages_purge_to(0);
  EXPECT_TRUE(any || HZ3_RETAIN_MIN_BYTES < HZ3_HUGE_PAGE_BYTES) << "or a half went as soon as it was free";
  EXPECT_EQ(Stats().dirty_bytes, 0u);
  for (hz3_span *span : spans) {
    EXPECT_EQ(ResidentBytes(span->base, HZ3_SLICE_BYTES), span == spans[3] ? HZ3_SLICE_BYTES : 0);
  }
  EXPECT_EQ(locked[0], 1);
  EXPECT_FALSE(hz3_pages_purge_to(0));
  syscall(SYS_munlock, locked, HZ3_SLICE_BYTES);
  EXPECT_TRUE(hz3_pages_trim(false));
  EXPECT_EQ(ResidentBytes(locked, HZ3_SLICE_BYTES), 0u);
  EXPECT_EQ(chunk->dirty, 0u);
}

TEST_F(Pages, TrimUnmapsFreeChunksOnly) {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < 8; i++) spans.push_back(Alloc(kSixteenClass));
  ASSERT_EQ(Stats().chunks, 2u);
  char *kept = spans[0]->base, *gone = nullptr;
  for (hz3_span *span : spans) {
    char *base = span->base;
    if (hz3_round_down(reinterpret_cast<uintptr_t>(base), HZ3_CHUNK_BYTES) != hz3_round_down(reinterpret_cast<uintptr_t>(kept), HZ3_CHUNK_BYTES))
      gone = base;
  }
  for (size_t i = 1; i < spans.size(); i++) Free(spans[i]);
  EXPECT_TRUE(hz3_pages_trim(true));
  EXPECT_EQ(Stats().chunks, 1u);
  EXPECT_EQ(Stats().mapped_bytes, HZ3_CHUNK_BYTES);
  EXPECT_EQ(hz3_pages_span_of(kept), spans[0]);
  EXPECT_TRUE(IsMapped(kept));
  EXPECT_FALSE(IsMapped(gone));
  EXPECT_EQ(hz3_pages_span_of(gone), nullptr);
  Free(spans[0]);
  EXPECT_TRUE(hz3_pages_trim(true));
  EXPECT_EQ(Stats().mapped_bytes, 0u);
  EXPECT_EQ(Stats().free_bytes, 0u);
  EXPECT_EQ(Stats().dirty_bytes, 0u);
  memset(Alloc(kSixteenClass)->base, 1, HZ3_MIB);  // the descriptor is used again
}

TEST_F(Pages, GuardsGoWithTheirChunks) {
  if (!HZ3_CHECKED) GTEST_SKIP() << "for the checked lane";
  std::set<char *> guards;
  while (Stats().chunks < 3) {
    hz3_chunk *chunk = ChunkOf(Alloc(kSliceClass));
    if (chunk->guard_bytes > 0) guards.insert(chunk->base + HZ3_CHUNK_BYTES);
  }
  ASSERT_FALSE(guards.empty());
  for (char *guard : guards) EXPECT_TRUE(IsMapped(guard));
  while (!Live().empty()) Free(*Live().begin());
  hz3_pages_trim(true);
  for (char *guard : guards) EXPECT_FALSE(IsMapped(guard));
}

TEST_F(Pages, KeepsErrno) {
  errno = 4321;
  hz3_span *span = Alloc(kSixteenClass);
  Free(span);
  hz3_pages_trim(true);
  EXPECT_EQ(errno, 4321);
}

// A long random run against a picture of who owns which slice.
TEST_F(Pages, RandomSpansNeverOverlap) {
  std::mt19937 random(20);
  std::vector<hz3_span *> live;
  for (int i = 0; i < 20000; i++) {
    if (live.size() < 200 && (live.empty() || random() % 100 < 55)) {
      hz3_span *span = Alloc(1 + random() % (HZ3_CLASS_COUNT - 1));
      for (size_t at = 0; at < SpanBytes(span); at += HZ3_SLICE_BYTES) {
        auto *cell = reinterpret_cast<uintptr_t *>(span->base + at);
        ASSERT_EQ(*cell, 0u) << "the slice has an owner already";
        *cell = reinterpret_cast<uintptr_t>(span);
      }
      live.push_back(span);
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      hz3_span *span = live.back();
      for (size_t at = 0; at < SpanBytes(span); at += HZ3_SLICE_BYTES) {
        auto *cell = reinterpret_cast<uintptr_t *>(span->base + at);
        ASSERT_EQ(*cell, reinterpret_cast<uintptr_t>(span));
        *cell = 0;
      }
      live.pop_back();
      Free(span);
    }
    if (i % 1000 == 0) hz3_pages_trim(i % 2000 == 0);
  }
  size_t live_bytes = 0;
  for (hz3_span *span : live) live_bytes += SpanBytes(span);
  EXPECT_EQ(Stats().mapped_bytes - Stats().free_bytes, live_bytes);
}

TEST_F(Pages, ThreadsNeverShareASpan) {
  const int kThreads = 4, kRounds = 3000;
  std::atomic<int> doubled{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) {
    threads.emplace_back([t, &doubled] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<hz3_span *> live;
      for (int i = 0; i < kRounds; i++) {
        if (live.size() < 20 && random() % 2 == 0) {
          hz3_span *span = hz3_pages_alloc_span(1 + random() % (HZ3_CLASS_COUNT - 1), random() % HZ3_SPAN_HOMES, 1);
          auto *cell = reinterpret_cast<uint32_t *>(span->base);
          if (__atomic_exchange_n(cell, 1u, __ATOMIC_RELAXED) != 0) doubled++;
          live.push_back(span);
        } else if (!live.empty()) {
          std::swap(live[random() % live.size()], live.back());
          *reinterpret_cast<uint32_t *>(live.back()->base) = 0;
          hz3_pages_free_span(live.back());
          live.pop_back();
        }
        if (i % 500 == 499) hz3_pages_trim(true);
      }
      for (hz3_span *span : live) {
        *reinterpret_cast<uint32_t *>(span->base) = 0;
        hz3_pages_free_span(span);
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(doubled, 0);
  EXPECT_EQ(Stats().free_bytes, Stats().mapped_bytes);
}

TEST_F(Pages, ForkLocksOutOthers) {
  hz3_pages_fork_prepare();
  hz3_span *span = nullptr;
  std::thread other([&] { span = hz3_pages_alloc_span(1, 0, 1); });
  hz3_pages_fork_release();
  other.join();
  ASSERT_NE(span, nullptr);
  hz3_pages_free_span(span);
}

// Of several tries the shortest, for this thread may be held up.
bool TrimWaitsForOthers() {
  uint64_t shortest = UINT64_MAX;
  for (int i = 0; i < 10; i++) {
    uint64_t start = hz3_os_now_ms();
    hz3_pages_trim(true);
    shortest = std::min(shortest, hz3_os_now_ms() - start);
  }
  return shortest >= HZ3_TAKEN_AWAY_MS;
}

TEST_F(Pages, WhatThreadsHadTakenAwayThatAForkCutOffIsNotWaitedFor) {
  hz3_pages_take_away();
  EXPECT_TRUE(TrimWaitsForOthers());
  hz3_pages_fork_prepare();
  hz3_pages_fork_child();
  hz3_pages_fork_release();
  EXPECT_FALSE(TrimWaitsForOthers());
  hz3_pages_take_away();
  EXPECT_TRUE(TrimWaitsForOthers()) << "this thread is the child's";
  hz3_pages_bring_back();
  EXPECT_FALSE(TrimWaitsForOthers());
  hz3_pages_bring_back();
  hz3_pages_fork_child();
}

size_t taken_away_meanwhile;

void FreeKeptSpan(hz3_span *span) {
  taken_away_meanwhile = hz3_read_figure(&hz3_pages.taken_away);
  hz3_pages_free_span(span);
}

// A store of one object per span. Those that ever learned to keep spans stay known.
hz3_span_store keeper, dipper;

void *FetchFrom(hz3_span_store *store) {
  store->lock.rank = HZ3_RANK_CLASS;
  bool is_clean;
  void *object;
  if (hz3_span_store_fetch(store, &object, 1, true, &is_clean) == 1) return object;
  hz3_span *span = hz3_pages_alloc_span(kSliceClass, 0, 1);
  span->out_words = &span->out_word;
  EXPECT_EQ(hz3_span_store_fetch_from(store, span, 0, &object, 1, &is_clean), 1u);
  return object;
}

void ReleaseTo(hz3_span_store *store, void *object) { hz3_span_store_release(store, kSliceClass, &object, 1, FreeKeptSpan); }

// Whether the store keeps a span that was wanted again. Tried again where this thread was held up.
bool Keeps(hz3_span_store *store) {
  for (int i = 0; i < 20 && Stats().kept_bytes == 0; i++) {
    ReleaseTo(store, FetchFrom(store));
    ReleaseTo(store, FetchFrom(store));
  }
  return Stats().kept_bytes != 0;
}

// Or a thread that is out of memory would not find it, as long as another one is giving it back.
TEST_F(Pages, WhatAStoreKeptIsTakenAwayUntilItIsFree) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing is kept";
  ASSERT_TRUE(Keeps(&keeper));
  taken_away_meanwhile = 0;
  hz3_pages_trim(false);
  EXPECT_EQ(taken_away_meanwhile, 1u);
  EXPECT_EQ(hz3_read_figure(&hz3_pages.taken_away), 0u);
}

// One dip would else use up for good what all stores may keep, if the store that learned by it never kept a span.
TEST_F(Pages, TicksForgetWhatAStoreLearnedAndNeverKept) {
  if (HZ3_CHECKED) GTEST_SKIP() << "nothing is kept";
  std::vector<void *> objects(4 * HZ3_RETAIN_MIN_BYTES / HZ3_SLICE_BYTES);
  for (void *&object : objects) object = FetchFrom(&dipper);
  for (void *object : objects) ReleaseTo(&dipper, object);
  for (void *&object : objects) object = FetchFrom(&dipper);
  EXPECT_EQ(Stats().kept_bytes, 0u);
  usleep((HZ3_SWING_MS + 10) * 1000);
  hz3_pages_purge_idle();
  EXPECT_TRUE(Keeps(&keeper));
  hz3_pages_trim(false);
  hz3_pages_purge_idle();
  for (void *object : objects) ReleaseTo(&dipper, object);
}

TEST_F(Pages, FreeingASpanTwiceIsFatal) {
  hz3_span *span = Alloc(kSliceClass);
  Free(span);
  EXPECT_DEATH(hz3_pages_free_span(span), "^hz3: fatal: internal check failed: .* at hz3/pages/pages\\.c:[0-9]+\n$");
}

TEST_F(Pages, PageMapHoldsLargeBlocks) {
  const size_t kBytes = 40 * HZ3_MIB;
  char *start = static_cast<char *>(hz3_os_map_aligned(nullptr, kBytes, HZ3_MIB));
  ASSERT_NE(start, nullptr);
  ASSERT_TRUE(hz3_page_map_reserve(start, kBytes));
  long descriptor;
  hz3_page_map_set_large(start + HZ3_MIB, &descriptor);
  EXPECT_EQ(hz3_page_map_large_of(start + HZ3_MIB), &descriptor);
  EXPECT_EQ(hz3_page_map_large_of(start + HZ3_MIB + 5), &descriptor) << "the slice of the start is entered";
  EXPECT_EQ(hz3_page_map_large_of(start), nullptr);
  EXPECT_EQ(hz3_page_map_large_of(start + 2 * HZ3_MIB), nullptr);
  EXPECT_EQ(hz3_pages_span_of(start + HZ3_MIB), nullptr);
  EXPECT_EQ(hz3_tag_of(start + HZ3_MIB), 0);
  hz3_page_map_set_large(start + HZ3_MIB, nullptr);
  EXPECT_EQ(hz3_page_map_large_of(start + HZ3_MIB), nullptr);
  EXPECT_NE(hz3_page_map_marks(start), hz3_page_map_marks(start + HZ3_MIB));
  EXPECT_EQ(hz3_page_map_marks(start)->dirty, 0u);
  EXPECT_EQ(hz3_page_map_marks(start)->refused, 0u);
  hz3_os_unmap(start, kBytes);
}

// When what was learned does not hold any more, it goes step by step.
TEST_F(Pages, NoCallPurgesMuchAtOnce) {
  constexpr size_t kMost = 8 * HZ3_MIB, kBlocks = 20 * HZ3_CHUNK_BYTES;
  std::vector<hz3_span *> spans;
  for (size_t bytes = 0; bytes < kBlocks; bytes += HZ3_SLICE_BYTES) spans.push_back(Alloc(kSliceClass));
  hz3_pages.retention.limit_bytes = 2 * kBlocks;
  hz3_pages.retention.known_low_bytes = 0;
  for (; spans.size() > 64; spans.pop_back()) Free(spans.back());
  EXPECT_GT(Stats().dirty_bytes, 18 * HZ3_CHUNK_BYTES);
  hz3_pages.retention.known_low_bytes = SIZE_MAX;
  for (; !spans.empty(); spans.pop_back()) {
    size_t before = Stats().dirty_bytes;
    Free(spans.back());
    EXPECT_LE(before, Stats().dirty_bytes + kMost + HZ3_CHUNK_BYTES) << "a chunk is not divided further";
  }
  EXPECT_LE(Stats().dirty_bytes, size_t{HZ3_RETAIN_MIN_BYTES});
}

TEST(SpanHeap, TheLowestComesFirst) {
  std::mt19937 random(1);
  std::vector<hz3_span> spans(200);
  for (size_t i = 0; i < spans.size(); i++) spans[i].base = reinterpret_cast<char *>(i * HZ3_SLICE_BYTES);
  for (size_t most : {size_t{1}, size_t{2}, size_t{7}, spans.size()}) {
    hz3_span *top = nullptr;
    std::set<hz3_span *> in;  // in order of addresses, as their bases are
    for (int i = 0; i < 5000; i++) {
      hz3_span *span = &spans[random() % spans.size()];
      if (in.size() < most && in.insert(span).second) {
        hz3_span_heap_add(&top, span);
      } else if (!in.empty()) {
        ASSERT_EQ(hz3_span_heap_take(&top), *in.begin());
        in.erase(in.begin());
      }
      ASSERT_EQ(top == nullptr, in.empty());
    }
  }
}

TEST(Retention, ATickTakesHalfOfWhatIsIdleButNotMuch) {
  EXPECT_EQ(hz3_idle_keep(10, 0), 10u);
  EXPECT_EQ(hz3_idle_keep(10, 8), 6u);
  EXPECT_EQ(hz3_idle_keep(3, 8), 0u) << "some was taken since";
  EXPECT_EQ(hz3_idle_keep(1000 * HZ3_MIB, 1000 * HZ3_MIB), 968 * HZ3_MIB);
}

TEST(Retention, AnExcessMayWait) {
  const size_t kLimit = HZ3_RETAIN_MIN_BYTES, kKeep = 5 * kLimit;
  hz3_retention retention = HZ3_RETENTION_INIT;
  EXPECT_EQ(hz3_retention_keep(&retention, kLimit, kLimit), kLimit);
  EXPECT_EQ(retention.excess_since_ms, 0u);
  EXPECT_EQ(hz3_retention_keep(&retention, kLimit + 1, kLimit), kKeep);
  uint64_t since = retention.excess_since_ms -= 10;
  size_t keep = hz3_retention_keep(&retention, 10 * kLimit, kLimit);
  if (hz3_os_now_ms() - since < 100) {  // else the machine stood still
    EXPECT_EQ(keep, kKeep);
  }
  EXPECT_EQ(retention.excess_since_ms, since) << "the clock starts once";
  retention.excess_since_ms -= 90;
  EXPECT_EQ(hz3_retention_keep(&retention, kLimit + 1, kLimit), kLimit) << "it has waited for long enough";
  hz3_retention_keep(&retention, kLimit, kLimit);
  EXPECT_EQ(hz3_retention_keep(&retention, kLimit + 1, kLimit), kKeep) << "the next excess waits anew";
}

TEST(Retention, AnExcessMayWaitForATenthOfASecond) {
  const size_t kLimit = HZ3_RETAIN_MIN_BYTES;
  auto keep_after = [=](uint64_t ms) {
    hz3_retention retention = HZ3_RETENTION_INIT;
    return AtOneTime([&](uint64_t now) { retention.excess_since_ms = now - ms; },
                     [&] { return hz3_retention_keep(&retention, 10 * kLimit, kLimit); });
  };
  EXPECT_EQ(keep_after(99), 5 * kLimit);
  EXPECT_EQ(keep_after(100), kLimit);
}

// What was purged a second ago counts, and not a moment longer.
TEST(Retention, PurgesCountForASecond) {
  const size_t kLimit = HZ3_RETAIN_MIN_BYTES;
  hz3_retention retention = HZ3_RETENTION_INIT;
  auto after = [&](uint64_t ms, auto result) {
    return AtOneTime(
        [&](uint64_t now) {
          retention = HZ3_RETENTION_INIT;
          hz3_retention_note_purge(&retention, kLimit, 0);
          retention.last_purge_ms = now - ms;
        },
        result);
  };
  auto is_regretted = [&] { return hz3_retention_note_regret(&retention, 1); };
  auto keep = [&] { return hz3_retention_keep(&retention, 10 * kLimit, kLimit); };
  auto purged = [&] { return hz3_retention_note_purge(&retention, 1, 0), retention.recent_bytes; };
  EXPECT_TRUE(after(1000, is_regretted));
  EXPECT_FALSE(after(1001, is_regretted));
  EXPECT_EQ(after(1000, keep), 5 * kLimit - kLimit / 2);
  EXPECT_EQ(after(1001, keep), 5 * kLimit);
  EXPECT_EQ(after(1000, purged), kLimit + 1);
  EXPECT_EQ(after(1001, purged), 1u);
}

TEST(Retention, TheBoundHoldsForFiveSeconds) {
  const size_t kLearned = 2 * HZ3_RETAIN_MIN_BYTES;
  auto bound_after = [=](uint64_t ms) {
    hz3_retention retention = HZ3_RETENTION_INIT;
    return AtOneTime(
        [&](uint64_t now) {
          retention.limit_bytes = kLearned;
          retention.last_regret_ms = now - ms;
        },
        [&] { return hz3_retention_note_purge(&retention, 1, 0), retention.limit_bytes; });
  };
  EXPECT_EQ(bound_after(5000), kLearned);
  EXPECT_EQ(bound_after(5001), kLearned / 2);
}

// Or a burst would leave as much more behind as may wait, however much of it went before.
TEST(Retention, AfterAPurgeLessWaits) {
  const size_t kLimit = HZ3_RETAIN_MIN_BYTES, kPart = kLimit / 4;
  hz3_retention retention = HZ3_RETENTION_INIT;
  hz3_retention_note_purge(&retention, 2 * kPart, 0);
  EXPECT_EQ(hz3_retention_keep(&retention, 10 * kLimit, kLimit), 5 * kLimit - kPart);
  hz3_retention_note_purge(&retention, 10 * kLimit, 0);
  EXPECT_EQ(hz3_retention_keep(&retention, 10 * kLimit, kLimit), kLimit);
  retention.excess_since_ms = 0;
  retention.last_purge_ms -= 1100;
  EXPECT_EQ(hz3_retention_keep(&retention, 10 * kLimit, kLimit), 5 * kLimit) << "that was long ago";
}

TEST(Retention, GrowsByWhatIsWantedAgain) {
  const size_t kMin = HZ3_RETAIN_MIN_BYTES, kMax = HZ3_RETAIN_MAX_BYTES, kPart = kMin / 4;
  hz3_retention retention = HZ3_RETENTION_INIT;
  EXPECT_EQ(hz3_retention_limit(&retention, 0), kMin);
  EXPECT_FALSE(hz3_retention_note_regret(&retention, kPart)) << "nothing was purged yet";
  hz3_retention_note_purge(&retention, kPart, 0);
  hz3_retention_note_purge(&retention, kPart, 0);
  EXPECT_TRUE(hz3_retention_note_regret(&retention, kPart));
  EXPECT_EQ(hz3_retention_limit(&retention, 0), kMin + kPart);
  EXPECT_TRUE(hz3_retention_note_regret(&retention, kMin));
  EXPECT_EQ(hz3_retention_limit(&retention, 0), kMin + 2 * kPart) << "no more than was purged";
  EXPECT_FALSE(hz3_retention_note_regret(&retention, kMin));
  hz3_retention_note_purge(&retention, 2 * kMax, 0);
  EXPECT_TRUE(hz3_retention_note_regret(&retention, 2 * kMax));
  EXPECT_EQ(hz3_retention_limit(&retention, 0), kMax);
}

TEST(Retention, ExceedsTheMaximumOnlyForALoadThatGoesOnComingBack) {
  constexpr size_t kMax = HZ3_RETAIN_MAX_BYTES;
  hz3_retention retention = HZ3_RETENTION_INIT;
  auto come_back = [&retention](uint64_t seconds) {
    retention.coming_back_since_ms -= 1000 * seconds;
    for (int i = 0; i < 10; i++) {
      hz3_retention_note_purge(&retention, 4 * kMax, 0);
      hz3_retention_note_regret(&retention, 4 * kMax);
    }
    return hz3_retention_limit(&retention, 0);
  };
  const uint64_t start = hz3_os_now_ms();
  for (size_t maxima = 1; maxima <= 8; maxima *= 2) EXPECT_TRUE(come_back(maxima > 1) == maxima * kMax || hz3_os_now_ms() - start > 900) << maxima;
  EXPECT_EQ(come_back(1000), 8 * kMax);
  // Nor does what was learned long ago tell more, or take anything away.
  retention.last_regret_ms -= 5001;
  hz3_retention_note_purge(&retention, kMax, 0);
  hz3_retention_note_regret(&retention, kMax);
  EXPECT_TRUE(hz3_retention_limit(&retention, 0) == 4 * kMax || hz3_os_now_ms() - start > 900);
  while (retention.limit_bytes > HZ3_RETAIN_MIN_BYTES) {
    retention.last_regret_ms -= 5001;
    hz3_retention_note_purge(&retention, 1, 0);
  }
  const uint64_t again = hz3_os_now_ms();
  EXPECT_TRUE(come_back(0) == kMax || hz3_os_now_ms() - again > 900) << "it has to go on for as long again";
}

// What a load has come back from, it may keep its memory for; of a lower low nothing is known.
TEST(Retention, HoldsDownToTheKnownLow) {
  constexpr size_t kMin = HZ3_RETAIN_MIN_BYTES, kSwing = HZ3_RETAIN_MAX_BYTES - kMin, kLow = 100 * kMin;
  constexpr size_t kTolerance = std::max<size_t>(HZ3_RETAIN_MAX_BYTES / 8, kMin);
  hz3_retention retention = HZ3_RETENTION_INIT;
  hz3_retention_note_purge(&retention, kSwing / 2, kLow + kMin);
  hz3_retention_note_purge(&retention, kSwing / 2, kLow);
  EXPECT_EQ(hz3_retention_limit(&retention, kLow), kMin) << "it may never come back";
  hz3_retention_note_regret(&retention, kSwing);
  EXPECT_EQ(hz3_retention_limit(&retention, kLow), HZ3_RETAIN_MAX_BYTES);
  EXPECT_EQ(hz3_retention_limit(&retention, kLow - kTolerance), HZ3_RETAIN_MAX_BYTES) << "lows differ a little";
  EXPECT_EQ(hz3_retention_limit(&retention, kLow - kTolerance - 1), kMin);
  hz3_retention_note_purge(&retention, kMin, 0);
  EXPECT_EQ(hz3_retention_limit(&retention, 0), kMin);
  hz3_retention_note_regret(&retention, kMin);
  EXPECT_EQ(hz3_retention_limit(&retention, 0), HZ3_RETAIN_MAX_BYTES) << "one deep swing is enough";
}

TEST(Retention, TheLowestUseAtAnyOfThePurgesIsTheLow) {
  constexpr size_t kMin = HZ3_RETAIN_MIN_BYTES, kLow = 100 * kMin;
  hz3_retention retention = HZ3_RETENTION_INIT;
  hz3_retention_note_purge(&retention, kMin, kLow);
  hz3_retention_note_purge(&retention, kMin, 2 * kLow);
  hz3_retention_note_regret(&retention, 2 * kMin);
  EXPECT_EQ(retention.known_low_bytes, kLow);
}

TEST(Retention, LateUseIsNoRegret) {
  constexpr size_t kDeep = 0, kHigh = size_t{100} * HZ3_RETAIN_MIN_BYTES;
  hz3_retention retention = HZ3_RETENTION_INIT;
  hz3_retention_note_purge(&retention, HZ3_MIB, kDeep);
  retention.last_purge_ms -= 1001;
  EXPECT_FALSE(hz3_retention_note_regret(&retention, HZ3_MIB));
  EXPECT_EQ(retention.limit_bytes, size_t{HZ3_RETAIN_MIN_BYTES});
  hz3_retention_note_purge(&retention, HZ3_MIB, kDeep);
  retention.last_purge_ms -= 1001;
  hz3_retention_note_purge(&retention, 2 * HZ3_SLICE_BYTES, kHigh);
  EXPECT_TRUE(hz3_retention_note_regret(&retention, HZ3_MIB));
  EXPECT_EQ(hz3_retention_limit(&retention, kHigh), HZ3_RETAIN_MIN_BYTES + 2 * HZ3_SLICE_BYTES) << "the first purge is forgotten";
  EXPECT_EQ(hz3_retention_limit(&retention, kDeep), size_t{HZ3_RETAIN_MIN_BYTES}) << "and its low";
}

TEST(Retention, DecaysWithoutRegret) {
  hz3_retention retention = HZ3_RETENTION_INIT;
  hz3_retention_note_purge(&retention, HZ3_RETAIN_MAX_BYTES, 0);
  hz3_retention_note_regret(&retention, HZ3_RETAIN_MAX_BYTES);
  hz3_retention_note_purge(&retention, HZ3_MIB, 0);
  EXPECT_EQ(hz3_retention_limit(&retention, 0), size_t{HZ3_RETAIN_MAX_BYTES}) << "the last regret is recent";
  size_t expected = HZ3_RETAIN_MAX_BYTES;
  for (int i = 0; i < 30; i++) {
    retention.last_regret_ms -= 5001;
    for (int purges = 0; purges < 2; purges++) hz3_retention_note_purge(&retention, HZ3_MIB, 0);
    expected = std::max<size_t>(expected / 2, HZ3_RETAIN_MIN_BYTES);
    EXPECT_EQ(hz3_retention_limit(&retention, 0), expected);
  }
  EXPECT_EQ(retention.known_low_bytes, SIZE_MAX) << "the low is forgotten with the rest";
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their runtimes need address space of their own
[[noreturn]] void RunInLimitedAddressSpace() {
  rlimit limit = {size_t{1} << 30, size_t{1} << 30};
  setrlimit(RLIMIT_AS, &limit);
  bool works = true;
  hz3_span *last = nullptr;
  size_t spans = 0;
  for (hz3_span *span; (span = hz3_pages_alloc_span(kSixteenClass, 0, 1)) != nullptr; last = span, spans++) {
    char *base = span->base;
    works = works && hz3_pages_span_of(base + HZ3_MIB - 1) == span && hz3_tag_of(base) == -intptr_t{kSixteenClass} * kTagPerClass;
  }
  works = works && spans >= 900;  // of 1024: next to nothing is reserved
  hz3_pages_free_span(last);
  works = works && hz3_pages_alloc_span(1, 0, 1) != nullptr;
  if (!works) fprintf(stderr, "%zu spans\n", spans);
  _exit(works ? 0 : 1);
}

// Both locks: that of the slices, and that of whoever maps more.
[[noreturn]] void AllocWhileAForkHoldsTheLocks() {
  hz3_pages_fork_prepare();
  HZ3_REQUIRE(hz3_test::WaitsForALock([] { Stats(); }));
  hz3_lock_release_for_fork(&hz3_pages.lock);
  HZ3_REQUIRE(hz3_test::WaitsForALock([] { hz3_pages_alloc_span(kSliceClass, 0, 1); }));
  _exit(0);
}

TEST(PagesDeathTest, ForkHoldsEveryLock) { EXPECT_EXIT(AllocWhileAForkHoldsTheLocks(), testing::ExitedWithCode(0), ""); }

// Threadsafe style starts the program anew: there is no table yet.
TEST(PagesDeathTest, WorkUntilAddressSpaceEnds) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(RunInLimitedAddressSpace(), testing::ExitedWithCode(0), "");
}

// A big heap maps several chunks at once; where there is no room for so many, it maps fewer.
[[noreturn]] void GrowWhereOneChunkFits() {
  while (Stats().chunks < 32) HZ3_REQUIRE(hz3_pages_alloc_span(kSixteenClass, 0, 1) != nullptr);
  while (Stats().free_bytes > 0) HZ3_REQUIRE(hz3_pages_alloc_span(kSliceClass, 0, 1) != nullptr);
  const size_t chunks = Stats().chunks, limit_bytes = hz3_test::AddressSpaceBytes() + 2 * HZ3_CHUNK_BYTES - HZ3_MIB;
  rlimit limit = {limit_bytes, limit_bytes};
  HZ3_REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
  HZ3_REQUIRE(hz3_pages_alloc_span(kSliceClass, 0, 1) != nullptr && Stats().chunks == chunks + 1);
  _exit(0);
}

TEST(PagesDeathTest, MapsNoMoreChunksThanThereIsRoomFor) { EXPECT_EXIT(GrowWhereOneChunkFits(), testing::ExitedWithCode(0), ""); }

// Between the call that asks for the huge page and the next step, another thread offers all that is held back, as a trim does.
[[noreturn]] void OfferWhileTheHalfIsOffered() {
  HZ3_REQUIRE(hz3_pages_alloc_span(kSliceClass, 0, 1) != nullptr);
  int listener = hz3_test::ListenToCall(SYS_madvise);
  std::atomic<int> heard{0};
  std::thread other([&] {
    for (;; heard++) {
      hz3_test::HeardCall call(listener);
      hz3_first_chunk_offer(HZ3_CHUNK_SLICES);
      HZ3_REQUIRE((hz3_pages.first->free & HZ3_HIGH_HALF) == 0);
    }
  });
  HZ3_REQUIRE(hz3_first_chunk_offer_huge() && hz3_pages.held == 0);
  HZ3_REQUIRE((hz3_pages.first->free & HZ3_HIGH_HALF) == HZ3_HIGH_HALF);
  while (heard == 0) std::this_thread::yield();
  _exit(0);
}

TEST(PagesDeathTest, AHalfThatIsBeingOfferedIsNobodyElses) {
  if (HZ3_CHECKED) GTEST_SKIP() << "it has no access to it";
  EXPECT_EXIT(OfferWhileTheHalfIsOffered(), testing::ExitedWithCode(0), "");
}

// While a tick purges, another thread frees more: the tick gives back what was idle when it began, not that too.
[[noreturn]] void TickWhileOthersFree() {
  std::map<hz3_chunk *, std::vector<hz3_span *>> chunks;
  while (Stats().chunks < 7) {
    hz3_span *span = hz3_pages_alloc_span(kSliceClass, 0, 1);
    chunks[ChunkOf(span)].push_back(span);
  }
  std::vector<std::vector<hz3_span *>> whole;
  for (auto &[chunk, spans] : chunks) {
    if (spans.size() == HZ3_CHUNK_SLICES && chunk != hz3_pages.first) whole.push_back(spans);
  }
  HZ3_REQUIRE(whole.size() >= 4);
  hz3_pages.retention.limit_bytes = HZ3_RETAIN_MAX_BYTES;
  hz3_pages.retention.known_low_bytes = 0;
  auto free_chunks = [&](size_t first) {
    for (size_t i : {first, first + 1}) {
      for (hz3_span *span : whole[i]) hz3_pages_free_span(span);
    }
  };
  free_chunks(0);
  hz3_pages_purge_idle();  // now they are what nobody needed since
  HZ3_REQUIRE(Stats().dirty_bytes == 2 * HZ3_CHUNK_BYTES);
  int listener = hz3_test::ListenToCall(SYS_madvise);
  std::thread other([&] {
    for (bool is_first = true;; is_first = false) {
      hz3_test::HeardCall call(listener, true);
      if (is_first) free_chunks(2);
    }
  });
  hz3_pages_purge_idle();
  HZ3_REQUIRE(Stats().dirty_bytes == 3 * HZ3_CHUNK_BYTES);  // half of the two went
  _exit(0);
}

TEST(PagesDeathTest, ATickPurgesWhatWasIdle) {
  if (HZ3_RETAIN_MAX_BYTES < 8 * HZ3_CHUNK_BYTES) GTEST_SKIP() << "too little is retained";
  EXPECT_EXIT(TickWhileOthersFree(), testing::ExitedWithCode(0), "");
}

// Nothing can leave the address space, for there are too many maps.
[[noreturn]] void TrimWithoutUnmapping() {
  std::vector<hz3_span *> spans;
  for (int i = 0; i < 8; i++) {
    spans.push_back(hz3_pages_alloc_span(kSixteenClass, 0, 1));
    memset(spans[i]->base, 1, HZ3_MIB);
  }
  for (hz3_span *span : spans) hz3_pages_free_span(span);
  size_t mapped = Stats().mapped_bytes;
  KnowHugePages(true);  // so that purges leave the advice as it is
  for (hz3_span *span : spans) HZ3_REQUIRE(hz3_chunk_set_huge_locked(ChunkOf(span), HZ3_LOW_HALF));
  hz3_test::RefuseCall(SYS_munmap);
  hz3_pages_trim(true);
  for (hz3_span *span : spans) HZ3_REQUIRE(hz3_chunk_set_huge_locked(ChunkOf(span), 0));
  HZ3_REQUIRE(hz3_pages.advice_ends == 0);  // none was forgotten, nor counted twice
  HZ3_REQUIRE(Stats().mapped_bytes == mapped && Stats().free_bytes == mapped && Stats().dirty_bytes == 0);
  // All of it can be had again, clean, and is found again.
  for (size_t i = 0; i < spans.size(); i++) {
    hz3_span *span = hz3_pages_alloc_span(kSixteenClass, 0, 1);
    char *base = span->base;
    HZ3_REQUIRE(IsZero(base, HZ3_MIB) && hz3_pages_span_of(base) == span && hz3_tag_of(base) == -intptr_t{kSixteenClass} * kTagPerClass);
  }
  HZ3_REQUIRE(Stats().mapped_bytes == mapped);
  _exit(0);
}

TEST(PagesDeathTest, ChunksThatCannotBeUnmappedAreUsedAgain) {
  EXPECT_EXIT(TrimWithoutUnmapping(), testing::ExitedWithCode(0), "");
}

// Where the maps cannot be made ready nothing may be entered, and lookups go on giving nothing.
[[noreturn]] void ReserveWithoutMemory() {
  char *volatile absurd = reinterpret_cast<char *>(~uintptr_t{0});
  char *far = reinterpret_cast<char *>(uintptr_t{1} << 44);
  hz3_test::RefuseCall(SYS_mmap);
  HZ3_REQUIRE(!hz3_page_map_reserve(far, HZ3_CHUNK_BYTES) && !hz3_object_map_reserve(far, HZ3_CHUNK_BYTES));
  HZ3_REQUIRE(hz3_page_map_large_of(far) == nullptr && hz3_pages_span_of(far) == nullptr);
  HZ3_REQUIRE(hz3_object_map_entry(far) == 0 && hz3_object_map_entry(absurd) == 0);
  HZ3_REQUIRE(!hz3_page_map_reserve(reinterpret_cast<char *>(uintptr_t{1} << 60), 1));
  _exit(0);
}

// A chunk that no map can name would never be found again: neither the first nor a later one stays.
[[noreturn]] void AllocWithoutPageMap() {
  size_t before = hz3_test::AddressSpaceBytes();
  hz3_test::RefuseCall(SYS_mmap, sizeof(hz3_page_map_leaf));
  for (int i = 0; i < 3; i++) HZ3_REQUIRE(hz3_pages_alloc_span(1, 0, 1) == nullptr);
  HZ3_REQUIRE(Stats().mapped_bytes == 0 && hz3_test::AddressSpaceBytes() < before + HZ3_CHUNK_BYTES);
  _exit(0);
}

// Threadsafe style starts the program anew: the first chunk is still to come.
TEST(PagesDeathTest, WithoutAPageMapThereIsNoChunk) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(AllocWithoutPageMap(), testing::ExitedWithCode(0), "");
}

// Slices of the first chunk get access when they are used. Where the kernel refuses that, they stay free.
[[noreturn]] void AllocWithoutAccess() {
  hz3_span *span = hz3_pages_alloc_span(1, 0, 1);
  char *base = span->base, *next = base + HZ3_SLICE_BYTES;
  memset(base, 1, HZ3_SLICE_BYTES);
  hz3_pages_stats before = Stats();
  hz3_test::RefuseCall(SYS_mprotect);
  for (unsigned c : {1u, kSliceClass, kSixteenClass}) {
    HZ3_REQUIRE(hz3_pages_alloc_span(c, 0, 1) == nullptr);
    HZ3_REQUIRE(Stats().free_bytes == before.free_bytes && Stats().dirty_bytes == before.dirty_bytes);
    HZ3_REQUIRE(hz3_pages_span_of(next) == nullptr && hz3_tag_of(next) == 0);
  }
  // What has access already goes on serving.
  hz3_pages_free_span(span);
  HZ3_REQUIRE(hz3_pages_alloc_span(kSliceClass, 0, 1) == span && hz3_pages_span_of(base) == span);
  memset(base, 2, HZ3_SLICE_BYTES);
  _exit(0);
}

TEST(PagesDeathTest, SlicesWithoutAccessStayFree) {
  if (!HZ3_CHECKED) GTEST_SKIP() << "for the checked lane";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(AllocWithoutAccess(), testing::ExitedWithCode(0), "");
}

TEST(PagesDeathTest, MapsSayWhenTheyHaveNoMemory) { EXPECT_EXIT(ReserveWithoutMemory(), testing::ExitedWithCode(0), ""); }
#endif

[[noreturn]] void WidenTheWindow() {
  // A chunk far from the first one: the window must widen and keep the tags it has.
  hz3_span *first = hz3_pages_alloc_span(1, 0, 1);
  char *base = first->base;
  const struct hz3_tag_map *before = hz3_tag_map;
  char *far = base - (size_t{1} << 40);
  hz3_tag_map_cover(far, HZ3_CHUNK_BYTES);
  const uintptr_t below = reinterpret_cast<uintptr_t>(base) - before->base;
  bool works = below > before->slices * HZ3_SLICE_BYTES / 2;  // the kernel maps downwards
  works = works && hz3_tag_map != before && hz3_tag_of(base) == kTagPerClass && hz3_tag_of(far) == 0;
  hz3_lock_acquire(&hz3_pages.lock);
  hz3_tag_map_set(far, 2, 64);
  hz3_lock_release(&hz3_pages.lock);
  works = works && hz3_tag_of(far) == 64 && hz3_tag_of(far + HZ3_SLICE_BYTES) == 64 && hz3_tag_of(far + 2 * HZ3_SLICE_BYTES) == 0;
  // Too far for any window: nothing changes, lookups there go through the page map.
  before = hz3_tag_map;
  hz3_tag_map_cover(reinterpret_cast<char *>(HZ3_CHUNK_BYTES), HZ3_CHUNK_BYTES);
  works = works && hz3_tag_map == before && hz3_tag_of(base) == kTagPerClass;
  _exit(works ? 0 : 1);
}

TEST(PagesDeathTest, TagWindowWidensAndKeepsItsTags) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(WidenTheWindow(), testing::ExitedWithCode(0), "");
}

}  // namespace
