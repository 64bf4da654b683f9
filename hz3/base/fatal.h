// SPDX-License-Identifier: Apache-2.0
// What it is: every way in which the allocator ends the process, one named function or text each.
// Called by: every box.
// Needs: write(2), abort(3).
// Invariant: one line on stderr, "hz3: fatal: WHAT: pointer 0x…", with " in a block of N bytes" where the block is known, or
//   "hz3: fatal: internal check failed: EXPRESSION at FILE:LINE"; built without allocating, then abort().
#ifndef HZ3_BASE_FATAL_H_
#define HZ3_BASE_FATAL_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

// The texts that users and tests see: WHAT, above. N is the size of the block's class, or what a large block takes.
#define HZ3_FATAL_DOUBLE_FREE "double free"
#define HZ3_FATAL_INVALID_FREE "free of a pointer that this allocator did not return"
#define HZ3_FATAL_MISALIGNED_FREE "free of a pointer into the middle of a block"
#define HZ3_FATAL_INVALID_REALLOC "realloc of a pointer that this allocator did not return"
#define HZ3_FATAL_INVALID_USABLE_SIZE "malloc_usable_size of a pointer that this allocator did not return"
#define HZ3_FATAL_MISALIGNED_REALLOC "realloc of a pointer into the middle of a block"
#define HZ3_FATAL_REALLOC_AFTER_FREE "realloc of a block that was freed"
#define HZ3_FATAL_MISALIGNED_USABLE_SIZE "malloc_usable_size of a pointer into the middle of a block"
#define HZ3_FATAL_USABLE_SIZE_AFTER_FREE "malloc_usable_size of a block that was freed"
#define HZ3_FATAL_UNDERFLOW "write before the start of a block"
#define HZ3_FATAL_OVERFLOW "write past the end of a block"
#define HZ3_FATAL_USE_AFTER_FREE "write to a block after it was freed"
#define HZ3_FATAL_SIZED_DELETE "sized free with a size that does not fit the block"
#define HZ3_FATAL_ALIGNED_DELETE "free with another alignment than the block was allocated with"
#define HZ3_FATAL_WRONG_DELETE "delete of a block from new[], or delete[] of a block from new"
#define HZ3_FATAL_NO_RUNTIME "operator new without memory, and without a C++ runtime to throw bad_alloc; called from"
#define HZ3_FATAL_CORRUPTED "the allocator's own records are damaged: a block in use was among the free ones"

// Prints the line and aborts. `pointer` may be anything; `block_bytes` is N, 0 if it is not known. Async-signal-safe.
__attribute__((noreturn)) HZ3_COLD void hz3_fatal(const char *what, const void *pointer, size_t block_bytes);

// Internal consistency: always on, for slow paths only.
__attribute__((noreturn)) HZ3_COLD void hz3_fatal_check(const char *expression, const char *file, int line);
#define HZ3_CHECK(cond) (HZ3_LIKELY(cond) ? (void)0 : hz3_fatal_check(#cond, __FILE__, __LINE__))

#ifdef NDEBUG
#define HZ3_ASSERT(cond) ((void)sizeof(cond))
#else
#define HZ3_ASSERT(cond) HZ3_CHECK(cond)
#endif

// Writes text to `fd` as it is, retrying interrupted and short writes. Keeps errno. Not a cancellation point.
void hz3_write_text(int fd, const char *text);

HZ3_END_DECLS

#endif  // HZ3_BASE_FATAL_H_
