// SPDX-License-Identifier: Apache-2.0
//
// Threads that come and go: blocks outlive them, destructors of thread-local data allocate and free to the very end,
// nothing grows per dead thread; cancellation, the smallest stacks, signals on an alternate stack.
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/churn.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::Cell;
using hz3_test::Random;
using hz3_test::scaled;
using hz3_test::status_kb;

// A thread without the weight of std::thread, optionally on a small stack.
template <typename Body>
void run_thread(Body body, size_t stack = hz3_test::small_stack()) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  REQUIRE(pthread_attr_setstacksize(&attributes, stack) == 0);
  pthread_t thread;
  auto entry = [](void* argument) -> void* {
    (*static_cast<Body*>(argument))();
    return nullptr;
  };
  REQUIRE(pthread_create(&thread, &attributes, entry, &body) == 0);
  REQUIRE(pthread_join(thread, nullptr) == 0);
  pthread_attr_destroy(&attributes);
}

TEST(Thread, BlocksOutliveTheirThread) {
  std::vector<Cell*> cells;
  for (uint64_t t = 0; t < 100; t++) {
    run_thread([&] {
      Random random(t);
      for (int i = 0; i < 300; i++) cells.push_back(Cell::make(random));
    });
  }
  // Freed by other short-lived threads, half of them, the rest here.
  for (int t = 0; t < 50; t++) {
    run_thread([&] {
      for (int i = 0; i < 300; i++) {
        Cell::drop(cells.back());
        cells.pop_back();
      }
    });
  }
  for (Cell* cell : cells) Cell::drop(cell);
}

long anonymous_kb() { return status_kb("RssAnon"); }
long anonymous_kb_after_trim() {
  malloc_trim(0);
  return anonymous_kb();
}

// What `look` sees after `rounds` more rounds of `body` than a first tenth, beyond what it saw before.
template <typename Body>
long growth_kb(long rounds, Body body, long (*look)() = anonymous_kb) {
  for (long i = 0; i < rounds / 10; i++) body(i);
  long before = look();
  for (long i = 0; i < rounds; i++) body(i);
  return look() - before;
}

TEST(Thread, ShortThreadsLeaveNothing) {
  size_t used = mallinfo2().uordblks;
  auto thread = [](long i) {
    run_thread([i] {
      Random random(static_cast<uint64_t>(i));
      Cell* cells[8];
      for (Cell*& cell : cells) cell = Cell::make(random);
      for (Cell* cell : cells) Cell::drop(cell);
    });
  };
  // A block of 1.5 MB that was freed, and the huge page that it may lie in, is kept at one moment and not at the next.
  EXPECT_LE(growth_kb(scaled(40000), thread), hz3_test::lane() == "checked" ? 6144 : 4096);
  // Random placement reaches more of its spans for longer.
  EXPECT_LE(growth_kb(scaled(40000), thread, anonymous_kb_after_trim), hz3_test::lane() == "checked" ? 6144 : 1024);
  EXPECT_LE(mallinfo2().uordblks, used + (64 << 10));
}

// libc's cache of stacks holds five of the usual size. What is beyond it frees the records of a thread that ended before, in one that is
// ending itself, and has no destructor to run any more.
TEST(Thread, DetachedThreadsThatAllocateNothingLeaveNothing) {
  static constexpr int kThreads = 40;
  static std::atomic<int> begun, ended;
  auto burst = [](long) {
    begun = ended = 0;
    for (int i = 0; i < kThreads; i++) {
      pthread_t thread;
      auto entry = [](void*) -> void* {  // not std::thread, which would free something first
        begun++;
        while (begun < kThreads) usleep(100);
        ended++;
        return nullptr;
      };
      REQUIRE(pthread_create(&thread, nullptr, entry, nullptr) == 0);
      pthread_detach(thread);
    }
    while (ended < kThreads) usleep(100);
    usleep(2000);
  };
  EXPECT_LE(growth_kb(scaled(200), burst), 4096);  // 9,000 and more where they leave heaps
}

// Blocks made by one short thread and freed by the next. Each round ends with nothing live and nothing kept, so that what is
// compared does not depend on which blocks they were.
TEST(Thread, HandedOverBlocksLeaveNothing) {
  static Cell* handed[16];
  constexpr long kThreads = 100;
  long grown = growth_kb(scaled(100), [](long round) {
    for (long i = 0; i < kThreads; i++) {
      run_thread([=] {
        Random random(static_cast<uint64_t>(round * kThreads + i));
        for (Cell*& cell : handed) {
          Cell::drop(cell);
          cell = i + 1 < kThreads ? Cell::make(random) : nullptr;
        }
      });
    }
    malloc_trim(0);
  });
  // One KiB lost by each thread would be 10,000. Each processor beyond the first two makes magazines of its own, 128 KiB at a time.
  const long more_processors = std::max(2l, static_cast<long>(std::thread::hardware_concurrency())) - 2;
  EXPECT_LE(grown, 1024 + 128 * more_processors);
}

// A key whose destructor allocates and sets itself again until libc gives up after its last iteration, and one whose
// value is a block.
pthread_key_t endless_key, block_key;
std::atomic<long> destructor_runs;

void allocate_and_return(void* value) {
  destructor_runs++;
  void* p = malloc(100);
  memset(p, 1, 100);
  p = realloc(p, 5000);
  free(p);
  delete new std::vector<int>(300);
  pthread_setspecific(endless_key, value);
}

void free_value(void* value) {
  free(value);
  free(malloc(70000));
}

struct LateUser {
  void* block = malloc(64);
  ~LateUser() {
    free(block);
    void* p = calloc(3, 1000);
    REQUIRE(p != nullptr);
    free(p);
  }
};

TEST(Thread, DestructorsAllocateToTheLastIteration) {
  ASSERT_EQ(pthread_key_create(&block_key, free_value), 0);
  ASSERT_EQ(pthread_key_create(&endless_key, allocate_and_return), 0);
  size_t used = mallinfo2().uordblks;
  long rounds = scaled(5000);
  long grown = growth_kb(rounds, [](long) {
    run_thread([] {
      pthread_setspecific(endless_key, &endless_key);
      static thread_local LateUser late;
      pthread_setspecific(block_key, malloc(100));
      REQUIRE(late.block != nullptr);
      // libc frees this thread's message buffer after all destructors.
      REQUIRE(strerror(98765) != nullptr);
      char* dropped = strdup("x");
      free(dropped);
    });
  });
  EXPECT_GE(destructor_runs, rounds * PTHREAD_DESTRUCTOR_ITERATIONS);
  EXPECT_LE(grown, 1024);
  EXPECT_LE(mallinfo2().uordblks, used + (64 << 10));
  pthread_key_delete(block_key);
  pthread_key_delete(endless_key);
}

// A thread whose first use of the allocator is in a destructor, after the allocator's own would have run.
TEST(Thread, FirstUseInADestructor) {
  static pthread_key_t key;
  ASSERT_EQ(pthread_key_create(&key, [](void*) {
    for (int i = 0; i < 100; i++) free(malloc(static_cast<size_t>(i) * 50));
  }), 0);
  long grown = growth_kb(scaled(3000), [](long) { run_thread([] { pthread_setspecific(key, &key); }); });
  EXPECT_LE(grown, 1024);
  pthread_key_delete(key);
}

void free_on_cancel(void* block) { free(block); }

void* work_until_cancelled(void* started) {
  static_cast<std::atomic<int>*>(started)->fetch_add(1);
  Random random(3);
  for (;;) {
    void* block = malloc(random.below(3000));
    pthread_cleanup_push(free_on_cancel, block);
    if (random.below(4) == 0) {
      FILE* file = fopen("/dev/null", "w");
      if (file != nullptr) fclose(file);
    }
    pthread_testcancel();
    pthread_cleanup_pop(1);
  }
}

TEST(Thread, CancelStorm) {
  std::atomic<int> started{0};
  auto wave = [&](long) {
    pthread_t threads[8];
    started = 0;
    for (pthread_t& thread : threads) {
      REQUIRE(pthread_create(&thread, nullptr, work_until_cancelled, &started) == 0);
    }
    while (started < 4) sched_yield();
    for (pthread_t thread : threads) pthread_cancel(thread);
    for (pthread_t thread : threads) {
      void* result = nullptr;
      REQUIRE(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    }
  };
  // fopen's own buffers may be lost by libc when cancelled inside: a few hundred bytes each.
  EXPECT_LE(growth_kb(scaled(60), wave), 4096);
}

// musl allows for stacks of 2 KiB, which a call of mallinfo2 would not fit on.
TEST(Thread, SmallestStacks) {
  for (int round = 0; round < 15; round++) {
    run_thread([] {
      for (size_t size = 1; size < (16u << 20); size = size * 5 / 4 + 1) {
        void* p = calloc(1, size);
        REQUIRE(p != nullptr);
        p = realloc(p, size * 2);
        REQUIRE(p != nullptr);
        void* q = memalign(4096, size);
        REQUIRE(q != nullptr);
        free(p);
        free(q);
      }
      struct mallinfo2 info = mallinfo2();
      REQUIRE(info.arena + info.hblkhd > 0);
      malloc_trim(0);
    }, std::max<size_t>(PTHREAD_STACK_MIN, 16384));
  }
}

// Signals land in the middle of allocations, on a stack that the allocator made; handlers do not allocate.
std::atomic<long> signals_seen;
thread_local unsigned char* alternate;

void handle_on_alternate_stack(int) {
  unsigned char local[512];
  unsigned char* here = static_cast<unsigned char*>(memset(local, 0x77, sizeof local));
  REQUIRE(here >= alternate && here < alternate + SIGSTKSZ * 4);
  signals_seen++;
}

TEST(Thread, SignalsOnAnAlternateStack) {
  struct sigaction action = {};
  action.sa_handler = handle_on_alternate_stack;
  action.sa_flags = SA_ONSTACK | SA_RESTART;
  ASSERT_EQ(sigaction(SIGUSR1, &action, nullptr), 0);
  std::atomic<bool> stop{false};
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 3; t++) {
    threads.emplace_back([&, t] {
      alternate = static_cast<unsigned char*>(malloc(static_cast<size_t>(SIGSTKSZ) * 4));
      stack_t stack = {};
      stack.ss_sp = alternate;
      stack.ss_size = static_cast<size_t>(SIGSTKSZ) * 4;
      REQUIRE(sigaltstack(&stack, nullptr) == 0);
      ready++;
      Random random(t);
      Cell* cells[50] = {};
      while (!stop) {
        Cell*& cell = cells[random.below(50)];
        Cell::drop(cell);
        cell = Cell::make(random);
      }
      for (Cell* cell : cells) Cell::drop(cell);
      stack.ss_flags = SS_DISABLE;
      REQUIRE(sigaltstack(&stack, nullptr) == 0);
      free(alternate);
    });
  }
  while (ready < 3) sched_yield();
  double end = hz3_test::now() + hz3_test::seconds(2);
  while (hz3_test::now() < end || signals_seen <= 100) {  // on a busy machine it takes longer
    for (auto& thread : threads) pthread_kill(thread.native_handle(), SIGUSR1);
    usleep(50);
  }
  // Ignored first, which also drops pending ones: none may arrive once a thread has given up its stack.
  signal(SIGUSR1, SIG_IGN);
  stop = true;
  for (auto& thread : threads) thread.join();
}

// More threads at a time than any cache table might expect, all alive at once.
TEST(Thread, ManyAtOnce) {
  constexpr int kThreads = 600;
  std::atomic<int> arrived{0};
  std::atomic<bool> go{false};
  std::vector<pthread_t> threads;
  struct Shared { std::atomic<int>* arrived; std::atomic<bool>* go; } shared{&arrived, &go};
  auto entry = [](void* argument) -> void* {
    auto* with = static_cast<Shared*>(argument);
    Random random(reinterpret_cast<uintptr_t>(&random));
    Cell* cell = Cell::make(random);
    ++*with->arrived;
    while (!*with->go) usleep(1000);
    Cell::drop(cell);
    return nullptr;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, hz3_test::small_stack());
  for (int i = 0; i < kThreads; i++) {
    pthread_t thread;
    ASSERT_EQ(pthread_create(&thread, &attributes, entry, &shared), 0);
    threads.push_back(thread);
  }
  while (arrived < kThreads) usleep(1000);
  go = true;
  for (pthread_t thread : threads) ASSERT_EQ(pthread_join(thread, nullptr), 0);
}

}  // namespace
