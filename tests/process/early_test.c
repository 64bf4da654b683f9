// SPDX-License-Identifier: Apache-2.0
//
// Allocation before main and after it, with nothing but libc: in an IFUNC resolver (while relocations are applied), in
// .preinit_array, in a constructor of the highest priority; freed again in destructors and atexit handlers.
// Invariant: what was allocated at one stage is intact and freeable at each later one.
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kStages = 3, kBlocks = 40 };
enum stage { kPreinit, kConstructor, kMain };

static unsigned char *blocks[kStages][kBlocks];
static size_t sizes[kStages][kBlocks];
static int stages_seen;

static void fail(const char *what) {
  (void)!write(2, what, strlen(what));
  (void)!write(2, "\n", 1);
  _exit(1);
}

static void allocate(enum stage stage) {
  stages_seen++;
  for (int i = 0; i < kBlocks; i++) {
    size_t size = (size_t)1 << (i % 22);
    unsigned char *p = i % 2 ? malloc(size) : calloc(1, size);
    if (p == NULL) fail("no block");
    memset(p, i + 1, size);
    blocks[stage][i] = p;
    sizes[stage][i] = size;
  }
  free(malloc(10));
}

static void check(enum stage stage) {
  for (int i = 0; i < kBlocks; i++) {
    unsigned char *p = blocks[stage][i];
    if (malloc_usable_size(p) < sizes[stage][i]) fail("usable size has shrunk");
    for (size_t at = 0; at < sizes[stage][i]; at++) {
      if (p[at] != i + 1) fail("contents have changed");
    }
  }
}

static void release(enum stage stage) {
  check(stage);
  for (int i = 0; i < kBlocks; i++) free(blocks[stage][i]);
  free(malloc(70000));
}

static int answer(void) { return 42; }
static void *resolver_block;

// Libraries may not be complete here: only malloc itself is called.
static int (*resolve(void))(void) {
  resolver_block = malloc(48);
  return resolver_block != NULL ? answer : NULL;
}
int resolved_answer(void) __attribute__((ifunc("resolve")));

static void at_preinit(void) { allocate(kPreinit); }
__attribute__((section(".preinit_array"), used)) static void (*const preinit)(void) = at_preinit;

__attribute__((constructor(101))) static void at_constructor(void) {
  check(kPreinit);
  allocate(kConstructor);
}

__attribute__((destructor(101))) static void at_destructor(void) { release(kPreinit); }

static void at_exit(void) { release(kConstructor); }

int main(void) {
  if (stages_seen != 2) fail("a stage before main was left out");
  if (resolved_answer() != 42 || resolver_block == NULL) fail("the resolver could not allocate");
  memset(resolver_block, 1, malloc_usable_size(resolver_block));
  free(resolver_block);
  if (atexit(at_exit) != 0) fail("atexit");
  allocate(kMain);
  check(kPreinit);
  check(kConstructor);
  release(kMain);
  return 0;
}
