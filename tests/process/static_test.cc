// SPDX-License-Identifier: Apache-2.0
//
// One program for -static and -static-pie: threads, fork, exceptions, thread-local destructors and stdio without a
// dynamic linker, where libc's own malloc must not be linked in besides ours.
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <new>
#include <string>
#include <thread>
#include <vector>

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "static_test: failed: %s\n", what);
  abort();
}

struct ThreadLocal {
  std::string text = std::string(3000, 't');
  ~ThreadLocal() { require(text.size() == 3000 && text.back() == 't', "thread-local object is intact"); }
};
thread_local ThreadLocal thread_local_object;

void work() {
  require(thread_local_object.text.front() == 't', "thread-local object is made");
  std::vector<std::string> texts;
  for (size_t i = 0; i < 2000; i++) texts.push_back(std::string(i * 13, 'a'));
  for (size_t i = 0; i < texts.size(); i++) require(texts[i].size() == i * 13, "strings are intact");
}

bool throws_bad_alloc() {
  volatile size_t huge = static_cast<size_t>(-1) / 2;
  try {
    ::operator delete(::operator new(huge));
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
  work();
  require(throws_bad_alloc(), "bad_alloc is thrown");
  char* copy = strdup("copied");
  require(malloc_usable_size(copy) >= 7, "strdup takes our blocks");
  free(copy);
  // glibc's answer would not know of our blocks.
  size_t before = mallinfo2().uordblks;
  std::vector<void*> blocks;
  for (int i = 0; i < 20000; i++) blocks.push_back(malloc(1000));
  require(mallinfo2().uordblks >= before + 19000000, "mallinfo2 is ours");
  for (void* p : blocks) free(p);
  pid_t pid = fork();
  if (pid == 0) {
    work();
    _exit(0);
  }
  int status = -1;
  require(waitpid(pid, &status, 0) == pid && status == 0, "the child ends well");
  return 0;
}
