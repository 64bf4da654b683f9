// SPDX-License-Identifier: Apache-2.0
//
// Stands in for libFuzzer where the compiler has none: runs the files named as arguments, or else random programs for
// ten seconds, each from a seed that is printed if it fails.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <vector>

#include "tests/support/support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

volatile uint64_t current_program;
const char* volatile current_file;

// abort() comes from the checks, SIGSEGV from a broken heap.
void say_program(int signal_number) {
  char text[300];
  int length = current_file != nullptr
                   ? snprintf(text, sizeof text, "failed in %s\n", current_file)
                   : snprintf(text, sizeof text, "failed in program HZ3_TEST_SEED=%llu\n",
                              static_cast<unsigned long long>(current_program));
  (void)!write(2, text, std::min(sizeof text, static_cast<size_t>(length)));
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

std::vector<uint8_t> random_program(uint64_t seed) {
  hz3_test::Random random(seed);
  std::vector<uint8_t> program(1 + random.below(12000));
  // Small exponents are commoner: real programs live there.
  for (uint8_t& byte : program) byte = static_cast<uint8_t>(random.below(3) ? random.next() : random.below(16));
  return program;
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGABRT, say_program);
  signal(SIGSEGV, say_program);
  for (int i = 1; i < argc; i++) {
    std::ifstream file(argv[i], std::ios::binary);
    REQUIRE(file.good());
    current_file = argv[i];
    std::vector<uint8_t> program{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    LLVMFuzzerTestOneInput(program.data(), program.size());
  }
  if (argc > 1) return 0;
  long count = 0;
  for (double end = hz3_test::now() + hz3_test::seconds(10); hz3_test::now() < end; count++) {
    current_program = hz3_test::seed() + static_cast<uint64_t>(count);
    std::vector<uint8_t> program = random_program(current_program);
    LLVMFuzzerTestOneInput(program.data(), program.size());
  }
  printf("%ld programs\n", count);
  return count > 0 ? 0 : 1;
}
