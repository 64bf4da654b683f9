// SPDX-License-Identifier: Apache-2.0
//
// Every way to end a process while threads are inside the allocator, and what runs last: atexit handlers, destructors
// of static and thread-local objects. Each ends with its own exit status, soon, and without a word on stderr.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/churn.h"
#include "tests/support/support.h"

namespace {

using hz3_test::Cell;
using hz3_test::Churn;
using hz3_test::Random;

// Threads that nobody stops.
void start_endless_churn() { (new Churn(3))->wait_until_all_work(); }

void allocate_a_little() {
  std::vector<std::string> texts;
  for (size_t i = 0; i < 200; i++) texts.push_back(std::string(i * 37, 'a'));
  void* p = malloc(3 << 20);
  REQUIRE(p != nullptr);
  free(p);
}

// Allocated before main, used and freed after it.
struct Static {
  std::vector<Cell*> cells;
  Static() {
    Random random(1);
    for (int i = 0; i < 100; i++) cells.push_back(Cell::make(random));
  }
  ~Static() {
    for (Cell* cell : cells) Cell::drop(cell);
    allocate_a_little();
  }
} static_object;

struct ThreadLocal {
  void* block = malloc(500);
  ~ThreadLocal() {
    free(block);
    allocate_a_little();
  }
};
thread_local ThreadLocal thread_local_object;

SCENARIO(return_from_main) { start_endless_churn(); }

SCENARIO(exit_from_main) {
  start_endless_churn();
  atexit(allocate_a_little);
  REQUIRE(thread_local_object.block != nullptr);
  exit(0);
}

SCENARIO(exit_from_thread) {
  start_endless_churn();
  atexit(allocate_a_little);
  std::thread([] {
    REQUIRE(thread_local_object.block != nullptr);
    exit(0);
  }).join();
}

SCENARIO(quick_exit) {
  start_endless_churn();
  at_quick_exit(allocate_a_little);
  quick_exit(0);
}

SCENARIO(underscore_exit) {
  start_endless_churn();
  _exit(0);
}

// The process goes on until its last thread has ended, without the main thread.
SCENARIO(main_thread_exits_first) {
  for (int t = 0; t < 3; t++) {
    std::thread([t] {
      Random random(static_cast<uint64_t>(t));
      for (int i = 0; i < 3000; i++) Cell::drop(Cell::make(random));
    }).detach();
  }
  REQUIRE(thread_local_object.block != nullptr);
  pthread_exit(nullptr);
}

SCENARIO(exit_from_atexit_registered_while_exiting) {
  start_endless_churn();
  atexit([] {
    allocate_a_little();
    atexit(allocate_a_little);
  });
  exit(0);
}

SCENARIO(exit_of_a_forked_child) {
  start_endless_churn();
  REQUIRE(hz3_test::run_child(30, [] {
    allocate_a_little();
    exit(0);
  }) == "exit 0");
}

SCENARIO(exit_in_the_middle_of_a_burst_of_frees) {
  static std::vector<Cell*> cells;
  static std::atomic<int> freed{0};
  Random random(2);
  for (int i = 0; i < 10000; i++) cells.push_back(Cell::make(random));
  std::thread([] {
    for (Cell* cell : cells) {
      Cell::drop(cell);
      freed++;
    }
  }).detach();
  while (freed < 100) sched_yield();
  // The vector itself must not be destroyed under the thread's feet.
  _exit(0);
}

SCENARIO(killed) {
  start_endless_churn();
  raise(SIGKILL);
}

class ExitTest : public testing::TestWithParam<const char*> {};

TEST_P(ExitTest, EndsCleanly) {
  for (long i = 0; i < hz3_test::scaled(30); i++) {
    std::string output;
    ASSERT_EQ(hz3_test::run_scenario(GetParam(), 20, &output), "exit 0") << output;
    std::string rest = output;
    if (rest.compare(0, 5, "seed:") == 0) rest.erase(0, rest.find('\n') + 1);
    ASSERT_EQ(rest, "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, ExitTest,
                         testing::Values("return_from_main", "exit_from_main", "exit_from_thread", "quick_exit",
                                         "underscore_exit", "main_thread_exits_first",
                                         "exit_from_atexit_registered_while_exiting", "exit_of_a_forked_child",
                                         "exit_in_the_middle_of_a_burst_of_frees"),
                         [](const testing::TestParamInfo<const char*>& info) { return std::string(info.param); });

TEST(ExitTest, KilledIsKilled) { EXPECT_EQ(hz3_test::run_scenario("killed", 20).substr(0, 8), "signal 9"); }

}  // namespace
