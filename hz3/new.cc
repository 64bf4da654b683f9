// SPDX-License-Identifier: Apache-2.0
// What it is: the C++ interface: all replaceable operators new and delete, as entry points of their own.
// Called by: C++ programs.
// Needs: hz3/hot, the C++ runtime.
#include <new>

#include "hz3/base/fatal.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/hot/hot.h"

// In libhz3.so the C++ runtime is weak: in a C program nobody calls an operator, and these resolve to null. A program
// that links hz3 in has the runtime, and needs strong references to get it from an archive.
#ifdef HZ3_WEAK_CXX_RUNTIME
__asm__(".weak __gxx_personality_v0\n.weak __cxa_begin_catch\n.weak __cxa_end_catch\n.weak __cxa_rethrow\n"
        ".weak _ZSt17__throw_bad_allocv\n.weak _ZSt15get_new_handlerv\n.weak _ZTISt9bad_alloc\n");

#endif

namespace std {
void __throw_bad_alloc() __attribute__((noreturn));
}  // namespace std

namespace {

// As the standard asks: call the new handler and try again for as long as there is one; then bad_alloc.
HZ3_COLD void *new_slow(size_t align, size_t bytes, hz3_block_origin origin) {
  for (;;) {
    void *pointer = HZ3_CHECKED ? hz3_checked_alloc(origin, align, bytes, false) : hz3_aligned_alloc(align, bytes);
    if (pointer != nullptr) return pointer;
    std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) std::__throw_bad_alloc();
    handler();
  }
}

HZ3_COLD void *new_slow_nothrow(size_t align, size_t bytes, hz3_block_origin origin) noexcept {
  try {
    return new_slow(align, bytes, origin);
  } catch (...) {
    return nullptr;
  }
}

// The checked lane has no fast path.
HZ3_INLINE void *new_fast(size_t bytes) {
  if (HZ3_CHECKED || HZ3_UNLIKELY(bytes > HZ3_TABLE_MAX)) return nullptr;
  return hz3_bin_pop(hz3_bin_at(hz3_bin_offsets[(bytes + 15) / 16]));
}

HZ3_INLINE void *new_fast(std::align_val_t align, size_t bytes) {
  return HZ3_CHECKED ? nullptr : hz3_take_aligned(size_t(align), bytes);
}

HZ3_INLINE void *or_slow(void *pointer, size_t align, size_t bytes, hz3_block_origin origin) {
  return HZ3_LIKELY(pointer != nullptr) ? pointer : new_slow(align, bytes, origin);
}

HZ3_INLINE void *or_slow_nothrow(void *pointer, size_t align, size_t bytes, hz3_block_origin origin) noexcept {
  return HZ3_LIKELY(pointer != nullptr) ? pointer : new_slow_nothrow(align, bytes, origin);
}

HZ3_INLINE void release(void *pointer, hz3_block_origin origin, size_t bytes, size_t align) {
  if (HZ3_CHECKED) hz3_checked_free_as(pointer, {origin, bytes, align});
  else hz3_free(pointer);
}

}  // namespace

HZ3_EXPORT void *operator new(size_t bytes) {
  return or_slow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW);
}
HZ3_EXPORT void *operator new[](size_t bytes) {
  return or_slow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW_ARRAY);
}
HZ3_EXPORT void *operator new(size_t bytes, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW);
}
HZ3_EXPORT void *operator new[](size_t bytes, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW_ARRAY);
}
HZ3_EXPORT void *operator new(size_t bytes, std::align_val_t align) {
  return or_slow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW);
}
HZ3_EXPORT void *operator new[](size_t bytes, std::align_val_t align) {
  return or_slow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW_ARRAY);
}
HZ3_EXPORT void *operator new(size_t bytes, std::align_val_t align, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW);
}
HZ3_EXPORT void *operator new[](size_t bytes, std::align_val_t align, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW_ARRAY);
}

HZ3_EXPORT void operator delete(void *p) noexcept { release(p, HZ3_FROM_NEW, HZ3_UNSAID, 1); }
HZ3_EXPORT void operator delete[](void *p) noexcept { release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, 1); }
HZ3_EXPORT void operator delete(void *p, const std::nothrow_t &) noexcept { release(p, HZ3_FROM_NEW, HZ3_UNSAID, 1); }
HZ3_EXPORT void operator delete[](void *p, const std::nothrow_t &) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, 1);
}
HZ3_EXPORT void operator delete(void *p, size_t bytes) noexcept { release(p, HZ3_FROM_NEW, bytes, 1); }
HZ3_EXPORT void operator delete[](void *p, size_t bytes) noexcept { release(p, HZ3_FROM_NEW_ARRAY, bytes, 1); }
HZ3_EXPORT void operator delete(void *p, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW, HZ3_UNSAID, size_t(align));
}
HZ3_EXPORT void operator delete[](void *p, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, size_t(align));
}
HZ3_EXPORT void operator delete(void *p, size_t bytes, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW, bytes, size_t(align));
}
HZ3_EXPORT void operator delete[](void *p, size_t bytes, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, bytes, size_t(align));
}
HZ3_EXPORT void operator delete(void *p, std::align_val_t align, const std::nothrow_t &) noexcept {
  release(p, HZ3_FROM_NEW, HZ3_UNSAID, size_t(align));
}
HZ3_EXPORT void operator delete[](void *p, std::align_val_t align, const std::nothrow_t &) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, size_t(align));
}
