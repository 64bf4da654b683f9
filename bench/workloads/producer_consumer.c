// SPDX-License-Identifier: Apache-2.0
//
// producer_consumer: one thread of a pair only allocates, the other only
// frees. An allocator that keeps freed memory with the thread that freed it
// grows without bound here; the live memory is bounded by the queues.
//
// Owns: one bounded queue of batches per pair.
// Locks: the lock of a queue, held to move an index, never while allocating.
// Invariant: batches [taken, filled) belong to the consumer, others to the
//   producer.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

#define QUEUE_BATCHES 16

struct queue {
  _Alignas(WL_CACHE_LINE) pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t filled;
  uint64_t taken;
  unsigned char** blocks;  // QUEUE_BATCHES batches
  uint64_t freed;
};

static struct {
  uint64_t batches;
  uint64_t batch;
  size_t size;
  struct queue* queues;
} run;

static unsigned char tag_of(uint64_t batch, uint64_t index) {
  return (unsigned char)(batch * 31 + index);
}

static unsigned char** batch_at(const struct queue* queue, uint64_t number) {
  return &queue->blocks[number % QUEUE_BATCHES * run.batch];
}

static void produce(struct queue* queue) {
  for (uint64_t number = 0; number < run.batches; number++) {
    pthread_mutex_lock(&queue->lock);
    while (queue->filled - queue->taken == QUEUE_BATCHES) {
      pthread_cond_wait(&queue->changed, &queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    unsigned char** blocks = batch_at(queue, number);
    for (uint64_t i = 0; i < run.batch; i++) {
      blocks[i] = malloc(run.size);
      if (__builtin_expect(blocks[i] == NULL, 0)) {
        wl_out_of_memory(run.size);
      }
      blocks[i][0] = tag_of(number, i);
    }
    pthread_mutex_lock(&queue->lock);
    queue->filled++;
    pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
  }
}

static void consume(struct queue* queue) {
  for (uint64_t number = 0; number < run.batches; number++) {
    pthread_mutex_lock(&queue->lock);
    while (queue->filled == queue->taken) {
      pthread_cond_wait(&queue->changed, &queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    unsigned char** blocks = batch_at(queue, number);
    for (uint64_t i = 0; i < run.batch; i++) {
      WL_CHECK(blocks[i][0] == tag_of(number, i), "a block changed on the way");
      free(blocks[i]);
    }
    queue->freed += run.batch;
    pthread_mutex_lock(&queue->lock);
    queue->taken++;
    pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
  }
}

static void work(unsigned index, void* context) {
  (void)context;
  struct queue* queue = &run.queues[index / 2];
  if (index % 2 == 0) {
    produce(queue);
  } else {
    consume(queue);
  }
}

int main(int argc, char** argv) {
  struct wl_arg args[] = {
      {"pairs", "of threads", 1, 1, WL_MAX_THREADS / 2},
      {"iters", "blocks per pair, rounded up to whole batches", 5000000, 1,
       UINT64_C(1) << 40},
      {"size", "bytes of a block", 64, 1, UINT64_C(1) << 40},
      {"batch", "blocks handed over together", 256, 1, 1 << 20},
  };
  struct wl_program program = {
      .name = "producer_consumer",
      .about = "Pairs of threads, one of which only allocates and the other\n"
               "only frees. An op is one malloc with its free; at most 16\n"
               "batches per pair are live.",
      .example = "2 1000000 64 256",
      .args = args,
      .arg_count = sizeof(args) / sizeof(args[0]),
  };
  wl_parse(&program, argc, argv);
  unsigned pairs = (unsigned)args[0].value;
  run.size = args[2].value;
  run.batch = args[3].value;
  run.batches = (args[1].value + run.batch - 1) / run.batch;
  run.queues = wl_map(pairs * sizeof(*run.queues));
  for (unsigned i = 0; i < pairs; i++) {
    pthread_mutex_init(&run.queues[i].lock, NULL);
    pthread_cond_init(&run.queues[i].changed, NULL);
    run.queues[i].blocks = wl_map(QUEUE_BATCHES * run.batch * sizeof(void*));
  }
  double time = wl_seconds(wl_run_threads(2 * pairs, work, NULL));
  uint64_t freed = 0;
  for (unsigned i = 0; i < pairs; i++) {
    freed += run.queues[i].freed;
  }
  uint64_t ops = pairs * run.batches * run.batch;
  WL_CHECK(freed == ops, "%" PRIu64 " blocks freed instead of %" PRIu64, freed,
           ops);
  printf("producer_consumer: pairs=%u ops=%" PRIu64
         " time=%.6f ops/s=%.2f live_limit_kib=%" PRIu64
         " peak_rss_kib=%" PRIu64 "\n",
         pairs, ops, time, (double)ops / time,
         pairs * QUEUE_BATCHES * run.batch * run.size / 1024,
         wl_read_memory_status().peak_rss_kib);
  return wl_finish(&program);
}
