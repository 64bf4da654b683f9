// SPDX-License-Identifier: Apache-2.0
//
// Injected faults: the n-th memory system call (mmap, munmap, mremap, mprotect, madvise) of a workload fails, for every
// n, alone, with its successors, or with all that follow. The victim must see NULL and ENOMEM or nothing at all, work
// perfectly afterwards, and end as small as without faults.
// Needs: HZ3_VICTIM names the victim; a kernel that lets a process supervise another's system calls.
#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "gtest/gtest.h"
#include "tests/scarcity/victim.h"
#include "tests/support/support.h"

namespace {

// Calls number `first` to `last` fail.
struct Plan {
  long first, last;
};

struct Result {
  int status = -1;
  bool supported = true, timed_out = false;
  long calls = 0, injected = 0;
  std::string output;
};

int receive_listener(int socket) {
  char byte, control[CMSG_SPACE(sizeof(int))];
  struct iovec data = {&byte, 1};
  struct msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (recvmsg(socket, &message, 0) != 1) return -1;
  struct cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return -1;
  int listener;
  memcpy(&listener, CMSG_DATA(header), sizeof listener);
  return listener;
}

// Answers system calls until every task of the victim has gone. False if that took too long.
bool supervise(int listener, const Plan& plan, Result* result) {
  bool injecting = true;
  for (double deadline = hz3_test::now() + 30; hz3_test::now() < deadline;) {
    struct pollfd ready = {listener, POLLIN, 0};
    if (poll(&ready, 1, 1000) <= 0) continue;
    if ((ready.revents & POLLIN) == 0) return true;
    struct seccomp_notif request = {};
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &request) != 0) continue;
    struct seccomp_notif_resp response = {};
    response.id = request.id;
    response.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    if (request.data.nr == SYS_madvise && request.data.args[2] == kVictimMarker) {
      injecting = false;
    } else if (injecting) {
      result->calls++;
      if (result->calls >= plan.first && result->calls <= plan.last) {
        response.flags = 0;
        response.error = -ENOMEM;
        result->injected++;
      }
    }
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
  }
  return false;
}

pid_t start_victim(int control, int output) {
  pid_t pid = fork();
  if (pid != 0) return pid;
  const char* path = getenv("HZ3_VICTIM");
  dup2(output, 1);
  dup2(output, 2);
  if (control != 3) dup2(control, 3);
  execl(path, path, "faults", static_cast<char*>(nullptr));
  _exit(127);
}

Result run(const Plan& plan) {
  Result result;
  int control[2], output[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control) == 0 && pipe2(output, O_CLOEXEC) == 0);
  pid_t pid = start_victim(control[1], output[1]);
  REQUIRE(pid > 0);
  close(control[1]);
  close(output[1]);
  int listener = receive_listener(control[0]);
  result.supported = listener >= 0;
  if (listener >= 0) result.timed_out = !supervise(listener, plan, &result);
  if (result.timed_out) kill(pid, SIGKILL);
  char buffer[4096];
  for (ssize_t count; (count = read(output[0], buffer, sizeof buffer)) > 0;) {
    result.output.append(buffer, static_cast<size_t>(count));
  }
  waitpid(pid, &result.status, 0);
  close(control[0]);
  close(output[0]);
  if (listener >= 0) close(listener);
  return result;
}

class Faults : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(getenv("HZ3_VICTIM"), nullptr);
    clean_ = run({-1, -1});
    if (!clean_.supported) GTEST_SKIP() << "no supervision of system calls on this machine";
    ASSERT_EQ(clean_.status, 0) << clean_.output;
    ASSERT_EQ(sscanf(clean_.output.c_str(), "%ld %ld", &clean_size_, &clean_resident_), 2);
    ASSERT_GT(clean_.calls, 5);
  }

  // Every n, or as many of them as the time allows, evenly spread; `window` calls fail from each n on.
  void inject_everywhere(long window, long most_runs) {
    long step = std::max(1L, clean_.calls / hz3_test::scaled(most_runs));
    long runs = 0, runs_with_faults = 0, injected = 0;
    for (long n = 1 + static_cast<long>(hz3_test::seed() % static_cast<uint64_t>(step)); n <= clean_.calls; n += step) {
      Result result = run({n, n + window - 1});
      runs++;
      runs_with_faults += result.injected > 0;
      injected += result.injected;
      ASSERT_FALSE(result.timed_out) << "call " << n << " of " << clean_.calls;
      ASSERT_EQ(result.status, 0) << "call " << n << " of " << clean_.calls << ": " << result.output;
      long size = 0, resident = 0;
      ASSERT_EQ(sscanf(result.output.c_str(), "%ld %ld", &size, &resident), 2) << result.output;
      EXPECT_LE(size, clean_size_ + spare_size_) << "call " << n;
      EXPECT_LE(resident, clean_resident_ + spare_resident_) << "call " << n;
    }
    printf("%ld faults injected over %ld calls, in %ld of %ld runs\n", injected, clean_.calls, runs_with_faults, runs);
    RecordProperty("injected", static_cast<int>(injected));
    EXPECT_GE(4 * runs_with_faults, runs);  // some make fewer calls than the run without faults did
  }

  Result clean_;
  long clean_size_ = 0, clean_resident_ = 0;
  // KiB more than without failures. Each of the two threads may lose the address space of one block, if the kernel first
  // gives a mapping that is not aligned and then refuses to take it back; and a huge page that was touched, if pages were not
  // moved there, since the kernel may have unmapped it. 2 MiB more may be resident.
  long spare_size_ = 2 * 48 << 10, spare_resident_ = 3 * 2048;
};

TEST_F(Faults, OneCallFails) { inject_everywhere(1, 250); }

TEST_F(Faults, FiveCallsFail) { inject_everywhere(5, 60); }

TEST_F(Faults, AllFurtherCallsFail) {
  // The checked lane may lose what it can neither make accessible nor give back (docs/reliability.md).
  std::string lane;
  ASSERT_EQ(hz3_test::run_program(20, {getenv("HZ3_VICTIM"), "lane"}, &lane), "exit 0") << lane;
  if (lane == "checked\n") spare_size_ = spare_resident_ = 1 << 30;
  inject_everywhere(1000000, 100);
}

}  // namespace
