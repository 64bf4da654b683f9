// SPDX-License-Identifier: Apache-2.0
// What it is: the fatal messages, see fatal.h.
#include "hz3/base/fatal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct line {
  size_t length;
  char text[256];
};

static void add_text(struct line *line, const char *text) {
  while (*text != '\0' && line->length + 1 < sizeof line->text) line->text[line->length++] = *text++;
  line->text[line->length] = '\0';
}

static void add_number(struct line *line, uintmax_t value, unsigned base) {
  char digits[sizeof(uintmax_t) * 3 + 1];
  size_t at = sizeof digits;
  digits[--at] = '\0';
  do {
    digits[--at] = "0123456789abcdef"[value % base];
    value /= base;
  } while (value != 0);
  add_text(line, digits + at);
}

void hz3_write_text(int fd, const char *text) {
  int saved = errno;
  size_t left = strlen(text);
  while (left > 0) {
    long done = syscall(SYS_write, fd, text, left);  // write(2) would be a cancellation point
    if (done < 0 && errno != EINTR) break;
    if (done > 0) {
      text += done;
      left -= (size_t)done;
    }
  }
  errno = saved;
}

void hz3_fatal(const char *what, const void *pointer, size_t block_bytes) {
  struct line line = {0};
  add_text(&line, "hz3: fatal: ");
  add_text(&line, what);
  add_text(&line, ": pointer 0x");
  add_number(&line, (uintptr_t)pointer, 16);
  if (block_bytes != 0) {
    add_text(&line, " in a block of ");
    add_number(&line, block_bytes, 10);
    add_text(&line, " bytes");
  }
  add_text(&line, "\n");
  hz3_write_text(STDERR_FILENO, line.text);
  abort();
}

void hz3_fatal_check(const char *expression, const char *file, int line_number) {
  struct line line = {0};
  add_text(&line, "hz3: fatal: internal check failed: ");
  add_text(&line, expression);
  add_text(&line, " at ");
  add_text(&line, file);
  add_text(&line, ":");
  add_number(&line, (uintmax_t)line_number, 10);
  add_text(&line, "\n");
  hz3_write_text(STDERR_FILENO, line.text);
  abort();
}
