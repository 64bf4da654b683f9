// SPDX-License-Identifier: Apache-2.0
//
// tasks: work that passes from thread to thread, as in an asynchronous server.
// Each step of a task runs in whichever thread takes it from a run queue; it
// allocates a few blocks and frees a few that earlier steps left, mostly in
// other threads. All tasks start together, so that the heap swings, too.
//
// Invariant: a task is in one queue or in the hands of one thread.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

#define QUEUES 16u
#define STEPS_PER_TASK 8u
#define MOST_PER_STEP 6u
#define SMALLEST_SHIFT 4u  // sizes are uniform in their logarithm
#define SHIFTS 8u          // from 16 to 4,095 bytes
#define WRITTEN_BYTES 256u

// The start of every block.
struct block {
  uint32_t size;
  uint32_t check;
};

struct task {
  struct task* next;
  unsigned steps;
  unsigned count;
  struct block* blocks[STEPS_PER_TASK * MOST_PER_STEP];
};

struct queue {
  _Alignas(WL_CACHE_LINE) pthread_mutex_t mutex;
  struct task* first;
  struct task* last;
};

struct worker {
  _Alignas(WL_CACHE_LINE) uint64_t allocated;
  uint64_t freed;
};

static struct {
  uint64_t steps;
  uint64_t seed;
  struct worker* workers;
  struct queue queues[QUEUES];
} run;

static void* allocate(struct worker* worker, size_t size) {
  void* memory = malloc(size);
  if (__builtin_expect(memory == NULL, 0)) {
    wl_out_of_memory(size);
  }
  worker->allocated++;
  return memory;
}

static void release(struct worker* worker, struct block* block) {
  WL_CHECK(block->check == ~block->size, "a block of %" PRIu32 " bytes changed",
           block->size);
  free(block);
  worker->freed++;
}

static struct task* new_task(struct worker* worker) {
  struct task* task = allocate(worker, sizeof(*task));
  task->steps = 0;
  task->count = 0;
  return task;
}

static void put(struct queue* queue, struct task* task) {
  task->next = NULL;
  pthread_mutex_lock(&queue->mutex);
  if (queue->first == NULL) {
    queue->first = task;
  } else {
    queue->last->next = task;
  }
  queue->last = task;
  pthread_mutex_unlock(&queue->mutex);
}

// NULL if it is empty.
static struct task* take(struct queue* queue) {
  pthread_mutex_lock(&queue->mutex);
  struct task* task = queue->first;
  if (task != NULL) {
    queue->first = task->next;
  }
  pthread_mutex_unlock(&queue->mutex);
  return task;
}

static void add_block(struct worker* worker, struct task* task,
                      uint64_t random) {
  uint32_t base = 1u << (SMALLEST_SHIFT + random % SHIFTS);
  uint32_t size = base + (uint32_t)(random / SHIFTS) % base;
  struct block* block = allocate(worker, size);
  memset(block, 1, size < WRITTEN_BYTES ? size : WRITTEN_BYTES);
  block->size = size;
  block->check = ~size;
  task->blocks[task->count++] = block;
}

static void drop_block(struct worker* worker, struct task* task,
                       unsigned index) {
  release(worker, task->blocks[index]);
  task->blocks[index] = task->blocks[--task->count];
}

static void end_task(struct worker* worker, struct task* task) {
  while (task->count > 0) {
    drop_block(worker, task, task->count - 1);
  }
  free(task);
  worker->freed++;
}

// Returns the task, or the one that follows it.
static struct task* do_step(struct worker* worker, struct task* task,
                            uint64_t* state) {
  unsigned count = 1 + (unsigned)wl_below(state, MOST_PER_STEP);
  for (unsigned i = 0; i < count; i++) {
    add_block(worker, task, wl_xorshift64(state) >> 16);
  }
  for (unsigned i = 0; i < count / 2; i++) {
    drop_block(worker, task, (unsigned)wl_below(state, task->count));
  }
  if (++task->steps < STEPS_PER_TASK) {
    return task;
  }
  end_task(worker, task);
  return new_task(worker);
}

static void work(unsigned index, void* context) {
  (void)context;
  struct worker* worker = &run.workers[index];
  uint64_t state = wl_stream_seed(run.seed, index);
  for (uint64_t step = 0; step < run.steps;) {
    uint64_t random = wl_xorshift64(&state) >> 32;
    struct task* task = take(&run.queues[random % QUEUES]);
    if (task != NULL) {
      put(&run.queues[random / QUEUES % QUEUES],
          do_step(worker, task, &state));
      step++;
    }
  }
}

// Returns how much of what was allocated was freed only here.
static uint64_t end_all(void) {
  struct worker rest = {0, 0};
  for (unsigned i = 0; i < QUEUES; i++) {
    for (struct task* task; (task = take(&run.queues[i])) != NULL;) {
      end_task(&rest, task);
    }
  }
  return rest.freed;
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"threads", "that take steps", 2, 1, WL_MAX_THREADS},
      {"steps", "that each takes", 1000000, 1, UINT64_C(1) << 40},
      {"tasks", "at once", 2000, 1, UINT64_C(1) << 31},
      {"seed", "of the generators", WL_DEFAULT_SEED, 0, UINT64_MAX},
  };
  struct wl_program program = {
      .name = "tasks",
      .about = "Passes tasks from thread to thread; each of their 8 steps\n"
               "allocates up to 6 blocks of 16 to 4,095 bytes and frees half\n"
               "as many of those there are. An op is one malloc or free.",
      .example = "2 100000 2000",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned threads = (unsigned)args[0].value;
  run.steps = args[1].value;
  run.seed = args[3].value;
  run.workers = wl_map(threads * sizeof(*run.workers));
  for (unsigned i = 0; i < QUEUES; i++) {
    pthread_mutex_init(&run.queues[i].mutex, NULL);
  }
  for (uint64_t i = 0; i < args[2].value; i++) {
    put(&run.queues[i % QUEUES], new_task(&run.workers[0]));
  }
  printf("[BENCH_ARGS] threads=%u steps=%" PRIu64 " tasks=%" PRIu64
         " seed=%#" PRIx64 "\n",
         threads, run.steps, args[2].value, run.seed);
  double time = wl_seconds(wl_run(threads, work, NULL));
  uint64_t allocated = 0;
  uint64_t freed = 0;
  for (unsigned i = 0; i < threads; i++) {
    allocated += run.workers[i].allocated;
    freed += run.workers[i].freed;
  }
  uint64_t ops = allocated - args[2].value + freed;  // not before the start
  freed += end_all();
  WL_CHECK(allocated == freed,
           "%" PRIu64 " blocks allocated, %" PRIu64 " freed", allocated, freed);
  printf("tasks: threads=%u ops=%" PRIu64 " time=%.6f ops/s=%.2f\n", threads,
         ops, time, (double)ops / time);
  return wl_finish(&program);
}
