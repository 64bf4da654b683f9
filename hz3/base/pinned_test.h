// SPDX-License-Identifier: Apache-2.0
// What it is: a thread that stays on one CPU, for tests of what is kept for each CPU: the scheduler may move them at any time.
// Called by: unit tests.
// Needs: the thread that asks first may run on every CPU of the process.
#ifndef HZ3_BASE_PINNED_TEST_H_
#define HZ3_BASE_PINNED_TEST_H_

#include <sched.h>

#include <cstddef>
#include <cstdlib>
#include <vector>

namespace hz3_test {

// The CPUs of this process.
inline const std::vector<int> &Cpus() {
  static const std::vector<int> cpus = [] {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) abort();
    std::vector<int> all;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(cpu, &set)) all.push_back(cpu);
    return all;
  }();
  return cpus;
}

// Keeps this thread on one of them, from its beginning to its end, and the threads that it starts meanwhile for good.
class Pinned {
 public:
  explicit Pinned(size_t index = 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(Cpus().at(index), &one);
    if (sched_getaffinity(0, sizeof before_, &before_) != 0 || sched_setaffinity(0, sizeof one, &one) != 0) abort();
  }
  Pinned(const Pinned &) = delete;
  Pinned &operator=(const Pinned &) = delete;
  ~Pinned() { sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_;
};

}  // namespace hz3_test

#endif  // HZ3_BASE_PINNED_TEST_H_
