// SPDX-License-Identifier: Apache-2.0
//
// The first test: nothing but libc, so that a broken allocator fails here and not inside a test framework.
// Needs: the allocator linked in (or preloaded); prints with write(2) only until the basics hold.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) ((condition) ? (void)0 : fail(#condition, __LINE__))

enum { kBlocks = 2000 };

static void *blocks[kBlocks];
static size_t sizes[kBlocks];

static void fail(const char *condition, int line) {
  char text[16];
  int at = sizeof text;
  text[--at] = '\n';
  for (; line > 0 && at > 0; line /= 10) text[--at] = (char)('0' + line % 10);
  (void)!write(2, "first_test: failed: ", 20);
  (void)!write(2, condition, strlen(condition));
  (void)!write(2, " at line ", 9);
  (void)!write(2, text + at, sizeof text - at);
  _exit(1);
}

static uint64_t random_state = 88172645463325252u;

static uint64_t next_random(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

// Mostly small, some medium, few large, so that each of the allocator's size ranges is entered.
static size_t random_size(void) {
  uint64_t draw = next_random();
  if (draw % 16 < 12) return draw / 16 % 2048;
  if (draw % 16 < 15) return draw / 16 % (128 << 10);
  return draw / 16 % (3 << 20);
}

static unsigned char mark_of(int index) { return (unsigned char)(index * 31 + 7); }

static void fill(int index) { memset(blocks[index], mark_of(index), sizes[index]); }

static void verify(int index, size_t length) {
  const unsigned char *bytes = blocks[index];
  for (size_t i = 0; i < length; i++) CHECK(bytes[i] == mark_of(index));
}

static void test_single_block(void) {
  char *p = malloc(1);
  CHECK(p != NULL);
  *p = 1;
  free(p);
  free(NULL);
  p = malloc(100);
  CHECK(p != NULL && (uintptr_t)p % 16 == 0);
  memset(p, 1, 100);
  p = realloc(p, 100000);
  CHECK(p != NULL && p[0] == 1 && p[99] == 1);
  free(p);
}

static void test_zero_sizes(void) {
  void *a = malloc(0), *b = malloc(0), *c = calloc(0, 8), *d = realloc(NULL, 0);
  CHECK(a && b && c && d);
  CHECK(a != b && a != c && a != d && b != c && b != d && c != d);
  free(a), free(b), free(c), free(d);
}

// Every block holds its own mark while all others are written: an overlap destroys a mark.
static void test_no_overlap(void) {
  for (int i = 0; i < kBlocks; i++) {
    sizes[i] = random_size();
    blocks[i] = malloc(sizes[i]);
    CHECK(blocks[i] != NULL && (uintptr_t)blocks[i] % 16 == 0);
    fill(i);
  }
  for (int i = 0; i < kBlocks; i++) verify(i, sizes[i]);
}

static void test_churn(void) {
  for (int round = 0; round < 20000; round++) {
    int i = (int)(next_random() % kBlocks);
    verify(i, sizes[i] < 64 ? sizes[i] : 64);
    size_t size = random_size(), kept = sizes[i] < size ? sizes[i] : size;
    if (round % 4 == 0) {
      blocks[i] = realloc(blocks[i], size ? size : 1);
      CHECK(blocks[i] != NULL);
      verify(i, kept);
    } else {
      free(blocks[i]);
      blocks[i] = malloc(size);
      CHECK(blocks[i] != NULL);
    }
    sizes[i] = size;
    fill(i);
  }
  for (int i = 0; i < kBlocks; i++) {
    verify(i, sizes[i]);
    free(blocks[i]);
  }
}

static void test_calloc_is_zero(void) {
  for (size_t size = 1; size < (4 << 20); size = size * 3 + 1) {
    for (int round = 0; round < 3; round++) {
      unsigned char *p = calloc(1, size);
      CHECK(p != NULL);
      for (size_t i = 0; i < size; i++) CHECK(p[i] == 0);
      memset(p, 0xff, size);
      free(p);
    }
  }
}

static void test_failure(void) {
  volatile size_t huge = SIZE_MAX - 100;
  errno = 0;
  CHECK(malloc(huge) == NULL && errno == ENOMEM);
  errno = 0;
  CHECK(calloc(huge, 2) == NULL && errno == ENOMEM);
  char *p = malloc(10);
  CHECK(p != NULL);
  p[9] = 42;
  errno = 0;
  CHECK(realloc(p, huge) == NULL && errno == ENOMEM);
  CHECK(p[9] == 42);
  errno = 7;
  free(p);
  CHECK(errno == 7);
}

int main(void) {
  test_single_block();
  test_zero_sizes();
  test_no_overlap();
  test_churn();
  test_calloc_is_zero();
  test_failure();
  return 0;
}
