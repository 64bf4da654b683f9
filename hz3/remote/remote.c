// SPDX-License-Identifier: Apache-2.0
// What it is: magazines and the depot, see remote.h.
#include "hz3/remote/remote.h"

#include "hz3/base/lock.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/base/size_class.h"
#include "hz3/config.h"
#include "hz3/remote/stack.h"

enum { MAX_SHARDS = 64, SLAB_UNITS = 128, UNIT_BYTES = 512, MAX_SLABS = 1 << (HZ3_STACK_INDEX_BITS - 7), WARM_LINES = 8 };

char *hz3_magazine_slabs[MAX_SLABS];

// The depot keeps the order of pushing: magazines are pushed to `warm`, which is now and then turned over into `cool`, the
// oldest on top.
struct shelf {
  struct hz3_stack warm, cool;
};
static struct shelf depot[MAX_SHARDS][HZ3_CLASS_COUNT];
// Object bytes on the warm stacks of a shard, of all classes: the sum over its lines, modulo 2^64. CPUs add and take on lines
// of their own; the sum is only wanted where a stack has run dry or is full.
static struct {
  size_t bytes;
} __attribute__((aligned(HZ3_CACHE_LINE))) warm[MAX_SHARDS][WARM_LINES];
static struct hz3_stack pools[MAX_SHARDS][HZ3_MAGAZINE_LEVELS];
static unsigned shard_count = 1;

static struct hz3_lock carve_lock = HZ3_LOCK_INIT(HZ3_RANK_MAGAZINES);
static uint32_t slab_count;
static uint32_t next_index[HZ3_MAGAZINE_LEVELS];  // each level carves a slab of its own; at a multiple of SLAB_UNITS it needs one

void hz3_remote_init(void) {
  size_t shards = (hz3_os_cpu_count() + HZ3_CPUS_PER_SHARD - 1) / HZ3_CPUS_PER_SHARD;
  shard_count = (unsigned)hz3_min(shards, MAX_SHARDS);
}

static unsigned shard_of(unsigned cpu) { return shard_count == 1 ? 0 : cpu / HZ3_CPUS_PER_SHARD % shard_count; }
static unsigned own_shard(void) { return shard_count == 1 ? 0 : shard_of(hz3_os_cpu()); }

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

static uint32_t height_of(const struct hz3_stack *stack) {
  return hz3_stack_count(__atomic_load_n(&stack->word, __ATOMIC_RELAXED));
}

static size_t warm_bytes(unsigned shard) {
  size_t sum = 0;
  for (int i = 0; i < WARM_LINES; i++) sum += __atomic_load_n(&warm[shard][i].bytes, __ATOMIC_RELAXED);
  return sum > PTRDIFF_MAX ? 0 : sum;  // the lines were read at different times
}

static void add_warm(unsigned shard, unsigned cpu, size_t bytes) {
  __atomic_fetch_add(&warm[shard][cpu % WARM_LINES].bytes, bytes, __ATOMIC_RELAXED);
}

static size_t bytes_of(unsigned size_class, const struct hz3_magazine *magazine) {
  return magazine->count * (size_t)hz3_size_classes[size_class].bytes;
}

bool hz3_depot_push(unsigned size_class, struct hz3_magazine *magazine, size_t limit, bool may_cool) {
  unsigned cpu = hz3_os_cpu(), shard = shard_of(cpu);
  struct shelf *shelf = &depot[shard][size_class];
  bool is_full = (size_t)(height_of(&shelf->warm) + height_of(&shelf->cool)) * shard_count >= limit;
  if (is_full && (!may_cool || warm_bytes(shard) >= 2 * HZ3_COOL_BYTES)) return false;
  __atomic_store_n(&magazine->cpu, cpu, __ATOMIC_RELAXED);
  add_warm(shard, cpu, bytes_of(size_class, magazine));
  if (hz3_stack_push(&shelf->warm, magazine, magazine, 1, false)) return true;
  add_warm(shard, cpu, 0 - bytes_of(size_class, magazine));
  return false;
}

static struct hz3_magazine *pop_warm(unsigned shard, unsigned size_class, unsigned cpu) {
  uint32_t count;
  struct hz3_magazine *magazine = hz3_stack_pop(&depot[shard][size_class].warm, 1, &count);
  if (magazine != NULL) add_warm(shard, cpu, 0 - bytes_of(size_class, magazine));
  return magazine;
}

static struct hz3_magazine *pop_cool(unsigned shard, unsigned size_class) {
  uint32_t count;
  return hz3_stack_pop(&depot[shard][size_class].cool, 1, &count);
}

// Whether this CPU pushed the magazine on top; a guess, as other threads push and pop meanwhile.
static bool is_own(const struct hz3_stack *stack, unsigned cpu) {
  uint32_t index = hz3_stack_index(__atomic_load_n(&stack->word, __ATOMIC_ACQUIRE));  // pairs with the release in push
  return index != 0 && __atomic_load_n(&hz3_magazine_at(index)->cpu, __ATOMIC_RELAXED) == cpu;
}

// Turns the warm stack over onto the cool one, except for the oldest magazine, which the caller gets. NULL if empty.
static struct hz3_magazine *turn_over(unsigned shard, unsigned size_class, unsigned cpu) {
  struct shelf *shelf = &depot[shard][size_class];
  struct hz3_magazine *newest = hz3_stack_take_all(&shelf->warm), *oldest = NULL;
  size_t bytes = 0;
  uint32_t count = 0;
  for (struct hz3_magazine *at = newest; at != NULL; count++) {
    uint32_t older = at->next;
    bytes += bytes_of(size_class, at);
    __atomic_store_n(&at->next, oldest == NULL ? 0 : oldest->index, __ATOMIC_RELAXED);
    oldest = at;
    at = older == 0 ? NULL : hz3_magazine_at(older);
  }
  add_warm(shard, cpu, 0 - bytes);
  if (count > 1) hz3_stack_push(&shelf->cool, hz3_magazine_at(oldest->next), newest, count - 1, true);
  return oldest;
}

static struct hz3_magazine *pop_from(unsigned shard, unsigned size_class, unsigned cpu) {
  struct hz3_stack *stack = &depot[shard][size_class].warm;
  struct hz3_magazine *magazine = is_own(stack, cpu) ? pop_warm(shard, size_class, cpu) : pop_cool(shard, size_class);
  if (magazine != NULL) return magazine;
  bool is_due = warm_bytes(shard) >= HZ3_COOL_BYTES || height_of(stack) > HZ3_STACK_MAX / 2;
  return is_due ? turn_over(shard, size_class, cpu) : NULL;
}

static struct hz3_magazine *drain_from(unsigned shard, unsigned size_class, unsigned cpu) {
  struct hz3_magazine *magazine = pop_cool(shard, size_class);
  return magazine != NULL ? magazine : pop_warm(shard, size_class, cpu);
}

typedef struct hz3_magazine *take_from(unsigned shard, unsigned size_class, unsigned cpu);

// From the own shard if possible.
HZ3_INLINE struct hz3_magazine *take(unsigned size_class, take_from *from) {
  unsigned cpu = hz3_os_cpu(), own = shard_of(cpu);
  for (unsigned i = 0; i < shard_count; i++) {
    struct hz3_magazine *magazine = from((own + i) % shard_count, size_class, cpu);
    if (magazine != NULL) return magazine;
  }
  return NULL;
}

struct hz3_magazine *hz3_depot_pop(unsigned size_class) { return take(size_class, pop_from); }
struct hz3_magazine *hz3_depot_drain(unsigned size_class) { return take(size_class, drain_from); }

static uint32_t take_low_water(struct hz3_stack *stack) {
  uint32_t unused = __atomic_load_n(&stack->low_water, __ATOMIC_RELAXED);
  __atomic_store_n(&stack->low_water, height_of(stack), __ATOMIC_RELAXED);
  return unused;
}

uint32_t hz3_depot_take_low_water(unsigned size_class) {
  uint32_t unused = 0;
  for (unsigned i = 0; i < shard_count; i++)
    unused += take_low_water(&depot[i][size_class].warm) + take_low_water(&depot[i][size_class].cool);
  return unused;
}

static size_t objects_on(const struct hz3_stack *stack) {
  size_t objects = 0;
  uint64_t word = __atomic_load_n(&stack->word, __ATOMIC_ACQUIRE);
  uint32_t index = hz3_stack_index(word);
  for (uint32_t left = hz3_stack_count(word); left > 0 && index != 0; left--) {
    struct hz3_magazine *magazine = hz3_magazine_at(index);
    objects += __atomic_load_n(&magazine->count, __ATOMIC_RELAXED);
    index = __atomic_load_n(&magazine->next, __ATOMIC_RELAXED);
  }
  return objects;
}

size_t hz3_depot_objects(unsigned size_class) {
  size_t objects = 0;
  for (unsigned i = 0; i < shard_count; i++)
    objects += objects_on(&depot[i][size_class].warm) + objects_on(&depot[i][size_class].cool);
  return objects;
}

void hz3_remote_fork_prepare(void) { hz3_lock_acquire_for_fork(&carve_lock); }
void hz3_remote_fork_release(void) { hz3_lock_release_for_fork(&carve_lock); }
