// SPDX-License-Identifier: Apache-2.0
// What it is: the kernel calls, see os.h.
#define _GNU_SOURCE  // mremap, mincore, sched_getcpu
#include "hz3/base/os.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

// Untouched memory is nobody's, so what is mapped ahead is not reserved; but from here on the kernel may say that there will never be so
// much: a length that went wrong is then refused, as by libc's malloc, instead of granted until it is touched.
#define RESERVED_MIN_BYTES ((size_t)1 << 30)

enum { PAGES_PER_LOOK = 256 };  // a byte of stack each

// To look at what is there takes 0.4 microseconds where to clear takes 4.5, for so much, and as long for a MiB of huge pages. So after so many
// clearings in which everything was there, one in so many looks.
#define LOOK_MIN_BYTES ((size_t)256 * 1024)
enum { SURE_CLEARINGS = 16, LOOK_SHARE = 16 };

static void *map(void *hint, size_t bytes, bool is_reserved) {
  int saved = errno, reserve = is_reserved ? 0 : MAP_NORESERVE;
  void *start = mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | reserve, -1, 0);
  errno = saved;
  return start == MAP_FAILED ? NULL : start;
}

void *hz3_os_map(void *hint, size_t bytes) { return map(hint, bytes, bytes >= RESERVED_MIN_BYTES); }

void *hz3_os_map_aligned(void *hint, size_t bytes, size_t align) {
  char *start = (char *)hz3_os_map(hint, bytes);
  // The kernel maps downwards, so just below its own choice there is usually room: no slack to cut off, which a limit on
  // address space might not allow.
  for (int tries = 0; start != NULL && tries < 2; tries++) {
    if (((uintptr_t)start & (align - 1)) == 0) return start;
    hz3_os_unmap(start, bytes);
    start = tries == 0 ? (char *)hz3_os_map((void *)hz3_round_down((uintptr_t)start, align), bytes) : NULL;
  }
  if (bytes + align < bytes) return NULL;
  start = (char *)map(NULL, bytes + align, bytes >= RESERVED_MIN_BYTES);  // not for the sake of what is cut off
  if (start == NULL) return NULL;
  char *aligned = (char *)hz3_round_up((uintptr_t)start, align);
  size_t head = (size_t)(aligned - start);
  if (head != 0) hz3_os_unmap(start, head);
  if (align - head != 0) hz3_os_unmap(aligned + bytes, align - head);
  return aligned;
}

bool hz3_os_map_once(void **slot, size_t bytes) {
  // Acquire, and release below: the memory is seen as zeroes.
  if (__atomic_load_n(slot, __ATOMIC_ACQUIRE) != NULL) return true;
  void *fresh = hz3_os_map(NULL, bytes), *expected = NULL;
  if (fresh == NULL) return false;
  if (!__atomic_compare_exchange_n(slot, &expected, fresh, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) hz3_os_unmap(fresh, bytes);
  return true;
}

bool hz3_os_can_map(size_t bytes) {
  int saved = errno;
  struct rlimit space, data;
  struct sysinfo info;
  bool known = getrlimit(RLIMIT_AS, &space) == 0 && getrlimit(RLIMIT_DATA, &data) == 0 && sysinfo(&info) == 0;
  errno = saved;
  if (!known) return true;
  return bytes <= space.rlim_cur && bytes <= data.rlim_cur && bytes / info.mem_unit <= info.totalram + info.totalswap;
}

bool hz3_os_make_writable(void *start, size_t bytes) {
  int saved = errno;
  bool done = mprotect(start, bytes, PROT_READ | PROT_WRITE) == 0;
  errno = saved;
  return done;
}

bool hz3_os_protect(void *start, size_t bytes) {
  int saved = errno;
  bool done = mprotect(start, bytes, PROT_NONE) == 0;
  errno = saved;
  return done;
}

bool hz3_os_unmap(void *start, size_t bytes) {
  int saved = errno;
  bool done = munmap(start, bytes) == 0;
  errno = saved;
  return done;
}

bool hz3_os_purge(void *start, size_t bytes) {
  int saved = errno;
  bool done = madvise(start, bytes, MADV_DONTNEED) == 0;
  errno = saved;
  return done;
}

size_t hz3_os_resident_bytes(void *start, size_t bytes) {
  int saved = errno;
  unsigned char states[PAGES_PER_LOOK];
  size_t page = hz3_os_page_bytes(), left = (bytes + page - 1) / page, resident = 0;
  char *at = (char *)start;
  for (size_t pages; left > 0; left -= pages, at += pages * page) {
    pages = hz3_min(left, PAGES_PER_LOOK);
    if (mincore(at, pages * page, states) != 0) break;
    for (size_t i = 0; i < pages; i++) resident += states[i] & 1;
  }
  errno = saved;
  return resident * page;
}

// Clears whole pages: those that are there by writing them, others by a call, which also takes what was swapped out. Whether there were such.
static bool clear_by_looking(char *at, size_t bytes) {
  int saved = errno;
  unsigned char states[PAGES_PER_LOOK];
  bool any_absent = false;
  size_t page = hz3_os_page_bytes(), left = (bytes + page - 1) / page;
  for (size_t pages; left > 0; left -= pages) {
    pages = hz3_min(left, PAGES_PER_LOOK);
    if (mincore(at, pages * page, states) != 0) memset(states, 1, pages);
    for (size_t i = 0, run; i < pages; i += run, at += run * page) {
      bool is_there = states[i] & 1;
      for (run = 1; i + run < pages && (states[i + run] & 1) == is_there; run++) continue;
      any_absent |= !is_there;
      if (is_there || !hz3_os_purge(at, run * page)) memset(at, 0, run * page);
    }
  }
  errno = saved;
  return any_absent;
}

void hz3_os_clear(void *start, size_t bytes) {
  static uint32_t clearings;  // since something was not there; relaxed: a hint
  if (bytes < LOOK_MIN_BYTES || (uintptr_t)start % hz3_os_page_bytes() != 0) {
    memset(start, 0, bytes);
    return;
  }
  uint32_t count = __atomic_load_n(&clearings, __ATOMIC_RELAXED);
  bool looks = count < SURE_CLEARINGS || count % LOOK_SHARE == 0, any_absent = looks && clear_by_looking((char *)start, bytes);
  if (!looks) memset(start, 0, bytes);
  __atomic_store_n(&clearings, any_absent ? 0 : count + 1, __ATOMIC_RELAXED);
}

bool hz3_os_is_resident(void *page) { return hz3_os_resident_bytes(page, 1) != 0; }

void hz3_os_advise_huge(void *start, size_t bytes, bool huge) {
  int saved = errno;
  madvise(start, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  errno = saved;
}

// Whether the pages lie in one of the kernel's mappings: those of several fail to grow in place for a reason of their own.
static bool is_one_mapping(char *start, size_t bytes) {
  size_t page = hz3_os_page_bytes();
  if (mremap(start, bytes, bytes + page, 0) == MAP_FAILED) return errno != EFAULT;
  hz3_os_unmap(start + bytes, page);  // nothing was mapped behind them
  return true;
}

// How many of these bytes, whole pages, lie in the same one of the kernel's mappings as the first.
static size_t bytes_in_one_mapping(char *start, size_t bytes) {
  if (is_one_mapping(start, bytes)) return bytes;
  size_t page = hz3_os_page_bytes(), within = page, beyond = bytes;
  while (beyond - within > page) {
    size_t middle = within + (beyond - within) / 2 / page * page;
    if (is_one_mapping(start, middle)) within = middle;
    else beyond = middle;
  }
  return within;
}

static bool moves_are_over;  // relaxed: who sees it late loses one more target

static enum hz3_os_moved move_mapping(char *from, char *to, size_t bytes) {
  if (__atomic_load_n(&moves_are_over, __ATOMIC_RELAXED)) return HZ3_OS_NOT_MOVED;
  // DONTUNMAP (Linux 5.7) keeps the source mapped, so that no other thread's mapping can slip in between.
  if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to) return HZ3_OS_MOVED;
  if (errno == EINVAL || errno == ENOSYS || errno == EPERM) return HZ3_OS_NOT_MOVED;  // an old kernel, an emulator, a filter
  // It may have been refused after its target was unmapped. What is mapped there now may be another thread's: not to be looked
  // at, nor unmapped. Where moves fail so, they do again: one target is lost, not one for each.
  __atomic_store_n(&moves_are_over, true, __ATOMIC_RELAXED);
  return HZ3_OS_TARGET_LOST;
}

// Mapping by mapping, for before Linux 6.17 the kernel refuses pages of two at once, having unmapped their target. What it refuses to
// move after others have moved is copied.
static enum hz3_os_moved move_mappings(char *from, char *to, size_t bytes) {
  for (size_t done = 0, piece; done < bytes; done += piece) {
    piece = bytes_in_one_mapping(from + done, bytes - done);
    switch (move_mapping(from + done, to + done, piece)) {
      case HZ3_OS_MOVED:
        break;
      case HZ3_OS_NOT_MOVED:
        if (done == 0) return HZ3_OS_NOT_MOVED;
        memcpy(to + done, from + done, piece);
        break;
      case HZ3_OS_TARGET_LOST:
        memcpy(from, to, done);
        hz3_os_unmap(to, done);
        hz3_os_unmap(to + done + piece, bytes - done - piece);
        return HZ3_OS_TARGET_LOST;
    }
  }
  return HZ3_OS_MOVED;
}

enum hz3_os_moved hz3_os_move_pages(void *from, void *to, size_t bytes) {
  int saved = errno;
  enum hz3_os_moved moved = move_mappings((char *)from, (char *)to, bytes);
  errno = saved;
  return moved;
}

static bool try_reuse(void) {
  size_t page = hz3_os_page_bytes();
  char *from = (char *)hz3_os_map(NULL, 2 * page), *to = from + page;
  if (from == NULL) return false;
  *(volatile char *)from = 1;
  enum hz3_os_moved moved = hz3_os_move_pages(from, to, page);
  *(volatile char *)from = 2;
  bool is_zero = hz3_os_purge(from, page) && *(volatile char *)from == 0;
  hz3_os_unmap(from, page);
  if (moved != HZ3_OS_TARGET_LOST) hz3_os_unmap(to, page);
  return moved == HZ3_OS_MOVED && is_zero;
}

bool hz3_os_can_reuse_what_moved(void) {
  enum { UNKNOWN, NO, YES };
  static int known;  // relaxed: every thread would find out the same
  int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (HZ3_LIKELY(answer != UNKNOWN)) return answer == YES;
  answer = try_reuse() ? YES : NO;
  __atomic_store_n(&known, answer, __ATOMIC_RELAXED);
  return answer == YES;
}

size_t hz3_os_page_bytes(void) {
  static size_t page_bytes;  // relaxed: every thread would store the same
  size_t bytes = __atomic_load_n(&page_bytes, __ATOMIC_RELAXED);
  if (HZ3_LIKELY(bytes != 0)) return bytes;
  bytes = (size_t)sysconf(_SC_PAGESIZE);
  __atomic_store_n(&page_bytes, bytes, __ATOMIC_RELAXED);
  return bytes;
}

uint64_t hz3_os_random(void) {
  uint64_t value = 0;
  int saved = errno;
  if (syscall(SYS_getrandom, &value, sizeof value, GRND_NONBLOCK) != (long)sizeof value) {
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    value = ((uint64_t)now.tv_nsec ^ (uintptr_t)&value) * 0x9e3779b97f4a7c15u;
  }
  errno = saved;
  return value;
}

uint64_t hz3_os_now_ms(void) {
  struct timespec now = {0};
  int saved = errno;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  errno = saved;
  return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

uint64_t hz3_os_thread_ns(void) {
  struct timespec used = {0};
  int saved = errno;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  errno = saved;
  return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

enum { CPUS = 8192, MASK_BITS = 8 * sizeof(unsigned long) };  // the most that Linux can be built for, on x86-64
static uint16_t cpu_ranks[CPUS];

unsigned hz3_os_cpu_count(void) {
  // The affinity mask, not sysconf: sysconf opens files, and may allocate.
  unsigned long mask[CPUS / MASK_BITS];
  int saved = errno;
  long mask_bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
  errno = saved;
  unsigned count = 0;
  for (unsigned cpu = 0; (long)cpu < mask_bytes * 8; cpu++) {
    cpu_ranks[cpu] = (uint16_t)count;
    count += mask[cpu / MASK_BITS] >> cpu % MASK_BITS & 1;
  }
  return count > 0 ? count : 1;
}

unsigned hz3_os_cpu(void) {
  int saved = errno, cpu = sched_getcpu();
  errno = saved;
  return cpu < 0 ? 0 : cpu_ranks[cpu % CPUS];
}

void hz3_os_await(const size_t *figure, size_t most, uint64_t most_ms) {
  int saved = errno;
  for (uint64_t start = hz3_os_now_ms(); hz3_read_figure(figure) > most && hz3_os_now_ms() - start < most_ms;) sched_yield();
  errno = saved;
}

void hz3_os_futex_wait(uint32_t *word, uint32_t expected) {
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
  errno = saved;
}

void hz3_os_futex_wake_one(uint32_t *word) {
  int saved = errno;
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
  errno = saved;
}
