// SPDX-License-Identifier: Apache-2.0
//
// realloc_grow: vectors that grow in turn from 16 bytes to their full length,
// once by half of their length and once by 16 bytes at a time. Shows how often
// realloc can stay where it is.
//
// Invariant: every byte of a vector holds a value given by its position, so
//   that what realloc preserved can be checked at the end.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

#define MAX_VECTORS 1024
#define START_BYTES 16
#define PATTERN_PERIOD 251  // a prime: no shift by a power of two fits it

struct vector {
  unsigned char* bytes;
  size_t size;
};

struct growth {
  uint64_t reallocs;
  uint64_t moves;
  uint64_t moved_bytes;
  uint64_t final_bytes;
};

static unsigned char pattern[PATTERN_PERIOD * 256];

// The pattern is periodic, so any piece of it can be taken from the table:
// the longest one that belongs at `from` and ends within `size`.
static size_t pattern_piece(size_t from, size_t size,
                            const unsigned char** piece) {
  size_t phase = from % PATTERN_PERIOD;
  size_t length = sizeof(pattern) - phase;
  *piece = pattern + phase;
  return length < size - from ? length : size - from;
}

static void fill(struct vector* vector, size_t from) {
  const unsigned char* piece;
  while (from < vector->size) {
    size_t length = pattern_piece(from, vector->size, &piece);
    memcpy(vector->bytes + from, piece, length);
    from += length;
  }
}

static void check(const struct vector* vector) {
  const unsigned char* piece;
  for (size_t from = 0; from < vector->size;) {
    size_t length = pattern_piece(from, vector->size, &piece);
    WL_CHECK(memcmp(vector->bytes + from, piece, length) == 0,
             "realloc lost a byte of %zu after byte %zu", vector->size, from);
    from += length;
  }
}

static void grow(struct vector* vector, size_t size, struct growth* growth) {
  uintptr_t before = (uintptr_t)vector->bytes;
  unsigned char* bytes = realloc(vector->bytes, size);
  if (bytes == NULL) {
    wl_out_of_memory(size);
  }
  if ((uintptr_t)bytes != before) {
    growth->moves++;
    growth->moved_bytes += vector->size;
  }
  growth->reallocs++;
  size_t old_size = vector->size;
  *vector = (struct vector){bytes, size};
  fill(vector, old_size);
}

static size_t half_more(size_t size) { return size + size / 2; }
static size_t sixteen_more(size_t size) { return size + 16; }

static void grow_all(struct vector* vectors, uint64_t count, size_t max,
                     size_t (*next)(size_t), struct growth* growth) {
  for (uint64_t i = 0; i < count; i++) {
    vectors[i] = (struct vector){malloc(START_BYTES), START_BYTES};
    if (vectors[i].bytes == NULL) {
      wl_out_of_memory(START_BYTES);
    }
    fill(&vectors[i], 0);
  }
  for (size_t size = START_BYTES; size < max;) {
    size = next(size);
    size = size < max ? size : max;
    for (uint64_t i = 0; i < count; i++) {
      grow(&vectors[i], size, growth);
    }
  }
}

// One pattern of growth, `rounds` times; returns its time without the checks.
static uint64_t run_growth(const char* name, size_t (*next)(size_t),
                           uint64_t count, size_t max, uint64_t rounds,
                           struct growth* total) {
  static struct vector vectors[MAX_VECTORS];
  struct growth growth = {0};
  uint64_t time = 0;
  for (uint64_t round = 0; round < rounds; round++) {
    uint64_t start = wl_now_ns();
    grow_all(vectors, count, max, next, &growth);
    time += wl_now_ns() - start;
    for (uint64_t i = 0; i < count; i++) {
      check(&vectors[i]);
      growth.final_bytes += vectors[i].size;
      start = wl_now_ns();
      free(vectors[i].bytes);
      time += wl_now_ns() - start;
    }
  }
  printf("[GROW] by=%s reallocs=%" PRIu64 " moves=%" PRIu64
         " time=%.6f moved_per_byte=%.3f\n",
         name, growth.reallocs, growth.moves, wl_seconds(time),
         (double)growth.moved_bytes / (double)growth.final_bytes);
  total->reallocs += growth.reallocs;
  total->moved_bytes += growth.moved_bytes;
  total->final_bytes += growth.final_bytes;
  return time;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"max", "bytes of a full vector", 64 << 20, START_BYTES,
       UINT64_C(1) << 36},
      {"vectors", "growing in turn", 4, 1, MAX_VECTORS},
      {"rounds", "of the growth by half", 5, 1, 1000000},
  };
  struct wl_program program = {
      .name = "realloc_grow",
      .about = "Grows vectors by half and by 16 bytes at a time. An op is one\n"
               "realloc. moved_per_byte counts the old length of every block\n"
               "whose address changed, copied or remapped, per byte of the\n"
               "full vectors.",
      .example = "1048576 4 5",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  size_t max = args[0].value;
  for (size_t i = 0; i < sizeof(pattern); i++) {
    pattern[i] = (unsigned char)(i % PATTERN_PERIOD);
  }
  struct growth total = {0};
  uint64_t ns = run_growth("x1.5", half_more, args[1].value, max,
                           args[2].value, &total);
  ns += run_growth("+16", sixteen_more, args[1].value, max, 1, &total);
  double time = wl_seconds(ns);
  printf("realloc_grow: ops=%" PRIu64
         " time=%.6f ops/s=%.2f moved_per_byte=%.3f\n",
         total.reallocs, time, (double)total.reallocs / time,
         (double)total.moved_bytes / (double)total.final_bytes);
  return wl_finish(&program);
}
