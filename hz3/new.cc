// SPDX-License-Identifier: Apache-2.0
// What it is: the C++ interface: all replaceable operators new and delete, as entry points of their own.
// Called by: C++ programs.
// Needs: hz3/hot, the C++ runtime (libhz3.so: where there is one).
#include <new>

#ifdef HZ3_WEAK_CXX_RUNTIME
#include <dlfcn.h>
#include <stdlib.h>
#endif

#include "hz3/base/base.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/hot/hot.h"

namespace std {
void __throw_bad_alloc() __attribute__((noreturn));
}  // namespace std

namespace {

#ifdef HZ3_WEAK_CXX_RUNTIME
// libhz3.so must not pull the C++ runtime into C programs, which may load it later, with a library that needs it: so it is looked
// for when memory has run out. `scope`: RTLD_DEFAULT or RTLD_NEXT. nullptr if there is none; nobody calls an operator then.
void *runtime(void *scope, const char *name) {
  void *symbol = dlsym(scope, name);
  static const char *const files[] = {"libstdc++.so.6", "libc++.so.1"};
  for (const char *file : files) {
    void *library = symbol != nullptr ? nullptr : dlopen(file, RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) continue;
    symbol = dlsym(library, name);
    dlclose(library);  // whoever called the operator keeps it
  }
  return symbol;
}

std::new_handler get_new_handler() {
  auto get = reinterpret_cast<std::new_handler (*)()>(runtime(RTLD_DEFAULT, "_ZSt15get_new_handlerv"));
  return get == nullptr ? nullptr : get();
}

[[noreturn]] void throw_bad_alloc() {
  auto raise = reinterpret_cast<void (*)()>(runtime(RTLD_DEFAULT, "_ZSt17__throw_bad_allocv"));
  if (raise != nullptr) raise();
  abort();
}
#else
std::new_handler get_new_handler() { return std::get_new_handler(); }
[[noreturn]] void throw_bad_alloc() { std::__throw_bad_alloc(); }
#endif

HZ3_INLINE void *alloc(size_t align, size_t bytes, hz3_block_origin origin) {
  return HZ3_CHECKED ? hz3_checked_alloc(origin, align, bytes, false) : hz3_aligned_alloc(align, bytes);
}

// As the standard asks: call the new handler and try again for as long as there is one; then bad_alloc. What no alignment is never
// comes, so the handler is not asked.
HZ3_COLD void *new_slow(size_t align, size_t bytes, hz3_block_origin origin) {
  if (!hz3_is_power_of_two(align)) throw_bad_alloc();
  for (;;) {
    void *pointer = alloc(align, bytes, origin);
    if (pointer != nullptr) return pointer;
    std::new_handler handler = get_new_handler();
    if (handler == nullptr) throw_bad_alloc();
    handler();
  }
}

HZ3_COLD void *new_slow_nothrow(size_t align, size_t bytes, hz3_block_origin origin) noexcept {
  if (!hz3_is_power_of_two(align)) return nullptr;
#ifdef HZ3_WEAK_CXX_RUNTIME
  void *pointer = alloc(align, bytes, origin);
  if (pointer != nullptr || get_new_handler() == nullptr) return pointer;
  // What the handler throws the runtime's own operator catches, which calls the one above.
  bool is_array = origin == HZ3_FROM_NEW_ARRAY;
  if (align > 1) {
    void *next = runtime(RTLD_NEXT, is_array ? "_ZnamSt11align_val_tRKSt9nothrow_t" : "_ZnwmSt11align_val_tRKSt9nothrow_t");
    return next == nullptr ? nullptr : reinterpret_cast<void *(*)(size_t, size_t, const void *)>(next)(bytes, align, "");
  }
  void *next = runtime(RTLD_NEXT, is_array ? "_ZnamRKSt9nothrow_t" : "_ZnwmRKSt9nothrow_t");
  return next == nullptr ? nullptr : reinterpret_cast<void *(*)(size_t, const void *)>(next)(bytes, "");
#else
  try {
    return new_slow(align, bytes, origin);
  } catch (...) {
    return nullptr;
  }
#endif
}

// The checked lane has no fast path.
HZ3_INLINE void *new_fast(size_t bytes) {
  if (HZ3_CHECKED || HZ3_UNLIKELY(bytes > HZ3_TABLE_MAX)) return nullptr;
  return hz3_bin_pop(hz3_bin_at(hz3_bin_offsets[(bytes + 15) / 16]));
}

HZ3_INLINE void *new_fast(std::align_val_t align, size_t bytes) {
  return HZ3_CHECKED || !hz3_is_power_of_two(size_t(align)) ? nullptr : hz3_take_aligned(size_t(align), bytes);
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
