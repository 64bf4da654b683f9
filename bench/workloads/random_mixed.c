// SPDX-License-Identifier: Apache-2.0
//
// random_mixed: one thread frees or allocates a random slot per iteration,
// sizes uniform between two bounds. The memory itself is never touched.
#include "random_mixed.h"

static uint32_t uniform_size(const struct random_mixed* run, uint32_t random) {
  return run->buckets[0].min + random % run->buckets[0].width;
}

static void plain_loop(struct random_mixed* run) {
  random_mixed_loop(run, uniform_size, false);
}

static void latency_loop(struct random_mixed* run) {
  random_mixed_loop(run, uniform_size, true);
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"iters", "mallocs and frees", 20000000, 1, UINT64_C(1) << 40},
      {"ws", "slots of the working set", 400, 1, UINT64_C(1) << 32},
      {"min", "smallest size in bytes", 16, 1, UINT32_MAX - 1},
      {"max", "largest size in bytes", 32768, 1, UINT32_MAX - 1},
      {"seed", "of the generator", WL_DEFAULT_SEED, 1, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "random_mixed",
      .about = "Frees or allocates a random slot per iteration in one thread,\n"
               "sizes uniform in [min, max], memory untouched.",
      .example = "1000000 400 16 2048",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
      .offers_latency = true,
  };
  wl_parse(&program, argc, argv);
  uint32_t min = (uint32_t)args[2].value;
  uint32_t max = (uint32_t)args[3].value;
  if (max < min) {
    wl_usage_error(&program, "max %u is smaller than min %u", max, min);
  }
  struct random_mixed run = {
      .iters = args[0].value,
      .slot_count = args[1].value,
      .seed = args[4].value,
      .buckets = {{.min = min, .width = max - min + 1}},
  };
  return run_random_mixed(&program, &run,
                          program.latency ? latency_loop : plain_loop);
}
