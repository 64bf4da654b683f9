// SPDX-License-Identifier: Apache-2.0
// What it is: the C++ interface: all replaceable operators new and delete, as entry points of their own.
// Called by: C++ programs.
// Needs: hz3/hot, the C++ runtime (libhz3.so: where there is one).
#include <new>

#ifdef HZ3_WEAK_CXX_RUNTIME
#include <dlfcn.h>
#include <stdint.h>
#endif

#include "hz3/base/base.h"
#include "hz3/base/fatal.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/hot/hot.h"

namespace std {
void __throw_bad_alloc() __attribute__((noreturn));
}  // namespace std

namespace {

HZ3_INLINE void *alloc(size_t align, size_t bytes, hz3_block_origin origin) {
  return HZ3_CHECKED ? hz3_checked_alloc(origin, align, bytes, false) : hz3_aligned_alloc(align, bytes);
}

#ifdef HZ3_WEAK_CXX_RUNTIME
// libhz3.so must not pull the C++ runtime into C programs, which may load it later, with a library that needs it. So when memory has run
// out, the operator that stands behind ours is asked, the runtime's: it calls ours or malloc, and the new handler, and throws.

bool is_in_file_of(const void *symbol, const void *other) {
  Dl_info of_symbol, of_other;
  return dladdr(symbol, &of_symbol) != 0 && dladdr(other, &of_other) != 0 && of_symbol.dli_fbase == of_other.dli_fbase;
}

void *in_library(void *library, const char *name) {
  if (library == nullptr) return nullptr;
  void *symbol = dlsym(library, name);
  dlclose(library);  // whoever called the operator keeps it
  return symbol;
}

// Of a library with a runtime inside (-static-libstdc++), which nobody else sees. Not of the program itself, which has an entry for
// every function that it calls, by which dlsym would lead back to ours.
void *inside_library_of(const void *caller, const char *name) {
  Dl_info of_caller;
  if (dladdr(caller, &of_caller) == 0) return nullptr;
  void *library = dlopen(of_caller.dli_fname, RTLD_NOLOAD | RTLD_LAZY), *program = dlopen(nullptr, RTLD_LAZY);
  void *symbol = in_library(library, name);
  if (program != nullptr) dlclose(program);
  bool is_inside = symbol != nullptr && library != program && is_in_file_of(symbol, caller);
  return is_inside && !is_in_file_of(symbol, reinterpret_cast<void *>(is_in_file_of)) ? symbol : nullptr;
}

// A library may have been loaded for itself, with a runtime that the program does not see. nullptr if there is none.
void *behind_ours(const void *caller, const char *name) {
  static const char *const kRuntimes[] = {"libstdc++.so.6", "libc++.so.1"};
  void *symbol = inside_library_of(caller, name);
  for (const char *file : kRuntimes) {
    if (symbol == nullptr) symbol = in_library(dlopen(file, RTLD_NOLOAD | RTLD_LAZY), name);
  }
  return symbol != nullptr ? symbol : dlsym(RTLD_NEXT, name);
}

// The largest size, which always fails: libstdc++ rounds up to the alignment, from above that to a small one.
HZ3_INLINE size_t no_more_than_any(size_t bytes) { return hz3_min(bytes, PTRDIFF_MAX); }

// By whether they are of arrays, aligned, and throw.
const char *const kOperators[2][2][2] = {
    {{"_ZnwmRKSt9nothrow_t", "_Znwm"}, {"_ZnwmSt11align_val_tRKSt9nothrow_t", "_ZnwmSt11align_val_t"}},
    {{"_ZnamRKSt9nothrow_t", "_Znam"}, {"_ZnamSt11align_val_tRKSt9nothrow_t", "_ZnamSt11align_val_t"}}};

HZ3_COLD void *new_slow(size_t align, size_t bytes, hz3_block_origin origin, const void *caller) {
  void *pointer = hz3_is_power_of_two(align) ? alloc(align, bytes, origin) : nullptr;
  if (pointer != nullptr) return pointer;
  void *next = behind_ours(caller, kOperators[origin == HZ3_FROM_NEW_ARRAY][align != 1][true]);
  if (next == nullptr) hz3_fatal(HZ3_FATAL_NO_RUNTIME, caller, 0);
  if (align == 1) return reinterpret_cast<void *(*)(size_t)>(next)(bytes);
  return reinterpret_cast<void *(*)(size_t, size_t)>(next)(no_more_than_any(bytes), align);
}

HZ3_COLD void *new_slow_nothrow(size_t align, size_t bytes, hz3_block_origin origin, const void *caller) noexcept {
  void *pointer = hz3_is_power_of_two(align) ? alloc(align, bytes, origin) : nullptr;
  if (pointer != nullptr) return pointer;
  void *next = behind_ours(caller, kOperators[origin == HZ3_FROM_NEW_ARRAY][align != 1][false]);
  if (next == nullptr) return nullptr;
  if (align == 1) return reinterpret_cast<void *(*)(size_t, const void *)>(next)(bytes, "");
  return reinterpret_cast<void *(*)(size_t, size_t, const void *)>(next)(no_more_than_any(bytes), align, "");
}
#else
// As the standard asks: call the new handler and try again for as long as there is one; then bad_alloc. What no alignment is never
// comes, so the handler is not asked.
HZ3_COLD void *new_slow(size_t align, size_t bytes, hz3_block_origin origin, const void *) {
  if (!hz3_is_power_of_two(align)) std::__throw_bad_alloc();
  for (;;) {
    void *pointer = alloc(align, bytes, origin);
    if (pointer != nullptr) return pointer;
    std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) std::__throw_bad_alloc();
    handler();
  }
}

HZ3_COLD void *new_slow_nothrow(size_t align, size_t bytes, hz3_block_origin origin, const void *) noexcept {
  if (!hz3_is_power_of_two(align)) return nullptr;
  try {
    return new_slow(align, bytes, origin, nullptr);
  } catch (...) {
    return nullptr;
  }
}
#endif

// The checked lane has no fast path.
HZ3_INLINE void *new_fast(size_t bytes) {
  if (HZ3_CHECKED || HZ3_UNLIKELY(bytes > HZ3_TABLE_MAX)) return nullptr;
  return hz3_bin_pop(hz3_bin_at(hz3_bin_offsets[(bytes + 15) / 16]));
}

HZ3_INLINE void *new_fast(std::align_val_t align, size_t bytes) {
  return HZ3_CHECKED || !hz3_is_power_of_two(size_t(align)) ? nullptr : hz3_take_aligned(size_t(align), bytes);
}

HZ3_INLINE void *or_slow(void *pointer, size_t align, size_t bytes, hz3_block_origin origin) {
  return HZ3_LIKELY(pointer != nullptr) ? pointer : new_slow(align, bytes, origin, __builtin_return_address(0));
}

HZ3_INLINE void *or_slow_nothrow(void *pointer, size_t align, size_t bytes, hz3_block_origin origin) noexcept {
  return HZ3_LIKELY(pointer != nullptr) ? pointer : new_slow_nothrow(align, bytes, origin, __builtin_return_address(0));
}

HZ3_INLINE void release(void *pointer, hz3_block_origin origin, size_t bytes, size_t align) {
  if (HZ3_CHECKED) hz3_checked_free_as(pointer, {origin, bytes, align});
  else hz3_free(pointer);
}

}  // namespace

// Weak, as the runtime's are: a program that links hz3 may still define its own.
#define HZ3_OPERATOR HZ3_EXPORT __attribute__((weak))

HZ3_OPERATOR void *operator new(size_t bytes) {
  return or_slow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW);
}
HZ3_OPERATOR void *operator new[](size_t bytes) {
  return or_slow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW_ARRAY);
}
HZ3_OPERATOR void *operator new(size_t bytes, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW);
}
HZ3_OPERATOR void *operator new[](size_t bytes, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(bytes), 1, bytes, HZ3_FROM_NEW_ARRAY);
}
HZ3_OPERATOR void *operator new(size_t bytes, std::align_val_t align) {
  return or_slow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW);
}
HZ3_OPERATOR void *operator new[](size_t bytes, std::align_val_t align) {
  return or_slow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW_ARRAY);
}
HZ3_OPERATOR void *operator new(size_t bytes, std::align_val_t align, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW);
}
HZ3_OPERATOR void *operator new[](size_t bytes, std::align_val_t align, const std::nothrow_t &) noexcept {
  return or_slow_nothrow(new_fast(align, bytes), size_t(align), bytes, HZ3_FROM_NEW_ARRAY);
}

HZ3_OPERATOR void operator delete(void *p) noexcept { release(p, HZ3_FROM_NEW, HZ3_UNSAID, 1); }
HZ3_OPERATOR void operator delete[](void *p) noexcept { release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, 1); }
HZ3_OPERATOR void operator delete(void *p, const std::nothrow_t &) noexcept { release(p, HZ3_FROM_NEW, HZ3_UNSAID, 1); }
HZ3_OPERATOR void operator delete[](void *p, const std::nothrow_t &) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, 1);
}
HZ3_OPERATOR void operator delete(void *p, size_t bytes) noexcept { release(p, HZ3_FROM_NEW, bytes, 1); }
HZ3_OPERATOR void operator delete[](void *p, size_t bytes) noexcept { release(p, HZ3_FROM_NEW_ARRAY, bytes, 1); }
HZ3_OPERATOR void operator delete(void *p, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW, HZ3_UNSAID, size_t(align));
}
HZ3_OPERATOR void operator delete[](void *p, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, size_t(align));
}
HZ3_OPERATOR void operator delete(void *p, size_t bytes, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW, bytes, size_t(align));
}
HZ3_OPERATOR void operator delete[](void *p, size_t bytes, std::align_val_t align) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, bytes, size_t(align));
}
HZ3_OPERATOR void operator delete(void *p, std::align_val_t align, const std::nothrow_t &) noexcept {
  release(p, HZ3_FROM_NEW, HZ3_UNSAID, size_t(align));
}
HZ3_OPERATOR void operator delete[](void *p, std::align_val_t align, const std::nothrow_t &) noexcept {
  release(p, HZ3_FROM_NEW_ARRAY, HZ3_UNSAID, size_t(align));
}
