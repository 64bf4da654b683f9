// SPDX-License-Identifier: Apache-2.0
//
// A libc without memory for the value of the allocator's key at thread exit: such a thread shares a heap, and leaves
// none of its own behind.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <thread>

#include "gtest/gtest.h"
#include "tests/support/churn.h"
#include "tests/support/support.h"

namespace {

thread_local bool has_no_memory;
std::atomic<long> refusals;

}  // namespace

// NOLINTNEXTLINE: stands before libc's.
extern "C" int pthread_setspecific(pthread_key_t key, const void* value) noexcept {
  if (has_no_memory) {
    refusals++;
    return ENOMEM;
  }
  static const auto real = reinterpret_cast<int (*)(pthread_key_t, const void*)>(dlsym(RTLD_NEXT, "pthread_setspecific"));
  return real(key, value);
}

namespace {

using hz3_test::Cell;
using hz3_test::Random;

TEST(ExitValue, ThreadsWorkWithoutAndLeaveNothing) {
  constexpr long kThreads = 2000;
  auto run_threads = [] {
    for (long i = 0; i < kThreads; i++) {
      std::thread([i] {
        has_no_memory = true;
        Random random(static_cast<uint64_t>(i));
        Cell* cells[20];
        for (Cell*& cell : cells) cell = Cell::make(random);
        for (Cell* cell : cells) Cell::drop(cell);
      }).join();
    }
  };
  run_threads();
  ASSERT_EQ(refusals, kThreads) << "a thread asks once";
  long before = hz3_test::status_kb("RssAnon");
  run_threads();
  constexpr long kHeapKb = 8;  // two pages, without what it holds; the blocks may reach a few more huge pages than before
  EXPECT_LT(hz3_test::status_kb("RssAnon") - before, kThreads * kHeapKb);
}

}  // namespace
