// SPDX-License-Identifier: Apache-2.0
//
// Limits on address space, data and locked memory, and a process with almost no mappings left: the memory that the
// limit leaves is really usable, for each size anew after the previous one was freed.
// Needs: HZ3_VICTIM names the program that works under the limit, HZ3_LIBRARY the library that is preloaded into it:
// a program that links the allocator brings the C++ runtime, whose mappings count as well.
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/support.h"

namespace {

struct Limit {
  const char* name;
  __rlimit_resource resource;
  size_t mebibytes;
};

std::string path_in(const char* variable) {
  const char* path = getenv(variable);
  EXPECT_NE(path, nullptr) << variable;
  char full[4096];
  return path != nullptr && realpath(path, full) != nullptr ? full : "";
}

// Runs the victim on the library, after `before` in the shell that becomes it.
std::string run_victim(const std::string& before, const std::vector<std::string>& arguments, std::string* output) {
  std::vector<std::string> command = {
      "/bin/sh", "-c", before + "LD_PRELOAD=" + path_in("HZ3_LIBRARY") + " exec \"$0\" \"$@\"", path_in("HZ3_VICTIM")};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return hz3_test::run_program(100, command, output);
}

// With a limit already in force when it starts.
std::string run_limited(const Limit& limit, const std::vector<std::string>& arguments, std::string* output) {
  // sh counts in KiB.
  return run_victim(std::string("ulimit -") + (limit.resource == RLIMIT_AS ? "v " : "d ") +
                        std::to_string(limit.mebibytes << 10) + " && ",
                    arguments, output);
}

// The part of the limit that blocks must reach. The checked lane spends on canaries, on a record of each object, and on
// freed blocks that are held back. Of 64 MiB a chunk more may be missing: it is in one start of a hundred, as many as put the
// heap across a multiple of 4 GiB, where the page map needs a second leaf, half a MiB; that it is those was not looked up.
double usable_fraction(size_t mebibytes) {
  std::string lane;
  EXPECT_EQ(run_victim("", {"lane"}, &lane), "exit 0") << lane;
  return (lane == "checked\n" ? 0.54 : 0.8) - (mebibytes <= 64 ? 0.05 : 0);
}

void expect_usable(const std::string& output, size_t sizes, size_t mebibytes) {
  const double fraction = usable_fraction(mebibytes);
  std::istringstream lines(output);
  size_t size = 0, bytes = 0, count = 0;
  while (lines >> size >> bytes) {
    count++;
    EXPECT_GE(static_cast<double>(bytes), fraction * static_cast<double>(mebibytes << 20))
        << "blocks of " << size << " bytes under " << mebibytes << " MiB";
  }
  EXPECT_EQ(count, sizes) << output;
}

const std::vector<std::string> kFill = {"fill", "600", "100", "5000", "70000", "1500000", "300"};

class LimitTest : public testing::TestWithParam<Limit> {};

TEST_P(LimitTest, MemoryIsReallyUsable) {
  std::string output;
  ASSERT_EQ(run_limited(GetParam(), kFill, &output), "exit 0") << output;
  expect_usable(output, kFill.size() - 1, GetParam().mebibytes);
}

INSTANTIATE_TEST_SUITE_P(All, LimitTest,
                         testing::Values(Limit{"as_64", RLIMIT_AS, 64}, Limit{"as_128", RLIMIT_AS, 128},
                                         Limit{"as_512", RLIMIT_AS, 512}, Limit{"data_64", RLIMIT_DATA, 64},
                                         Limit{"data_256", RLIMIT_DATA, 256}),
                         [](const testing::TestParamInfo<Limit>& info) { return info.param.name; });

// The limit comes after the allocator has started, as with programs that restrict themselves: what was reserved before
// counts against it, so a reservation must not eat it up.
TEST(Limit, SetByTheProgramItself) {
  std::vector<std::string> arguments = {"limit", "256"};
  arguments.insert(arguments.end(), kFill.begin() + 1, kFill.end());
  std::string output;
  ASSERT_EQ(run_victim("", arguments, &output), "exit 0") << output;
  expect_usable(output, kFill.size() - 1, 256);
}

// One block is not held back by the room that its old place takes while it moves, if it grows in small steps.
TEST(Limit, ReachedByOneBlockThatGrows) {
  const std::vector<std::string> arguments = {"grow", "8388608", "4000000"};
  for (const Limit& limit : {Limit{"as_512", RLIMIT_AS, 512}, Limit{"data_512", RLIMIT_DATA, 512}}) {
    std::string output;
    ASSERT_EQ(run_limited(limit, arguments, &output), "exit 0") << output;
    expect_usable(output, arguments.size() - 1, limit.mebibytes);
  }
}

// Nor what lies in the caches, even if no page of it can be given back.
TEST(Limit, RefusesWhenTheLastGapIsFilled) {
  for (const char* size : {"64", "300", "5000"}) {
    std::string output;
    ASSERT_EQ(run_limited({"as_128", RLIMIT_AS, 128}, {"gaps", size}, &output), "exit 0") << size << ": " << output;
  }
}

// Nobody is refused what others have mapped and not used yet.
TEST(Limit, ReachedByManyThreadsAtOnce) {
  const std::vector<std::string> arguments = {"crowd", "1024", "1000", "65536", "300000", "1200000", "65536"};
  std::string output;
  ASSERT_EQ(run_victim("", arguments, &output), "exit 0") << output;
  expect_usable(output, arguments.size() - 2, 1024);
}

TEST(Limit, AllMemoryLocked) {
  std::string output;
  std::string outcome = run_victim("", {"lock", "64"}, &output);
  if (outcome == "exit 77") GTEST_SKIP() << "this user may not lock memory";
  ASSERT_EQ(outcome, "exit 0") << output;
  long made = 0, locked_kb = 0;
  ASSERT_EQ(sscanf(output.c_str(), "%ld %ld", &made, &locked_kb), 2) << output;
  // Stacks, libraries and a margin; not a whole arena.
  EXPECT_LT(locked_kb, (made >> 10) * 3 / 2 + (48 << 10));
}

TEST(Limit, AlmostNoMappingsLeft) {
  std::string output;
  std::string outcome = run_victim("", {"maps"}, &output);
  if (outcome == "exit 77") GTEST_SKIP() << "the limit is too high to be reached";
  ASSERT_EQ(outcome, "exit 0") << output;
}

}  // namespace
