// SPDX-License-Identifier: Apache-2.0
//
// Every replaceable form of operator new and delete: which pairs work, what happens when memory runs out, and that the
// new handler is asked again until it helps, throws or goes away.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <new>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using std::align_val_t;
using std::nothrow;

volatile size_t max = SIZE_MAX;
constexpr align_val_t kWide{128};

struct NewForm {
  const char* name;
  void* (*make)(size_t size);
  bool array, aligned, throws;
};

const NewForm kNews[] = {
    {"plain", [](size_t n) { return ::operator new(n); }, false, false, true},
    {"array", [](size_t n) { return ::operator new[](n); }, true, false, true},
    {"nothrow", [](size_t n) { return ::operator new(n, nothrow); }, false, false, false},
    {"array_nothrow", [](size_t n) { return ::operator new[](n, nothrow); }, true, false, false},
    {"aligned", [](size_t n) { return ::operator new(n, kWide); }, false, true, true},
    {"array_aligned", [](size_t n) { return ::operator new[](n, kWide); }, true, true, true},
    {"aligned_nothrow", [](size_t n) { return ::operator new(n, kWide, nothrow); }, false, true, false},
    {"array_aligned_nothrow", [](size_t n) { return ::operator new[](n, kWide, nothrow); }, true, true, false},
};

struct DeleteForm {
  const char* name;
  void (*drop)(void* block, size_t size);
  bool array, aligned;
};

const DeleteForm kDeletes[] = {
    {"plain", [](void* p, size_t) { ::operator delete(p); }, false, false},
    {"array", [](void* p, size_t) { ::operator delete[](p); }, true, false},
    {"nothrow", [](void* p, size_t) { ::operator delete(p, nothrow); }, false, false},
    {"array_nothrow", [](void* p, size_t) { ::operator delete[](p, nothrow); }, true, false},
    {"sized", [](void* p, size_t n) { ::operator delete(p, n); }, false, false},
    {"array_sized", [](void* p, size_t n) { ::operator delete[](p, n); }, true, false},
    {"aligned", [](void* p, size_t) { ::operator delete(p, kWide); }, false, true},
    {"array_aligned", [](void* p, size_t) { ::operator delete[](p, kWide); }, true, true},
    {"aligned_nothrow", [](void* p, size_t) { ::operator delete(p, kWide, nothrow); }, false, true},
    {"array_aligned_nothrow", [](void* p, size_t) { ::operator delete[](p, kWide, nothrow); }, true, true},
    {"sized_aligned", [](void* p, size_t n) { ::operator delete(p, n, kWide); }, false, true},
    {"array_sized_aligned", [](void* p, size_t n) { ::operator delete[](p, n, kWide); }, true, true},
};

const size_t kSizes[] = {0, 1, 8, 16, 17, 100, 1000, 2048, 2049, 5000, 32768, 40000, 262144, 1 << 20, 3 << 20};

TEST(Operator, EveryNewPairsWithEveryDelete) {
  for (const NewForm& form : kNews) {
    for (const DeleteForm& drop : kDeletes) {
      if (form.aligned != drop.aligned || form.array != drop.array) continue;
      for (size_t size : kSizes) {
        for (int round = 0; round < 5; round++) {
          void* p = form.make(size);
          ASSERT_NE(p, nullptr) << form.name;
          ASSERT_EQ(reinterpret_cast<uintptr_t>(p) % (form.aligned ? 128 : 16), 0u) << form.name << " " << size;
          ASSERT_GE(malloc_usable_size(p), size);
          memset(p, 0x11, size);
          drop.drop(p, size);
        }
      }
      drop.drop(nullptr, 0);
    }
  }
}

// The operators and malloc share one heap, as programs silently rely on.
TEST(Operator, BlocksArePlainBlocks) {
  for (const NewForm& form : kNews) {
    void* p = form.make(100);
    p = realloc(p, 5000);
    ASSERT_NE(p, nullptr);
    free(p);
  }
  ::operator delete(malloc(100));
}

// libstdc++'s answer. The new handler could not help, so it is not asked.
TEST(Operator, WhatIsNoAlignmentIsRefused) {
  std::set_new_handler([] { throw 1; });
  for (size_t align : {size_t{0}, size_t{3}, size_t{24}, size_t{48}, size_t{3} << 20, size_t{max}}) {
    volatile size_t bytes = 1000;
    EXPECT_THROW(free(::operator new(bytes, align_val_t{align})), std::bad_alloc) << align;
    EXPECT_THROW(free(::operator new[](bytes, align_val_t{align})), std::bad_alloc) << align;
    EXPECT_EQ(::operator new(bytes, align_val_t{align}, nothrow), nullptr) << align;
    EXPECT_EQ(::operator new[](bytes, align_val_t{align}, nothrow), nullptr) << align;
  }
  std::set_new_handler(nullptr);
}

class Exhausted : public testing::TestWithParam<NewForm> {
 protected:
  void TearDown() override { std::set_new_handler(nullptr); }
};

INSTANTIATE_TEST_SUITE_P(All, Exhausted, testing::ValuesIn(kNews),
                         [](const testing::TestParamInfo<NewForm>& info) { return info.param.name; });

// Runs the form; 'p' a block, '0' NULL, 'b' bad_alloc, 'x' another exception.
char outcome_of(const NewForm& form, size_t size) {
  try {
    void* p = form.make(size);
    if (p == nullptr) return '0';
    free(p);
    return 'p';
  } catch (const std::bad_alloc&) {
    return 'b';
  } catch (...) {
    return 'x';
  }
}

TEST_P(Exhausted, OverflowingSizes) {
  for (size_t back : {0, 1, 7, 15, 16, 63, 64, 100, 127, 128, 129, 255, 4095, 4096, 65536, 1 << 22}) {
    EXPECT_EQ(outcome_of(GetParam(), max - back), GetParam().throws ? 'b' : '0') << back;
  }
  EXPECT_EQ(outcome_of(GetParam(), max / 2), GetParam().throws ? 'b' : '0');
  EXPECT_EQ(outcome_of(GetParam(), size_t{1} << 60), GetParam().throws ? 'b' : '0');
}

int handler_calls;

TEST_P(Exhausted, HandlerIsAskedUntilItGoesAway) {
  handler_calls = 0;
  std::set_new_handler([] {
    if (++handler_calls == 5) std::set_new_handler(nullptr);
  });
  EXPECT_EQ(outcome_of(GetParam(), max - 1000), GetParam().throws ? 'b' : '0');
  EXPECT_EQ(handler_calls, 5);
}

TEST_P(Exhausted, HandlerMayThrowBadAlloc) {
  handler_calls = 0;
  std::set_new_handler([] {
    handler_calls++;
    throw std::bad_alloc();
  });
  EXPECT_EQ(outcome_of(GetParam(), max - 1000), GetParam().throws ? 'b' : '0');
  EXPECT_EQ(handler_calls, 1);
}

// Leaves the process `bytes` more of address space. Twice: the first refusal makes the allocator give up reservations. It does so for what
// the limit itself would allow, and the kernel refuses that, since there are other mappings.
void limit_address_space(size_t bytes) {
  for (int round = 0; round < 2; round++) {
    struct rlimit limit = {(static_cast<rlim_t>(hz3_test::status_kb("VmSize")) << 10) + bytes, RLIM_INFINITY};
    REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
    REQUIRE(malloc(limit.rlim_cur) == nullptr);
  }
}

// The handler gives memory back under an address-space limit, and the same call then succeeds.
void* reserve;

TEST_P(Exhausted, HandlerThatFreesLetsTheCallSucceed) {
  EXPECT_EQ(hz3_test::run_child(60, [] {
    const size_t kBig = size_t{64} << 20;
    reserve = malloc(kBig);
    REQUIRE(reserve != nullptr);
    limit_address_space(16 << 20);
    handler_calls = 0;
    std::set_new_handler([] {
      REQUIRE(++handler_calls == 1);
      free(reserve);
    });
    void* p = GetParam().make(kBig - 4096);
    REQUIRE(p != nullptr && handler_calls == 1);
    memset(p, 1, kBig - 4096);
  }), "exit 0");
}

// Exhaustion by many blocks, as programs meet it; afterwards the heap is whole again.
TEST_P(Exhausted, RealExhaustionAndRecovery) {
  EXPECT_EQ(hz3_test::run_child(60, [] {
    limit_address_space(96 << 20);
    for (size_t size : {size_t{100}, size_t{10000}, size_t{1000000}}) {
      std::vector<void*> blocks;
      blocks.reserve((size_t{8} << 20) / sizeof(void*));
      char end = 0;
      while (end == 0 && blocks.size() < blocks.capacity()) {
        try {
          void* p = GetParam().make(size);
          if (p == nullptr) end = '0';
          else blocks.push_back(p);
        } catch (const std::bad_alloc&) {
          end = 'b';
        }
      }
      REQUIRE(end == (GetParam().throws ? 'b' : '0'));
      REQUIRE(blocks.size() * size > (size_t{48} << 20));
      for (void* p : blocks) free(p);
    }
  }), "exit 0");
}

TEST(Operator, NewExpressionsUnwind) {
  struct Thrower {
    char bytes[3000];
    Thrower() { throw 7; }
  };
  size_t before = mallinfo2().uordblks;
  for (int i = 0; i < 10000; i++) {
    try {
      delete new Thrower;
      FAIL();
    } catch (int value) {
      ASSERT_EQ(value, 7);
    }
  }
  EXPECT_LT(mallinfo2().uordblks, before + (1 << 20));
}

}  // namespace
