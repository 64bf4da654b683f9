// SPDX-License-Identifier: Apache-2.0
// What it is: the checked lane's blocks of no bytes: addresses that are theirs alone and that nobody may read or write.
// Called by: checked.c of this box only.
// Owns: one area of address space without access, mapped at the first such block; a record of each address in it.
// Locks: one, rank QUARANTINE. A block's word needs none: it belongs to whoever owns the block.
#ifndef HZ3_HOT_ZERO_SIZE_H_
#define HZ3_HOT_ZERO_SIZE_H_

#include "hz3/base/base.h"

HZ3_BEGIN_DECLS

// An address, a multiple of 16, with this word as its record. NULL when there is no memory or all of them are in use.
void *hz3_zero_size_alloc(uint32_t word);
// The record of an address of the area, also of one that never was a block (0); NULL for addresses outside.
uint32_t *hz3_zero_size_word(const void *pointer);
// Takes the block back. Others are handed out first, as long as there are any.
void hz3_zero_size_free(void *pointer);
void hz3_zero_size_fork_prepare(void);
void hz3_zero_size_fork_release(void);

HZ3_END_DECLS

#endif  // HZ3_HOT_ZERO_SIZE_H_
