// SPDX-License-Identifier: Apache-2.0
//
// cache_scratch: passive false sharing, when freeing an object of another
// thread brings a part of that thread's cache line into one's own heap.
#include "cache_sharing.h"

int main(int argc, char** argv) {
  return run_cache_sharing(
      "cache_scratch",
      "As cache_thrash, but each thread first frees an object that the main\n"
      "thread allocated beside those of the others. An op is one pass over\n"
      "an object.",
      true, argc, argv);
}
