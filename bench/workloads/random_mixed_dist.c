// SPDX-License-Identifier: Apache-2.0
//
// random_mixed_dist: the loop of random_mixed with sizes from three weighted
// ranges. `app` is the size mix of ordinary programs, `trimix` takes the
// ranges from the command line.
//
// Invariant: the high half of the one draw per iteration decides both: its
//   remainder by the total weight the range, its quotient the size therein.
#include <string.h>

#include "random_mixed.h"

static uint32_t weighted_size(const struct random_mixed* run, uint32_t random) {
  uint32_t pick = random % run->total_weight;
  uint32_t rest = random / run->total_weight;
  const struct size_bucket* bucket = run->buckets;
  while (pick >= bucket->weight) {
    pick -= bucket->weight;
    bucket++;
  }
  return bucket->min + rest % bucket->width;
}

static void plain_loop(struct random_mixed* run) {
  random_mixed_loop(run, weighted_size, false);
}

static void latency_loop(struct random_mixed* run) {
  random_mixed_loop(run, weighted_size, true);
}

struct weighted_range {
  uint64_t min;
  uint64_t max;
  uint64_t weight;
};

// Clips the ranges to [min, max]; what is empty then has no weight.
static void set_buckets(const struct wl_program* program,
                        struct random_mixed* run,
                        const struct weighted_range ranges[3], uint64_t min,
                        uint64_t max) {
  for (int i = 0; i < 3; i++) {
    uint64_t low = ranges[i].min > min ? ranges[i].min : min;
    uint64_t high = ranges[i].max < max ? ranges[i].max : max;
    if (low > high) {
      continue;
    }
    run->buckets[i] = (struct size_bucket){(uint32_t)low,
                                           (uint32_t)(high - low + 1),
                                           (uint32_t)ranges[i].weight};
    run->total_weight += run->buckets[i].weight;
  }
  if (run->total_weight == 0) {
    wl_usage_error(program, "no range with a weight lies within min and max");
  }
}

static void parse_mode(const struct wl_program* program,
                       struct random_mixed* run, uint64_t min, uint64_t max) {
  struct weighted_range ranges[3] = {
      {16, 256, 80}, {257, 2048, 15}, {2049, max, 5}};
  const char* mode = program->mode_count > 0 ? program->mode[0] : "app";
  if (strcmp(mode, "app") == 0) {
    if (program->mode_count > 1) {
      wl_usage_error(program, "app takes no numbers");
    }
  } else if (strcmp(mode, "trimix") == 0) {
    if (program->mode_count != 10) {
      wl_usage_error(program, "trimix takes 9 numbers, not %d",
                     program->mode_count - 1);
    }
    for (int i = 0; i < 9; i++) {
      uint64_t value;
      const char* text = program->mode[i + 1];
      if (!wl_parse_number(text, &value) || value >= UINT32_MAX / 3) {
        wl_usage_error(program, "trimix: '%s' is not a size or weight", text);
      }
      struct weighted_range* range = &ranges[i / 3];
      *(i % 3 == 0 ? &range->min : i % 3 == 1 ? &range->max : &range->weight) =
          value;
    }
  } else {
    wl_usage_error(program, "the mode is app or trimix, not '%s'", mode);
  }
  set_buckets(program, run, ranges, min, max);
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
      .name = "random_mixed_dist",
      .about = "Frees or allocates a random slot per iteration in one thread,\n"
               "sizes from three weighted ranges clipped to [min, max]:\n"
               "app (default) is 80 % 16-256, 15 % 257-2048, 5 % 2049-max;\n"
               "trimix is followed by min max weight of each range.",
      .example = "1000000 400 16 256 0x12345678 trimix 16 256 100 257 2048 0 "
                 "2049 32768 0",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
      .offers_latency = true,
      .mode_help = "[app | trimix aMin aMax a% bMin bMax b% cMin cMax c%]",
  };
  wl_parse(&program, argc, argv);
  struct random_mixed run = {
      .iters = args[0].value,
      .slot_count = args[1].value,
      .seed = args[4].value,
  };
  parse_mode(&program, &run, args[2].value, args[3].value);
  return run_random_mixed(&program, &run,
                          program.latency ? latency_loop : plain_loop);
}
