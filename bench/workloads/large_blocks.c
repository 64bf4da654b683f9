// SPDX-License-Identifier: Apache-2.0
//
// large_blocks: a table of buffers of several MiB; each iteration replaces one
// of them by a new zero-filled block. Costs are page faults, zeroing and
// mapping calls.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "workload.h"

#define MAX_BUFFERS 4096
#define MIB ((uint64_t)1 << 20)

// ---- Mersenne twister MT19937 (Matsumoto and Nishimura 1998) -------------

#define TWISTER_WORDS 624
#define TWISTER_MIDDLE 397

struct twister {
  uint32_t words[TWISTER_WORDS];
  unsigned next;
};

static void twister_seed(struct twister* twister, uint32_t seed) {
  twister->words[0] = seed;
  for (uint32_t i = 1; i < TWISTER_WORDS; i++) {
    uint32_t last = twister->words[i - 1];
    twister->words[i] = 1812433253u * (last ^ (last >> 30)) + i;
  }
  twister->next = TWISTER_WORDS;
}

static void twister_refill(struct twister* twister) {
  uint32_t* words = twister->words;
  for (unsigned i = 0; i < TWISTER_WORDS; i++) {
    uint32_t mixed = (words[i] & 0x80000000u) |
                     (words[(i + 1) % TWISTER_WORDS] & 0x7fffffffu);
    words[i] = words[(i + TWISTER_MIDDLE) % TWISTER_WORDS] ^ (mixed >> 1) ^
               ((mixed & 1) ? 0x9908b0dfu : 0);
  }
  twister->next = 0;
}

static uint32_t twister_draw(struct twister* twister) {
  if (twister->next == TWISTER_WORDS) {
    twister_refill(twister);
  }
  uint32_t x = twister->words[twister->next++];
  x ^= x >> 11;
  x ^= (x << 7) & 0x9d2c5680u;
  x ^= (x << 15) & 0xefc60000u;
  return x ^ (x >> 18);
}

// Uniform below `bound`, without the bias of a remainder: the few products
// whose low half is too small are drawn again.
static uint32_t twister_below(struct twister* twister, uint32_t bound) {
  uint64_t product = (uint64_t)twister_draw(twister) * bound;
  uint32_t threshold = (uint32_t)-bound % bound;
  while ((uint32_t)product < threshold) {
    product = (uint64_t)twister_draw(twister) * bound;
  }
  return (uint32_t)(product >> 32);
}

// ---- Work ----------------------------------------------------------------

struct buffer {
  char* block;
  size_t size;
};

static struct buffer buffers[MAX_BUFFERS];

static void release(struct buffer* buffer) {
  if (buffer->block != NULL) {
    WL_CHECK(buffer->block[0] == 0 && buffer->block[buffer->size - 1] == 0,
             "a zero-filled block of %zu bytes changed", buffer->size);
    free(buffer->block);
    buffer->block = NULL;
  }
}

static void replace_all(uint64_t iters, uint32_t buffer_count, uint32_t min,
                        uint32_t max, struct twister* twister) {
  for (uint64_t i = 0; i < iters; i++) {
    struct buffer* buffer = &buffers[twister_below(twister, buffer_count)];
    size_t size = min + twister_below(twister, max - min + 1);
    char* block = malloc(size);
    if (block == NULL) {
      wl_out_of_memory(size);
    }
    memset(block, 0, size);
    release(buffer);
    *buffer = (struct buffer){wl_opaque(block), size};
  }
  for (uint32_t i = 0; i < buffer_count; i++) {
    release(&buffers[i]);
  }
}

static long minor_faults(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"iters", "blocks to allocate", 2000, 1, UINT64_C(1) << 40},
      {"buffers", "in the table", 20, 1, MAX_BUFFERS},
      {"min_mib", "smallest block in MiB", 5, 1, 2000},
      {"max_mib", "largest block in MiB", 25, 1, 2000},
      {"seed", "of the generator", 42, 0, UINT32_MAX},
  };
  struct wl_program program = {
      .name = "large_blocks",
      .about = "Replaces a random buffer by a new zero-filled block of some\n"
               "MiB, 2000 times. An op is one replacement.",
      .example = "200 20 5 25",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  uint32_t min = (uint32_t)(args[2].value * MIB);
  uint32_t max = (uint32_t)(args[3].value * MIB);
  if (max < min) {
    wl_usage_error(&program, "max_mib is smaller than min_mib");
  }
  static struct twister twister;
  twister_seed(&twister, (uint32_t)args[4].value);
  long faults = minor_faults();
  uint64_t start = wl_now_ns();
  replace_all(args[0].value, (uint32_t)args[1].value, min, max, &twister);
  double time = wl_seconds(wl_now_ns() - start);
  printf("large_blocks: ops=%" PRIu64
         " time=%.6f ops/s=%.2f minor_faults=%ld\n",
         args[0].value, time, (double)args[0].value / time,
         minor_faults() - faults);
  return wl_finish(&program);
}
