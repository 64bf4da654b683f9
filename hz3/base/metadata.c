// SPDX-License-Identifier: Apache-2.0
// What it is: bump allocation of bookkeeping memory, see metadata.h.
#include "hz3/base/metadata.h"

#include "hz3/base/lock.h"
#include "hz3/base/os.h"

enum { PAGE_BYTES = 4096, MIN_BITMAP_BYTES_LOG2 = 3, BITMAP_SIZES = 12 };
// Small enough for address limits of tens of MiB, large enough that one thousand threads need few maps.
#define BLOCK_BYTES (256 * HZ3_KIB)

static struct hz3_lock lock = HZ3_LOCK_INIT(HZ3_RANK_METADATA);
static char *block_at, *block_end;
static size_t mapped_bytes;
static void *free_bitmaps[BITMAP_SIZES];  // linked through their first word

static void *alloc_locked(size_t bytes) {
  size_t align = bytes % PAGE_BYTES == 0 ? PAGE_BYTES : hz3_min(hz3_ceil_power_of_two(bytes), HZ3_CACHE_LINE);
  char *start = (char *)hz3_round_up((uintptr_t)block_at, align);
  if (block_at == NULL || bytes > (size_t)(block_end - block_at) || start + bytes > block_end) {
    // Held across mmap: rare (once per 256 KiB of bookkeeping), and racing threads would map twice.
    size_t block_bytes = hz3_round_up(hz3_max(bytes, BLOCK_BYTES), PAGE_BYTES);
    start = (char *)hz3_os_map(block_at == NULL ? NULL : block_end, block_bytes);
    if (start == NULL) return NULL;
    hz3_add_to_figure(&mapped_bytes, block_bytes);
    block_end = start + block_bytes;
  }
  block_at = start + bytes;
  return start;
}

void *hz3_metadata_alloc(size_t bytes) {
  hz3_lock_acquire(&lock);
  void *start = alloc_locked(bytes);
  hz3_lock_release(&lock);
  return start;
}

static unsigned bitmap_index(size_t bytes) { return hz3_log2(bytes) - MIN_BITMAP_BYTES_LOG2; }

void *hz3_metadata_alloc_bitmap(size_t bytes) {
  void **head = &free_bitmaps[bitmap_index(bytes)];
  hz3_lock_acquire(&lock);
  void **bitmap = (void **)*head;
  if (bitmap != NULL) {
    *head = *bitmap;
    *bitmap = NULL;
  } else {
    bitmap = (void **)alloc_locked(bytes);
  }
  hz3_lock_release(&lock);
  return bitmap;
}

void hz3_metadata_free_bitmap(void *bitmap, size_t bytes) {
  void **head = &free_bitmaps[bitmap_index(bytes)];
  hz3_lock_acquire(&lock);
  *(void **)bitmap = *head;
  *head = bitmap;
  hz3_lock_release(&lock);
}

size_t hz3_metadata_bytes(void) { return hz3_read_figure(&mapped_bytes); }
void hz3_metadata_fork_prepare(void) { hz3_lock_acquire_for_fork(&lock); }
void hz3_metadata_fork_release(void) { hz3_lock_release_for_fork(&lock); }
