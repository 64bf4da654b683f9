// SPDX-License-Identifier: Apache-2.0
// What it is: blocks from 2 KiB to 1 MiB: spans of 1 to 16 slices, the objects that are out in one 64-bit word. Free spans go
//   back to their chunk, where neighbouring slices serve any other class.
// Called by: hot, in batches only.
// Owns: one store per medium class.
// Locks: one per class, rank CLASS.
// Invariant: objects of a span that are out = bits set of out_word; no object memory is read or written.
#ifndef HZ3_MEDIUM_MEDIUM_H_
#define HZ3_MEDIUM_MEDIUM_H_

#include "hz3/pages/pages.h"

HZ3_BEGIN_DECLS

// As hz3_small_fetch. If all objects written are known to be zero, *is_clean is set, else cleared.
size_t hz3_medium_fetch(unsigned size_class, void **out, size_t count, bool *is_clean);
// As hz3_small_release.
void hz3_medium_release(unsigned size_class, void **objects, size_t count);
// As hz3_small_purge, hz3_small_purge_sparse.
bool hz3_medium_purge(unsigned size_class);
size_t hz3_medium_purge_sparse(unsigned size_class, uint32_t now_ms, size_t most);

struct hz3_class_use hz3_medium_use(unsigned size_class);  // racy
void hz3_medium_fork_prepare(void);
void hz3_medium_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_MEDIUM_MEDIUM_H_
