// SPDX-License-Identifier: Apache-2.0
// What it is: the kernel calls the allocator makes, and nothing else.
// Called by: every box.
// Needs: mmap family, futex, clock.
// Invariant: every function keeps errno; failure is a return value. No lock of the allocator is held across a call
//   that can take long (purge, map), except where the caller says why.
#ifndef HZ3_BASE_OS_H_
#define HZ3_BASE_OS_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

// Private anonymous zeroed memory, readable and writable. `hint` is a wish only, may be NULL. NULL on failure.
void *hz3_os_map(void *hint, size_t bytes);
// The same at a multiple of `align` (a power of two >= the page size).
void *hz3_os_map_aligned(void *hint, size_t bytes, size_t align);
// Puts such memory into the slot, unless some is there already. False on failure. Thread-safe; published by a release, for readers
// that load the slot with acquire.
bool hz3_os_map_once(void **slot, size_t bytes);
// Whether so many bytes could be mapped if all other memory of this process were given back: there is as much, and no limit below.
bool hz3_os_can_map(size_t bytes);
// Makes protected pages writable. False if the kernel refuses.
bool hz3_os_make_writable(void *start, size_t bytes);
// Makes whole pages fault on any access. False if the kernel refuses (too many maps); nothing changed then.
bool hz3_os_protect(void *start, size_t bytes);
// False if the kernel refuses (for example vm.max_map_count); the memory then stays mapped.
bool hz3_os_unmap(void *start, size_t bytes);
// Gives the pages back; they read as zero afterwards. False if refused (locked memory), contents then unchanged.
bool hz3_os_purge(void *start, size_t bytes);
// Makes memory read as zero, and with it the rest of its last page. Of 256 KiB and more, what the process does not have it does not get:
// to write it all would make it resident. But where everything was there for a while, this is tried only now and then. Thread-safe.
void hz3_os_clear(void *start, size_t bytes);
// Whether the page is backed by memory; false if it is not mapped.
bool hz3_os_is_resident(void *page);
// How much of whole pages is. Where some are not mapped, others may not count.
size_t hz3_os_resident_bytes(void *start, size_t bytes);
void hz3_os_advise_huge(void *start, size_t bytes, bool huge);  // a wish: back this range with huge pages, or not

// Moves `bytes` of whole pages from `from` to `to`, both mapped; `from` stays mapped.
enum hz3_os_moved {
  HZ3_OS_MOVED,        // what `from` holds now is not said
  HZ3_OS_NOT_MOVED,    // `from` is as it was; `to` is mapped, with whatever contents
  HZ3_OS_TARGET_LOST,  // `from` is as it was; what is at `to` now may be others'. Further calls say NOT_MOVED
};
enum hz3_os_moved hz3_os_move_pages(void *from, void *to, size_t bytes);

// Whether what `from` is mapped to then can be used, and purged, like any other memory. Some emulators say they had purged it, and have not.
bool hz3_os_can_reuse_what_moved(void);

size_t hz3_os_page_bytes(void);
// A number that nobody outside of the process can guess, from the kernel; early at boot from clock and addresses.
uint64_t hz3_os_random(void);
// Milliseconds since some fixed point, at tick resolution.
uint64_t hz3_os_now_ms(void);
// Nanoseconds of processor time of this thread: what others take away in between does not count.
uint64_t hz3_os_thread_ns(void);
// CPUs that this thread may run on, at least 1, each of which it ranks for hz3_os_cpu. Not thread-safe.
unsigned hz3_os_cpu_count(void);
// The rank of the CPU that this thread runs on among those that were counted last: 0, 1, … Not the kernel's number, for a container
// may be given CPUs 40 to 47 of 64, and is to see eight that differ. A hint: the thread may move at once. 0 where unknown. Thread-safe.
unsigned hz3_os_cpu(void);

// Lets other threads run until a figure of theirs is no more than that, or for so long.
void hz3_os_await(const size_t *figure, size_t most, uint64_t most_ms);

// futex(2), private. Wait returns when *word != expected, when woken, or spuriously.
void hz3_os_futex_wait(uint32_t *word, uint32_t expected);
void hz3_os_futex_wake_one(uint32_t *word);

HZ3_END_DECLS

#endif  // HZ3_BASE_OS_H_
