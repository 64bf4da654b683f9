// SPDX-License-Identifier: Apache-2.0
//
// Every misuse that ends the process, one a scenario: the exact line, the pointer in it, and abort(). The table says
// what each lane promises; what a lane does not promise it is not asked.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

extern "C" {
void free_sized(void* block, size_t size);
void free_aligned_sized(void* block, size_t alignment, size_t size);
}

namespace {

// Names the pointer that the message must name. Through volatile, so that no compiler reasons about the misuse.
template <typename T>
T* misused(T* pointer) {
  dprintf(2, "misused 0x%zx\n", reinterpret_cast<uintptr_t>(pointer));
  T* volatile hidden = pointer;
  return hidden;
}

char* block_of(size_t size) {
  char* volatile p = static_cast<char*>(malloc(size));
  REQUIRE(p != nullptr);
  memset(p, 1, size);
  return p;
}

// Uses the class of `size` until whatever a cache holds of it has been to its span and back.
void churn_class(size_t size) {
  static void* blocks[20000];
  const size_t count = size < 4096 ? 20000 : 200;
  for (size_t i = 0; i < count; i++) blocks[i] = malloc(size);
  for (size_t i = 0; i < count; i++) free(blocks[i]);
  malloc_trim(0);
}

// --- pointers that never were blocks

char static_object[4096];

SCENARIO(free_of_stack) {
  char local[256];
  free(misused(local + 16));
}
SCENARIO(free_of_static) { free(misused(static_object + 64)); }
SCENARIO(free_of_function) { free(misused(reinterpret_cast<char*>(&block_of))); }
SCENARIO(free_of_mapping) {
  free(misused(static_cast<char*>(mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) + 4096));
}
SCENARIO(free_of_small_number) { free(misused(reinterpret_cast<char*>(uintptr_t{4096 + 16}))); }
SCENARIO(free_of_unmapped) { free(misused(reinterpret_cast<char*>(uintptr_t{0x123456789000}))); }
SCENARIO(free_of_non_canonical) { free(misused(reinterpret_cast<char*>(uintptr_t{0xdead5a5a5a5a5a50}))); }
SCENARIO(delete_of_static) { ::operator delete(misused(static_object + 128)); }
SCENARIO(realloc_of_stack) {
  char local[256];
  block_of(realloc(misused(local + 32), 100) != nullptr);
}
SCENARIO(usable_size_of_static) { block_of(malloc_usable_size(misused(static_object + 256))); }

// --- the same block twice

template <size_t kSize>
void free_twice_in_a_row() {
  char* p = misused(block_of(kSize));
  free(p);
  free(p);
}
SCENARIO(adjacent_double_free_small) { free_twice_in_a_row<100>(); }
SCENARIO(adjacent_double_free_tiny) { free_twice_in_a_row<8>(); }
SCENARIO(adjacent_double_free_medium) { free_twice_in_a_row<20000>(); }
SCENARIO(adjacent_double_free_run) { free_twice_in_a_row<300000>(); }
SCENARIO(adjacent_double_free_large) { free_twice_in_a_row<5000000>(); }
SCENARIO(adjacent_double_free_zero) { free_twice_in_a_row<0>(); }
SCENARIO(adjacent_double_delete) {
  char* p = misused(static_cast<char*>(::operator new(64)));
  ::operator delete(p);
  ::operator delete(p);
}
// The second free comes while the span still holds another block; it is gone when the next free takes the block up.
SCENARIO(double_free_of_what_is_gone_since) {
  char *p = misused(block_of(1900)), *neighbour = block_of(1900), *other = block_of(3000);
  free(p);
  malloc_trim(0);
  free(p);
  std::thread([=] {
    free(neighbour);
    malloc_trim(0);
  }).join();
  free(other);
}
// Between them a block of another class, and one behind them that puts the second into its bin.
SCENARIO(double_free_around_another) {
  char *p = misused(block_of(100)), *other = block_of(3000), *behind = block_of(3000);
  free(p);
  free(other);
  free(p);
  free(behind);
}

// Taken last, it is back in its bin at once, while another one waits.
SCENARIO(adjacent_double_free_of_what_was_taken_last) {
  free(block_of(100));
  char* p = misused(block_of(100));
  free(p);
  free(p);
}
// The place above the newest of the bin still holds what was taken from there: the same block.
SCENARIO(double_free_where_it_lay_before) {
  char *low = block_of(100), *p = block_of(100), *waits = block_of(100), *other = block_of(3000), *behind = block_of(3000);
  free(low);
  free(p);
  free(other);
  char *again = misused(block_of(100)), *low_again = block_of(100);
  free(again);
  free(behind);
  free(waits);
  free(again);
  free(low_again);
}

template <size_t kSize>
void free_twice_with_another_between() {
  char *p = block_of(kSize), *q = block_of(kSize);
  free(p);
  free(q);
  free(misused(p));
  malloc_trim(0);
  churn_class(kSize);
}
SCENARIO(separated_double_free_small) { free_twice_with_another_between<100>(); }
SCENARIO(separated_double_free_big_small) { free_twice_with_another_between<1500>(); }
SCENARIO(separated_double_free_medium) { free_twice_with_another_between<20000>(); }

// What the block's neighbours went through in between does not matter.
SCENARIO(double_free_after_reuse_of_neighbours) {
  char *left = block_of(100), *p = block_of(100), *right = block_of(100);
  free(p);
  free(left);
  free(right);
  for (int i = 0; i < 50; i++) free(block_of(100));
  free(misused(p));
  malloc_trim(0);
  churn_class(100);
}
SCENARIO(separated_double_free_large) {
  char *p = block_of(5000000), *q = block_of(5000000);
  free(p);
  free(q);
  free(misused(p));
}

SCENARIO(double_free_by_another_thread) {
  // One more block keeps the span alive: of a span that is gone nobody remembers which blocks were freed.
  char *p = block_of(200), *keeper = block_of(200);
  free(p);
  std::thread([p] { free(misused(p)); }).join();
  malloc_trim(0);
  churn_class(200);
  free(keeper);
}

// --- pointers into blocks

template <size_t kSize, size_t kOffset>
void free_inside() {
  char* p = block_of(kSize);
  free(misused(p + kOffset));
  malloc_trim(0);
  churn_class(kSize);
}
SCENARIO(interior_small) { free_inside<100, 16>(); }
SCENARIO(misaligned_small) { free_inside<100, 1>(); }
SCENARIO(off_by_eight_small) { free_inside<100, 8>(); }
SCENARIO(off_by_eight_medium) { free_inside<20000, 8>(); }
SCENARIO(interior_zero) { free_inside<0, 8>(); }
SCENARIO(interior_medium) { free_inside<20000, 4096>(); }
SCENARIO(interior_large) { free_inside<5000000, 65536>(); }
SCENARIO(interior_large_page) { free_inside<5000000, 4096>(); }
SCENARIO(realloc_interior) { block_of(realloc(misused(block_of(100) + 16), 200) != nullptr); }
SCENARIO(usable_size_interior) { block_of(malloc_usable_size(misused(block_of(100) + 16))); }

// --- use after free

SCENARIO(realloc_after_free) {
  char* p = block_of(100);
  free(p);
  block_of(realloc(misused(p), 200) != nullptr);
}
SCENARIO(usable_size_after_free) {
  char* p = block_of(100);
  free(p);
  block_of(malloc_usable_size(misused(p)));
}
SCENARIO(realloc_after_free_medium) {
  char* p = block_of(300000);
  free(p);
  block_of(realloc(misused(p), 200) != nullptr);
}
SCENARIO(realloc_after_free_large) {
  char* p = block_of(5000000);
  free(p);
  block_of(realloc(misused(p), 200) != nullptr);
}
SCENARIO(usable_size_after_free_large) {
  char* p = block_of(5000000);
  free(p);
  block_of(malloc_usable_size(misused(p)));
}
template <size_t kSize, size_t kOffset = 24, size_t kBytes = 1>
void write_after_free() {
  char* volatile p = misused(block_of(kSize));
  free(p);
  memset(p + kOffset, 1, kBytes);
  // Each free may push it out of where freed blocks are held back, and each malloc may then be given it.
  for (int i = 0; i < 20000; i++) free(block_of(kSize));
}
SCENARIO(write_after_free_small) { write_after_free<100>(); }
SCENARIO(write_after_free_medium) { write_after_free<20000>(); }
SCENARIO(write_after_free_start) { write_after_free<100, 0, 1>(); }
SCENARIO(write_after_free_middle) { write_after_free<128, 65, 1>(); }
SCENARIO(write_after_free_end) { write_after_free<100, 99, 1>(); }
SCENARIO(write_after_free_word) { write_after_free<16, 8, 8>(); }
SCENARIO(write_after_free_all) { write_after_free<3000, 0, 3000>(); }
SCENARIO(write_after_free_trimmed) {
  char* volatile p = misused(block_of(100));
  char* keeper = block_of(100);
  free(p);
  p[50] = 1;
  malloc_trim(0);
  free(keeper);
}

// --- writes around blocks

template <size_t kSize>
void write_behind() {
  char* volatile p = misused(block_of(kSize));
  p[kSize] = 6;  // every byte of a canary is odd
  free(p);
}
SCENARIO(overflow_tiny) { write_behind<1>(); }
SCENARIO(overflow_small) { write_behind<100>(); }
SCENARIO(overflow_full_class) { write_behind<112>(); }
SCENARIO(overflow_medium) { write_behind<20000>(); }
SCENARIO(overflow_large) { write_behind<5000001>(); }
SCENARIO(overflow_run) { write_behind<300000>(); }
SCENARIO(overflow_calloc) {
  char* volatile p = misused(static_cast<char*>(calloc(10, 10)));
  p[100] = 2;
  free(p);
}
SCENARIO(overflow_zero) {  // the byte that is written by mistake most often
  char* volatile p = misused(block_of(24));
  p[24] = 0;
  free(p);
}
template <size_t kBytes>
void write_before() {
  char* p = block_of(100);
  while (reinterpret_cast<uintptr_t>(p) % 65536 == 0) p = block_of(100);
  char* volatile hidden = misused(p);
  memset(hidden - kBytes, 6, kBytes);
  free(hidden);
}
SCENARIO(underflow_byte) { write_before<1>(); }
SCENARIO(underflow_word) { write_before<8>(); }
SCENARIO(overflow_seen_by_realloc) {
  char* volatile p = misused(block_of(100));
  p[100] = 6;
  block_of(realloc(p, 5000) != nullptr);
}

// --- frees that say something wrong about the block

SCENARIO(wrong_size_delete) { ::operator delete(misused(static_cast<char*>(::operator new(100))), 200); }
SCENARIO(wrong_size_free) { free_sized(misused(block_of(100)), 99); }
SCENARIO(wrong_size_zero) { free_sized(misused(block_of(0)), 1); }
SCENARIO(wrong_size_large) { free_sized(misused(block_of(5000000)), 4000000); }
SCENARIO(wrong_alignment) {
  free_aligned_sized(misused(static_cast<char*>(aligned_alloc(64, 100))), 128, 100);
}
SCENARIO(delete_of_array) { ::operator delete(misused(static_cast<char*>(::operator new[](100)))); }
SCENARIO(array_delete_of_object) { ::operator delete[](misused(static_cast<char*>(::operator new(100)))); }

const char kInvalid[] = "free of a pointer that this allocator did not return";
const char kInterior[] = "free of a pointer into the middle of a block";
const char kDouble[] = "double free";
const char kOverflow[] = "write past the end of a block";
const char kAfterFree[] = "write to a block after it was freed";
const char kUnderflow[] = "write before the start of a block";
const char kReallocFreed[] = "realloc of a block that was freed";
const char kSize[] = "sized free with a size that does not fit the block";

struct Misuse {
  const char* scenario;
  const char* in_release;  // NULL: not promised there
  const char* in_checked;
};

const Misuse kMisuses[] = {
    {"free_of_stack", kInvalid, kInvalid},
    {"free_of_static", kInvalid, kInvalid},
    {"free_of_function", kInvalid, kInvalid},
    {"free_of_mapping", kInvalid, kInvalid},
    {"free_of_small_number", kInvalid, kInvalid},
    {"free_of_unmapped", kInvalid, kInvalid},
    {"free_of_non_canonical", kInvalid, kInvalid},
    {"delete_of_static", kInvalid, kInvalid},
    {"realloc_of_stack", "realloc of a pointer that this allocator did not return",
     "realloc of a pointer that this allocator did not return"},
    {"usable_size_of_static", "malloc_usable_size of a pointer that this allocator did not return",
     "malloc_usable_size of a pointer that this allocator did not return"},
    {"adjacent_double_free_small", kDouble, kDouble},
    {"adjacent_double_free_tiny", kDouble, kDouble},
    {"double_free_around_another", kDouble, kDouble},
    {"adjacent_double_free_of_what_was_taken_last", kDouble, kDouble},
    {"double_free_where_it_lay_before", kDouble, kDouble},
    {"double_free_of_what_is_gone_since", kInvalid, kDouble},
    {"adjacent_double_free_medium", kDouble, kDouble},
    // Its address is no block's any more, and nobody remembers that it was.
    {"adjacent_double_free_run", kInvalid, kDouble},
    {"adjacent_double_free_large", kInvalid, kDouble},
    {"adjacent_double_free_zero", kDouble, kDouble},
    {"adjacent_double_delete", kDouble, kDouble},
    {"separated_double_free_small", kDouble, kDouble},
    {"separated_double_free_big_small", kDouble, kDouble},
    {"separated_double_free_medium", kDouble, kDouble},
    {"double_free_by_another_thread", kDouble, kDouble},
    {"double_free_after_reuse_of_neighbours", kDouble, kDouble},
    {"separated_double_free_large", kInvalid, kDouble},
    {"off_by_eight_small", kInterior, kInterior},
    {"off_by_eight_medium", kInterior, kInterior},
    {"interior_small", kInterior, kInterior},
    {"misaligned_small", kInterior, kInterior},
    {"interior_zero", kInterior, kInterior},
    {"interior_medium", kInterior, kInterior},
    {"interior_large", kInvalid, kInterior},
    {"interior_large_page", kInvalid, kInterior},
    {"realloc_interior", nullptr, "realloc of a pointer into the middle of a block"},
    {"usable_size_interior", nullptr, "malloc_usable_size of a pointer into the middle of a block"},
    {"realloc_after_free", nullptr, "realloc of a block that was freed"},
    {"realloc_after_free_medium", nullptr, kReallocFreed},
    // Its address is no block's any more.
    {"realloc_after_free_large", "realloc of a pointer that this allocator did not return", kReallocFreed},
    {"usable_size_after_free_large", "malloc_usable_size of a pointer that this allocator did not return",
     "malloc_usable_size of a block that was freed"},
    {"usable_size_after_free", nullptr, "malloc_usable_size of a block that was freed"},
    {"write_after_free_small", nullptr, kAfterFree},
    {"write_after_free_medium", nullptr, kAfterFree},
    {"write_after_free_start", nullptr, kAfterFree},
    {"write_after_free_middle", nullptr, kAfterFree},
    {"write_after_free_end", nullptr, kAfterFree},
    {"write_after_free_word", nullptr, kAfterFree},
    {"write_after_free_all", nullptr, kAfterFree},
    {"write_after_free_trimmed", nullptr, kAfterFree},
    {"overflow_tiny", nullptr, kOverflow},
    {"overflow_small", nullptr, kOverflow},
    {"overflow_full_class", nullptr, kOverflow},
    {"overflow_medium", nullptr, kOverflow},
    {"overflow_large", nullptr, kOverflow},
    {"overflow_run", nullptr, kOverflow},
    {"overflow_calloc", nullptr, kOverflow},
    {"overflow_zero", nullptr, kOverflow},
    {"underflow_byte", nullptr, kUnderflow},
    {"underflow_word", nullptr, kUnderflow},
    {"overflow_seen_by_realloc", nullptr, kOverflow},
    {"wrong_size_delete", nullptr, kSize},
    {"wrong_size_free", nullptr, kSize},
    {"wrong_size_zero", nullptr, kSize},
    {"wrong_size_large", nullptr, kSize},
    {"wrong_alignment", nullptr, "free with another alignment than the block was allocated with"},
    {"delete_of_array", nullptr, "delete of a block from new[], or delete[] of a block from new"},
    {"array_delete_of_object", nullptr, "delete of a block from new[], or delete[] of a block from new"},
};

std::vector<Misuse> promised() {
  std::vector<Misuse> list;
  for (const Misuse& misuse : kMisuses) {
    if (hz3_test::lane() == "checked" || misuse.in_release != nullptr) list.push_back(misuse);
  }
  return list;
}

class MisuseTest : public testing::TestWithParam<Misuse> {};

TEST_P(MisuseTest, EndsWithItsMessage) {
  const Misuse& misuse = GetParam();
  const std::string text = hz3_test::lane() == "checked" ? misuse.in_checked : misuse.in_release;
  std::string output;
  std::string outcome = hz3_test::run_scenario(misuse.scenario, 30, &output);
  EXPECT_EQ(outcome.substr(0, 8), "signal 6") << outcome << "\n" << output;
  std::smatch match;
  const std::regex form("misused (0x[0-9a-f]+)\nhz3: fatal: ([^\n]*): pointer (0x[0-9a-f]+)( in a block of [0-9]+ bytes)?\n");
  ASSERT_TRUE(std::regex_match(output, match, form)) << output;
  EXPECT_EQ(match[2], text);
  EXPECT_EQ(match[3], match[1]);
}

INSTANTIATE_TEST_SUITE_P(All, MisuseTest, testing::ValuesIn(promised()),
                         [](const testing::TestParamInfo<Misuse>& info) { return std::string(info.param.scenario); });

// Foreign memory is looked at by no lane, and never written: what looks like a block keeps its bytes.
SCENARIO(foreign_memory_is_untouched) {
  char* area = static_cast<char*>(mmap(nullptr, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  free(misused(area + 65536));
}

TEST(MisuseTest, ForeignMemoryIsUntouched) {
  std::string output;
  EXPECT_EQ(hz3_test::run_scenario("foreign_memory_is_untouched", 30, &output).substr(0, 8), "signal 6") << output;
  EXPECT_NE(output.find(kInvalid), std::string::npos) << output;
}

}  // namespace
