// SPDX-License-Identifier: Apache-2.0
// What it is: a model check of the depot's lock-free stack: every interleaving, at the grain of single atomic
//   operations, of two or three threads that push and pop. It compiles stack.h itself, with the atomic builtins replaced.
// How: the state of a thread is a function of the values it has seen. So instead of saving stacks, a thread is run again
//   from its start with the recorded values until it asks for one more; the explorer then branches over who goes next.
//   States that were reached before, by another order, are not explored twice.
// Invariant: the model is sequentially consistent; what the memory orders add is checked by the thread sanitizer.
#include <gtest/gtest.h>
#include <stdint.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "hz3/remote/remote.h"  // first: where magazines are is no part of the model

namespace model {

enum Kind { kLoad, kStore, kCompareExchange };
struct Operation {
  Kind kind;
  const void *address;
  uint64_t value, expected;
};

// What the running thread has seen so far; `Next` replays it and then throws what the thread wants to do.
struct Replay {
  const std::vector<uint64_t> *seen;
  size_t at;
  uint64_t Next(const Operation &operation) {
    if (at < seen->size()) return (*seen)[at++];
    throw operation;
  }
};
Replay replay;

template <typename T>
T Load(const T *address) {
  return static_cast<T>(replay.Next({kLoad, address, 0, 0}));
}
template <typename T, typename V>
void Store(T *address, V value) {
  replay.Next({kStore, address, static_cast<uint64_t>(static_cast<T>(value)), 0});
}
template <typename T>
bool CompareExchange(T *address, T *expected, T value) {
  T found = static_cast<T>(replay.Next({kCompareExchange, address, value, *expected}));
  bool swapped = found == *expected;
  *expected = found;
  return swapped;
}

}  // namespace model

#define __atomic_load_n(address, order) model::Load(address)
#define __atomic_store_n(address, value, order) model::Store(address, value)
#define __atomic_compare_exchange_n(address, expected, value, weak, success, failure) \
  model::CompareExchange(address, expected, value)
#include "hz3/remote/stack.h"
#undef __atomic_load_n
#undef __atomic_store_n
#undef __atomic_compare_exchange_n

namespace {

using model::Operation;

// What a planted bug makes of a stack word, as memory keeps it.
using Fault = std::function<uint64_t(uint64_t word)>;
uint64_t NoFault(uint64_t word) { return word; }
uint64_t VersionNeverChanges(uint64_t word) { return word & ((uint64_t{1} << (HZ3_STACK_INDEX_BITS + HZ3_STACK_HEIGHT_BITS)) - 1); }

// Magazines that a thread holds; the thread's program moves them to and from the stack.
struct Thread {
  std::vector<hz3_magazine *> held;
  hz3_stack *stack;

  void Pop(uint32_t wanted = 1) {
    uint32_t count = 0;
    hz3_magazine *magazine = hz3_stack_pop(stack, wanted, &count);
    // As the callers do: the chain is followed by `next`, which nobody else writes once it is popped.
    for (; magazine != nullptr && count > 0; count--) {
      held.push_back(magazine);
      if (count > 1) magazine = hz3_magazine_at(model::Load(&magazine->next));
    }
  }
  void Push() {
    if (held.empty()) return;
    hz3_magazine *magazine = held.front();
    held.erase(held.begin());
    hz3_stack_push(stack, magazine, magazine, 1, true);
  }
  // As the depot does, but back onto the same stack, where the others are.
  void TurnOver() {
    hz3_magazine *newest = hz3_stack_take_all(stack), *oldest = nullptr;
    uint32_t count = 0;
    for (hz3_magazine *at = newest; at != nullptr; count++) {
      uint32_t older = model::Load(&at->next);
      model::Store(&at->next, oldest == nullptr ? 0 : oldest->index);
      oldest = at;
      at = older == 0 ? nullptr : hz3_magazine_at(older);
    }
    if (count > 0) hz3_stack_push(stack, oldest, newest, count, true);
  }
  void PushTwo() {
    if (held.size() < 2) return Push();
    hz3_magazine *first = held[0], *last = held[1];
    held.erase(held.begin(), held.begin() + 2);
    model::Store(&first->next, last->index);
    hz3_stack_push(stack, first, last, 2, true);
  }
};
using Program = std::function<void(Thread *)>;

struct Result {
  size_t states = 0, ends = 0;
  std::string error;  // of the first wrong end
};

class Explorer {
 public:
  // Magazines 1 .. on_stack are on the stack, 1 on top; the next `held` ones belong to the threads in turn.
  Explorer(std::vector<Program> programs, uint32_t on_stack, std::vector<uint32_t> held, Fault fault)
      : programs_(std::move(programs)), held_(std::move(held)), fault_(std::move(fault)) {
    Node start{std::map<const void *, uint64_t>(), std::vector<std::vector<uint64_t>>(programs_.size())};
    start.memory[&stack_.word] = on_stack == 0 ? 0 : fault_(hz3_stack_next_word(0, 1, on_stack));
    start.memory[&stack_.low_water] = 0;
    magazines_ = on_stack;
    for (uint32_t count : held_) magazines_ += count;
    for (uint32_t index = 1; index <= magazines_; index++) {
      hz3_magazine *magazine = hz3_magazine_at(index);
      magazine->index = index;
      start.memory[&magazine->next] = index < on_stack ? index + 1 : 0;
    }
    first_held_ = on_stack + 1;
    start_ = start;
  }

  Result Run() {
    std::vector<Node> open = {start_};
    Result result;
    while (!open.empty() && result.error.empty()) {
      Node node = std::move(open.back());
      open.pop_back();
      if (!known_.insert(Key(node)).second) continue;
      result.states++;
      bool has_ended = true;
      for (size_t t = 0; t < programs_.size(); t++) {
        Thread thread;
        Operation operation;
        if (HasFinished(node, t, &thread, &operation)) continue;
        has_ended = false;
        open.push_back(Step(node, t, operation));
      }
      if (!has_ended) continue;
      result.ends++;
      result.error = ErrorOf(node);
    }
    return result;
  }

 private:
  struct Node {
    std::map<const void *, uint64_t> memory;
    std::vector<std::vector<uint64_t>> seen;  // per thread
  };

  static std::string Key(const Node &node) {
    std::string key;
    auto add = [&key](uint64_t value) { key.append(reinterpret_cast<const char *>(&value), sizeof value); };
    for (const auto &cell : node.memory) add(cell.second);
    for (const auto &seen : node.seen) {
      add(seen.size());
      for (uint64_t value : seen) add(value);
    }
    return key;
  }

  bool HasFinished(const Node &node, size_t t, Thread *thread, Operation *operation) {
    *thread = Thread{{}, &stack_};
    uint32_t index = first_held_;
    for (size_t i = 0; i < t; i++) index += held_[i];
    for (uint32_t i = 0; i < held_[t]; i++) thread->held.push_back(hz3_magazine_at(index + i));
    model::replay = {&node.seen[t], 0};
    try {
      programs_[t](thread);
    } catch (const Operation &next) {
      *operation = next;
      return false;
    }
    return true;
  }

  Node Step(Node node, size_t t, const Operation &operation) {
    uint64_t &cell = node.memory.at(operation.address);
    uint64_t seen = operation.kind == model::kStore ? 0 : cell;
    bool writes = operation.kind == model::kStore || (operation.kind == model::kCompareExchange && cell == operation.expected);
    if (writes) cell = operation.address == &stack_.word ? fault_(operation.value) : operation.value;
    node.seen[t].push_back(seen);
    return node;
  }

  // Every magazine is in exactly one place, and the word's count is the number on the stack.
  std::string ErrorOf(const Node &node) {
    std::vector<int> places(magazines_ + 1, 0);
    for (size_t t = 0; t < programs_.size(); t++) {
      Thread thread;
      Operation operation;
      HasFinished(node, t, &thread, &operation);
      for (hz3_magazine *magazine : thread.held) places[magazine->index]++;
    }
    uint64_t word = node.memory.at(&stack_.word);
    uint32_t height = 0;
    for (uint32_t index = hz3_stack_index(word); index != 0 && height <= magazines_; height++) {
      places[index]++;
      index = static_cast<uint32_t>(node.memory.at(&hz3_magazine_at(index)->next));
    }
    for (uint32_t index = 1; index <= magazines_; index++) {
      if (places[index] == 0) return "lost";
      if (places[index] > 1) return "doubled";
    }
    return height == hz3_stack_height(word) ? "" : "miscounted";
  }

  std::vector<Program> programs_;
  std::vector<uint32_t> held_;
  Fault fault_;
  hz3_stack stack_;
  uint32_t magazines_, first_held_;
  Node start_;
  std::set<std::string> known_;
};

void Pop(Thread *t) { t->Pop(); }
void PopPop(Thread *t) { t->Pop(), t->Pop(); }
void PopPush(Thread *t) { t->Pop(), t->Push(); }
void PushPop(Thread *t) { t->Push(), t->Pop(); }
void PopPopPush(Thread *t) { t->Pop(), t->Pop(), t->Push(); }
void PopPopPushPush(Thread *t) { t->Pop(), t->Pop(), t->Push(), t->Push(); }
void PopThreePushThree(Thread *t) { t->Pop(), t->Pop(), t->Pop(), t->Push(), t->Push(), t->Push(); }
void PushPopPush(Thread *t) { t->Push(), t->Pop(), t->Push(); }
void PopTwoPushTwo(Thread *t) { t->Pop(2), t->PushTwo(); }
void PopTwoPush(Thread *t) { t->Pop(2), t->Push(); }
void TurnOver(Thread *t) { t->TurnOver(); }

class StackModel : public testing::Test {
 protected:
  void SetUp() override { hz3_magazine_slabs[0] = memory_; }
  void ExpectSound(std::vector<Program> programs, uint32_t on_stack, std::vector<uint32_t> held) {
    Result result = Explorer(std::move(programs), on_stack, std::move(held), NoFault).Run();
    EXPECT_EQ(result.error, "");
    EXPECT_GT(result.ends, 1u) << "the threads never met";
    RecordProperty("states", static_cast<int>(result.states));
    printf("%zu states, %zu ends\n", result.states, result.ends);
  }

 private:
  alignas(64) char memory_[16 * 512] = {};
};

TEST_F(StackModel, TwoThreadsPop) { ExpectSound({PopPop, PopPop}, 3, {0, 0}); }
TEST_F(StackModel, TwoThreadsPopAndPush) { ExpectSound({PopPush, PopPush}, 2, {0, 0}); }
TEST_F(StackModel, TwoThreadsPushAndPop) { ExpectSound({PushPopPush, PushPopPush}, 1, {1, 1}); }
TEST_F(StackModel, AbaSchedule) { ExpectSound({Pop, PopPopPushPush}, 3, {0, 1}); }
TEST_F(StackModel, AbaScheduleOfChains) { ExpectSound({PopTwoPush, PopThreePushThree}, 3, {0, 2}); }
TEST_F(StackModel, AbaScheduleTwice) { ExpectSound({PopPopPush, PopPopPushPush}, 3, {0, 0}); }
TEST_F(StackModel, ChainsAndSingles) { ExpectSound({PopTwoPushTwo, PopPopPushPush}, 3, {0, 0}); }
TEST_F(StackModel, ChainsOnly) { ExpectSound({PopTwoPushTwo, PopTwoPushTwo}, 3, {0, 0}); }
TEST_F(StackModel, EmptyStack) { ExpectSound({PushPop, PopPush, Pop}, 0, {1, 0, 0}); }
TEST_F(StackModel, ThreeThreadsPop) { ExpectSound({Pop, Pop, Pop}, 2, {0, 0, 0}); }
TEST_F(StackModel, ThreeThreadsPopAndPush) { ExpectSound({PopPush, PopPush, PopPush}, 2, {0, 0, 0}); }
TEST_F(StackModel, ThreeThreadsChains) { ExpectSound({PopTwoPush, PopPush, Pop}, 3, {0, 0, 0}); }
TEST_F(StackModel, TurnedOverAmongPops) { ExpectSound({TurnOver, PopPopPushPush}, 3, {0, 1}); }
TEST_F(StackModel, TurnedOverAmongChains) { ExpectSound({TurnOver, PopTwoPushTwo}, 3, {0, 0}); }
TEST_F(StackModel, TurnedOverTwice) { ExpectSound({TurnOver, TurnOver, PopPush}, 3, {0, 0, 0}); }

// The model must be able to see what it is for. Without the version: a pop reads the top and the one below it, then sleeps;
// another thread pops both, pushes one of its own and the old top. Top and count are as before, and the sleeper makes
// the magazine that the other thread holds the new top.
TEST_F(StackModel, FindsAbaWithoutVersion) {
  Result result = Explorer({Pop, PopPopPushPush}, 3, {0, 1}, VersionNeverChanges).Run();
  EXPECT_TRUE(result.error == "doubled" || result.error == "lost") << result.error;
}

TEST_F(StackModel, FindsAbaOfChainsWithoutVersion) {
  Result result = Explorer({PopTwoPush, PopThreePushThree}, 3, {0, 2}, VersionNeverChanges).Run();
  EXPECT_TRUE(result.error == "doubled" || result.error == "lost") << result.error;
}

// Sanity of the model itself: a stack without ABA needs no version.
TEST_F(StackModel, PopsAloneNeedNoVersion) {
  Result result = Explorer({PopPop, PopPop}, 3, {0, 0}, VersionNeverChanges).Run();
  EXPECT_EQ(result.error, "");
}

}  // namespace

// Of remote.c, which the model does not link: its atomics are the real ones.
extern "C" {
char *hz3_magazine_slabs[1];
}
