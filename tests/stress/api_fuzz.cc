// SPDX-License-Identifier: Apache-2.0
//
// The API driven by a program of bytes: operations over slots, by up to four threads that run at the same time on slots
// of their own and pass them on in a circle, so that blocks are freed and grown by other threads than made them. A
// shadow model knows each block's contents, alignment and usable size; between rounds it checks that none overlap.
// Called by: libFuzzer, or replay_main.cc with random programs and files.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

using hz3_test::fill_pattern;
using hz3_test::pattern_holds;
using hz3_test::pattern_key;

constexpr size_t kSlots = 64, kThreads = 4, kRoundBytes = 256;
constexpr size_t kSampled = 8192;

enum Origin { kMalloc, kNew, kNewArray, kNewAligned };

struct Slot {
  unsigned char* bytes = nullptr;
  size_t size = 0, usable = 0, alignment = 0;
  uint64_t key = 0;
  Origin origin = kMalloc;
};

class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool done() const { return at_ == end_; }
  uint8_t byte() { return done() ? 0 : *at_++; }
  // Eight bits shifted by up to 15, one more or less: the borders of size classes are near at hand.
  size_t size() {
    size_t mantissa = byte(), code = byte(), value = mantissa << (code & 15);
    if (code & 16) value++;
    if ((code & 32) && value > 0) value--;
    return value;
  }

 private:
  const uint8_t *at_, *end_;
};

void check(const Slot& slot) {
  if (slot.bytes == nullptr) return;
  REQUIRE(malloc_usable_size(slot.bytes) == slot.usable);
  REQUIRE(pattern_holds(slot.bytes, std::min(slot.size, kSampled), slot.key));
  if (slot.size > 2 * kSampled) REQUIRE(pattern_holds(slot.bytes + slot.size - 64, 64, ~slot.key));
}

// Takes a fresh block into the model. Its last usable byte is written: what lies there belongs to nobody else.
void adopt(Slot& slot, void* block, size_t size, size_t alignment, Origin origin = kMalloc) {
  slot.bytes = static_cast<unsigned char*>(block);
  if (block == nullptr) return;
  REQUIRE(reinterpret_cast<uintptr_t>(block) % alignment == 0);
  slot.size = size;
  slot.alignment = alignment;
  slot.origin = origin;
  slot.usable = malloc_usable_size(block);
  REQUIRE(slot.usable >= size);
  if (slot.usable > 0) slot.bytes[slot.usable - 1] = 0xdb;
  slot.key = pattern_key(block, size, 0);
  fill_pattern(slot.bytes, std::min(size, kSampled), slot.key);
  if (size > 2 * kSampled) fill_pattern(slot.bytes + size - 64, 64, ~slot.key);
}

void drop(Slot& slot) {
  check(slot);
  free(slot.bytes);
  slot.bytes = nullptr;
}

void make_zeroed(Slot& slot, size_t size, size_t count) {
  unsigned char* p = static_cast<unsigned char*>(calloc(size / count, count));
  for (size_t i = 0; p != nullptr && i < size / count * count; i += i < 4096 ? 1 : 20011) REQUIRE(p[i] == 0);
  adopt(slot, p, size / count * count, 16);
}

void grow(Slot& slot, size_t size, bool as_array) {
  if (slot.bytes == nullptr) return adopt(slot, realloc(nullptr, size), size, 16);
  check(slot);
  // glibc's choice: zero frees.
  void* moved = as_array ? reallocarray(slot.bytes, size, 1) : realloc(slot.bytes, size);
  if (size == 0) {
    REQUIRE(moved == nullptr);
    slot.bytes = nullptr;
    return;
  }
  if (moved == nullptr) return check(slot);
  REQUIRE(pattern_holds(moved, std::min({slot.size, size, kSampled}), slot.key));
  adopt(slot, moved, size, 16);
}

void make_aligned(Slot& slot, unsigned how, size_t size, size_t alignment) {
  void* p = nullptr;
  if (how == 0) p = aligned_alloc(alignment, size);
  if (how == 1) p = memalign(alignment, size);
  if (how == 2 && posix_memalign(&p, alignment, size) != 0) p = nullptr;
  if (how == 3) p = ::operator new(size, std::align_val_t(alignment), std::nothrow);
  // An operator must be told the same alignment again.
  adopt(slot, p, size, how == 3 ? alignment : std::max(alignment, size_t{16}), how == 3 ? kNewAligned : kMalloc);
}

// By the sized form that belongs to the block's origin.
void drop_sized(Slot& slot) {
  if (slot.bytes == nullptr) return;
  check(slot);
  switch (slot.origin) {
    case kMalloc: free(slot.bytes); break;
    case kNew: ::operator delete(slot.bytes, slot.size); break;
    case kNewArray: ::operator delete[](slot.bytes, slot.size); break;
    case kNewAligned: ::operator delete(slot.bytes, slot.size, std::align_val_t(slot.alignment)); break;
  }
  slot.bytes = nullptr;
}

void step(Reader& reader, Slot* slots) {
  unsigned operation = reader.byte();
  Slot& slot = slots[reader.byte() % (kSlots / kThreads)];
  switch (operation % 16) {
    case 0: case 1: case 2: {
      drop(slot);
      size_t size = reader.size();
      return adopt(slot, malloc(size), size, 16);
    }
    case 3: case 4: return drop(slot);
    case 5: case 6: return grow(slot, reader.size(), operation & 16);
    case 7: {
      drop(slot);
      size_t size = reader.size();
      return make_zeroed(slot, size, operation / 16 + 1);
    }
    case 8: {
      drop(slot);
      size_t size = reader.size();
      return make_aligned(slot, operation >> 4 & 3, size, size_t{8} << reader.byte() % 16);
    }
    case 9: {
      drop_sized(slot);
      size_t size = reader.size();
      if (operation & 16) return adopt(slot, ::operator new[](size, std::nothrow), size, 16, kNewArray);
      return adopt(slot, ::operator new(size, std::nothrow), size, 16, kNew);
    }
    case 10: return drop_sized(slot);
    case 11:
      if (operation == 11) malloc_trim(0);
      return check(slot);
    case 12: {
      // A burst of one size: magazines overflow and spans come and go.
      size_t size = reader.size() % 40000;
      void* burst[200];
      for (void*& p : burst) p = malloc(size);
      for (void* p : burst) free(p);
      return;
    }
    default: return check(slot);
  }
}

void check_no_overlap(const Slot* slots) {
  std::vector<std::pair<const unsigned char*, size_t>> blocks;
  for (size_t i = 0; i < kSlots; i++) {
    if (slots[i].bytes != nullptr) blocks.push_back({slots[i].bytes, slots[i].usable});
  }
  std::sort(blocks.begin(), blocks.end());
  for (size_t i = 1; i < blocks.size(); i++) REQUIRE(blocks[i - 1].first + blocks[i - 1].second <= blocks[i].first);
}

// One thread's part of one round.
void run_part(const uint8_t* data, size_t size, Slot* slots) {
  Reader reader(data, size);
  while (!reader.done()) step(reader, slots);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t threads = data[0] % kThreads + 1;
  static Slot slots[kSlots];
  data++, size--;
  for (size_t round = 0; size > 0; round++) {
    std::vector<std::thread> others;
    for (size_t t = 0; t < threads && size > 0; t++) {
      size_t part = std::min(size, kRoundBytes);
      Slot* own = slots + (t + round) % kThreads * (kSlots / kThreads);
      if (t + 1 < threads && size > part) others.emplace_back(run_part, data, part, own);
      else run_part(data, part, own);
      data += part, size -= part;
    }
    for (auto& other : others) other.join();
    check_no_overlap(slots);
  }
  for (Slot& slot : slots) drop(slot);
  return 0;
}
