// SPDX-License-Identifier: Apache-2.0
//
// Chunks and per-thread heaps of the null allocators; see floor.h.
//
// Owns: the list of heaps whose thread has ended.
// Locks: waiting_lock, held for a few instructions and never with another.
#include "floor.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

__thread struct floor_heap* floor_own_heap
    __attribute__((tls_model("initial-exec")));

static pthread_mutex_t waiting_lock = PTHREAD_MUTEX_INITIALIZER;
static struct floor_heap* waiting_heaps;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static pthread_key_t heap_key;

static void* reserve(size_t size) {
  void* memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

static void release_heap(void* argument) {
  struct floor_heap* heap = argument;
  floor_own_heap = NULL;
  pthread_mutex_lock(&waiting_lock);
  heap->waiting = waiting_heaps;
  waiting_heaps = heap;
  pthread_mutex_unlock(&waiting_lock);
}

static void create_key(void) { pthread_key_create(&heap_key, release_heap); }

struct floor_heap* floor_adopt_heap(void) {
  pthread_mutex_lock(&waiting_lock);
  struct floor_heap* heap = waiting_heaps;
  if (heap != NULL) {
    waiting_heaps = heap->waiting;
  }
  pthread_mutex_unlock(&waiting_lock);
  if (heap == NULL) {
    heap = reserve(sizeof(*heap));
    if (heap == NULL) {
      __builtin_trap();
    }
  }
  // Set before the key: pthread_setspecific may ask malloc for memory.
  floor_own_heap = heap;
  pthread_once(&key_once, create_key);
  pthread_setspecific(heap_key, heap);
  return heap;
}

void* floor_refill(struct floor_heap* heap, size_t size) {
  size_t header = floor_round(sizeof(struct floor_chunk));
  if (size > ((size_t)1 << 46)) {
    errno = ENOMEM;
    return NULL;
  }
  size_t needed = (size + header + FLOOR_CHUNK - 1) & ~(FLOOR_CHUNK - 1);
  char* memory = reserve(needed + FLOOR_CHUNK);
  if (memory == NULL) {
    errno = ENOMEM;
    return NULL;
  }
  uintptr_t start = ((uintptr_t)memory + FLOOR_CHUNK - 1) & ~(FLOOR_CHUNK - 1);
  char* chunk = (char*)start;
  if (chunk > memory) {
    munmap(memory, (size_t)(chunk - memory));
  }
  munmap(chunk + needed, (size_t)(memory + FLOOR_CHUNK - chunk));
  ((struct floor_chunk*)chunk)->end = chunk + needed;
  heap->next = chunk + header + size;
  heap->end = chunk + needed;
  return chunk + header;
}
