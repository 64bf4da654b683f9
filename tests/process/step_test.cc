// SPDX-License-Identifier: Apache-2.0
//
// A thread goes through the allocator one instruction at a time, and after each another thread does something: it forks, and
// the child uses everything that it has inherited; or it allocates and frees itself. What chance finds once in a week (a fork
// between two stores that belong together) is found here soon. There is time for a stop at one instruction in hundreds only, by
// chance; HZ3_TEST_SCALE=1000 stops at every one.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "gtest/gtest.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::Random;
using hz3_test::scaled;

// ---- blocks, each of which knows its slot: of two slots that were given one block, the first to be looked at shows it ----

constexpr int kLate = 900, kOther = 1000, kChild = 2000, kSlots = 4000;  // below kOther: of the thread that is stepped
std::atomic<char*> blocks[kSlots];

uint64_t first_word(int slot, size_t bytes) { return static_cast<uint64_t>(slot) << 40 | bytes; }
uint64_t last_word(const char* block, int slot) { return reinterpret_cast<uintptr_t>(block) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(slot); }

void stamp(char* block, int slot, size_t bytes) {
  uint64_t first = first_word(slot, bytes), last = last_word(block, slot);
  memcpy(block + bytes - sizeof last, &last, sizeof last);
  memcpy(block, &first, sizeof first);
}

bool holds(const char* block, int slot) {
  uint64_t first, last;
  memcpy(&first, block, sizeof first);
  size_t bytes = first & ((1ull << 40) - 1);
  if (first != first_word(slot, bytes) || bytes > 8 << 20) return false;
  memcpy(&last, block + bytes - sizeof last, sizeof last);
  return last == last_word(block, slot);
}

void take(int slot, size_t bytes) {
  char* block = static_cast<char*>(malloc(bytes));
  REQUIRE(block != nullptr);
  stamp(block, slot, bytes);
  blocks[slot].store(block);
}

// Whoever takes it out of the slot frees it.
void drop(int slot) {
  char* block = blocks[slot].exchange(nullptr);
  if (block == nullptr) return;
  REQUIRE(holds(block, slot));
  free(block);
}

void resize(int slot, size_t bytes) {
  char* block = blocks[slot].exchange(nullptr);
  if (block == nullptr) return;
  REQUIRE(holds(block, slot));
  block = static_cast<char*>(realloc(block, bytes));
  REQUIRE(block != nullptr);
  stamp(block, slot, bytes);
  blocks[slot].store(block);
}

void check(int first, int end) {
  for (int slot = first; slot < end; slot++) {
    const char* block = blocks[slot].load();
    REQUIRE(block == nullptr || holds(block, slot));
  }
}

// ---- one instruction at a time ----

std::atomic<bool> is_busy;
sem_t go, has_passed;
void (*meanwhile)();
const char* stopped_at;

// Of the thread that is stepped.
long steps, stops, next_stop, mean_gap;
Random* gaps;
bool is_waiting;

// False if the other thread waits for a lock, as far as one can tell from here: this one has to go on, then.
bool passes_within(int rounds) {
  for (int i = 0; i < rounds; i++) {
    if (sem_trywait(&has_passed) == 0) return true;
    sched_yield();
  }
  return false;
}

#if defined(__x86_64__)
constexpr bool kCanStep = true;
constexpr uint64_t kTrapFlag = 0x100;

void set_stepping(bool on) {
  uint64_t flags = on ? kTrapFlag : 0;
  __asm__ volatile(
      "lea -128(%%rsp), %%rsp\n\t"  // below the red zone
      "pushfq\n\t"
      "andq %1, (%%rsp)\n\t"
      "orq %0, (%%rsp)\n\t"
      "popfq\n\t"
      "lea 128(%%rsp), %%rsp"
      :
      : "r"(flags), "r"(~kTrapFlag)
      : "cc", "memory");
}

const char* place_of(void* context) {
  return reinterpret_cast<const char*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
}
#else
constexpr bool kCanStep = false;
void set_stepping(bool) {}
const char* place_of(void*) { return nullptr; }
#endif

void on_step(int, siginfo_t*, void* context) {
  steps++;
  if (is_waiting) {
    is_waiting = !passes_within(20);
    return;
  }
  if (steps < next_stop) return;
  next_stop = steps + 1 + static_cast<long>(gaps->below(static_cast<uint64_t>(2 * mean_gap - 1)));
  stops++;
  while (is_busy.load()) sched_yield();
  stopped_at = place_of(context);
  is_busy.store(true);
  sem_post(&go);
  is_waiting = !passes_within(3000);
}

// Runs after the allocator's own destructor, which is older: what the allocator does for threads past theirs is stepped, too.
pthread_key_t last_key;

void at_end_of_thread(void*) {
  take(kLate, 100);
  drop(kLate);
  take(kLate, 3 << 20);
  drop(kLate);
  set_stepping(false);
}

struct Script {
  const char* name;
  void (*prepare)();
  void (*act)();
};

void* run_script(void* argument) {
  const Script* script = static_cast<const Script*>(argument);
  if (script->prepare != nullptr) script->prepare();
  pthread_setspecific(last_key, script);
  set_stepping(true);
  script->act();
  return nullptr;
}

// ---- what is stepped ----

void take_some(int slot, int count, size_t bytes) {
  for (int i = 0; i < count; i++) take(slot + i, bytes);
}
void drop_some(int slot, int count) {
  for (int i = 0; i < count; i++) drop(slot + i);
}
void* come_and_go(void*) {
  take_some(500, 100, 64);
  take_some(600, 100, 1000);
  drop_some(500, 200);
  return nullptr;
}
void leave_a_parked_heap() {
  pthread_t thread;
  REQUIRE(pthread_create(&thread, nullptr, come_and_go, nullptr) == 0);
  pthread_join(thread, nullptr);
}

const Script kScripts[] = {
    {"first blocks of a thread", nullptr, [] {
       for (int i = 0; i < 12; i++) take(i, 16u << i);
       drop_some(0, 12);
     }},
    {"small blocks that come", nullptr, [] { take_some(0, 200, 64); }},
    {"small blocks that go", [] { take_some(0, 300, 200); }, [] { drop_some(0, 300); }},
    {"small blocks that come and go in turn", [] { take_some(0, 130, 64); }, [] {
       for (int i = 0; i < 130; i += 2) drop(i);
       for (int i = 0; i < 130; i += 2) take(i, 64);
       drop_some(0, 130);
     }},
    {"medium blocks", nullptr, [] {
       for (int i = 0; i < 40; i++) take(i, 5000u << (i % 7));
       drop_some(0, 40);
     }},
    {"large blocks", nullptr, [] {
       for (int i = 0; i < 6; i++) {
         take(0, 2 << 20);
         take(1, 3 << 20);
         drop_some(0, 2);
       }
       take_some(0, 3, 2 << 20);
       drop_some(0, 3);
     }},
    // Few bytes to copy: each counts as an instruction.
    {"blocks that grow and shrink", [] {
       take(0, 24);
       take(1, 2 << 20);
     }, [] {
       for (size_t bytes = 32; bytes < 2000; bytes += bytes / 2) resize(0, bytes);
       for (size_t bytes = 600; bytes > 24; bytes /= 3) resize(0, bytes);
       resize(1, 5 << 20);
       resize(1, 3 << 20);
       resize(1, 1000);
       drop_some(0, 2);
     }},
    {"another thread's blocks", [] {
       pthread_t thread;
       auto body = [](void*) -> void* {
         take_some(0, 300, 64);
         return nullptr;
       };
       REQUIRE(pthread_create(&thread, nullptr, body, nullptr) == 0);
       pthread_join(thread, nullptr);
     }, [] { drop_some(0, 300); }},
    {"malloc_trim", [] {
       come_and_go(nullptr);
       leave_a_parked_heap();
     }, [] { malloc_trim(0); }},
    {"a tick", [] {
       come_and_go(nullptr);
       leave_a_parked_heap();
       usleep(250000);  // longer than the period, twice
     }, [] {
       take_some(0, 70, 66000);
       drop_some(0, 70);
     }},
};

// ---- what happens meanwhile ----

constexpr size_t kSizes[] = {16, 64, 200, 1000, 5000, 40000, 300000, 2 << 20};
constexpr int kCounts[] = {150, 200, 150, 70, 20, 6, 3, 2};

void* use_heap(void* first_slot) {
  int first = static_cast<int>(reinterpret_cast<intptr_t>(first_slot));
  for (int round = 0; round < 2; round++) {
    int slot = first;
    for (size_t i = 0; i < sizeof kSizes / sizeof *kSizes; i++) {
      take_some(slot, kCounts[i], kSizes[i]);
      slot += kCounts[i];
    }
    check(0, kSlots);
    drop_some(first, slot - first);
  }
  return nullptr;
}

void in_child() {
  alarm(60);
  check(0, kSlots);
  // A new thread gets the heap of the one that was stepped, if it can be had.
  pthread_t thread;
  REQUIRE(pthread_create(&thread, nullptr, use_heap, reinterpret_cast<void*>(intptr_t{kChild})) == 0);
  pthread_join(thread, nullptr);
  drop_some(0, kChild);
  malloc_trim(0);
  use_heap(reinterpret_cast<void*>(intptr_t{kChild}));
  _exit(0);
}

long failures;

void fork_meanwhile() {
  const char* place = stopped_at;
  pid_t pid = fork();
  if (pid == 0) in_child();
  REQUIRE(pid > 0);
  sem_post(&has_passed);
  int status = 0;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  failures++;
  Dl_info info = {};
  dladdr(place, &info);
  fprintf(stderr, "forked at %s+0x%lx: status 0x%x\n", info.dli_fname == nullptr ? "?" : info.dli_fname,
          static_cast<unsigned long>(place - static_cast<const char*>(info.dli_fbase)), status);
}

void allocate_meanwhile() {
  static Random random(hz3_test::seed());
  for (int i = 0; i < 40; i++) {
    int slot = kOther + static_cast<int>(random.below(400));
    size_t bytes = kSizes[random.below(random.below(8) == 0 ? 8 : 5)];
    drop(slot);
    take(slot, bytes);
  }
  drop(static_cast<int>(random.below(300)));  // of the thread that is being stepped
  if (random.below(16) == 0) malloc_trim(0);
  check(kOther, kChild);
  sem_post(&has_passed);
}

void run(const Script& script) {
  steps = stops = 0;
  next_stop = 1;
  is_waiting = false;
  is_busy.store(false);  // the last stop of the run before may have gone unanswered
  sem_init(&go, 0, 0);
  sem_init(&has_passed, 0, 0);
  pthread_t actor;
  REQUIRE(pthread_create(&actor, nullptr, run_script, const_cast<Script*>(&script)) == 0);
  while (pthread_tryjoin_np(actor, nullptr) != 0) {
    if (sem_trywait(&go) == 0) {
      meanwhile();
      is_busy.store(false);
    } else {
      sched_yield();
    }
  }
  drop_some(0, kOther);
}

void run_all(void (*what)(), long gap) {
  if (!kCanStep) GTEST_SKIP() << "no trap flag on this processor";
  struct sigaction action = {};
  action.sa_sigaction = on_step;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTRAP, &action, nullptr);
  pthread_key_create(&last_key, at_end_of_thread);
  meanwhile = what;
  Random random(hz3_test::seed());
  gaps = &random;
  mean_gap = std::max(1l, gap * 100 / scaled(100));
  for (const Script& script : kScripts) {
    failures = 0;
    run(script);
    printf("%-40s %6ld instructions, %ld stops\n", script.name, steps, stops);
    EXPECT_GT(stops, 5) << script.name;
    EXPECT_EQ(failures, 0) << script.name;
  }
  drop_some(0, kSlots);
  pthread_key_delete(last_key);
}

TEST(Step, AForkAtAnyInstruction) { run_all(fork_meanwhile, 300); }

TEST(Step, AnotherThreadAtAnyInstruction) { run_all(allocate_meanwhile, 50); }

}  // namespace
