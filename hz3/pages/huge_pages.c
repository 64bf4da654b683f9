// SPDX-License-Identifier: Apache-2.0
// What it is: whether huge pages are worth asking for, see pages.h and docs/decisions/0028.
// Called by: pages.c and purge.c; large through pages.h.
// Locks: none. Relaxed atomics: times, by which nothing is published.
#include "hz3/base/os.h"
#include "hz3/pages/pages_internal.h"

enum {
  WORTH_NS = 1000 * 1000,             // a huge page saves 512 page faults, of 2 microseconds each
  UNPROBED_BYTES = 16 * 1024 * 1024,  // what is asked for may never be used, so little is asked for without a touch,
  CHEAP_MS = 10,                      // and one is touched no more often than this
  DEAR_MS = 1000                      // where they are dear, 5 ms each were seen
};

bool hz3_huge_pages_are_dear(void) { return hz3_os_now_ms() < __atomic_load_n(&hz3_pages.huge_dear_until_ms, __ATOMIC_RELAXED); }

// The first touch is what costs: the kernel clears the page, and may have to move others first, or to get memory back from the
// host of a virtual machine.
static bool probe_is_dear(char *page) {
  uint64_t before = hz3_os_thread_ns();
  *(volatile char *)page = 0;
  return hz3_os_thread_ns() - before > WORTH_NS;
}

// Whether the caller is to find out; then nobody else does for a while.
static bool may_probe(size_t bytes) {
  bool is_much = __atomic_fetch_add(&hz3_pages.huge_asked_bytes, bytes, __ATOMIC_RELAXED) + bytes > UNPROBED_BYTES;
  uint64_t now = hz3_os_now_ms(), until = __atomic_load_n(&hz3_pages.huge_cheap_until_ms, __ATOMIC_RELAXED);
  return is_much && now >= until &&
         __atomic_compare_exchange_n(&hz3_pages.huge_cheap_until_ms, &until, now + CHEAP_MS, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

size_t hz3_huge_pages_ask(char *start, size_t bytes) {
  if (hz3_huge_pages_are_dear()) return 0;
  if (may_probe(bytes)) {
    size_t first = hz3_min(bytes, HZ3_HUGE_PAGE_BYTES);
    hz3_os_advise_huge(start, first, true);
    if (probe_is_dear(start)) {
      __atomic_store_n(&hz3_pages.huge_dear_until_ms, hz3_os_now_ms() + DEAR_MS, __ATOMIC_RELAXED);
      return first;
    }
  }
  hz3_os_advise_huge(start, bytes, true);
  return bytes;
}
