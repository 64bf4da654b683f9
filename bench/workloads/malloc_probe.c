// SPDX-License-Identifier: Apache-2.0
//
// An allocator that observes or misbehaves on purpose, to test the benchmark
// programs. The environment variable PROBE chooses:
//   count  counts calls and bytes and reports them when the process ends;
//   guard  aborts when a block was written beyond its end;
//   spoil  changes a live block whenever another one is freed;
//   slow   spends 20 microseconds in every malloc.
//
// Called by: workloads_test.py, through LD_PRELOAD.
// Needs: glibc, whose own malloc does the work.
#include <inttypes.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void* __libc_malloc(size_t size);
void __libc_free(void* block);

#define GUARD_BYTE 0xa5
#define GUARD_MARK UINT64_C(0x6775000000000000)  // or-ed with the size

static enum { COUNT, GUARD, SPOIL, SLOW } mode;
static _Atomic uint64_t mallocs;
static _Atomic uint64_t bytes;
static _Atomic uint64_t frees;
static _Atomic(unsigned char*) newest;

__attribute__((constructor)) static void read_mode(void) {
  const char* probe = getenv("PROBE");
  if (probe != NULL) {
    mode = strcmp(probe, "guard") == 0   ? GUARD
           : strcmp(probe, "spoil") == 0 ? SPOIL
           : strcmp(probe, "slow") == 0  ? SLOW
                                         : COUNT;
  }
}

__attribute__((destructor)) static void report(void) {
  if (mode == COUNT) {
    fprintf(stderr,
            "[PROBE] mallocs=%" PRIu64 " bytes=%" PRIu64 " frees=%" PRIu64 "\n",
            atomic_load(&mallocs), atomic_load(&bytes), atomic_load(&frees));
  }
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// The last word that glibc lets us use holds the size that was asked for;
// whatever lies between is filled with the guard byte.
static uint64_t* size_word(void* block) {
  size_t usable = malloc_usable_size(block) & ~(size_t)7;
  return (uint64_t*)((char*)block + usable) - 1;
}

static void* guarded_malloc(size_t size) {
  char* block = __libc_malloc(size + 2 * sizeof(uint64_t));
  if (block != NULL) {
    *size_word(block) = GUARD_MARK | size;
    memset(block + size, GUARD_BYTE,
           (size_t)((char*)size_word(block) - block) - size);
  }
  return block;
}

// Blocks without the mark are those that libc got by calloc.
static void check_guard(unsigned char* block) {
  uint64_t word = *size_word(block);
  unsigned char* end = (unsigned char*)size_word(block);
  if ((word & GUARD_MARK) != GUARD_MARK) {
    return;
  }
  for (unsigned char* guard = block + (word ^ GUARD_MARK); guard < end;
       guard++) {
    if (*guard != GUARD_BYTE) {
      fprintf(stderr, "[PROBE] overrun=%p\n", (void*)block);
      abort();
    }
  }
}

void* malloc(size_t size) {
  if (mode == SLOW) {
    uint64_t start = now_ns();
    while (now_ns() - start < 20000) {
    }
  }
  atomic_fetch_add(&mallocs, 1);
  atomic_fetch_add(&bytes, size);
  void* block = mode == GUARD ? guarded_malloc(size) : __libc_malloc(size);
  atomic_store(&newest, block);
  return block;
}

void free(void* block) {
  if (block == NULL) {
    return;
  }
  atomic_fetch_add(&frees, 1);
  if (mode == GUARD) {
    check_guard(block);
  }
  if (mode != SPOIL) {
    __libc_free(block);
    return;
  }
  // Nothing is really freed, so that glibc's own data stays whole.
  unsigned char* other = atomic_exchange(&newest, NULL);
  if (other != NULL && other != block) {
    other[0] ^= 0xff;
  }
}
