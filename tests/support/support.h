// SPDX-License-Identifier: Apache-2.0
//
// What the whole-library tests share: figures from /proc, seeded random numbers, blocks that carry a checkable
// pattern, and children under a time limit. The figure readers do not allocate, so they do not disturb what they read.
// Called by: every test under tests/.
#ifndef HZ3_TESTS_SUPPORT_SUPPORT_H_
#define HZ3_TESTS_SUPPORT_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// For threads and children, where a failed EXPECT would be lost: says where, then aborts.
#define REQUIRE(condition) \
  ((condition) ? (void)0 : ::hz3_test::require_failed(__FILE__, __LINE__, #condition))

namespace hz3_test {

[[noreturn]] void require_failed(const char* file, int line, const char* condition);

// xorshift64*: fast enough not to hide the allocator, and the same on every machine for one seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t next();
  uint64_t below(uint64_t limit) { return next() % limit; }

 private:
  uint64_t state_;
};

// HZ3_TEST_SEED, or one drawn from the clock; printed once, so that a failure can be replayed.
uint64_t seed();

// `normal` seconds, multiplied by HZ3_TEST_SCALE (a decimal number) where a longer or shorter run is wanted.
double seconds(double normal);

// `normal` iterations, multiplied likewise.
long scaled(long normal);

// Seconds since some fixed moment.
double now();

// Bytes of stack for a thread that needs little: 64 KiB, or the least that the machine allows.
size_t small_stack();

// A figure in kB of /proc/self/status, such as "RssAnon"; -1 where it is missing.
long status_kb(const char* field);

// Number of mappings of this process.
int map_count();

// Runs `body` in a forked child; "exit 0" if it returned, else "exit N", "signal N (name)" or "timeout".
std::string run_child(unsigned limit_seconds, const std::function<void()>& body);

// Runs a program with arguments likewise; its standard output and error go to *output where given.
std::string run_program(unsigned limit_seconds, const std::vector<std::string>& arguments, std::string* output = nullptr);

// A named body that this executable can run in a fresh process: SCENARIO(name) { ... } at namespace scope, then
// run_scenario("name", ...). It ends by returning from main, unless the body ends the process itself.
struct Scenario {
  Scenario(const char* name, void (*body)());
  const char* name;
  void (*body)();
  Scenario* next;
};
#define SCENARIO(name)                                                         \
  static void scenario_##name();                                               \
  static ::hz3_test::Scenario register_##name(#name, scenario_##name);         \
  static void scenario_##name()
std::string run_scenario(const char* name, unsigned limit_seconds, std::string* output = nullptr);

// Does what main does for every test: runs the scenario that the arguments name, else all tests.
int test_main(int argc, char** argv);

// The lane of the allocator this program runs on, from its build info; "none" on another allocator.
std::string lane();

// A pattern whose key depends on place, size and seed: a block that was shared, cut or moved does not verify. The first
// `length` bytes can be checked alone, and a moved block against the key of its old place.
uint64_t pattern_key(const void* block, size_t size, uint64_t seed);
void fill_pattern(void* block, size_t length, uint64_t key);
bool pattern_holds(const void* block, size_t length, uint64_t key);

}  // namespace hz3_test

#endif  // HZ3_TESTS_SUPPORT_SUPPORT_H_
