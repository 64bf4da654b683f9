// SPDX-License-Identifier: Apache-2.0
// What it is: memory for the allocator's own structures, apart from everything the user can touch.
// Called by: pages, small, large, remote, hot.
// Owns: the metadata blocks, never unmapped (type-stable for lock-free readers).
// Locks: one, rank METADATA.
#ifndef HZ3_BASE_METADATA_H_
#define HZ3_BASE_METADATA_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

// Zeroed memory: whole 4 KiB pages are page-aligned, anything else is aligned to the smaller of its size's power of two
// and a cache line. NULL when the kernel gives no more. Thread-safe. `bytes` > 0.
void *hz3_metadata_alloc(size_t bytes);

// Recycled memory for bitmaps: a power of two from 8 bytes to 16 KiB, all bits zero. Thread-safe; NULL as above.
void *hz3_metadata_alloc_bitmap(size_t bytes);
void hz3_metadata_free_bitmap(void *bitmap, size_t bytes);  // the caller has zeroed it

size_t hz3_metadata_bytes(void);  // mapped so far
void hz3_metadata_fork_prepare(void);
void hz3_metadata_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_BASE_METADATA_H_
