// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the small box: the common ones for every class, and its out-of-line bitmaps.
#include "hz3/small/small.h"

#include "hz3/base/metadata.h"
#include "hz3/pages/span_box_test.h"

const SpanBox kBox = {hz3_small_fetch,        hz3_small_release,      hz3_small_live_objects, hz3_small_spans,
                      hz3_small_fork_prepare, hz3_small_fork_release, 1};

INSTANTIATE_TEST_SUITE_P(Small, SpanBoxTest, testing::Range(1u, HZ3_SMALL_CLASS_LAST + 1u), ClassName);
// Death is slow, and the code the same for all: the smallest, one with a tail, one off the powers of two, the biggest.
INSTANTIATE_TEST_SUITE_P(Small, SpanBoxDeathTest, testing::Values(1u, 3u, 33u, unsigned{HZ3_SMALL_CLASS_LAST}), ClassName);

namespace {

TEST(SmallTest, BitmapsOfRetiredSpansAreRecycled) {
  std::vector<void *> objects(2048);
  size_t before = 0;
  for (int round = 0; round < 50; round++) {
    size_t got = hz3_small_fetch(2, objects.data(), objects.size());
    ASSERT_EQ(got, objects.size());
    hz3_small_release(2, objects.data(), got);
    ASSERT_EQ(hz3_small_spans(2), 0u);
    if (round == 0) before = hz3_metadata_bytes();
  }
  EXPECT_EQ(hz3_metadata_bytes(), before);
}

}  // namespace
