// SPDX-License-Identifier: Apache-2.0
// What it is: the fast paths: allocation up to 128 KiB and free of small and medium blocks.
// Called by: the API edge (hz3/malloc.c, hz3/new.cc) and hot itself.
// Needs: the tag table. No lock, no read-modify-write atomic, no access to object memory.
// Invariant: a bin holds the objects lo[0] .. top[-1], the newest last. Empty: top == lo. Full: top == hi. All zero means
//   empty and full at once, so every first use takes the slow path.
#ifndef HZ3_HOT_BIN_H_
#define HZ3_HOT_BIN_H_

#include "hz3/base/base.h"
#include "hz3/base/size_class.h"
#include "hz3/pages/tag_map.h"

HZ3_BEGIN_DECLS

struct hz3_bin {
  void **top;  // one above the object freed last, which is returned next
  void **hi;   // top of a full bin
  void **lo;   // slots of the loaded magazine, top of an empty bin
  size_t uneven;  // see hz3_prefetch_freed. With it 32 bytes: two bins to a cache line, none across two
};
HZ3_STATIC_ASSERT(sizeof(struct hz3_bin) == HZ3_TAG_STEP, "a tag is the offset of a bin");

// The block up to 128 KiB that this thread freed last, not in its bin yet: the next free puts it there. The address of that
// bin's slot is known only after three loads in a row, and later loads of the program wait for such a store on some
// processors; for the block before, all three are long done (docs/decisions/0025). But what comes back to the place above the top of
// this bin that it was taken from is there at once, while this one goes on waiting: who frees the newest first gets it again, still in the
// processor's cache (docs/decisions/0045). All zero: none; the tag is that of bin 0, which is always full.
struct hz3_last_freed {
  void *object;
  size_t tag;
};
// What each heap begins with (heap.h).
struct hz3_heap_start {
  struct hz3_bin bins[HZ3_CLASS_COUNT];
  struct hz3_last_freed last;
};

struct hz3_heap;
extern const struct hz3_heap hz3_heap_empty;  // all zero: every thread's heap until its first slow path
// This thread's heap as an offset from hz3_heap_empty: zero-initialised thread-local data is valid even before libc has set it up.
extern __thread uintptr_t hz3_heap_offset __attribute__((tls_model("initial-exec")));
extern const uint16_t hz3_bin_offsets[HZ3_TABLE_MAX / 16 + 1];  // by (bytes + 15) / 16

void *hz3_malloc_slow(size_t bytes);  // as hz3_malloc, which goes on here when the bin is empty or `bytes` are above 128 KiB
HZ3_COLD HZ3_NOTHROW void hz3_free_slow(void *pointer);  // any block, NULL
HZ3_NOTHROW void hz3_free_untagged(void *pointer);  // the same for what has no tag: a large block, most likely

// The empty asm hides from the compiler that the sum usually lies outside of hz3_heap_empty, and keeps it one register.
HZ3_INLINE uintptr_t hz3_heap_base(void) {
  uintptr_t heap = (uintptr_t)&hz3_heap_empty + hz3_heap_offset;
  __asm__("" : "+r"(heap));
  return heap;
}

HZ3_INLINE struct hz3_bin *hz3_bin_at(size_t offset) { return (struct hz3_bin *)(hz3_heap_base() + offset); }

// NULL if the bin is empty.
HZ3_INLINE void *hz3_bin_pop(struct hz3_bin *bin) {
  void **top = bin->top;
  if (HZ3_UNLIKELY(top == bin->lo)) return NULL;
  bin->top = top - 1;
  void *object = top[-1];
  if (object == NULL) __builtin_unreachable();  // spares the callers a second test
  return object;
}

// The bin has room. The slot is stored before `top`: what fork copies in between may miss the object, nothing worse.
HZ3_INLINE void hz3_bin_push_at(struct hz3_bin *bin, void **top, void *object) {
  *top = object;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  bin->top = top + 1;
}

HZ3_INLINE void hz3_bin_push(struct hz3_bin *bin, void *object) { hz3_bin_push_at(bin, bin->top, object); }

// Whether the object is the one freed last. The bin has a magazine; below its first slot is the magazine's header, which
// never looks like an object.
HZ3_INLINE bool hz3_bin_is_newest(const struct hz3_bin *bin, const void *object) { return bin->top[-1] == object; }

// A block of at least `bytes`, also of 0, at a multiple of 16. NULL with errno ENOMEM. For any thread.
HZ3_INLINE void *hz3_malloc(size_t bytes) {
  if (HZ3_LIKELY(bytes <= HZ3_TABLE_MAX)) {
    void *object = hz3_bin_pop(hz3_bin_at(hz3_bin_offsets[(bytes + 15) / 16]));
    if (HZ3_LIKELY(object != NULL)) return object;
  }
  return hz3_malloc_slow(bytes);
}

// The same at a multiple of align, a power of two: every multiple of it up to 128 KiB is in a class of such blocks. NULL if the
// bin is empty, and above 128 KiB.
HZ3_INLINE void *hz3_take_aligned(size_t align, size_t bytes) {
  if (HZ3_UNLIKELY(bytes > HZ3_TABLE_MAX) || HZ3_UNLIKELY(align > HZ3_TABLE_MAX)) return NULL;
  return hz3_bin_pop(hz3_bin_at(hz3_bin_offsets[(hz3_round_up(hz3_max(bytes, align), align) + 15) / 16]));
}

// Shows the processor where the frees are going: the block, or, if it lies as far from the one before as that from its own, the one 16 such steps
// ahead (docs/decisions/0027). But not what another thread may be writing. That may have allocated these: then `uneven` is 1, else 0, and no two
// steps are as long. And the next slice may be its own, so only the address within the slice moves on, and wraps around.
// No access: an address where nothing is does nothing. No branch either, which would cost more.
HZ3_INLINE void hz3_prefetch_freed(const void *freed, const void *before, const void *one_before, size_t uneven) {
  uintptr_t step = (uintptr_t)freed - (uintptr_t)before, sum = (uintptr_t)one_before + uneven;
  __asm__("" : "+r"(sum));  // or uneven would be added to step, by an instruction more
  bool is_even = sum + step == (uintptr_t)before;
  __builtin_prefetch((const void *)hz3_move_in_slice((uintptr_t)freed, is_even ? 16 * step : 0));
}

// Takes a block back, from any thread; NULL is fine. A pointer that is found to be none, or free already, ends the process. Keeps errno.
// The order of the stores: what fork copies in between may miss an object, nothing worse. A block that is freed twice in a row is the last
// of all, or the newest of its bin.
HZ3_INLINE void hz3_free(void *pointer) {
  intptr_t tag = hz3_tag_of(pointer);
  uintptr_t heap = hz3_heap_base();
  if (HZ3_LIKELY(tag > 0)) {
    struct hz3_last_freed *last = &((struct hz3_heap_start *)heap)->last;
    struct hz3_bin *bin = (struct hz3_bin *)(heap + last->tag);
    void *before = last->object, **top = bin->top;
    if (HZ3_LIKELY(top != bin->hi) && HZ3_LIKELY(before != pointer)) {
      void *newest = top[-1];
      // Taken from there last. The slot may be older than the magazine's use for this class, and the block's own.
      if (HZ3_UNLIKELY(*top == pointer) && last->tag == (size_t)tag && newest != pointer) {
        __asm__("" : "+r"(top));  // or the sum would be worked out before, and cost the other path a register
        bin->top = top + 1;
        return;
      }
      if (HZ3_LIKELY(newest != before) && HZ3_LIKELY(newest != pointer)) {
        last->object = pointer;
        last->tag = (size_t)tag;
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        hz3_bin_push_at(bin, top, before);
        hz3_prefetch_freed(pointer, before, newest, bin->uneven);
        return;
      }
    }
  } else if (tag < 0) {  // too big to let one wait in every thread
    struct hz3_bin *bin = (struct hz3_bin *)(heap - (size_t)tag);
    if (bin->top != bin->hi && !hz3_bin_is_newest(bin, pointer)) {
      hz3_bin_push(bin, pointer);
      return;
    }
  } else {
    hz3_free_untagged(pointer);
    return;
  }
  hz3_free_slow(pointer);
}

HZ3_END_DECLS

#endif  // HZ3_HOT_BIN_H_
