// SPDX-License-Identifier: Apache-2.0
// What it is: a program as its author would write it, which knows nothing about hz3.
// Called by: the three targets of BUILD.bazel, which differ in the malloc that they link.
#include <malloc.h>

#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

static size_t count_words(int rounds) {
  std::map<std::string, std::vector<int>> seen;
  for (int i = 0; i < rounds; i++) {
    seen["word " + std::to_string(i % 1000) + std::string(i % 100, '.')].push_back(i);
  }
  size_t count = 0;
  for (const auto& [word, places] : seen) {
    count += places.size();
  }
  return count;
}

int main() {
  std::vector<std::thread> threads;
  std::vector<size_t> counts(4);
  for (size_t& count : counts) {
    threads.emplace_back([&count] { count = count_words(100000); });
  }
  size_t total = 0;
  for (size_t i = 0; i < threads.size(); i++) {
    threads[i].join();
    total += counts[i];
  }
  std::printf("%zu words\n", total);
  malloc_stats();  // hz3 says here which build it is
  return 0;
}
