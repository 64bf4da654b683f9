// SPDX-License-Identifier: Apache-2.0
// What it is: the C interface: libc's names, errno, overflow rules. No policy, no state.
// Called by: the application.
// Needs: hz3/hot.
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/hot/hot.h"

static void *out_of_memory(void) {
  errno = ENOMEM;
  return NULL;
}

// HZ3_CHECKED is a constant: of the two ways of each the compiler keeps one.
HZ3_INLINE void *allocate(size_t bytes) {
  return HZ3_CHECKED ? hz3_checked_malloc(bytes) : hz3_malloc(bytes);
}

HZ3_INLINE void *allocate_aligned(size_t align, size_t bytes) {
  if (HZ3_CHECKED) return hz3_checked_alloc(HZ3_FROM_MALLOC, align, bytes, false);
  void *pointer = hz3_take_aligned(align, bytes);
  return HZ3_LIKELY(pointer != NULL) ? pointer : hz3_aligned_alloc(align, bytes);
}

HZ3_INLINE void release(void *pointer) {
  if (HZ3_CHECKED) hz3_checked_free(pointer);
  else hz3_free(pointer);
}

HZ3_EXPORT void *malloc(size_t bytes) { return allocate(bytes); }

HZ3_EXPORT void free(void *pointer) { release(pointer); }

HZ3_EXPORT void *calloc(size_t count, size_t bytes) {
  size_t total;
  if (__builtin_mul_overflow(count, bytes, &total)) return out_of_memory();
  return HZ3_CHECKED ? hz3_checked_alloc(HZ3_FROM_MALLOC, 1, total, true) : hz3_calloc(total);
}

HZ3_EXPORT void *realloc(void *pointer, size_t bytes) {
  if (pointer == NULL) return allocate(bytes);
  if (bytes == 0) {  // glibc's choice
    release(pointer);
    return NULL;
  }
  return HZ3_CHECKED ? hz3_checked_realloc(pointer, bytes) : hz3_realloc(pointer, bytes);
}

HZ3_EXPORT void *reallocarray(void *pointer, size_t count, size_t bytes) {
  size_t total;
  if (__builtin_mul_overflow(count, bytes, &total)) return out_of_memory();
  return realloc(pointer, total);
}

HZ3_EXPORT void free_sized(void *pointer, size_t bytes) {
  if (HZ3_CHECKED) hz3_checked_free_as(pointer, (struct hz3_claim){HZ3_FROM_MALLOC, bytes, HZ3_UNSAID});
  else hz3_free(pointer);
}

HZ3_EXPORT void free_aligned_sized(void *pointer, size_t align, size_t bytes) {
  if (HZ3_CHECKED) hz3_checked_free_as(pointer, (struct hz3_claim){HZ3_FROM_MALLOC, bytes, align});
  else hz3_free(pointer);
}

HZ3_EXPORT void *aligned_alloc(size_t align, size_t bytes) {
  if (!hz3_is_power_of_two(align)) {
    errno = EINVAL;
    return NULL;
  }
  return allocate_aligned(align, bytes);
}

static HZ3_COLD void *allocate_aligned_keeping_errno(size_t align, size_t bytes) {
  int saved = errno;
  void *pointer = allocate_aligned(align, bytes);
  errno = saved;
  return pointer;
}

HZ3_EXPORT int posix_memalign(void **out, size_t align, size_t bytes) {
  if (!hz3_is_power_of_two(align) || align % sizeof(void *) != 0) return EINVAL;
  void *pointer = HZ3_CHECKED ? NULL : hz3_take_aligned(align, bytes);
  if (HZ3_UNLIKELY(pointer == NULL)) pointer = allocate_aligned_keeping_errno(align, bytes);
  if (pointer == NULL) return ENOMEM;
  *out = pointer;
  return 0;
}

HZ3_EXPORT void *memalign(size_t align, size_t bytes) {
  if (align > SIZE_MAX / 2 + 1) {
    errno = EINVAL;
    return NULL;
  }
  return allocate_aligned(hz3_ceil_power_of_two(align), bytes);  // glibc rounds up
}

HZ3_EXPORT void *valloc(size_t bytes) { return allocate_aligned(hz3_os_page_bytes(), bytes); }

HZ3_EXPORT void *pvalloc(size_t bytes) {
  size_t page = hz3_os_page_bytes();
  if (bytes > SIZE_MAX - page) return out_of_memory();
  return allocate_aligned(page, bytes == 0 ? page : hz3_round_up(bytes, page));
}

HZ3_EXPORT size_t malloc_usable_size(void *pointer) {
  return HZ3_CHECKED ? hz3_checked_usable_size(pointer) : hz3_usable_size(pointer);
}

HZ3_EXPORT void cfree(void *pointer) { release(pointer); }

#ifdef __GLIBC__
// glibc's own names of the same, which programs call that wrap malloc: their blocks and ours come to each other. Weak, for a static
// program that links glibc's malloc besides.
#define HZ3_LIBC_NAME HZ3_EXPORT __attribute__((weak))
HZ3_LIBC_NAME void *__libc_malloc(size_t bytes) { return malloc(bytes); }
HZ3_LIBC_NAME void __libc_free(void *pointer) { free(pointer); }
HZ3_LIBC_NAME void *__libc_calloc(size_t count, size_t bytes) { return calloc(count, bytes); }
HZ3_LIBC_NAME void *__libc_realloc(void *pointer, size_t bytes) { return realloc(pointer, bytes); }
HZ3_LIBC_NAME void *__libc_memalign(size_t align, size_t bytes) { return memalign(align, bytes); }
HZ3_LIBC_NAME void *__libc_valloc(size_t bytes) { return valloc(bytes); }
HZ3_LIBC_NAME void *__libc_pvalloc(size_t bytes) { return pvalloc(bytes); }
#endif
