// SPDX-License-Identifier: Apache-2.0
//
// A libc without a key left for the hook at thread exit: threads share one heap then, and nobody else's key is used.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/churn.h"
#include "tests/support/support.h"

namespace {

int key_calls;  // the first comes from the first allocation of the process

}  // namespace

// NOLINTNEXTLINE: stands before libc's.
extern "C" int pthread_key_create(pthread_key_t *key, void (*destructor)(void *)) noexcept {
  if (key_calls++ == 0) return EAGAIN;
  static const auto real = reinterpret_cast<int (*)(pthread_key_t *, void (*)(void *))>(dlsym(RTLD_NEXT, "pthread_key_create"));
  return real(key, destructor);
}

namespace {

using hz3_test::Cell;
using hz3_test::Random;

TEST(ExitKey, ThreadsWorkWithoutAndLeaveOtherKeysAlone) {
  ASSERT_GT(key_calls, 0) << "nobody asked for a key before main";
  std::vector<pthread_key_t> keys;
  pthread_key_t key;
  while (pthread_key_create(&key, nullptr) == 0) keys.push_back(key);
  ASSERT_FALSE(keys.empty());
  for (int round = 0; round < 20; round++) {
    std::vector<Cell *> cells;
    std::thread([&] {
      Random random(round);
      for (int i = 0; i < 500; i++) cells.push_back(Cell::make(random));
      for (pthread_key_t k : keys) REQUIRE(pthread_getspecific(k) == nullptr);
    }).join();
    std::thread([&] {
      for (Cell *cell : cells) Cell::drop(cell);
    }).join();
  }
}

}  // namespace
