// SPDX-License-Identifier: Apache-2.0
// What it is: system calls that fail on purpose, for tests of what the boxes do when the kernel refuses.
// Called by: unit tests, in a child that ends with the test (EXPECT_EXIT): a refusal cannot be taken back.
// Needs: seccomp, which asks for no rights.
#ifndef HZ3_BASE_REFUSE_TEST_H_
#define HZ3_BASE_REFUSE_TEST_H_

#include <errno.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace hz3_test {

// In a child: ends it with status 1 and says which line, unless the condition holds.
#define HZ3_REQUIRE(condition) ((condition) ? (void)0 : ::hz3_test::EndAt(__FILE__, __LINE__, #condition))

[[noreturn]] inline void EndAt(const char *file, int line, const char *condition) {
  dprintf(2, "%s:%d: failed: %s\n", file, line, condition);
  _exit(1);
}

inline size_t AddressSpaceBytes() {
  size_t pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  HZ3_REQUIRE(file != nullptr && fscanf(file, "%zu", &pages) == 1);
  fclose(file);
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The filter's file descriptor, if `flags` ask for one.
inline int InstallFilter(sock_filter *code, size_t length, unsigned flags) {
  sock_fprog program = {static_cast<unsigned short>(length), code};
  HZ3_REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  long installed = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
  HZ3_REQUIRE(installed >= 0);
  return static_cast<int>(installed);
}

// From now on every such call of this process fails; with `bytes`, only those whose second argument, which is the length of all
// memory calls, is that.
inline void RefuseCall(long number, uint32_t bytes = 0, uint32_t error = ENOMEM) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),  // the lower half, on a little-endian machine
      BPF_JUMP(bytes == 0 ? BPF_JMP | BPF_JGE | BPF_K : BPF_JMP | BPF_JEQ | BPF_K, bytes, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  InstallFilter(code, sizeof code / sizeof *code, 0);
}

// From now on such calls of this thread wait until another thread has heard them. Once the result is closed, they fail with ENOSYS.
inline int ListenToCall(long number) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return InstallFilter(code, sizeof code / sizeof *code, SECCOMP_FILTER_FLAG_NEW_LISTENER);
}

// The next such call. At the end of its life the caller gets ENOMEM, or, if it `may_go_on`, what the kernel says.
class HeardCall {
 public:
  explicit HeardCall(int listener, bool may_go_on = false) : listener_(listener), may_go_on_(may_go_on) {
    HZ3_REQUIRE(ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call_) == 0);
  }
  HeardCall(const HeardCall &) = delete;
  HeardCall &operator=(const HeardCall &) = delete;
  ~HeardCall() {
    seccomp_notif_resp answer{};
    answer.id = call_.id;
    if (may_go_on_) answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    else answer.error = -ENOMEM;
    HZ3_REQUIRE(ioctl(listener_, SECCOMP_IOCTL_NOTIF_SEND, &answer) == 0);
  }
  uintptr_t Argument(int index) const { return call_.data.args[index]; }

 private:
  int listener_;
  bool may_go_on_;
  seccomp_notif call_{};
};

// Whether the body has to wait for a lock. It runs in a thread of its own, which stays there for good if it does.
template <typename Body>
bool WaitsForALock(Body body) {
  static uint32_t end_of_body;  // called for where nobody waits
  std::atomic<int> listener{-1};
  std::thread([&listener, body] {
    listener = ListenToCall(SYS_futex);
    body();
    syscall(SYS_futex, &end_of_body, FUTEX_WAKE_PRIVATE, 0, nullptr, nullptr, 0);
  }).detach();
  while (listener == -1) std::this_thread::yield();
  return HeardCall(listener).Argument(0) != reinterpret_cast<uintptr_t>(&end_of_body);
}

}  // namespace hz3_test

#endif  // HZ3_BASE_REFUSE_TEST_H_
