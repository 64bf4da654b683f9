// SPDX-License-Identifier: Apache-2.0
// What it is: heaps from thread start to exit, and fork; see heap.h.
// Owns: the registry of heaps, the parked list, the shared heap.
// Locks: shared_lock, rank SHARED_HEAP; heaps_lock, rank HEAPS.
#include "hz3/hot/heap.h"

#include <pthread.h>
#include <signal.h>

#include "hz3/base/lock.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/hot/checked.h"
#include "hz3/large/large.h"
#include "hz3/medium/medium.h"
#include "hz3/pages/pages.h"
#include "hz3/small/small.h"

// Objects that all parked heaps together may hold; a thread that exits beyond it gives its objects back at once. Those that a fork
// leaves behind come on top.
#define PARKED_MAX_BYTES (8 * HZ3_MIB)

enum { FREES_WITHOUT_HEAP = 64 };  // of a thread that has not allocated

const struct hz3_heap hz3_heap_empty;
__thread uintptr_t hz3_heap_offset;
static __thread bool thread_has_exited __attribute__((tls_model("initial-exec")));
static __thread uint8_t frees_without_heap __attribute__((tls_model("initial-exec")));

static struct hz3_lock heaps_lock = HZ3_LOCK_INIT(HZ3_RANK_HEAPS);
static struct hz3_lock shared_lock = HZ3_LOCK_INIT(HZ3_RANK_SHARED_HEAP);
static struct hz3_heap shared_heap = {.state = HZ3_HEAP_SHARED};  // for threads without one: past their destructors, or in their first frees
static struct hz3_heap *all_heaps = &shared_heap;
static struct hz3_heap *parked, *oldest_parked, *flushed;  // newest first; flushed: parked, too, and holds nothing
enum { FEW_PER_CPU = 2 };  // of so many threads for each CPU those that work mostly have one to themselves
static size_t parked_bytes, heap_count;
static unsigned cpu_count = 1, home_count = 1;  // as many homes as threads can run at once, if there are so many
static bool is_initialised, is_hooked, has_exit_key;
static pthread_key_t exit_key;  // these two before is_initialised

static struct hz3_heap *own_heap(void) {
  return hz3_heap_offset == 0 ? NULL : (struct hz3_heap *)hz3_heap_base();
}

static void set_own_heap(struct hz3_heap *heap) {
  hz3_heap_offset = heap == NULL ? 0 : (uintptr_t)heap - (uintptr_t)&hz3_heap_empty;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// What fork_child looks at is stored in an order in which no handler that forks in between finds a heap that seems to be that of a thread
// which is gone: first whose it is, or that it is busy; then that it is owned. The other way round, first that it is not owned.
static void set_state(struct hz3_heap *heap, enum hz3_heap_state state) {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  heap->state = (uint8_t)state;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static void set_busy(struct hz3_heap *heap, bool value) {
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
  heap->is_busy = value;
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static void push_parked_locked(struct hz3_heap *heap) {
  heap->prev_parked = NULL;
  heap->next_parked = parked;
  if (parked != NULL) parked->prev_parked = heap;
  else oldest_parked = heap;
  parked = heap;
}

static void unlink_parked_locked(struct hz3_heap *heap) {
  if (heap->prev_parked != NULL) heap->prev_parked->next_parked = heap->next_parked;
  else parked = heap->next_parked;
  if (heap->next_parked != NULL) heap->next_parked->prev_parked = heap->prev_parked;
  else oldest_parked = heap->prev_parked;
  parked_bytes -= heap->parked_bytes;
  heap->parked_bytes = 0;
}

static void put_parked_locked(struct hz3_heap *heap, size_t bytes) {
  heap->parked_bytes = bytes;
  parked_bytes += bytes;
  set_state(heap, HZ3_HEAP_PARKED);
  set_busy(heap, false);
  if (bytes != 0) {
    push_parked_locked(heap);
  } else {
    heap->next_parked = flushed;
    flushed = heap;
  }
}

bool hz3_heap_put_parked(struct hz3_heap *heap, size_t bytes) {
  uint64_t now = hz3_os_now_ms();
  hz3_lock_acquire(&heaps_lock);
  bool fits = bytes == 0 || parked_bytes + bytes <= PARKED_MAX_BYTES;
  if (fits) {
    heap->last_tick_ms = now;
    put_parked_locked(heap, bytes);
  }
  hz3_lock_release(&heaps_lock);
  return fits;
}

struct hz3_heap *hz3_heap_take_parked(uint64_t before_ms) {
  hz3_lock_acquire(&heaps_lock);
  struct hz3_heap *heap = oldest_parked;
  if (heap != NULL && heap->last_tick_ms > before_ms) heap = NULL;
  if (heap != NULL) {
    unlink_parked_locked(heap);
    set_busy(heap, true);
    set_state(heap, HZ3_HEAP_OWNED);
  }
  hz3_lock_release(&heaps_lock);
  return heap;
}

static struct hz3_heap *take_any_parked_locked(void) {
  struct hz3_heap *heap = parked;
  if (heap != NULL) unlink_parked_locked(heap);
  else if ((heap = flushed) != NULL) flushed = heap->next_parked;
  return heap;
}

static void own_locked(struct hz3_heap *heap) {
  heap->is_letting_go = false;  // left so by a thread that a fork cut off
  set_own_heap(heap);
  set_state(heap, HZ3_HEAP_OWNED);
}

// This thread's from now on: the warmest parked heap, or a new one. NULL when out of memory.
static struct hz3_heap *adopt_heap(void) {
  hz3_lock_acquire(&heaps_lock);
  struct hz3_heap *heap = take_any_parked_locked();
  if (heap != NULL) own_locked(heap);
  hz3_lock_release(&heaps_lock);
  if (heap != NULL) return heap;
  heap = (struct hz3_heap *)hz3_metadata_alloc(sizeof *heap);
  if (heap == NULL) return NULL;
  hz3_lock_acquire(&heaps_lock);
  heap->home = (uint8_t)(heap_count % home_count);
  heap->is_of_a_crowd = heap_count >= HZ3_CROWD_HEAPS;
  own_locked(heap);
  heap->next_heap = all_heaps;
  all_heaps = heap;
  hz3_add_to_figure(&heap_count, 1);
  hz3_lock_release(&heaps_lock);
  return heap;
}

// Of objects in bins and spares, and the one that waits, of a heap that nobody uses.
static size_t held_bytes(const struct hz3_heap *heap) {
  size_t bytes = heap->spare_bytes + hz3_size_classes[hz3_tag_class((intptr_t)heap->last.tag)].bytes;
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    bytes += hz3_bin_objects(&heap->bins[c]) * hz3_size_classes[c].bytes;
    if (hz3_heap_has_drain(heap, c)) bytes += hz3_bin_objects(&heap->drains[c]) * hz3_size_classes[c].bytes;
  }
  return bytes;
}

static void on_thread_exit(void *value) {
  struct hz3_heap *heap = own_heap();
  (void)value;
  if (heap == NULL) return;
  thread_has_exited = true;
  set_busy(heap, true);
  set_own_heap(NULL);
  hz3_large_cache_flush(&heap->large);  // the next thread may never ask for such sizes
  size_t bytes = held_bytes(heap) + (HZ3_CHECKED ? hz3_checked_quarantined_bytes(heap) : 0);
  if (bytes != 0 && hz3_heap_put_parked(heap, bytes)) return;
  hz3_heap_flush(heap);
  hz3_heap_put_parked(heap, 0);
}

// libc's fork takes the lock of the list of streams after it ran fork_prepare. Others hold it while they wait for a stream
// whose owner waits for memory (fflush(NULL), fclose): so it has to be taken before the first lock of ours. It may be taken
// several times by one thread; libc exports it, and resets it in the child. Not in a process without threads: there libc leaves
// it alone, since the thread may fork while it holds it itself, from a signal handler or for a stream of its own making.
#define HZ3_LIBC_IF_THERE __attribute__((weak, visibility("default")))
HZ3_LIBC_IF_THERE void _IO_list_lock(void);
HZ3_LIBC_IF_THERE void _IO_list_unlock(void);
HZ3_LIBC_IF_THERE void _IO_list_resetlock(void);
HZ3_LIBC_IF_THERE extern char __libc_single_threaded;

static bool others_may_flush(void) {
  return _IO_list_lock != NULL && (&__libc_single_threaded == NULL || !__libc_single_threaded);
}

// Of the thread that forks, guarded by all locks together: its signals, and whether it took the lock of the list of streams.
static sigset_t mask_at_fork;
static bool has_streams_at_fork;

// Signals wait: a handler that forks would wait for locks that this thread is just taking.
static void fork_prepare(void) {
  sigset_t all, mask;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &mask);
  bool has_streams = others_may_flush();
  if (has_streams) _IO_list_lock();
  hz3_lock_acquire_for_fork(&shared_lock);
  hz3_lock_acquire_for_fork(&heaps_lock);
  hz3_small_fork_prepare();
  hz3_medium_fork_prepare();
  hz3_large_fork_prepare();
  hz3_pages_fork_prepare();
  hz3_remote_fork_prepare();
  hz3_metadata_fork_prepare();
  if (HZ3_CHECKED) hz3_checked_fork_prepare();
  hz3_lock_set_forking(true);
  mask_at_fork = mask;
  has_streams_at_fork = has_streams;
}

static void release_locks(void) {
  hz3_lock_set_forking(false);
  if (HZ3_CHECKED) hz3_checked_fork_release();
  hz3_metadata_fork_release();
  hz3_remote_fork_release();
  hz3_pages_fork_release();
  hz3_large_fork_release();
  hz3_medium_fork_release();
  hz3_small_fork_release();
  hz3_lock_release_for_fork(&heaps_lock);
  hz3_lock_release_for_fork(&shared_lock);
}

static void fork_parent(void) {
  sigset_t mask = mask_at_fork;
  bool has_streams = has_streams_at_fork;
  release_locks();
  if (has_streams) _IO_list_unlock();
  pthread_sigmask(SIG_SETMASK, &mask, NULL);
}

// The other threads are gone: their heaps are parked for the next threads, except one caught inside a slow path, or while it
// was emptied: its magazines may be half exchanged. All are given up if the handler that forks interrupted a change of the lists.
static void fork_child(void) {
  struct hz3_heap *own = own_heap();
  bool is_list_torn = hz3_lock_is_mine(&heaps_lock);
  for (struct hz3_heap *heap = all_heaps; heap != NULL; heap = heap->next_heap) {
    if (heap == own || heap->state != HZ3_HEAP_OWNED) continue;
    heap->last.tag = 0;  // it may be of another block than the one beside it: the slow path looks
    bool is_lost = heap->is_busy || is_list_torn;
    heap->state = is_lost ? HZ3_HEAP_ABANDONED : HZ3_HEAP_PARKED;
    if (!is_lost) push_parked_locked(heap);
  }
  hz3_pages_fork_child();
  hz3_large_fork_child();
  sigset_t mask = mask_at_fork;
  bool has_streams = has_streams_at_fork;
  release_locks();
  if (has_streams) _IO_list_resetlock();
  pthread_sigmask(SIG_SETMASK, &mask, NULL);
}

// Tables and the key first, then a heap, then what may itself allocate: the value of the key, and the fork handlers.
static void initialise(void) {
  hz3_lock_acquire(&heaps_lock);
  if (!is_initialised) {
    cpu_count = hz3_os_cpu_count();
    hz3_remote_init(cpu_count);
    home_count = hz3_min(cpu_count, HZ3_SPAN_HOMES);
    has_exit_key = pthread_key_create(&exit_key, on_thread_exit) == 0;
    // Release: pairs with the load in start_thread.
    __atomic_store_n(&is_initialised, true, __ATOMIC_RELEASE);
  }
  hz3_lock_release(&heaps_lock);
}

// Handlers that run before fork run in the reverse order of their registration. Ours takes every lock, so it has to be the last: whoever
// runs after it may wait for a thread that waits for memory. Hence first thing (libhz3.so is linked with -z initfirst).
__attribute__((constructor)) static void hook_fork(void) {
  if (!__atomic_exchange_n(&is_hooked, true, __ATOMIC_RELAXED)) pthread_atfork(fork_prepare, fork_parent, fork_child);
}

// NULL without memory for a heap; and where libc had no key left, or no memory for its value, since nobody would park the heap when the thread
// exits.
static struct hz3_heap *start_thread(void) {
  // Acquire: pairs with the release above.
  if (!__atomic_load_n(&is_initialised, __ATOMIC_ACQUIRE)) initialise();
  struct hz3_heap *heap = has_exit_key ? adopt_heap() : NULL;
  if (heap == NULL) return NULL;
  if (pthread_setspecific(exit_key, heap) != 0) {
    on_thread_exit(NULL);
    return NULL;
  }
  hook_fork();  // where something allocates before constructors run
  return heap;
}

struct hz3_heap *hz3_heap_enter_shared(void) {
  if (hz3_lock_is_mine(&shared_lock)) return NULL;
  hz3_lock_acquire(&shared_lock);
  return &shared_heap;
}

struct hz3_heap *hz3_heap_entered(void) {
  struct hz3_heap *heap = own_heap();
  return heap == NULL ? &shared_heap : heap;
}

struct hz3_heap *hz3_heap_enter(void) {
  struct hz3_heap *heap = own_heap();
  if (heap == NULL && !thread_has_exited && !hz3_lock_is_mine(&shared_lock)) heap = start_thread();
  if (heap == NULL) return hz3_heap_enter_shared();
  if (heap->is_busy) return NULL;
  set_busy(heap, true);
  return heap;
}

struct hz3_heap *hz3_heap_enter_to_free(void) {
  if (own_heap() != NULL || frees_without_heap >= FREES_WITHOUT_HEAP) return hz3_heap_enter();
  frees_without_heap++;
  return hz3_heap_enter_shared();
}

void hz3_heap_leave(struct hz3_heap *heap) {
  if (heap == &shared_heap) {
    hz3_lock_release(&shared_lock);
    return;
  }
  set_busy(heap, false);
}

size_t hz3_heap_count(void) { return hz3_read_figure(&heap_count); }

void hz3_heap_settle(struct hz3_heap *heap) {
  if (hz3_heap_count() > (size_t)FEW_PER_CPU * cpu_count) heap->home = (uint8_t)(hz3_os_cpu() % home_count);
}

struct hz3_heap *hz3_heap_first(void) {
  hz3_lock_acquire(&heaps_lock);
  struct hz3_heap *first = all_heaps;
  hz3_lock_release(&heaps_lock);
  return first;
}
