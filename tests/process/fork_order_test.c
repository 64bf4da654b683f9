// SPDX-License-Identifier: Apache-2.0
//
// A thread allocates under a lock that a library takes before fork: the allocator's own locks must be taken after that one,
// though the library was there first.
// Needs: the library fork_hook.so.
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kForks = 200, kBlocks = 100, kBytes = 300000 };

void fork_hook_lock(void);
void fork_hook_unlock(void);

static atomic_bool is_over;

static void *allocate_under_lock(void *argument) {
  (void)argument;
  while (!is_over) {
    void *blocks[kBlocks];
    fork_hook_lock();
    for (int i = 0; i < kBlocks; i++) blocks[i] = malloc(kBytes);
    for (int i = 0; i < kBlocks; i++) free(blocks[i]);
    fork_hook_unlock();
  }
  return NULL;
}

int main(void) {
  alarm(60);  // a deadlock
  pthread_t thread;
  if (pthread_create(&thread, NULL, allocate_under_lock, NULL) != 0) return 2;
  for (int i = 0; i < kForks; i++) {
    pid_t child = fork();
    if (child == 0) _exit(malloc(kBytes) == NULL);
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      fprintf(stderr, "fork %d failed\n", i);
      return 1;
    }
  }
  is_over = true;
  return pthread_join(thread, NULL);
}
