// SPDX-License-Identifier: Apache-2.0
// A library with a known fault, for the tests that the benchmark tool can be trusted.
//
// Called by: runner_test.py and planted_test.py, through LD_PRELOAD.
// PLANTED_SPIN=N   every 64th malloc also turns a loop N times: a calibrated delay.
// PLANTED_KILL=MS  the process is killed after MS milliseconds, in the middle of its run.
// PLANTED_EXIT=N   the process leaves with status N before main.
// Needs: glibc, whose own malloc does the work.
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

void* __libc_malloc(size_t size);
void __libc_free(void* block);

static long spin;
static __thread unsigned calls;

static void die(int signal_number)
{
  (void)signal_number;
  raise(SIGKILL);
}

__attribute__((constructor)) static void read_fault(void)
{
  const char* text = getenv("PLANTED_SPIN");
  spin = text != NULL ? atol(text) : 0;
  text = getenv("PLANTED_EXIT");
  if (text != NULL) {
    // Late enough for the library to be seen in the memory map.
    usleep(20000);
    _exit(atoi(text));
  }
  text = getenv("PLANTED_KILL");
  if (text != NULL) {
    signal(SIGALRM, die);
    struct itimerval timer = {.it_value = {.tv_usec = atol(text) * 1000}};
    setitimer(ITIMER_REAL, &timer, NULL);
  }
}

__attribute__((visibility("default"))) void* malloc(size_t size)
{
  // Counted without a delay too, so that the delay is all that two settings differ in.
  if ((++calls & 63) == 0)
    for (long i = 0; i < spin; i++)
      __asm__ volatile("");
  return __libc_malloc(size);
}

__attribute__((visibility("default"))) void free(void* block)
{
  __libc_free(block);
}
