// SPDX-License-Identifier: Apache-2.0
//
// A program that lives near the limit of its cgroup: a base of all sizes that is replaced bit by bit, and bursts of one kind
// of block after the other, six by one thread and six by four. The kernel ends it if what it freed is kept for too long.
// Usage: bursts BASE_MIB PEAK_MIB ROUNDS PAUSE_MS SEED; prints the largest resident size in KiB.
// Called by: machine_test.py.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REQUIRE(condition) ((condition) ? (void)0 : fail(__LINE__, #condition))

enum { kThreads = 4, kSlots = 1 << 20 };

struct block {
  unsigned char *bytes;
  size_t size;
};

struct range {
  size_t low, high;
};
// Of bursts; the last is that of the base.
static const struct range kinds[] = {{16, 200}, {200, 2000}, {2000, 32000}, {32000, 1000000}, {1100000, 20000000}, {16, 60000}};
enum { kKinds = sizeof kinds / sizeof *kinds };

static void fail(int line, const char *condition) {
  fprintf(stderr, "bursts.c:%d: failed: %s\n", line, condition);
  exit(1);
}

static uint64_t next_random(uint64_t *state) {
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state;
}

// Small ones are more frequent, as in programs: each doubling within the range is as likely as the next.
static size_t draw_size(const struct range *range, uint64_t *random) {
  size_t high = range->low * 2;
  while (high < range->high && next_random(random) % 4 != 0) high *= 2;
  if (high > range->high) high = range->high;
  return range->low + next_random(random) % (high - range->low);
}

static struct block make_block(const struct range *range, uint64_t *random) {
  struct block block = {NULL, draw_size(range, random)};
  block.bytes = malloc(block.size);
  REQUIRE(block.bytes != NULL);
  memset(block.bytes, (int)(block.size & 255), block.size);
  return block;
}

static void free_block(struct block *block) {
  REQUIRE(block->bytes[0] == (block->size & 255) && block->bytes[block->size - 1] == (block->size & 255));
  free(block->bytes);
  block->bytes = NULL;
}

struct burst {
  const struct range *range;
  size_t bytes;
  uint64_t random;
};

// Allocates all of it, then frees all of it, every third block first.
static void *run_burst(void *argument) {
  struct burst *burst = argument;
  size_t room = burst->bytes / burst->range->low + 1, count = 0;
  if (room > kSlots) room = kSlots;
  struct block *blocks = malloc(room * sizeof *blocks);
  REQUIRE(blocks != NULL);
  for (size_t total = room * sizeof *blocks; total + burst->range->high < burst->bytes && count < room; count++) {
    blocks[count] = make_block(burst->range, &burst->random);
    total += blocks[count].size;
  }
  for (size_t start = 0; start < 3; start++) {
    for (size_t i = start; i < count; i += 3) free_block(&blocks[i]);
  }
  free(blocks);
  return NULL;
}

static void run_bursts(const struct range *range, size_t bytes, int threads, uint64_t *random) {
  struct burst bursts[kThreads];
  pthread_t ids[kThreads];
  for (int t = 0; t < threads; t++) {
    bursts[t] = (struct burst){range, bytes / (size_t)threads, next_random(random)};
    if (threads == 1) run_burst(&bursts[t]);
    else REQUIRE(pthread_create(&ids[t], NULL, run_burst, &bursts[t]) == 0);
  }
  for (int t = 0; threads > 1 && t < threads; t++) REQUIRE(pthread_join(ids[t], NULL) == 0);
}

static void print_peak(void) {
  char line[256];
  FILE *status = fopen("/proc/self/status", "r");
  REQUIRE(status != NULL);
  while (fgets(line, sizeof line, status) != NULL) {
    if (strncmp(line, "VmHWM:", 6) == 0) printf("%ld\n", strtol(line + 6, NULL, 10));
  }
  fclose(status);
}

// A little traffic, in whose course memory goes back.
static void work_a_little(int ms, uint64_t *random) {
  for (int i = 0; i < ms / 10; i++) {
    struct block few[300];
    for (int k = 0; k < 300; k++) few[k] = make_block(&kinds[kKinds - 1], random);
    for (int k = 0; k < 300; k++) free_block(&few[k]);
    usleep(10000);
  }
}

int main(int argc, char **argv) {
  REQUIRE(argc == 6);
  size_t base_limit = strtoul(argv[1], NULL, 10) << 20, peak = strtoul(argv[2], NULL, 10) << 20, base_bytes = 0, base_count = 0;
  int rounds = atoi(argv[3]), pause_ms = atoi(argv[4]);
  uint64_t random = strtoul(argv[5], NULL, 10) * 0x9e3779b97f4a7c15u | 1;
  static struct block base[kSlots];
  for (; base_bytes < base_limit && base_count < kSlots; base_count++) {
    base[base_count] = make_block(&kinds[kKinds - 1], &random);
    base_bytes += base[base_count].size;
  }
  for (int round = 0; round < rounds; round++) {
    run_bursts(&kinds[round % kKinds], peak - base_bytes, round / kKinds % 2 == 0 ? 1 : kThreads, &random);
    for (size_t i = 0; i < base_count / 16; i++) {
      struct block *old = &base[next_random(&random) % base_count];
      size_t size = old->size;
      free_block(old);
      struct range same = {size, size + 1};
      *old = make_block(&same, &random);
    }
    work_a_little(pause_ms, &random);
  }
  print_peak();
  return 0;
}
