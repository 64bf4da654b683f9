// SPDX-License-Identifier: Apache-2.0
//
// Many blocks at once: mappings stay few, and nothing in the allocator is sized for fewer blocks than memory holds.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::map_count;

// The checked lane's guards take two mappings for each of the first 64 chunks of 4 MiB, and two for each 64 MiB above.
int most_mappings() { return hz3_test::lane() == "checked" ? 250 : 50; }

TEST(ManyBlocks, MappingsStayFew) {
  constexpr int kBlocks = 60000;
  hz3_test::Random random(hz3_test::seed());
  std::vector<unsigned char*> blocks(kBlocks);
  int before = map_count();
  for (auto& p : blocks) {
    p = static_cast<unsigned char*>(malloc(4096 + random.below(60 << 10)));
    ASSERT_NE(p, nullptr);
    *p = 1;
  }
  EXPECT_LE(map_count() - before, most_mappings());
  // Half of them freed at random places and given back: holes are no mappings.
  for (auto& p : blocks) {
    if (random.below(2) == 0) {
      free(p);
      p = nullptr;
    }
  }
  malloc_trim(0);
  EXPECT_LE(map_count() - before, most_mappings());
  for (auto& p : blocks) free(p);
}

// HZ3_TEST_SCALE=50 makes it a million. Each block keeps its number at both ends; only some are touched, or the test
// would need gigabytes.
TEST(ManyBlocks, ManyLiveLargeBlocks) {
  const size_t kSize = (1 << 20) + 70000;
  const size_t count = static_cast<size_t>(hz3_test::scaled(20000));
  std::vector<size_t*> blocks;
  for (size_t i = 0; i < count; i++) {
    size_t* p = static_cast<size_t*>(malloc(kSize));
    ASSERT_NE(p, nullptr) << i;
    if (i % 16 == 0) p[0] = p[kSize / sizeof(size_t) - 1] = i;
    blocks.push_back(p);
  }
  for (size_t i = 0; i < count; i += 16) {
    ASSERT_EQ(blocks[i][0], i);
    ASSERT_EQ(blocks[i][kSize / sizeof(size_t) - 1], i);
    ASSERT_GE(malloc_usable_size(blocks[i]), kSize);
  }
  // Freed in an order that leaves holes first, and filled again.
  for (size_t i = 0; i < count; i += 2) free(blocks[i]);
  for (size_t i = 0; i < count; i += 2) {
    blocks[i] = static_cast<size_t*>(malloc(kSize));
    ASSERT_NE(blocks[i], nullptr);
  }
  for (size_t* p : blocks) free(p);
}

TEST(ManyBlocks, OneBlockOfSixGiB) {
  // Untouched address space is legal even where memory is short; refusal is legal too, but only as ENOMEM.
  errno = 0;
  void* p = malloc(size_t{6} << 30);
  if (p != nullptr) {
    EXPECT_GE(malloc_usable_size(p), size_t{6} << 30);
    static_cast<char*>(p)[size_t{6} << 30 >> 1] = 1;
  } else {
    EXPECT_EQ(errno, ENOMEM);
  }
  free(p);
}

}  // namespace
