// SPDX-License-Identifier: Apache-2.0
// What it is: giving back what nobody needed for a while, or all that is free.
// Called by: slow.c of this box only.
// Locks: none of its own; the heap is the caller's.
#ifndef HZ3_HOT_TICK_H_
#define HZ3_HOT_TICK_H_

#include "hz3/hot/heap.h"

HZ3_BEGIN_DECLS

enum { HZ3_COARSE_STEP_MS = 4 };
extern uint32_t hz3_coarse_now_ms;  // the time in such steps, as far as a tick has looked at the clock; atomic, relaxed

// Looks at the clock. Every HZ3_TICK_MS the heap gives back what it did not use, and one thread does so for all.
void hz3_tick(struct hz3_heap *heap);
// Everything that this heap, the depot and the heaps of threads that ended cache, and all free memory. Whether there was any.
bool hz3_reclaim(struct hz3_heap *heap);

HZ3_END_DECLS

#endif  // HZ3_HOT_TICK_H_
