// SPDX-License-Identifier: Apache-2.0
//
// queue: linked queues with a backlog, as programs have that take work in
// faster than they do it for a while. What is freed is what was allocated
// first, while the queue becomes shorter and longer; but a part of what is
// taken out may stay longer, as what takes more time to deal with does.
//
// Invariant: a queue has `live` blocks, or up to `swing` fewer; each block is
// taken out as it was put in, in the same order. A block that stays points to
// itself.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

enum { IN_TIDES, AT_RANDOM, WAYS };
enum { AT_ONCE, IN_USE, FILLS };
enum { STAYING_PART = 4 };  // of `live`: the places of those that stay

struct block {
  uint64_t number;
  struct block* next;
};

struct queue {
  _Alignas(WL_CACHE_LINE) struct block* first;
  struct block* last;
  uint64_t pushed;
  uint64_t popped;
  struct block** stayed;
  uint64_t state;
};

static struct {
  uint64_t pairs;
  uint64_t live;
  uint64_t size;
  uint64_t swing;
  unsigned way;
  unsigned fill;
  unsigned stay_percent;
  uint64_t seed;
  uint64_t pushed;  // by all threads, atomic
} run;

static uint64_t length(const struct queue* queue) {
  return queue->pushed - queue->popped;
}

static void push(struct queue* queue) {
  struct block* block = malloc(run.size);
  if (__builtin_expect(block == NULL, 0)) {
    wl_out_of_memory(run.size);
  }
  block->next = NULL;
  block->number = queue->pushed++;
  if (queue->first == NULL) {
    queue->first = block;
  } else {
    queue->last->next = block;
  }
  queue->last = block;
}

static uint64_t staying_places(void) { return run.live / STAYING_PART; }

static void release_stayed(struct block* block) {
  WL_CHECK(block == NULL || block->next == block, "a block at %p changed",
           (void*)block);
  free(block);
}

static void pop(struct queue* queue) {
  struct block* block = queue->first;
  WL_CHECK(block->number == queue->popped, "block %" PRIu64 " changed",
           queue->popped);
  queue->first = block->next;
  queue->popped++;
  if (!wl_is_chance_if_any(&queue->state, run.stay_percent)) {
    free(block);
    return;
  }
  uint64_t place = wl_below(&queue->state, staying_places());
  release_stayed(queue->stayed[place]);
  queue->stayed[place] = block->next = block;
}

// Three operations, of which one or two are pushes, as the tide is.
static void move_with_tide(struct queue* queue, bool is_falling) {
  if (is_falling) {
    pop(queue);
    pop(queue);
    push(queue);
  } else {
    push(queue);
    pop(queue);
    push(queue);
  }
}

static void work(unsigned index, void* context) {
  (void)context;
  struct queue queue = {
      .stayed = wl_map(staying_places() * sizeof(*queue.stayed)),
      .state = wl_stream_seed(run.seed, WL_MAX_THREADS + index)};
  uint64_t state = wl_stream_seed(run.seed, index);
  uint64_t least = run.live - run.swing;
  bool is_falling = true;
  while (length(&queue) < run.live) {
    if (run.fill == IN_USE && queue.pushed > 0) {
      move_with_tide(&queue, false);
    } else {
      push(&queue);
    }
  }
  while (queue.popped < run.pairs) {
    uint64_t now = length(&queue);
    if (run.way == IN_TIDES) {
      is_falling = is_falling ? now > least : now >= run.live;
      move_with_tide(&queue, is_falling);
    } else if (now == least ||
               (now < run.live && wl_xorshift64(&state) >> 63 != 0)) {
      push(&queue);
    } else {
      pop(&queue);
    }
  }
  while (queue.first != NULL) {
    pop(&queue);
  }
  for (uint64_t i = 0; i < staying_places(); i++) {
    release_stayed(queue.stayed[i]);
  }
  __atomic_fetch_add(&run.pushed, queue.pushed, __ATOMIC_RELAXED);
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "at once, each with a queue of its own", 1, 1,
       WL_MAX_THREADS},
      {"pairs", "blocks that pass through each queue, at least", 10000000, 1,
       UINT64_C(1) << 40},
      {"live", "blocks in a queue, at most", 1000000, 4, UINT64_C(1) << 31},
      {"size", "of each block, in bytes", 64, sizeof(struct block),
       UINT64_C(1) << 40},
      {"swing", "blocks by which a queue becomes shorter", 1000, 1,
       UINT64_C(1) << 31},
      {"way", "0 two out and one in, then the reverse; 1 at random", IN_TIDES,
       0, WAYS - 1},
      {"fill", "first: 0 at once, 1 two in and one out", AT_ONCE, 0, FILLS - 1},
      {"stay", "of a hundred that are taken out so many stay for longer", 0, 0,
       100},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "queue",
      .about = "Puts blocks of one size into a linked queue with a backlog,\n"
               "and takes the oldest out. An op is one malloc with its free.",
      .example = "1 1000000 100000 64 1000",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  run.pairs = args[1].value;
  run.live = args[2].value;
  run.size = args[3].value;
  run.swing = args[4].value;
  run.way = (unsigned)args[5].value;
  run.fill = (unsigned)args[6].value;
  run.stay_percent = (unsigned)args[7].value;
  run.seed = args[8].value;
  if (run.swing > run.live - 3) {
    wl_usage_error(&program, "swing has to be less than live by 3 or more");
  }
  double time = wl_seconds(wl_run(threads, work, NULL));
  printf("queue: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", threads,
         run.pushed, time, (double)run.pushed / time);
  return wl_finish(&program);
}
