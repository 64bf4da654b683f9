// SPDX-License-Identifier: Apache-2.0
//
// The rest of the malloc interface of the null allocators, in terms of the
// four functions that floor_bump.c and floor_lifo.c define.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "floor.h"

void* malloc(size_t size);
void* memalign(size_t alignment, size_t size);

FLOOR_EXPORT void* calloc(size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) {
    errno = ENOMEM;
    return NULL;
  }
  void* block = malloc(bytes);
  return block == NULL ? NULL : memset(block, 0, bytes);
}

FLOOR_EXPORT void* aligned_alloc(size_t alignment, size_t size) {
  return memalign(alignment, size);
}

FLOOR_EXPORT int posix_memalign(void** block, size_t alignment, size_t size) {
  if (alignment < sizeof(void*) || (alignment & (alignment - 1)) != 0) {
    return EINVAL;
  }
  void* memory = memalign(alignment, size);
  if (memory == NULL) {
    return ENOMEM;
  }
  *block = memory;
  return 0;
}

FLOOR_EXPORT void* valloc(size_t size) {
  return memalign((size_t)sysconf(_SC_PAGESIZE), size);
}

FLOOR_EXPORT void* pvalloc(size_t size) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return memalign(page, (size + page - 1) & ~(page - 1));
}
