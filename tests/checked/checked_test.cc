// SPDX-License-Identifier: Apache-2.0
//
// The checked lane's own promises: exact usable sizes, freed blocks that are held back, random placement, pages behind
// and after large blocks that fault, and the misuses that only surroundings show. Skipped in the other lanes.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

constexpr size_t kSlice = 65536;
constexpr size_t kLarge = 5000000;

char* block_of(size_t size) {
  char* volatile p = static_cast<char*>(malloc(size));
  REQUIRE(p != nullptr);
  memset(p, 1, size);
  return p;
}

// A block that has a left neighbour of its class.
char* block_with_neighbour(size_t size) {
  for (;;) {
    char* p = block_of(size);
    if (reinterpret_cast<uintptr_t>(p) % kSlice != 0) return p;
  }
}

class CheckedTest : public testing::Test {
 protected:
  void SetUp() override {
    if (hz3_test::lane() != "checked") GTEST_SKIP() << "promised in the checked lane only";
  }

  static void expect_end(const char* scenario, const std::string& outcome, const std::string& text) {
    std::string output;
    EXPECT_EQ(hz3_test::run_scenario(scenario, 30, &output).substr(0, outcome.size()), outcome) << output;
    EXPECT_NE(output.find(text), std::string::npos) << output;
  }
};

SCENARIO(underflow) {
  char* volatile p = block_with_neighbour(100);
  p[-1] ^= 1;
  free(p);
}
TEST_F(CheckedTest, WriteBeforeABlock) { expect_end("underflow", "signal 6", "hz3: fatal: write before the start of a block"); }

SCENARIO(far_overflow) {
  char* volatile p = block_of(4096);
  p[4096 + 31] ^= 1;
  free(p);
}
TEST_F(CheckedTest, WriteFurtherBehindABlock) {
  expect_end("far_overflow", "signal 6", "hz3: fatal: write past the end of a block");
}

SCENARIO(wrong_aligned_delete) {
  void* volatile p = ::operator new(100, std::align_val_t(64));
  ::operator delete(p, std::align_val_t(128));
}
TEST_F(CheckedTest, DeleteWithAnotherAlignment) {
  expect_end("wrong_aligned_delete", "signal 6", "hz3: fatal: free with another alignment than the block was allocated with");
}

SCENARIO(plain_delete_of_aligned) {
  void* volatile p = ::operator new(100, std::align_val_t(64));
  ::operator delete(p);
}
TEST_F(CheckedTest, DeleteWithoutTheAlignment) {
  expect_end("plain_delete_of_aligned", "signal 6", "hz3: fatal: free with another alignment than the block was allocated with");
}

SCENARIO(touch_behind_large) {
  char* volatile p = block_of(kLarge);
  uintptr_t end = (reinterpret_cast<uintptr_t>(p) + kLarge + 4095) & ~uintptr_t{4095};
  *reinterpret_cast<volatile char*>(end) = 1;
}
TEST_F(CheckedTest, PageBehindALargeBlockFaults) { expect_end("touch_behind_large", "signal 11", ""); }

SCENARIO(touch_freed_large) {
  char* volatile p = block_of(kLarge);
  free(p);
  p[kLarge / 2] = 1;
}
TEST_F(CheckedTest, FreedLargeBlockFaults) { expect_end("touch_freed_large", "signal 11", ""); }

SCENARIO(read_what_was_shrunk) {
  char* volatile p = block_of(kLarge);
  REQUIRE(realloc(p, kLarge / 3) != nullptr);
  _exit(p[kLarge / 2] & 1);
}
TEST_F(CheckedTest, WhatABlockLosesFaults) { expect_end("read_what_was_shrunk", "signal 11", ""); }

// Too big to be copied: it stays where it is, and what it loses reads as zero.
SCENARIO(read_what_a_big_block_lost) {
  constexpr size_t kBig = 100000000;
  char* volatile p = block_of(kBig);
  char* shrunk = static_cast<char*>(realloc(p, kBig / 3));
  REQUIRE(shrunk == p && std::count(shrunk, shrunk + kBig / 3, 1) == static_cast<ptrdiff_t>(kBig / 3));
  _exit(p[kBig / 2]);
}
TEST_F(CheckedTest, WhatABigBlockLosesIsZero) { expect_end("read_what_a_big_block_lost", "exit 0", ""); }

SCENARIO(read_of_no_bytes) { _exit(*static_cast<volatile char*>(block_of(0)) & 1); }
SCENARIO(write_of_no_bytes) {
  char* volatile p = static_cast<char*>(calloc(0, 8));
  *p = 0;
}
SCENARIO(write_of_no_bytes_new) {
  char* volatile p = static_cast<char*>(::operator new[](0));
  *p = 1;
}
TEST_F(CheckedTest, ABlockOfNoBytesFaults) {
  expect_end("read_of_no_bytes", "signal 11", "");
  expect_end("write_of_no_bytes", "signal 11", "");
  expect_end("write_of_no_bytes_new", "signal 11", "");
}

// More than have addresses without access: the others are ordinary blocks.
TEST_F(CheckedTest, ManyBlocksOfNoBytes) {
  std::vector<void*> blocks(100000);
  for (int round = 0; round < 3; round++) {
    for (void*& p : blocks) {
      p = round == 1 ? calloc(0, 1) : malloc(0);
      ASSERT_NE(p, nullptr);
      ASSERT_EQ(malloc_usable_size(p), 0u);
    }
    std::vector<void*> sorted = blocks;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end());
    for (size_t i = 0; i < blocks.size(); i += 2) {
      blocks[i] = realloc(blocks[i], 24);
      memset(blocks[i], 1, 24);
    }
    for (void* p : blocks) free(p);
  }
}

// Spans of several chunks, neighbours in address space if nothing kept them apart; from the lowest of their blocks on,
// everything is written over for as long as it takes.
SCENARIO(overrun_of_spans) {
  char* lowest = nullptr;
  for (int i = 0; i < 60; i++) {
    char* p = block_of(1000000);
    if (lowest == nullptr || p < lowest) lowest = p;
  }
  for (volatile char* p = lowest; p < lowest + 4 * 1024 * 1024 + 4096; p += 64) *p = 1;
}
TEST_F(CheckedTest, OverrunOfSpansMeetsAGuard) { expect_end("overrun_of_spans", "signal 11", ""); }

bool is_accessible(uintptr_t address) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  bool is = write(ends[1], reinterpret_cast<const void*>(address), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return is;
}

// A program with a small heap: slices get access when they are used, and before the first of them is a MiB without.
SCENARIO(little_access) {
  constexpr uintptr_t kChunk = 64 * kSlice;
  uintptr_t chunk = reinterpret_cast<uintptr_t>(block_of(8)) / kChunk * kChunk;
  int accessible = 0;
  for (uintptr_t slice = chunk; slice < chunk + kChunk; slice += kSlice) accessible += is_accessible(slice);
  dprintf(2, "%d of 64 slices\n", accessible);
  REQUIRE(accessible >= 1 && accessible <= 40);
  for (uintptr_t page = chunk - (1 << 20); page < chunk; page += 4096) REQUIRE(!is_accessible(page));
  for (int i = 0; i < 8000; i++) block_of(1000);
  for (uintptr_t slice = chunk; slice < chunk + kChunk; slice += kSlice) REQUIRE(is_accessible(slice));
}
TEST_F(CheckedTest, MemoryThatWasNeverUsedFaults) { expect_end("little_access", "exit 0", "slices"); }

TEST_F(CheckedTest, UsableSizeIsWhatWasAskedFor) {
  for (size_t size : {0, 1, 15, 16, 17, 100, 4096, 20000, 300000, 1048576, 5000000}) {
    void* p = malloc(size);
    EXPECT_EQ(malloc_usable_size(p), size);
    memset(p, 0x5a, size);
    p = realloc(p, size + 3);
    EXPECT_EQ(malloc_usable_size(p), size + 3);
    free(p);
  }
}

TEST_F(CheckedTest, FreedBlocksAreHeldBack) {
  for (size_t size : {8, 100, 4096, 20000, 300000}) {
    void* p = malloc(size);
    uintptr_t freed = reinterpret_cast<uintptr_t>(p);
    free(p);
    std::vector<void*> others(8);
    for (void*& other : others) {
      other = malloc(size);
      EXPECT_NE(reinterpret_cast<uintptr_t>(other), freed) << size;
    }
    for (void* other : others) free(other);
  }
}

TEST_F(CheckedTest, NeighboursInTimeAreNotNeighboursInMemory) {
  std::vector<uintptr_t> blocks;
  for (int i = 0; i < 200; i++) blocks.push_back(reinterpret_cast<uintptr_t>(malloc(1000)));
  int adjacent = 0;
  for (size_t i = 1; i < blocks.size(); i++) {
    uintptr_t distance = std::max(blocks[i], blocks[i - 1]) - std::min(blocks[i], blocks[i - 1]);
    adjacent += distance <= 1024;
  }
  EXPECT_LT(adjacent, 100);  // all 199 where blocks are carved in order; about 30 in random order
  for (uintptr_t block : blocks) free(reinterpret_cast<void*>(block));
}

TEST_F(CheckedTest, ReusedMemoryIsZeroForCalloc) {
  for (int round = 0; round < 3000; round++) {
    size_t size = static_cast<size_t>(round) % 700 * (round % 7 == 0 ? 40 : 1);
    char* p = static_cast<char*>(calloc(1, size));
    ASSERT_TRUE(std::all_of(p, p + size, [](char c) { return c == 0; })) << size;
    memset(p, 0x77, size);
    free(p);
  }
}

}  // namespace
