// SPDX-License-Identifier: Apache-2.0
//
// A user's library that keeps a lock of its own sound across fork, registered before anything allocates.
// Called by: fork_order_test.c, which is linked with it.
#include <pthread.h>

void fork_hook_lock(void);
void fork_hook_unlock(void);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void fork_hook_lock(void) { pthread_mutex_lock(&lock); }
void fork_hook_unlock(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void hook(void) { pthread_atfork(fork_hook_lock, fork_hook_unlock, fork_hook_unlock); }
