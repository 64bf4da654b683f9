// SPDX-License-Identifier: Apache-2.0
// What it is: blocks of no bytes, see zero_size.h. Compiled in every lane, called in the checked one alone.
// Invariant: the free addresses are free_line[first_free % BLOCKS] .. free_line[(last_free - 1) % BLOCKS], oldest first, and
//   those from `fresh` on.
#include "hz3/hot/zero_size.h"

#include "hz3/base/lock.h"
#include "hz3/base/os.h"

enum { STEP = 16, BLOCKS = 65536 };  // 1 MiB of address space in all; records cost memory where they are used

struct records {
  uint32_t words[BLOCKS];
  uint16_t free_line[BLOCKS];
};

static struct {
  struct hz3_lock lock;
  uint32_t fresh, first_free, last_free;
  char *base;  // read without the lock: release, so that the records are there
  struct records *records;
} area = {.lock = HZ3_LOCK_INIT(HZ3_RANK_QUARANTINE)};

// Under the lock: once per process.
static bool map_area_locked(void) {
  char *base = (char *)hz3_os_map(NULL, (size_t)STEP * BLOCKS);
  struct records *records = base == NULL ? NULL : (struct records *)hz3_os_map(NULL, sizeof *records);
  if (records == NULL || !hz3_os_protect(base, (size_t)STEP * BLOCKS)) {
    if (base != NULL) hz3_os_unmap(base, (size_t)STEP * BLOCKS);
    if (records != NULL) hz3_os_unmap(records, sizeof *records);
    return false;
  }
  area.records = records;
  // Release: pairs with the load in hz3_zero_size_word.
  __atomic_store_n(&area.base, base, __ATOMIC_RELEASE);
  return true;
}

static void *alloc_locked(uint32_t word) {
  if (area.base == NULL && !map_area_locked()) return NULL;
  uint32_t index;
  if (area.fresh < BLOCKS) index = area.fresh++;
  else if (area.first_free != area.last_free) index = area.records->free_line[area.first_free++ % BLOCKS];
  else return NULL;
  area.records->words[index] = word;
  return area.base + (size_t)index * STEP;
}

void *hz3_zero_size_alloc(uint32_t word) {
  hz3_lock_acquire(&area.lock);
  void *block = alloc_locked(word);
  hz3_lock_release(&area.lock);
  return block;
}

uint32_t *hz3_zero_size_word(const void *pointer) {
  // Acquire: pairs with the release in map_area_locked, so that the records are there.
  const char *base = __atomic_load_n(&area.base, __ATOMIC_ACQUIRE);
  uintptr_t offset = (uintptr_t)pointer - (uintptr_t)base;
  return base == NULL || offset >= (uintptr_t)STEP * BLOCKS ? NULL : &area.records->words[offset / STEP];
}

void hz3_zero_size_free(void *pointer) {
  hz3_lock_acquire(&area.lock);
  area.records->free_line[area.last_free++ % BLOCKS] = (uint16_t)((size_t)((char *)pointer - area.base) / STEP);
  hz3_lock_release(&area.lock);
}

void hz3_zero_size_fork_prepare(void) { hz3_lock_acquire_for_fork(&area.lock); }
void hz3_zero_size_fork_release(void) { hz3_lock_release_for_fork(&area.lock); }
