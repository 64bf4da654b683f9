// SPDX-License-Identifier: Apache-2.0
//
// malloc.h with all that glibc's has: hz3 has it also where another libc's header, or that of glibc before 2.33, has not.
#ifndef TESTS_SUPPORT_MALLOC_NAMES_H_
#define TESTS_SUPPORT_MALLOC_NAMES_H_

#include <malloc.h>
#include <stddef.h>
#include <stdio.h>

#if defined(__GLIBC__)
#define HZ3_TEST_HAS_MALLINFO2 __GLIBC_PREREQ(2, 33)
#else
#define HZ3_TEST_HAS_MALLINFO2 0
struct mallinfo {
  int arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};
// All of one type, as glibc's are, so that they go into one list.
enum {
  M_MXFAST = 1, M_NLBLKS, M_GRAIN, M_KEEP,
  M_TRIM_THRESHOLD = -1, M_TOP_PAD = -2, M_MMAP_THRESHOLD = -3, M_MMAP_MAX = -4, M_PERTURB = -6, M_ARENA_MAX = -8
};
extern "C" {
struct mallinfo mallinfo();
int malloc_info(int options, FILE* stream);
void malloc_stats();
int malloc_trim(size_t pad);
int mallopt(int parameter, int value);
void* pvalloc(size_t bytes);
}
#endif

#if !HZ3_TEST_HAS_MALLINFO2
struct mallinfo2 {
  size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};
extern "C" struct mallinfo2 mallinfo2();
#endif

#endif  // TESTS_SUPPORT_MALLOC_NAMES_H_
