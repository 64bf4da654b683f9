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
// needs without the NUL, as snprintf does; `buffer` may be NULL when `size` is 0. All figures in bytes unless named
// otherwise. Does not allocate.
size_t hz3_stats_json(char *buffer, size_t size);

// Name, revision, lane, options and compiler of this build, one line. Static storage.
const char *hz3_version(void);

#ifdef __cplusplus
}
#endif

#endif  // HZ3_HZ3_H_
