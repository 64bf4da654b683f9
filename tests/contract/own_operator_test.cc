// SPDX-License-Identifier: Apache-2.0
//
// A program that defines an operator new of its own, for all objects to be aligned, with the plain delete
// beside it and none of the sized ones.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wsized-deallocation"
#endif

#include <stdlib.h>

#include <new>
#include <string>

#include "gtest/gtest.h"

namespace {

constexpr size_t kAlign = 64;
int calls;

}  // namespace

void* operator new(size_t bytes) {
  calls++;
  void* p = aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

void operator delete(void* p) noexcept { free(p); }

namespace {

TEST(OwnOperator, IsTheOneThatIsCalled) {
  int before = calls;
  std::string* volatile object = new std::string;
  delete object;  // by the sized delete, with less bytes than the block was asked for with
  EXPECT_EQ(calls, before + 1);
}

}  // namespace
