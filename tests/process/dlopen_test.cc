// SPDX-License-Identifier: Apache-2.0
//
// The shared library loaded by dlopen into a program that runs on libc's allocator: its own entry points work from old
// and new threads, across fork and unloading, and its thread-local storage fits the little that libc keeps spare.
// Needs: HZ3_LIBRARY and HZ3_TLS_FILLER name the libraries.
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/support.h"

namespace {

std::string library_path(const char* variable) {
  const char* path = getenv(variable);
  EXPECT_NE(path, nullptr) << variable;
  char full[4096];
  return path != nullptr && realpath(path, full) != nullptr ? full : "";
}

struct Library {
  void* handle;
  void* (*malloc)(size_t);
  void (*free)(void*);
  void* (*realloc)(void*, size_t);
  void* (*calloc)(size_t, size_t);
  size_t (*usable_size)(void*);

  explicit Library(int flags) : handle(dlopen(library_path("HZ3_LIBRARY").c_str(), flags)) {
    if (handle == nullptr) {
      ADD_FAILURE() << dlerror();
      return;
    }
    find(&malloc, "malloc");
    find(&free, "free");
    find(&realloc, "realloc");
    find(&calloc, "calloc");
    find(&usable_size, "malloc_usable_size");
  }
  template <typename Function>
  void find(Function* function, const char* name) {
    *function = reinterpret_cast<Function>(dlsym(handle, name));
    REQUIRE(*function != nullptr);
  }
  // Memory of this library, and not of the program's allocator.
  void use(uint64_t seed) const {
    hz3_test::Random random(seed);
    std::vector<void*> blocks;
    for (int i = 0; i < 500; i++) {
      size_t size = random.below(i % 50 == 0 ? 3000000 : 5000);
      void* p = i % 2 ? malloc(size) : calloc(1, size);
      REQUIRE(p != nullptr && usable_size(p) >= size);
      memset(p, 1, size);
      if (i % 3 == 0) p = realloc(p, size * 2 + 1);
      REQUIRE(p != nullptr);
      blocks.push_back(p);
    }
    for (void* p : blocks) free(p);
  }
};

TEST(Dlopen, IsItsOwnAllocator) {
  Library library(RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library.handle, nullptr);
  EXPECT_NE(reinterpret_cast<void*>(library.malloc), reinterpret_cast<void*>(&::malloc));
  library.use(1);
  dlclose(library.handle);
}

TEST(Dlopen, LoadUseUnloadRepeatedly) {
  for (uint64_t i = 0; i < 20; i++) {
    Library library(i % 2 ? RTLD_NOW : RTLD_LAZY);
    ASSERT_NE(library.handle, nullptr);
    library.use(i);
    std::thread([&] { library.use(i + 100); }).join();
    dlclose(library.handle);
  }
}

TEST(Dlopen, ThreadsOlderThanTheLibrary) {
  std::atomic<Library*> shared{nullptr};
  std::atomic<bool> unloaded{false};
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; t++) {
    threads.emplace_back([&, t] {
      while (shared == nullptr) sched_yield();
      shared.load()->use(t);
      done++;
      // These threads end after dlclose: nothing of the library may be called then that is no longer there.
      while (!unloaded) usleep(100);
    });
  }
  Library library(RTLD_NOW);
  ASSERT_NE(library.handle, nullptr);
  shared = &library;
  while (done < 4) usleep(100);
  dlclose(library.handle);
  unloaded = true;
  for (auto& thread : threads) thread.join();
}

TEST(Dlopen, ForkAfterLoadAndAfterUnload) {
  Library library(RTLD_NOW);
  ASSERT_NE(library.handle, nullptr);
  void* p = library.malloc(1000);
  EXPECT_EQ(hz3_test::run_child(20, [&] {
    library.free(p);
    library.use(3);
    std::thread([&] { library.use(4); }).join();
  }), "exit 0");
  library.free(p);
  dlclose(library.handle);
  EXPECT_EQ(hz3_test::run_child(20, [] { free(malloc(100)); }), "exit 0");
}

int find_tls(struct dl_phdr_info* info, size_t, void* found) {
  if (strstr(info->dlpi_name, "libhz3") == nullptr) return 0;
  *static_cast<long*>(found) = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type == PT_TLS) *static_cast<long*>(found) = static_cast<long>(info->dlpi_phdr[i].p_memsz);
  }
  return 1;
}

TEST(Dlopen, StaticTlsIsSmall) {
  Library library(RTLD_NOW);
  ASSERT_NE(library.handle, nullptr);
  long size = -1;
  dl_iterate_phdr(find_tls, &size);
  EXPECT_GE(size, 0);
  EXPECT_LE(size, 256);
  dlclose(library.handle);
}

// Other libraries have used the surplus up to its last 256 bytes and a filler's own alignment.
TEST(Dlopen, LoadsWithTheSurplusNearlyUsed) {
  EXPECT_EQ(hz3_test::run_child(60, [] {
    char directory[] = "/tmp/dlopen_test_XXXXXX";
    REQUIRE(mkdtemp(directory) != nullptr);
    std::vector<void*> fillers;
    for (int i = 0; i < 1000; i++) {
      std::string copy = std::string(directory) + "/filler" + std::to_string(i) + ".so";
      std::ofstream(copy, std::ios::binary) << std::ifstream(library_path("HZ3_TLS_FILLER"), std::ios::binary).rdbuf();
      void* handle = dlopen(copy.c_str(), RTLD_NOW);
      unlink(copy.c_str());
      if (handle == nullptr) break;
      fillers.push_back(handle);
    }
    rmdir(directory);
    REQUIRE(fillers.size() > 9 && fillers.size() < 1000);
    // libc takes static TLS back only from its end: the newest fillers go.
    for (int i = 0; i < 9; i++) {
      dlclose(fillers.back());
      fillers.pop_back();
    }
    Library library(RTLD_NOW);
    REQUIRE(library.handle != nullptr);
    library.use(7);
    std::thread([&] { library.use(8); }).join();
  }), "exit 0");
}

}  // namespace
