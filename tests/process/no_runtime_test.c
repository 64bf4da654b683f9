// SPDX-License-Identifier: Apache-2.0
//
// A program in C calls the preloaded operator new and there is no memory: nobody could throw, so the process ends by a line that says so.
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
  static const char text[] = "hz3: fatal: operator new without memory, and without a C++ runtime to throw bad_alloc; called from: pointer 0x";
  void *(*operator_new)(size_t);
  *(void **)&operator_new = dlsym(RTLD_DEFAULT, "_Znwm");
  int ends[2];
  if (operator_new == NULL || pipe(ends) != 0) return 1;
  pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    operator_new(PTRDIFF_MAX / 2);
    _exit(0);
  }
  close(ends[1]);
  char said[256] = "";
  ssize_t length = read(ends[0], said, sizeof said - 1);
  int status = 0;
  if (waitpid(child, &status, 0) != child) return 1;
  if (length > 0 && strncmp(said, text, strlen(text)) == 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) return 0;
  fprintf(stderr, "status 0x%x, said: %s\n", (unsigned)status, said);
  return 1;
}
