// SPDX-License-Identifier: Apache-2.0
// What it is: tests of who maps more memory, and who looks for it again.
#include "hz3/base/growth.h"

#include <gtest/gtest.h>

namespace {

TEST(Growth, WhoeverFoundNothingBeforeMoreWasMappedLooksAgain) {
  hz3_growth growth = HZ3_GROWTH_INIT(HZ3_RANK_PAGES_GROWTH);
  size_t before = hz3_growth_count(&growth);
  ASSERT_TRUE(hz3_growth_begin(&growth, before));
  EXPECT_TRUE(hz3_lock_is_mine(&growth.lock));
  hz3_growth_end(&growth, true);
  EXPECT_FALSE(hz3_growth_begin(&growth, before));
  EXPECT_EQ(growth.lock.holder, 0u) << "nobody waits for one who looks";
  ASSERT_TRUE(hz3_growth_begin(&growth, hz3_growth_count(&growth))) << "and finds nothing";
  hz3_growth_end(&growth, true);
  EXPECT_EQ(growth.lock.holder, 0u);
}

TEST(Growth, WhereNothingWasMappedThereIsNothingToLookFor) {
  hz3_growth growth = HZ3_GROWTH_INIT(HZ3_RANK_PAGES_GROWTH);
  size_t before = hz3_growth_count(&growth);
  ASSERT_TRUE(hz3_growth_begin(&growth, before));
  hz3_growth_end(&growth, false);
  ASSERT_TRUE(hz3_growth_begin(&growth, before));
  hz3_growth_end(&growth, false);
}

}  // namespace
