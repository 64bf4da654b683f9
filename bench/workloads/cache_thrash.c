// SPDX-License-Identifier: Apache-2.0
//
// cache_thrash: active false sharing, when malloc gives objects of one cache
// line to several threads.
#include "cache_sharing.h"

int main(int argc, char** argv) {
  return run_cache_sharing(
      "cache_thrash",
      "Each thread allocates an object, writes it many times and frees it.\n"
      "An op is one pass over an object.",
      false, argc, argv);
}
