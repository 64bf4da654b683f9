// SPDX-License-Identifier: Apache-2.0
// What it is: compiler attributes, checks and small integer helpers shared by all boxes.
// Called by: every box.
// Needs: nothing but the compiler.
#ifndef HZ3_BASE_BASE_H_
#define HZ3_BASE_BASE_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// What the boxes declare is hidden also where it is only used: the compiler then needs no indirection to reach it.
#define HZ3_HIDDEN_ON _Pragma("GCC visibility push(hidden)")
#define HZ3_HIDDEN_OFF _Pragma("GCC visibility pop")
#ifdef __cplusplus
#define HZ3_BEGIN_DECLS extern "C" { HZ3_HIDDEN_ON
#define HZ3_END_DECLS HZ3_HIDDEN_OFF }
#define HZ3_STATIC_ASSERT static_assert
#else
#define HZ3_BEGIN_DECLS HZ3_HIDDEN_ON
#define HZ3_END_DECLS HZ3_HIDDEN_OFF
#define HZ3_STATIC_ASSERT _Static_assert
#endif

#define HZ3_LIKELY(x) __builtin_expect(!!(x), 1)
#define HZ3_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define HZ3_COLD __attribute__((noinline, cold))
#define HZ3_NOINLINE __attribute__((noinline))
#define HZ3_NOTHROW __attribute__((nothrow))  // for C++: who must not throw either can jump there instead of calling it
#define HZ3_INLINE static inline __attribute__((always_inline))
// At the start of a cache line: elsewhere in it, a loop over malloc and free takes up to 7 % longer (docs/decisions/0027).
#define HZ3_EXPORT __attribute__((visibility("default"), aligned(HZ3_CACHE_LINE)))
#define HZ3_CACHE_LINE 64

#define HZ3_KIB ((size_t)1024)
#define HZ3_MIB ((size_t)1024 * 1024)

HZ3_BEGIN_DECLS

// Rounds up to a multiple of `align`, a power of two. Wraps for values within `align` of SIZE_MAX: check first.
HZ3_INLINE size_t hz3_round_up(size_t value, size_t align) { return (value + align - 1) & ~(align - 1); }
HZ3_INLINE size_t hz3_round_down(size_t value, size_t align) { return value & ~(align - 1); }
HZ3_INLINE bool hz3_is_power_of_two(size_t value) { return value != 0 && (value & (value - 1)) == 0; }
HZ3_INLINE size_t hz3_min(size_t a, size_t b) { return a < b ? a : b; }
HZ3_INLINE size_t hz3_max(size_t a, size_t b) { return a > b ? a : b; }
// Index of the highest set bit; value != 0.
HZ3_INLINE unsigned hz3_log2(size_t value) { return 63u - (unsigned)__builtin_clzll((unsigned long long)value); }
// Smallest power of two >= value, 1 <= value <= 2^63.
HZ3_INLINE size_t hz3_ceil_power_of_two(size_t value) { return value <= 1 ? 1 : (size_t)1 << (hz3_log2(value - 1) + 1); }

// Changes a figure that others read without the lock that its writers hold, and that may be a moment old there.
HZ3_INLINE void hz3_add_to_figure(size_t *figure, size_t change) { __atomic_store_n(figure, *figure + change, __ATOMIC_RELAXED); }
HZ3_INLINE void hz3_take_from_figure(size_t *figure, size_t change) { hz3_add_to_figure(figure, (size_t)0 - change); }
HZ3_INLINE size_t hz3_read_figure(const size_t *figure) { return __atomic_load_n(figure, __ATOMIC_RELAXED); }

HZ3_END_DECLS

#endif  // HZ3_BASE_BASE_H_
