// SPDX-License-Identifier: Apache-2.0
// What it is: tests of the texts with which the allocator ends the process.
#include "hz3/base/fatal.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

namespace {

const void *Pointer(uintptr_t address) { return reinterpret_cast<const void *>(address); }

TEST(FatalDeathTest, NamesWhatAndPointer) {
  EXPECT_DEATH(hz3_fatal(HZ3_FATAL_INVALID_FREE, Pointer(0x12ab), 0),
               "^hz3: fatal: free of a pointer that this allocator did not return: pointer 0x12ab\n$");
  EXPECT_DEATH(hz3_fatal(HZ3_FATAL_MISALIGNED_FREE, nullptr, 0),
               "^hz3: fatal: free of a pointer into the middle of a block: pointer 0x0\n$");
}

TEST(FatalDeathTest, NamesBlockSizeWhereKnown) {
  EXPECT_DEATH(hz3_fatal(HZ3_FATAL_DOUBLE_FREE, Pointer(~uintptr_t{0}), 1048576),
               "^hz3: fatal: double free: pointer 0xffffffffffffffff in a block of 1048576 bytes\n$");
}

TEST(FatalDeathTest, EndsByAbort) {
  EXPECT_EXIT(hz3_fatal(HZ3_FATAL_DOUBLE_FREE, nullptr, 16), testing::KilledBySignal(SIGABRT), "double free");
}

TEST(FatalDeathTest, OverlongTextIsCutNotOverrun) {
  EXPECT_DEATH(hz3_fatal(std::string(1000, 'x').c_str(), nullptr, 0), "^hz3: fatal: x{243}$");
}

TEST(FatalDeathTest, CheckNamesExpressionAndPlace) {
  int zero = 0;
  HZ3_CHECK(zero == 0);
  EXPECT_DEATH(HZ3_CHECK(zero == 1), "^hz3: fatal: internal check failed: zero == 1 at hz3/base/fatal_test\\.cc:[0-9]+\n$");
}

TEST(FatalDeathTest, AssertIsForDebugBuilds) {
  int zero = 0;
#ifdef NDEBUG
  HZ3_ASSERT(zero == 1);
#else
  EXPECT_DEATH(HZ3_ASSERT(zero == 1), "internal check failed: zero == 1");
#endif
  HZ3_ASSERT(zero == 0);
}

// More than a pipe holds, so that write(2) returns short counts or blocks in between.
TEST(WriteText, WritesAllOfALongText) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::string text(1 << 20, 'a'), got;
  text += "end";
  std::thread reader([&] {
    char part[4096];
    for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) got.append(part, static_cast<size_t>(n));
  });
  hz3_write_text(ends[1], text.c_str());
  close(ends[1]);
  reader.join();
  close(ends[0]);
  EXPECT_EQ(got, text);
}

// A thread that is to end where write(2) would let it: the text comes out all the same.
TEST(WriteText, IsNoCancellationPoint) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::atomic<bool> is_cancelled{false};
  std::thread writer([&] {
    while (!is_cancelled) continue;  // no cancellation point either
    hz3_write_text(ends[1], "whole");
    pthread_testcancel();
  });
  pthread_cancel(writer.native_handle());  // by another thread: glibc 2.36 ends one that cancels itself at once
  is_cancelled = true;
  writer.join();
  close(ends[1]);
  char got[16] = "";
  EXPECT_EQ(read(ends[0], got, sizeof got - 1), 5);
  EXPECT_STREQ(got, "whole");
  close(ends[0]);
}

TEST(WriteText, FailureKeepsErrno) {
  errno = 1234;
  hz3_write_text(-1, "nobody reads this");
  EXPECT_EQ(errno, 1234);
}

}  // namespace
