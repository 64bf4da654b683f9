// SPDX-License-Identifier: Apache-2.0
// What it is: blocks up to 2 KiB: spans of one or two slices, a bit per object that is out, kept apart from the objects.
// Called by: hot, in batches only.
// Owns: one store per small class and home.
// Locks: one per class and home, rank CLASS.
// Invariant: objects of a span that are out = bits set; no object memory is read or written.
#ifndef HZ3_SMALL_SMALL_H_
#define HZ3_SMALL_SMALL_H_

#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

// Writes up to `count` objects of the class to out and returns how many; 0 only when the kernel gives no more memory. Callers
// with different homes (below HZ3_SPAN_HOMES) get objects of different spans while there is memory.
size_t hz3_small_fetch(unsigned home, unsigned size_class, void **out, size_t count);
// Takes objects back. A block that is already free, or no block, ends the process. Spans that become free go back. Thread-safe;
// what `objects` holds afterwards is not said.
void hz3_small_release(unsigned size_class, void **objects, size_t count);
// Gives the pages of the class's spans back in which no byte of an object is out; whether there was anything to give. Thread-safe.
bool hz3_small_purge(unsigned size_class);
// For a tick: the same for at most so many spans of which little has been out for a second; how many there were.
size_t hz3_small_purge_sparse(unsigned size_class, uint32_t now_ms, size_t most);

// Of all homes, and of one. Racy, for hints and statistics.
struct hz3_class_use hz3_small_use(unsigned size_class);
struct hz3_class_use hz3_small_use_at(unsigned size_class, unsigned home);
void hz3_small_fork_prepare(void);
void hz3_small_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_SMALL_SMALL_H_
