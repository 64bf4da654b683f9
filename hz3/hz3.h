// SPDX-License-Identifier: Apache-2.0
// What it is: hz3's own interface beside the standard one (malloc and friends keep their usual headers).
// Called by: programs that want more than malloc.h offers. All functions are thread-safe.
#ifndef HZ3_HZ3_H_
#define HZ3_HZ3_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Writes the allocator's statistics as one JSON object with a terminating NUL, cut off at `size`. Returns the length it
// needs without the NUL, as snprintf does; `buffer` may be NULL when `size` is 0. Does not allocate. Other threads go on
// meanwhile, so the figures may not add up exactly. Members:
//   build           what hz3_version() says
//   mapped_bytes    address space from the kernel, but for metadata_bytes
//   live_bytes      in blocks that the program holds, rounded to their size classes
//   cached_bytes    in free objects that threads, or the depot that they share, keep for the next allocation
//   free_bytes      free beside those, in memory of every kind
//   dirty_bytes     the part of free_bytes that may still be resident; not counted where a span is free in part only
//   metadata_bytes  the allocator's own records, without the tables that are indexed by address
//   large_blocks, large_bytes  number and address space of live blocks above 1 MiB
//   purges          how often memory was given back to the kernel
//   heaps           per-thread heaps there ever were at once, and one that exiting threads share
//   classes         of each size class with memory: bytes of an object; numbers of live objects, cached objects, spans
size_t hz3_stats_json(char *buffer, size_t size);

// Name, revision, lane, options and compiler of this build, one line. Static storage. The revision is known in hz3's own
// checkout only, "unknown" where it is built as a dependency.
const char *hz3_version(void);

#ifdef __cplusplus
}
#endif

#endif  // HZ3_HZ3_H_
