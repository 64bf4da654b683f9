// SPDX-License-Identifier: Apache-2.0
//
// The other way round: the program runs on this allocator, and libraries that hold its blocks come and go.
// Needs: HZ3_HOLDER names the library holder.so.
#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/churn.h"
#include "tests/support/support.h"

namespace {

struct Holder {
  void* handle;
  void* (*give)(size_t);
  void (*take)(void*);
  size_t (*touch_thread_area)();

  Holder() {
    const char* path = getenv("HZ3_HOLDER");
    char full[4096];
    REQUIRE(path != nullptr && realpath(path, full) != nullptr);
    handle = dlopen(full, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(handle != nullptr);
    give = reinterpret_cast<void* (*)(size_t)>(dlsym(handle, "holder_give"));
    take = reinterpret_cast<void (*)(void*)>(dlsym(handle, "holder_take"));
    touch_thread_area = reinterpret_cast<size_t (*)()>(dlsym(handle, "holder_touch_thread_area"));
    REQUIRE(give && take && touch_thread_area);
  }
};

TEST(Unload, OneHeapForProgramAndLibrary) {
  for (int round = 0; round < 30; round++) {
    Holder holder;
    std::vector<void*> given;
    for (size_t size = 1; size < 3000000; size = size * 2 + 1) {
      void *ours = malloc(size), *theirs = holder.give(size);
      ASSERT_TRUE(ours && theirs);
      ASSERT_TRUE(malloc_usable_size(ours) >= size && malloc_usable_size(theirs) >= size);
      holder.take(ours);
      memset(theirs, 5, malloc_usable_size(theirs));
      given.push_back(theirs);
    }
    dlclose(holder.handle);
    for (void* p : given) free(p);
  }
}

// The library's thread-local area of a thread is a block too; libc frees it when the thread or the library goes.
TEST(Unload, ThreadAreasWhileOthersAllocate) {
  hz3_test::Churn churn(2);
  for (int round = 0; round < 100; round++) {
    Holder holder;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++) threads.emplace_back([&] { ASSERT_EQ(holder.touch_thread_area(), 2000u); });
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(holder.touch_thread_area(), 2000u);
    dlclose(holder.handle);
  }
}

}  // namespace
