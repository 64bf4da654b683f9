// SPDX-License-Identifier: Apache-2.0
// What it is: magazines and the depot, see remote.h.
#include "hz3/remote/remote.h"

#include "hz3/base/lock.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/base/size_class.h"
#include "hz3/config.h"
#include "hz3/remote/stack.h"

enum { MAX_SHARDS = 64, SLAB_UNITS = 128, UNIT_BYTES = 512, MAX_SLABS = 1 << (HZ3_STACK_INDEX_BITS - 7) };

char *hz3_magazine_slabs[MAX_SLABS];
static struct hz3_stack depot[MAX_SHARDS][HZ3_CLASS_COUNT];
static struct hz3_stack pools[MAX_SHARDS][HZ3_MAGAZINE_LEVELS];
static unsigned shard_count = 1;

static struct hz3_lock carve_lock = HZ3_LOCK_INIT(HZ3_RANK_MAGAZINES);
static uint32_t slab_count;
static uint32_t next_index[HZ3_MAGAZINE_LEVELS];  // each level carves a slab of its own; at a multiple of SLAB_UNITS it needs one

void hz3_remote_init(void) {
  size_t shards = (hz3_os_cpu_count() + HZ3_CPUS_PER_SHARD - 1) / HZ3_CPUS_PER_SHARD;
  shard_count = (unsigned)hz3_min(shards, MAX_SHARDS);
}

static unsigned own_shard(void) { return shard_count == 1 ? 0 : hz3_os_cpu() / HZ3_CPUS_PER_SHARD % shard_count; }

// False when out of memory or of indices.
static bool add_slab_locked(unsigned level) {
  char *slab = slab_count == MAX_SLABS ? NULL : (char *)hz3_metadata_alloc(SLAB_UNITS * UNIT_BYTES);
  if (slab == NULL) return false;
  // Readers get an index only after the magazine was published by a release operation, so a plain store is enough.
  hz3_magazine_slabs[slab_count] = slab;
  next_index[level] = slab_count * SLAB_UNITS;
  if (slab_count++ == 0) next_index[level] += 1u << level;  // index 0 means "none"
  return true;
}

static struct hz3_magazine *carve_locked(unsigned level) {
  if (next_index[level] % SLAB_UNITS == 0 && !add_slab_locked(level)) return NULL;
  struct hz3_magazine *magazine = hz3_magazine_at(next_index[level]);
  magazine->index = next_index[level];
  magazine->level = (uint16_t)level;
  next_index[level] += 1u << level;
  return magazine;
}

struct hz3_magazine *hz3_magazine_alloc(unsigned level, uint32_t wanted, uint32_t *count) {
  unsigned own = own_shard();
  for (unsigned i = 0; i < shard_count; i++) {
    struct hz3_magazine *magazine = hz3_stack_pop(&pools[(own + i) % shard_count][level], wanted, count);
    if (magazine != NULL) return magazine;
  }
  hz3_lock_acquire(&carve_lock);
  struct hz3_magazine *magazine = carve_locked(level);
  hz3_lock_release(&carve_lock);
  *count = magazine != NULL;
  return magazine;
}

void hz3_magazine_free(struct hz3_magazine *first, struct hz3_magazine *last, uint32_t count) {
  hz3_stack_push(&pools[own_shard()][first->level], first, last, count, true);
}

bool hz3_depot_push(unsigned size_class, struct hz3_magazine *magazine, size_t limit) {
  struct hz3_stack *stack = &depot[own_shard()][size_class];
  uint32_t height = hz3_stack_count(__atomic_load_n(&stack->word, __ATOMIC_RELAXED));
  if (height * shard_count >= limit) return false;
  return hz3_stack_push(stack, magazine, magazine, 1, false);
}

struct hz3_magazine *hz3_depot_pop(unsigned size_class) {
  unsigned own = own_shard();
  for (unsigned i = 0; i < shard_count; i++) {
    uint32_t count;
    struct hz3_magazine *magazine = hz3_stack_pop(&depot[(own + i) % shard_count][size_class], 1, &count);
    if (magazine != NULL) return magazine;
  }
  return NULL;
}

uint32_t hz3_depot_take_low_water(unsigned size_class) {
  uint32_t unused = 0;
  for (unsigned i = 0; i < shard_count; i++) {
    struct hz3_stack *stack = &depot[i][size_class];
    unused += __atomic_load_n(&stack->low_water, __ATOMIC_RELAXED);
    uint64_t word = __atomic_load_n(&stack->word, __ATOMIC_RELAXED);
    __atomic_store_n(&stack->low_water, hz3_stack_count(word), __ATOMIC_RELAXED);
  }
  return unused;
}

size_t hz3_depot_objects(unsigned size_class) {
  size_t objects = 0;
  for (unsigned shard = 0; shard < shard_count; shard++) {
    uint64_t word = __atomic_load_n(&depot[shard][size_class].word, __ATOMIC_ACQUIRE);
    uint32_t index = hz3_stack_index(word);
    for (uint32_t left = hz3_stack_count(word); left > 0 && index != 0; left--) {
      struct hz3_magazine *magazine = hz3_magazine_at(index);
      objects += __atomic_load_n(&magazine->count, __ATOMIC_RELAXED);
      index = __atomic_load_n(&magazine->next, __ATOMIC_RELAXED);
    }
  }
  return objects;
}

void hz3_remote_fork_prepare(void) { hz3_lock_acquire_for_fork(&carve_lock); }
void hz3_remote_fork_release(void) { hz3_lock_release_for_fork(&carve_lock); }
