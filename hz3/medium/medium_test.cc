// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the medium box: the common ones for every class, and what it knows about zeroed memory.
#include "hz3/medium/medium.h"

#include "hz3/pages/span_box_test.h"

namespace {

size_t FetchAndForget(unsigned, unsigned size_class, void **out, size_t count) {
  bool is_clean;
  return hz3_medium_fetch(size_class, out, count, &is_clean);
}

const unsigned kFirst = HZ3_SMALL_CLASS_LAST + 1, kLast = HZ3_CLASS_COUNT - 1;

}  // namespace

const SpanBox kBox = {FetchAndForget,   hz3_medium_release,      hz3_medium_purge,        hz3_medium_purge_sparse, hz3_medium_use,
                      hz3_medium_fork_prepare, hz3_medium_fork_release, kFirst};

INSTANTIATE_TEST_SUITE_P(Medium, SpanBoxTest, testing::Range(kFirst, kLast + 1), ClassName);
// Death and waiting are slow, and the code the same for all: many objects, a tail, two objects, one object.
INSTANTIATE_TEST_SUITE_P(Medium, SpanBoxDeathTest, testing::Values(kFirst, 61u, 77u, kLast), ClassName);
INSTANTIATE_TEST_SUITE_P(Medium, SpanBoxKeepTest, testing::Values(kFirst, 61u, 77u, kLast), ClassName);

namespace {

bool IsZero(const char *memory, size_t bytes) {
  return bytes == 0 || (memory[0] == 0 && memcmp(memory, memory + 1, bytes - 1) == 0);
}

class MediumCleanTest : public testing::TestWithParam<unsigned> {
 protected:
  void SetUp() override { hz3_pages_trim(true); }
};

TEST_P(MediumCleanTest, FreshMemoryIsCleanUsedMemoryIsNot) {
  unsigned c = GetParam();
  size_t bytes = hz3_size_classes[c].bytes;
  void *object;
  bool is_clean = false;
  ASSERT_EQ(hz3_medium_fetch(c, &object, 1, &is_clean), 1u);
  EXPECT_TRUE(is_clean);
  EXPECT_TRUE(IsZero(static_cast<char *>(object), bytes));
  memset(object, 0xff, bytes);
  hz3_medium_release(c, &object, 1);
  // The class keeps the span, or its slices are free and dirty now, unless so many were over the limit and were purged at once.
  hz3_pages_stats stats;
  hz3_pages_get_stats(&stats);
  ASSERT_EQ(hz3_medium_fetch(c, &object, 1, &is_clean), 1u);
  EXPECT_EQ(is_clean, stats.dirty_bytes == 0 && stats.kept_bytes == 0);
  hz3_medium_release(c, &object, 1);
  hz3_pages_trim(false);
  ASSERT_EQ(hz3_medium_fetch(c, &object, 1, &is_clean), 1u);
  EXPECT_TRUE(is_clean);
  EXPECT_TRUE(IsZero(static_cast<char *>(object), bytes));
  hz3_medium_release(c, &object, 1);
}

// Whatever happened before: clean means zero.
TEST_P(MediumCleanTest, CleanIsNeverALie) {
  unsigned c = GetParam();
  size_t bytes = hz3_size_classes[c].bytes, most = std::min<size_t>(3u * hz3_size_classes[c].objects, 40);
  std::mt19937 random(c);
  std::vector<void *> live, batch(most);
  size_t clean = 0;
  for (int i = 0; i < 200; i++) {
    bool is_clean;
    size_t got = live.size() > most ? 0 : hz3_medium_fetch(c, batch.data(), 1 + random() % (most / 2 + 1), &is_clean);
    for (size_t j = 0; j < got; j++) {
      ASSERT_TRUE(!is_clean || IsZero(static_cast<char *>(batch[j]), bytes)) << "round " << i;
      clean += is_clean;
      memset(batch[j], 0xff, bytes);
      live.push_back(batch[j]);
    }
    std::shuffle(live.begin(), live.end(), random);
    size_t back = random() % (live.size() + 1);
    if (back > 0) hz3_medium_release(c, &live[live.size() - back], back);
    live.resize(live.size() - back);
    if (random() % 20 == 0) hz3_pages_trim(false);
  }
  EXPECT_GT(clean, 0u);
  if (!live.empty()) hz3_medium_release(c, live.data(), live.size());
  EXPECT_EQ(hz3_medium_use(c).out, 0u);
}

INSTANTIATE_TEST_SUITE_P(Medium, MediumCleanTest, testing::Values(kFirst, 57u, 65u, 73u, 81u, kLast), ClassName);

}  // namespace
