// SPDX-License-Identifier: Apache-2.0
//
// Threads that do everything at once for some seconds, on blocks that carry a checksum of their own place and size:
// all sizes, aligned and zeroed blocks, realloc, frees on other threads, threads that come and go, trims in between.
// HZ3_TEST_SEED replays the choices, HZ3_TEST_SCALE lengthens the run.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::Random;
using hz3_test::fill_pattern;
using hz3_test::now;
using hz3_test::pattern_holds;
using hz3_test::pattern_key;

struct Block {
  unsigned char* bytes = nullptr;
  size_t size = 0;
  uint64_t key = 0;
};

// Of a big block both ends are checked; the middle is only touched now and then.
constexpr size_t kChecked = 4096;

void mark(Block& block, uint64_t seed) {
  block.key = pattern_key(block.bytes, block.size, seed);
  fill_pattern(block.bytes, std::min(block.size, kChecked), block.key);
  if (block.size > 2 * kChecked) fill_pattern(block.bytes + block.size - kChecked, kChecked, ~block.key);
}

void check(const Block& block) {
  REQUIRE(pattern_holds(block.bytes, std::min(block.size, kChecked), block.key));
  if (block.size > 2 * kChecked) {
    REQUIRE(pattern_holds(block.bytes + block.size - kChecked, kChecked, ~block.key));
  }
}

size_t random_size(Random& random) {
  uint64_t draw = random.below(1000);
  if (draw < 700) return random.below(1025);
  if (draw < 930) return random.below(33000);
  if (draw < 990) return random.below(300000);
  return random.below(5000000);
}

Block make(Random& random) {
  Block block;
  block.size = random_size(random);
  uint64_t draw = random.below(20);
  if (draw == 0) {
    size_t alignment = size_t{16} << random.below(13);
    block.bytes = static_cast<unsigned char*>(memalign(alignment, block.size));
    REQUIRE(reinterpret_cast<uintptr_t>(block.bytes) % alignment == 0);
  } else if (draw < 4) {
    block.bytes = static_cast<unsigned char*>(calloc(block.size, 1));
    for (size_t i = 0; i < block.size; i += i < 2048 ? 1 : 20011) REQUIRE(block.bytes[i] == 0);
  } else if (draw < 8) {
    block.bytes = static_cast<unsigned char*>(::operator new(block.size));
  } else {
    block.bytes = static_cast<unsigned char*>(malloc(block.size));
  }
  REQUIRE(block.bytes != nullptr);
  REQUIRE(reinterpret_cast<uintptr_t>(block.bytes) % 16 == 0);
  REQUIRE(malloc_usable_size(block.bytes) >= block.size);
  mark(block, 0);
  return block;
}

void resize(Block& block, Random& random) {
  check(block);
  size_t size = random.below(2) ? random_size(random) + 1 : block.size + random.below(block.size + 16) / 4 + 1;
  unsigned char* moved = static_cast<unsigned char*>(realloc(block.bytes, size));
  REQUIRE(moved != nullptr);
  REQUIRE(pattern_holds(moved, std::min({block.size, size, kChecked}), block.key));
  block.bytes = moved;
  block.size = size;
  mark(block, 1);
}

void drop(Block& block) {
  if (block.bytes == nullptr) return;
  check(block);
  free(block.bytes);
  block = Block();
}

// Blocks on their way from thread to thread.
class Exchange {
 public:
  ~Exchange() {
    for (auto& shelf : shelves_) {
      for (Block& block : shelf.blocks) drop(block);
    }
  }
  void swap(Block& block, Random& random) {
    Shelf& shelf = shelves_[random.below(kShelves)];
    std::lock_guard<std::mutex> lock(shelf.mutex);
    std::swap(block, shelf.blocks[random.below(kDepth)]);
  }

 private:
  static constexpr size_t kShelves = 16, kDepth = 64;
  struct Shelf {
    std::mutex mutex;
    Block blocks[kDepth];
  };
  Shelf shelves_[kShelves];
};

// A life of about 8,000 operations; the thread's blocks die with it, except those it has given away.
void live(uint64_t number, Exchange& exchange) {
  Random random(number);
  std::vector<Block> own(300);
  for (int i = 0; i < 8000; i++) {
    Block& block = own[random.below(own.size())];
    uint64_t draw = random.below(100);
    if (block.bytes == nullptr || draw < 50) {
      drop(block);
      block = make(random);
    } else if (draw < 65) {
      resize(block, random);
    } else if (draw < 90) {
      exchange.swap(block, random);
    } else if (draw < 99 || random.below(100) != 0) {
      check(block);
    } else {
      malloc_trim(0);
    }
  }
  for (Block& block : own) drop(block);
}

void run_for(double duration, uint64_t threads) {
  Exchange exchange;
  std::atomic<uint64_t> lives{0};
  const uint64_t seed = hz3_test::seed();
  const double end = now() + duration;
  std::vector<std::thread> keepers;
  for (uint64_t t = 0; t < threads; t++) {
    keepers.emplace_back([&] {
      do {
        uint64_t number = lives++;
        std::thread([&] { live(seed + number, exchange); }).join();
      } while (now() < end);
    });
  }
  for (auto& keeper : keepers) keeper.join();
  printf("%llu threads lived\n", static_cast<unsigned long long>(lives));
}

// Each thread's blocks take some 14 MiB, and a container may have little memory on many cores. Unknown: 0.
unsigned cores() { return std::clamp(std::thread::hardware_concurrency(), 2u, 16u); }

TEST(Stress, AsManyThreadsAsCores) { run_for(hz3_test::seconds(5), cores()); }

TEST(Stress, MoreThreadsThanCores) { run_for(hz3_test::seconds(5), 4 * cores() + 3); }

}  // namespace
