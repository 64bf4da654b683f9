// SPDX-License-Identifier: Apache-2.0
//
// Background load: threads that allocate, check, realloc and free without pause, partly each other's blocks, and do
// some stdio, so that locks of the allocator and of libc are held at any moment a test chooses to act.
// Called by: the process tests.
// Owns: its threads until it is destroyed; every block it made is freed then.
#ifndef HZ3_TESTS_SUPPORT_CHURN_H_
#define HZ3_TESTS_SUPPORT_CHURN_H_

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/support/support.h"

namespace hz3_test {

// A block that knows its size and checks itself; headed so that any thread can verify and free it.
struct Cell {
  size_t size;
  uint64_t key;

  static Cell* make(Random& random) {
    uint64_t draw = random.below(64);
    size_t extra = draw < 56 ? random.below(1500) : draw < 63 ? random.below(60000) : random.below(1500000);
    Cell* cell = static_cast<Cell*>(malloc(sizeof(Cell) + extra));
    REQUIRE(cell != nullptr);
    cell->size = extra;
    cell->key = pattern_key(cell, extra, 0);
    // Large blocks only at their ends: the load shall consist of allocator calls, not of memset.
    fill_pattern(cell + 1, extra < 512 ? extra : 512, cell->key);
    return cell;
  }
  static void check(const Cell* cell) {
    REQUIRE(pattern_holds(cell + 1, cell->size < 512 ? cell->size : 512, cell->key));
  }
  static void drop(Cell* cell) {
    if (cell == nullptr) return;
    check(cell);
    free(cell);
  }
};

class Churn {
 public:
  explicit Churn(int threads) {
    for (auto& slot : shared_) slot.store(nullptr);
    // Asked for here, not in the threads: a fork while one of them is the first to ask would leave the child waiting for it.
    const uint64_t first = seed();
    std::thread([] {}).join();  // the same for what a C++ library sets up with its first thread
    for (int i = 0; i < threads; i++) threads_.emplace_back([this, i, first] { run(static_cast<uint64_t>(i) + first); });
  }
  ~Churn() {
    stop_.store(true);
    for (auto& thread : threads_) thread.join();
    for (auto& slot : shared_) Cell::drop(slot.load());
  }
  // Until each thread has done its first two hundred allocations.
  void wait_until_all_work() const {
    while (working_ < threads_.size()) usleep(100);
  }
  Churn(const Churn&) = delete;
  Churn& operator=(const Churn&) = delete;

 private:
  static constexpr size_t kSlots = 256;

  void run(uint64_t number) {
    Random random(number);
    std::vector<Cell*> own(64, nullptr);
    for (bool is_first = true; !stop_.load(std::memory_order_relaxed); is_first = false) {
      for (int i = 0; i < 100; i++) {
        Cell*& slot = own[random.below(own.size())];
        Cell::drop(slot);
        slot = Cell::make(random);
        Cell::drop(shared_[random.below(kSlots)].exchange(Cell::make(random)));
      }
      working_ += is_first;
      FILE* file = fopen("/dev/null", "w");
      if (file == nullptr) continue;
      fprintf(file, "%f %d", 1.5, 7);
      fclose(file);
    }
    for (Cell* cell : own) Cell::drop(cell);
  }

  std::atomic<bool> stop_{false};
  std::atomic<size_t> working_{0};
  std::atomic<Cell*> shared_[kSlots];
  std::vector<std::thread> threads_;
};

}  // namespace hz3_test

#endif  // HZ3_TESTS_SUPPORT_CHURN_H_
