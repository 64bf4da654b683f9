// SPDX-License-Identifier: Apache-2.0
//
// fork while other threads allocate and do stdio: the child allocates, frees the parent's blocks, starts threads and
// forks again; from several threads at once, from a signal handler, with atfork handlers that allocate; vfork and spawn.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/churn.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::Cell;
using hz3_test::Churn;
using hz3_test::Random;
using hz3_test::now;
using hz3_test::run_child;
using hz3_test::scaled;
using hz3_test::seconds;

std::vector<Cell*> make_cells(uint64_t seed, int count) {
  Random random(seed);
  std::vector<Cell*> cells;
  for (int i = 0; i < count; i++) cells.push_back(Cell::make(random));
  return cells;
}

void drop_cells(std::vector<Cell*>& cells) {
  for (Cell* cell : cells) Cell::drop(cell);
  cells.clear();
}

// What a child does with the heap it inherited.
void use_heap(uint64_t number, std::vector<Cell*> inherited) {
  drop_cells(inherited);
  std::vector<Cell*> own = make_cells(number, 100);
  if (number % 4 == 0) {
    std::thread([&own, number] {
      drop_cells(own);
      own = make_cells(number + 1, 100);
    }).join();
  }
  FILE* file = fopen("/dev/null", "w");
  REQUIRE(file != nullptr);
  fprintf(file, "%s %d\n", "child", 5);
  fclose(file);
  if (number % 8 == 0) {
    REQUIRE(run_child(20, [number] {
      std::vector<Cell*> again = make_cells(number + 2, 100);
      drop_cells(again);
    }) == "exit 0");
  }
  drop_cells(own);
}

TEST(Fork, ChildUsesTheHeapWhileOthersAllocate) {
  Churn churn(3);
  double end = now() + seconds(4);
  long done = 0;
  for (; done < scaled(2000) && (now() < end || done < 10); done++) {  // ten also where a fork takes half a second
    std::vector<Cell*> cells = make_cells(static_cast<uint64_t>(done), 60);
    ASSERT_EQ(run_child(30, [&] { use_heap(static_cast<uint64_t>(done), cells); }), "exit 0") << "fork " << done;
    drop_cells(cells);
  }
  RecordProperty("forks", static_cast<int>(done));
  EXPECT_GE(done, 10);
}

TEST(Fork, FromSeveralThreadsAtOnce) {
  Churn churn(1);
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  double end = now() + seconds(3);
  for (uint64_t t = 0; t < 3; t++) {
    threads.emplace_back([&failures, t, end] {
      for (uint64_t i = 0; i < 400 && (now() < end || i < 5); i++) {  // five also where a fork takes a second
        std::vector<Cell*> cells = make_cells(t * 1000 + i, 30);
        failures += run_child(30, [&] { use_heap(t * 1000 + i, cells); }) != "exit 0";
        drop_cells(cells);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
}

// A chain of generations, each forked by a thread that its parent never had at start.
TEST(Fork, GenerationsOfThreadedParents) {
  std::function<void(int)> generation = [&](int depth) {
    Churn churn(2);
    if (depth == 0) return;
    std::thread([&] {
      std::vector<Cell*> cells = make_cells(static_cast<uint64_t>(depth), 50);
      REQUIRE(run_child(60, [&] {
        drop_cells(cells);
        generation(depth - 1);
      }) == "exit 0");
      drop_cells(cells);
    }).join();
  };
  for (int i = 0; i < 10; i++) EXPECT_EQ(run_child(100, [&] { generation(6); }), "exit 0");
}

// The child of a threaded parent lives on and must not grow: what other threads had cached is not lost for ever.
TEST(Fork, LongLivedChildDoesNotGrow) {
  Churn churn(3);
  EXPECT_EQ(run_child(60, [] {
    long before = 0;
    // What is kept for the next round may swing by itself (retention): what is left without it is compared.
    auto resident_kb = [] {
      malloc_trim(0);
      return hz3_test::status_kb("RssAnon");
    };
    // The first two thirds fill every cache: the quarantines of the checked lane take some 150 rounds to level out.
    for (int round = 0; round < 300; round++) {
      std::vector<Cell*> cells = make_cells(9, 2000);
      std::thread([&] { drop_cells(cells); }).join();
      if (round == 200) before = resident_kb();
    }
    REQUIRE(resident_kb() - before < 8192);
  }), "exit 0");
}

std::atomic<int> forked_in_handler;

void fork_in_handler(int) {
  int saved = errno;
  pid_t pid = fork();
  if (pid == 0) {
    Random random(1);
    for (int i = 0; i < 50; i++) Cell::drop(Cell::make(random));
    _exit(0);
  }
  int status = -1;
  double deadline = now() + 30;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      REQUIRE(!"child of a fork in a signal handler hangs");
    }
  }
  REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  forked_in_handler++;
  errno = saved;
}

// The interrupted thread computes or waits; the others are inside the allocator and stdio at that moment.
TEST(Fork, InsideASignalHandler) {
  sigset_t alarm_only, old;
  sigemptyset(&alarm_only);
  sigaddset(&alarm_only, SIGALRM);
  pthread_sigmask(SIG_BLOCK, &alarm_only, &old);
  {
    Churn churn(3);
    signal(SIGALRM, fork_in_handler);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    // One signal at a time: on a slow machine a periodic timer would leave no time between two forks.
    double end = now() + seconds(2);
    while (now() < end || forked_in_handler < 5) {
      struct itimerval once = {{0, 0}, {0, 2000}};
      int before = forked_in_handler;
      setitimer(ITIMER_REAL, &once, nullptr);
      while (forked_in_handler == before) {}
    }
    pthread_sigmask(SIG_BLOCK, &alarm_only, nullptr);
    signal(SIGALRM, SIG_DFL);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }
  EXPECT_GE(forked_in_handler, 5);
}

// Streams are locked while their buffers are allocated, and fflush(NULL) waits for them with libc's list of streams locked,
// which fork wants, too.
TEST(Fork, WhileOthersFlushAllStreams) {
#ifndef __GLIBC__
  GTEST_SKIP() << "musl takes the lock of its list of streams after all handlers, and lets nobody take it before";
#endif
  EXPECT_EQ(run_child(60, [] {
    std::string path = testing::TempDir() + "/hz3-fork-test-XXXXXX";
    int file = mkstemp(path.data());
    REQUIRE(file >= 0);
    std::string text(50000, 'x');  // one line: its buffer grows through many classes
    REQUIRE(write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    close(file);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++) {
      threads.emplace_back([&] {
        FILE* stream = fopen(path.c_str(), "r");
        REQUIRE(stream != nullptr);
        while (!stop) {
          char* line = nullptr;
          size_t room = 0;
          rewind(stream);
          REQUIRE(getline(&line, &room, stream) == 50000);
          free(line);
        }
        fclose(stream);
      });
    }
    threads.emplace_back([&] {
      while (!stop) fflush(nullptr);
    });
    for (int i = 0; i < 4; i++) {
      threads.emplace_back([&] {
        while (!stop) {
          int status = -1;
          pid_t pid = fork();
          if (pid == 0) _exit(0);
          REQUIRE(waitpid(pid, &status, 0) == pid && status == 0);
        }
      });
    }
    usleep(static_cast<useconds_t>(seconds(2) * 1e6));
    stop = true;
    for (std::thread& thread : threads) thread.join();
    unlink(path.c_str());
  }), "exit 0");
}

#ifdef __GLIBC__  // musl knows no fopencookie
// The thread that forks may itself hold libc's list of streams locked, where it writes to a stream of its own making: in a process
// without threads libc leaves that lock as it is, and so must we.
pid_t forked_in_write = -1;

ssize_t fork_in_write(void*, const char*, size_t size) {
  if (forked_in_write < 0) forked_in_write = fork();
  return static_cast<ssize_t>(size);
}

SCENARIO(fork_while_flushing_all_streams) {
  cookie_io_functions_t functions = {nullptr, fork_in_write, nullptr, nullptr};
  FILE* stream = fopencookie(nullptr, "w", functions);
  REQUIRE(stream != nullptr && fputs("x", stream) >= 0 && fflush(nullptr) == 0);
  if (forked_in_write == 0) alarm(20);
  std::thread([] { REQUIRE(fclose(fopen("/dev/null", "w")) == 0); }).join();
  if (forked_in_write == 0) _exit(0);
  int status = -1;
  REQUIRE(forked_in_write > 0 && waitpid(forked_in_write, &status, 0) == forked_in_write && status == 0);
}

TEST(Fork, WhileTheThreadItselfFlushesAllStreams) {
  EXPECT_EQ(hz3_test::run_scenario("fork_while_flushing_all_streams", 60), "exit 0");
}
#endif

volatile sig_atomic_t is_forking, interrupted_forks;

void fork_in_fork(int) {
  int saved = errno, status = -1;
  if (is_forking) interrupted_forks = interrupted_forks + 1;
  pid_t pid = fork();
  if (pid == 0) _exit(0);
  REQUIRE(waitpid(pid, &status, 0) == pid && status == 0);
  errno = saved;
}

// The handler forks as well. A process of its own, without threads: once a process has had one, glibc's fork takes a lock of
// its own around each call of a handler, and a signal just then hangs on any allocator.
SCENARIO(fork_interrupted_by_a_signal) {
  signal(SIGALRM, fork_in_fork);
  Random random(5);
  double end = now() + seconds(20);
  for (int i = 0; interrupted_forks < 40 && now() < end; i++) {
    struct itimerval once = {{0, 0}, {0, 1 + static_cast<suseconds_t>(random.below(600))}};
    is_forking = 1;
    setitimer(ITIMER_REAL, &once, nullptr);
    pid_t pid = fork();
    if (pid == 0) {
      free(malloc(1000));
      _exit(0);
    }
    is_forking = 0;
    int status = -1;
    while (waitpid(pid, &status, 0) < 0) REQUIRE(errno == EINTR);
    REQUIRE(status == 0);
    free(malloc(static_cast<size_t>(i)));
  }
  REQUIRE(interrupted_forks >= 5);
}

TEST(Fork, InterruptedByASignal) { EXPECT_EQ(hz3_test::run_scenario("fork_interrupted_by_a_signal", 60), "exit 0"); }

TEST(Fork, LeavesSignalsAndStreamsAsTheyWere) {
  sigset_t blocked, old, now_blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &blocked, &old);
  auto check = [&now_blocked] {
    pthread_sigmask(SIG_BLOCK, nullptr, &now_blocked);
    REQUIRE(sigismember(&now_blocked, SIGUSR2) == 1);
    REQUIRE(sigismember(&now_blocked, SIGUSR1) == 0);
    // From another thread: the thread that forked may take the lock of the list again without waiting.
    std::thread([] { REQUIRE(fflush(nullptr) == 0); }).join();
  };
  for (int i = 0; i < 3; i++) {
    EXPECT_EQ(run_child(20, check), "exit 0");
    check();
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

// Three sets of handlers: registered before any constructor, among the first of them, and in the test, as different
// libraries do. Each keeps a block over the fork.
std::atomic<bool> handlers_active{false};
std::atomic<int> prepared, in_parent;
#ifdef __GLIBC__
constexpr int kSets = 3;
#else
constexpr int kSets = 2;  // musl knows no .preinit_array
#endif

template <int kSet>
struct Handlers {
  static thread_local void* held;

  static void prepare() {
    if (!handlers_active) return;
    prepared++;
    free(malloc(200000));
    held = malloc(300);
    memset(held, 1, 300);
  }
  static void parent() {
    if (!handlers_active) return;
    in_parent++;
    free(held);
    free(malloc(77));
  }
  static void child() {
    if (!handlers_active) return;
    held = realloc(held, 5000);
    free(malloc(1 << 20));
    free(held);
  }
  static void install() { pthread_atfork(prepare, parent, child); }
};

template <int kSet>
thread_local void* Handlers<kSet>::held;

void install_first() { Handlers<0>::install(); }
__attribute__((section(".preinit_array"), used)) void (*const install_first_of_all)() = install_first;
__attribute__((constructor(101))) void install_early() { Handlers<1>::install(); }

TEST(Fork, HandlersThatAllocate) {
  Handlers<2>::install();
  handlers_active = true;
  {
    Churn churn(3);
    for (uint64_t i = 0; i < 150; i++) {
      std::vector<Cell*> cells = make_cells(i, 20);
      ASSERT_EQ(run_child(30, [&] { use_heap(i, cells); }), "exit 0");
      drop_cells(cells);
    }
  }
  handlers_active = false;
  EXPECT_GE(prepared, 150 * kSets);
  EXPECT_EQ(prepared, in_parent);
}

TEST(Fork, VforkSpawnSystemPopen) {
  Churn churn(2);
  char* arguments[] = {const_cast<char*>("true"), nullptr};
  for (int i = 0; i < 60; i++) {
    int status = -1;
    pid_t pid = vfork();
    if (pid == 0) {
      execv("/bin/true", arguments);
      _exit(1);
    }
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_EQ(status, 0);
    ASSERT_EQ(posix_spawn(&pid, "/bin/true", nullptr, nullptr, arguments, environ), 0);
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_EQ(status, 0);
    ASSERT_EQ(system("exit 0"), 0);
    FILE* pipe = popen("echo popen", "r");
    ASSERT_NE(pipe, nullptr);
    char text[16] = "";
    ASSERT_NE(fgets(text, sizeof text, pipe), nullptr);
    ASSERT_STREQ(text, "popen\n");
    ASSERT_EQ(pclose(pipe), 0);
  }
}

// The vfork child shares the parent's memory: what it allocates before exec is the parent's to free.
TEST(Fork, VforkChildMayAllocate) {
  Churn churn(2);
  static void* volatile made;
  for (int i = 0; i < 200; i++) {
    pid_t pid = vfork();
    if (pid == 0) {
      made = malloc(1000);
      _exit(0);
    }
    int status = -1;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_EQ(status, 0);
    ASSERT_NE(made, nullptr);
    memset(made, 1, 1000);
    free(made);
  }
}

}  // namespace
