// SPDX-License-Identifier: Apache-2.0
//
// A C++ library that a C program loads: what its operators new do where there is no memory.
// Called by: cxx_plugin_test.c.
#include <stddef.h>

#include <new>

namespace {

constexpr std::align_val_t kAlign{64};
bool is_called;

void give_up() {
  is_called = true;
  throw std::bad_alloc();
}

}  // namespace

extern "C" int cxx_plugin_catches_bad_alloc(size_t bytes) {
  try {
    ::operator delete(::operator new(bytes));
  } catch (const std::bad_alloc &) {
    return 1;
  }
  return 0;
}

// A jump to the operator, which then returns to a program in C. Not with the runtime inside, which only that return address tells of.
extern "C" void *cxx_plugin_allocate(size_t bytes) {
  void *block = ::operator new(bytes);
#ifdef RUNTIME_INSIDE
  asm volatile("");
#endif
  return block;
}

extern "C" int cxx_plugin_catches_from_afar(size_t bytes, void *(*relay)(void *(*)(size_t), size_t)) {
  try {
    ::operator delete(relay(cxx_plugin_allocate, bytes));
  } catch (const std::bad_alloc &) {
    return 1;
  }
  return 0;
}

extern "C" int cxx_plugin_gets_null(size_t bytes) {
  return ::operator new(bytes, std::nothrow) == nullptr && ::operator new[](bytes, std::nothrow) == nullptr &&
         ::operator new(bytes, kAlign, std::nothrow) == nullptr && ::operator new[](bytes, kAlign, std::nothrow) == nullptr;
}

// A new handler that throws, which only the nothrow forms may catch.
extern "C" int cxx_plugin_handler_is_called(size_t bytes) {
  std::set_new_handler(give_up);
  bool null = cxx_plugin_gets_null(bytes) != 0, thrown = cxx_plugin_catches_bad_alloc(bytes) != 0;
  std::set_new_handler(nullptr);
  return is_called && null && thrown;
}
