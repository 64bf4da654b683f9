// SPDX-License-Identifier: Apache-2.0
// launch: starts one benchmark child, proves which library it runs on, accounts for it.
//
// Called by: bench/ssot/runner.py. Owns: nothing outlives one run.
// Needs: Linux /proc. It is a small C program because the peak resident size that wait4
// reports is never below that of the process that forked, and Python's is 100 MB.
// Usage: launch FD LIBRARY|- SAMPLE_MS [NAME=VALUE...] -- PROGRAM ARGS...
// Writes to descriptor FD: `rss T_MS KIB` lines when SAMPLE_MS > 0, then one `child ...` line.
// The library is looked up when the child is about to exit, with ptrace, so that even the shortest
// run is seen; where ptrace is forbidden, by polling. Nothing is traced in between.
// Invariant: the child has exactly the environment of launch plus the NAME=VALUE pairs.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now_ms(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void sleep_us(long us)
{
  struct timespec t = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&t, NULL);
}

// True when some mapping of the process comes from exactly this file.
static int maps_has_file(pid_t pid, const char* file)
{
  char name[64], line[4608];
  snprintf(name, sizeof name, "/proc/%d/maps", (int)pid);
  FILE* f = fopen(name, "re");
  if (f == NULL)
    return 0;
  int found = 0;
  while (!found && fgets(line, sizeof line, f) != NULL) {
    char* path = strchr(line, '/');
    if (path != NULL) {
      path[strcspn(path, "\n")] = '\0';
      found = strcmp(path, file) == 0;
    }
  }
  fclose(f);
  return found;
}

static long rss_kib(pid_t pid)
{
  char name[64];
  long size, resident;
  snprintf(name, sizeof name, "/proc/%d/statm", (int)pid);
  FILE* f = fopen(name, "re");
  if (f == NULL)
    return -1;
  int n = fscanf(f, "%ld %ld", &size, &resident);
  fclose(f);
  return n == 2 ? resident * (sysconf(_SC_PAGESIZE) / 1024) : -1;
}

static void exec_child(char** settings, int setting_count, char** program, int report_fd,
                       int go_fd)
{
  char go;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  fcntl(report_fd, F_SETFD, FD_CLOEXEC);
  for (int i = 0; i < setting_count; i++)
    putenv(settings[i]);
  if (read(go_fd, &go, 1) != 1)
    _exit(127);
  execv(program[0], program);
  fprintf(stderr, "launch: %s: %s\n", program[0], strerror(errno));
  _exit(127);
}

// Lets a stopped child go on as if nobody watched; at its exit, looks for the library first.
static int pass_stop(pid_t pid, int status, const char* library)
{
  int event = status >> 16, signal_number = WSTOPSIG(status), seen = 0;
  if (event == PTRACE_EVENT_EXIT)
    seen = maps_has_file(pid, library);
  int stays_stopped = event == PTRACE_EVENT_STOP && signal_number != SIGTRAP;
  ptrace(stays_stopped ? PTRACE_LISTEN : PTRACE_CONT, pid, NULL,
         (void*)(long)(event == 0 ? signal_number : 0));
  return seen;
}

struct outcome {
  int status;
  int seen;
  struct rusage usage;
};

// Watches until the child ends: for the library and (if asked) for its resident size.
static struct outcome watch(pid_t pid, const char* library, int traced, long sample_ms, FILE* out)
{
  struct outcome o = {0};
  double start = now_ms();
  int want = strcmp(library, "-") != 0;
  for (;;) {
    int polling = want && !o.seen && !traced;
    pid_t done = wait4(pid, &o.status, polling || sample_ms > 0 ? WNOHANG : 0, &o.usage);
    if (done == pid && WIFSTOPPED(o.status)) {
      o.seen |= pass_stop(pid, o.status, library);
    } else if (done == pid) {
      return o;
    } else if (polling) {
      o.seen = maps_has_file(pid, library);
      sleep_us(200);
    } else {
      fprintf(out, "rss %.1f %ld\n", now_ms() - start, rss_kib(pid));
      sleep_us(sample_ms * 1000);
    }
  }
}

int main(int argc, char** argv)
{
  int dashes = 4;
  while (dashes < argc && strcmp(argv[dashes], "--") != 0)
    dashes++;
  if (argc < 6 || dashes + 1 >= argc) {
    fprintf(stderr, "usage: launch FD LIBRARY|- SAMPLE_MS [NAME=VALUE...] -- PROGRAM ARGS...\n");
    return 2;
  }
  int report_fd = atoi(argv[1]);
  FILE* out = fdopen(report_fd, "w");
  if (out == NULL)
    return 2;
  int go[2];
  if (pipe2(go, O_CLOEXEC) != 0)
    return 2;
  pid_t pid = fork();
  if (pid < 0)
    return 2;
  if (pid == 0)
    exec_child(argv + 4, dashes - 4, argv + dashes + 1, report_fd, go[0]);
  int traced =
      ptrace(PTRACE_SEIZE, pid, NULL, (void*)(PTRACE_O_TRACEEXIT | PTRACE_O_EXITKILL)) == 0;
  double start = now_ms();
  if (write(go[1], "g", 1) != 1)
    return 2;
  struct outcome o = watch(pid, argv[2], traced, atol(argv[3]), out);
  struct rusage u = o.usage;
  double wall = (now_ms() - start) / 1e3;
  fprintf(out,
          "child exit=%d signal=%d loaded=%d wall_s=%.6f user_s=%ld.%06ld sys_s=%ld.%06ld "
          "peak_rss_kib=%ld minor_faults=%ld major_faults=%ld voluntary_switches=%ld "
          "involuntary_switches=%ld\n",
          WIFEXITED(o.status) ? WEXITSTATUS(o.status) : -1,
          WIFSIGNALED(o.status) ? WTERMSIG(o.status) : 0, o.seen, wall, (long)u.ru_utime.tv_sec, (long)u.ru_utime.tv_usec, (long)u.ru_stime.tv_sec,
          (long)u.ru_stime.tv_usec, u.ru_maxrss, u.ru_minflt, u.ru_majflt, u.ru_nvcsw, u.ru_nivcsw);
  return fclose(out) == 0 ? 0 : 2;
}
