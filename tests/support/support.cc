// SPDX-License-Identifier: Apache-2.0
//
// See support.h.
#include "tests/support/support.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "gtest/gtest.h"

// Weak, so that the same test can also be tried on another allocator.
extern "C" __attribute__((weak)) const char* hz3_version(void);

namespace hz3_test {
namespace {

// A list without allocation: scenarios register before main.
Scenario* scenarios;

double scale() {
  const char* text = getenv("HZ3_TEST_SCALE");
  double value = text ? atof(text) : 1.0;
  return value > 0 ? value : 1.0;
}

// Waits for `pid` at most `limit_seconds`; kills it afterwards.
std::string wait_for(pid_t pid, double deadline) {
  int status = 0;
  for (useconds_t pause = 50;; pause = pause < 5000 ? pause * 2 : pause) {
    pid_t done = waitpid(pid, &status, WNOHANG);
    if (done == pid) break;
    if (done < 0) return "lost";
    if (now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      return "timeout";
    }
    usleep(pause);
  }
  char text[64];
  if (WIFEXITED(status)) {
    snprintf(text, sizeof text, "exit %d", WEXITSTATUS(status));
  } else {
    snprintf(text, sizeof text, "signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
  }
  return text;
}

// Appends what the child writes until it closes the pipe or the deadline comes.
void collect(int fd, double deadline, std::string* output) {
  char buffer[4096];
  for (;;) {
    struct pollfd ready = {fd, POLLIN, 0};
    double left = deadline - now();
    if (left <= 0 || poll(&ready, 1, static_cast<int>(left * 1000) + 1) <= 0) return;
    ssize_t count = read(fd, buffer, sizeof buffer);
    if (count <= 0) return;
    output->append(buffer, static_cast<size_t>(count));
  }
}

}  // namespace

void require_failed(const char* file, int line, const char* condition) {
  dprintf(2, "%s:%d: failed: %s (pid %d)\n", file, line, condition, getpid());
  abort();
}

uint64_t Random::next() {
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return state_ * 0x2545f4914f6cdd1du >> 8;
}

uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = getenv("HZ3_TEST_SEED");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t drawn = text ? strtoull(text, nullptr, 10)
                          : static_cast<uint64_t>(t.tv_nsec) ^ static_cast<uint64_t>(t.tv_sec) << 20;
    printf("seed: HZ3_TEST_SEED=%llu\n", static_cast<unsigned long long>(drawn));
    fflush(stdout);
    return drawn;
  }();
  return value;
}

double seconds(double normal) { return normal * scale(); }

long scaled(long normal) {
  long value = static_cast<long>(static_cast<double>(normal) * scale());
  return value > 0 ? value : 1;
}

double now() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

size_t small_stack() { return std::max(size_t{64} << 10, static_cast<size_t>(PTHREAD_STACK_MIN)); }

long status_kb(const char* field) {
  char text[8192];
  int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t length = read(fd, text, sizeof text - 1);
  close(fd);
  if (length <= 0) return -1;
  text[length] = 0;
  size_t width = strlen(field);
  for (const char* line = text; line != nullptr; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (strncmp(line, field, width) == 0 && line[width] == ':') return atol(line + width + 1);
  }
  return -1;
}

int map_count() {
  char text[16384];
  int lines = 0;
  int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  for (ssize_t length; (length = read(fd, text, sizeof text)) > 0;) {
    for (ssize_t i = 0; i < length; i++) lines += text[i] == '\n';
  }
  close(fd);
  return lines;
}

std::string run_child(unsigned limit_seconds, const std::function<void()>& body) {
  fflush(nullptr);
  pid_t pid = fork();
  if (pid < 0) return "fork failed";
  if (pid == 0) {
    body();
    _exit(0);
  }
  return wait_for(pid, now() + limit_seconds);
}

std::string run_program(unsigned limit_seconds, const std::vector<std::string>& arguments, std::string* output) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "pipe failed";
  std::vector<char*> raw;
  for (const std::string& argument : arguments) raw.push_back(const_cast<char*>(argument.c_str()));
  raw.push_back(nullptr);
  fflush(nullptr);
  double deadline = now() + limit_seconds;
  pid_t pid = fork();
  if (pid < 0) return "fork failed";
  if (pid == 0) {
    if (output != nullptr) {
      dup2(ends[1], 1);
      dup2(ends[1], 2);
    }
    execv(raw[0], raw.data());
    _exit(127);
  }
  close(ends[1]);
  if (output != nullptr) collect(ends[0], deadline, output);
  close(ends[0]);
  return wait_for(pid, deadline);
}

Scenario::Scenario(const char* name_, void (*body_)()) : name(name_), body(body_), next(scenarios) { scenarios = this; }

std::string run_scenario(const char* name, unsigned limit_seconds, std::string* output) {
  return run_program(limit_seconds, {"/proc/self/exe", "--scenario", name}, output);
}

int test_main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "--scenario") == 0) {
    for (Scenario* scenario = scenarios; scenario != nullptr; scenario = scenario->next) {
      if (strcmp(scenario->name, argv[2]) != 0) continue;
      scenario->body();
      return 0;
    }
    dprintf(2, "no scenario %s\n", argv[2]);
    return 126;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

std::string lane() {
  if (hz3_version == nullptr) return "none";
  std::string text = hz3_version();
  size_t begin = text.find("lane=");
  if (begin == std::string::npos) return "unknown";
  begin += strlen("lane=");
  return text.substr(begin, text.find(' ', begin) - begin);
}

uint64_t pattern_key(const void* block, size_t size, uint64_t seed) {
  uint64_t value = reinterpret_cast<uintptr_t>(block) ^ size << 17 ^ seed;
  value ^= value >> 31;
  value *= 0x7fb5d329728ea185u;
  return value ^ value >> 27;
}

void fill_pattern(void* block, size_t length, uint64_t key) {
  unsigned char* bytes = static_cast<unsigned char*>(block);
  size_t i = 0;
  for (; i + 8 <= length; i += 8) {
    uint64_t value = key + i * 0x0101010101010101u;
    memcpy(bytes + i, &value, 8);
  }
  uint64_t last = key + i * 0x0101010101010101u;
  if (i < length) memcpy(bytes + i, &last, length - i);
}

bool pattern_holds(const void* block, size_t length, uint64_t key) {
  const unsigned char* bytes = static_cast<const unsigned char*>(block);
  for (size_t i = 0; i < length; i += 8) {
    uint64_t value = key + i * 0x0101010101010101u;
    if (memcmp(bytes + i, &value, length - i < 8 ? length - i : 8) != 0) return false;
  }
  return true;
}

}  // namespace hz3_test
