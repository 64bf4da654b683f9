// SPDX-License-Identifier: Apache-2.0
// What it is: magazines and the depot, see remote.h.
#include "hz3/remote/remote.h"

#include "hz3/base/lock.h"
#include "hz3/base/metadata.h"
#include "hz3/base/os.h"
#include "hz3/config.h"
#include "hz3/remote/stack.h"

enum { MAX_SLABS = 1 << 16 };  // 4 GiB of magazines, for 500 million objects
HZ3_STATIC_ASSERT(HZ3_MAGAZINE_SLAB_UNITS * MAX_SLABS <= 1 << HZ3_STACK_INDEX_BITS, "every magazine has an index");
// A CPU makes so much of magazines for itself before it takes those of others, whose lines are in another cache; then it asks so many pools,
// and as many more each time that it has made as much again.
enum { MADE_FIRST_BYTES = 128 * 1024, POOLS_ASKED = 8 };
enum { ALWAYS_KEPT_MOST_BYTES = 256 };  // of bigger objects it would be too much after a burst (docs/decisions/0029)
enum { MAX_CPUS = 512, MAX_SHARDS = (MAX_CPUS + HZ3_CPUS_PER_SHARD - 1) / HZ3_CPUS_PER_SHARD };

char *hz3_magazine_slabs[MAX_SLABS];

// What a CPU puts down lies on stacks of its own, so that threads that run side by side and need nothing of each other do not
// touch each other's memory (docs/decisions/0029). The warm stacks are now and then turned over onto the cool ones of their
// shard, the oldest on top, where every CPU takes from. The stacks publish what is on them; all else is read and written relaxed,
// as hints.
static struct {
  struct hz3_stack warm[HZ3_CLASS_COUNT];
  struct hz3_stack pools[HZ3_MAGAZINE_LEVELS];
  size_t warm_bytes[2];  // of objects on the warm stacks: of those that cool, and, [true], in magazines that are its threads' own; modulo 2^64
  size_t made_bytes;  // of magazines
  uint16_t pool_away[HZ3_MAGAZINE_LEVELS];  // how far from this CPU is the one, 0 for the next, that is asked if its own pool has nothing
  uint16_t away[HZ3_CLASS_COUNT];  // how far from the CPU's own shard is the one, 0 for the next, that is asked if its own has nothing
} __attribute__((aligned(HZ3_CACHE_LINE))) cpus[MAX_CPUS];
static struct {
  struct hz3_stack stack;
  bool may_cool;  // a CPU of the shard has put down a magazine of the class that is not its threads' own, which may still be there
} __attribute__((aligned(HZ3_CACHE_LINE))) cool[MAX_SHARDS][HZ3_CLASS_COUNT];
static unsigned cpu_count = 1, shard_count = 1;

static struct hz3_lock carve_lock = HZ3_LOCK_INIT(HZ3_RANK_MAGAZINES);
static uint32_t slab_count;
static uint32_t next_index[HZ3_MAGAZINE_LEVELS];  // each level carves a slab of its own; at a multiple of HZ3_MAGAZINE_SLAB_UNITS it needs one

void hz3_remote_init(unsigned cpus) {
  cpu_count = (unsigned)hz3_min(cpus, MAX_CPUS);
  shard_count = (cpu_count + HZ3_CPUS_PER_SHARD - 1) / HZ3_CPUS_PER_SHARD;
}

static unsigned own_cpu(void) { return cpu_count == 1 ? 0 : hz3_os_cpu() % cpu_count; }
static unsigned shard_of(unsigned cpu) { return cpu / HZ3_CPUS_PER_SHARD; }
static unsigned first_cpu(unsigned shard) { return shard * HZ3_CPUS_PER_SHARD; }
static unsigned end_cpu(unsigned shard) { return hz3_min(first_cpu(shard + 1), cpu_count); }

// False when out of memory or of indices.
static bool add_slab_locked(unsigned level) {
  char *slab = slab_count == MAX_SLABS ? NULL : (char *)hz3_metadata_alloc(HZ3_MAGAZINE_SLAB_UNITS * HZ3_MAGAZINE_UNIT_BYTES);
  if (slab == NULL) return false;
  // Relaxed: an index that counts comes with a release, by whoever gives the magazine away. Who follows others sees this or NULL.
  __atomic_store_n(&hz3_magazine_slabs[slab_count], slab, __ATOMIC_RELAXED);
  next_index[level] = slab_count * HZ3_MAGAZINE_SLAB_UNITS;
  if (slab_count++ == 0) next_index[level] += 1u << level;  // index 0 means "none"
  return true;
}

static struct hz3_magazine *carve_locked(unsigned level) {
  if (next_index[level] % HZ3_MAGAZINE_SLAB_UNITS == 0 && !add_slab_locked(level)) return NULL;
  struct hz3_magazine *magazine = hz3_magazine_at(next_index[level]);
  magazine->index = next_index[level];
  magazine->level = (uint8_t)level;
  next_index[level] += 1u << level;
  return magazine;
}

// A few other CPUs are asked, first the one that had some the last time: to ask all would read a line of each, whenever threads
// free what others allocate.
static struct hz3_magazine *alloc_away(unsigned cpu, unsigned level, uint32_t wanted, uint32_t *count) {
  unsigned others = cpu_count - 1, away = __atomic_load_n(&cpus[cpu].pool_away[level], __ATOMIC_RELAXED);
  size_t asked = (1 + __atomic_load_n(&cpus[cpu].made_bytes, __ATOMIC_RELAXED) / MADE_FIRST_BYTES) * POOLS_ASKED;
  struct hz3_magazine *magazine = NULL;
  for (size_t left = hz3_min(others, asked); left > 0; left--) {
    magazine = hz3_stack_pop(&cpus[(cpu + 1 + away) % cpu_count].pools[level], wanted, count);
    if (magazine != NULL) break;
    away = (away + 1) % others;
  }
  __atomic_store_n(&cpus[cpu].pool_away[level], (uint16_t)away, __ATOMIC_RELAXED);
  return magazine;
}

static struct hz3_magazine *make(unsigned cpu, unsigned level, uint32_t *count) {
  hz3_lock_acquire(&carve_lock);
  struct hz3_magazine *magazine = carve_locked(level);
  hz3_lock_release(&carve_lock);
  if (magazine == NULL) return NULL;
  __atomic_fetch_add(&cpus[cpu].made_bytes, (size_t)HZ3_MAGAZINE_UNIT_BYTES << level, __ATOMIC_RELAXED);
  *count = 1;
  return magazine;
}

struct hz3_magazine *hz3_magazine_alloc(unsigned level, uint32_t wanted, uint32_t *count) {
  unsigned own = own_cpu();
  struct hz3_magazine *magazine = hz3_stack_pop(&cpus[own].pools[level], wanted, count);
  if (magazine != NULL) return magazine;
  bool makes_first = __atomic_load_n(&cpus[own].made_bytes, __ATOMIC_RELAXED) < MADE_FIRST_BYTES;
  magazine = makes_first ? make(own, level, count) : alloc_away(own, level, wanted, count);
  if (magazine != NULL) return magazine;
  return makes_first ? alloc_away(own, level, wanted, count) : make(own, level, count);
}

void hz3_magazine_free(struct hz3_magazine *first, struct hz3_magazine *last, uint32_t count) {
  hz3_stack_push(&cpus[own_cpu()].pools[first->level], first, last, count, true);
}

static uint32_t height_of(const struct hz3_stack *stack) {
  return hz3_stack_height(__atomic_load_n(&stack->word, __ATOMIC_RELAXED));
}

static size_t warm_bytes(unsigned shard) {
  size_t sum = 0;
  for (unsigned i = first_cpu(shard); i < end_cpu(shard); i++) sum += __atomic_load_n(&cpus[i].warm_bytes[false], __ATOMIC_RELAXED);
  return sum > PTRDIFF_MAX ? 0 : sum;  // the lines were read at different times
}

static void add_warm(unsigned cpu, bool is_own, size_t bytes) { __atomic_fetch_add(&cpus[cpu].warm_bytes[is_own], bytes, __ATOMIC_RELAXED); }

static size_t bytes_of(unsigned size_class, const struct hz3_magazine *magazine) {
  return magazine->count * (size_t)hz3_size_classes[size_class].bytes;
}

// A CPU may always keep a little of small objects: threads with little to free would else push each other's to the spans.
static bool is_full(unsigned size_class, unsigned cpu, size_t magazine_bytes, size_t limit) {
  size_t stack_bytes = height_of(&cpus[cpu].warm[size_class]) * magazine_bytes;
  if (hz3_size_classes[size_class].bytes <= ALWAYS_KEPT_MOST_BYTES && stack_bytes < HZ3_MAGAZINE_BYTES) return false;
  unsigned shard = shard_of(cpu);
  size_t height = height_of(&cool[shard][size_class].stack);
  for (unsigned i = first_cpu(shard); i < end_cpu(shard); i++) height += height_of(&cpus[i].warm[size_class]);
  return height * shard_count >= limit;
}

static bool push_warm(unsigned size_class, unsigned cpu, struct hz3_magazine *magazine, bool is_own) {
  size_t bytes = bytes_of(size_class, magazine);
  magazine->is_own = is_own;
  add_warm(cpu, is_own, bytes);
  if (hz3_stack_push(&cpus[cpu].warm[size_class], magazine, magazine, 1, false)) return true;
  add_warm(cpu, is_own, 0 - bytes);
  return false;
}

bool hz3_depot_push(unsigned size_class, struct hz3_magazine *magazine, size_t limit, size_t always_below_bytes) {
  unsigned cpu = own_cpu();
  bool is_too_much = is_full(size_class, cpu, bytes_of(size_class, magazine), limit) && warm_bytes(shard_of(cpu)) >= always_below_bytes;
  if (is_too_much || !push_warm(size_class, cpu, magazine, false)) return false;
  bool *may_cool = &cool[shard_of(cpu)][size_class].may_cool;
  if (!__atomic_load_n(may_cool, __ATOMIC_RELAXED)) __atomic_store_n(may_cool, true, __ATOMIC_RELAXED);
  return true;
}

// No line of other CPUs is read: each changes with every exchange of theirs.
bool hz3_depot_push_own(unsigned size_class, struct hz3_magazine *magazine, size_t limit) {
  unsigned cpu = own_cpu();
  return height_of(&cpus[cpu].warm[size_class]) < limit && push_warm(size_class, cpu, magazine, true);
}

static struct hz3_magazine *pop_warm(unsigned size_class, unsigned cpu) {
  uint32_t count;
  struct hz3_magazine *magazine = hz3_stack_pop(&cpus[cpu].warm[size_class], 1, &count);
  if (magazine != NULL) add_warm(cpu, magazine->is_own, 0 - bytes_of(size_class, magazine));
  return magazine;
}

static struct hz3_magazine *pop_cool(unsigned shard, unsigned size_class) {
  uint32_t count;
  return hz3_stack_pop(&cool[shard][size_class].stack, 1, &count);
}

// Turns a CPU's warm stack over onto the cool one, except for the oldest magazine, which the caller gets. NULL if empty.
static struct hz3_magazine *turn_over(unsigned size_class, unsigned cpu) {
  struct hz3_magazine *newest = hz3_stack_take_all(&cpus[cpu].warm[size_class]), *oldest = NULL;
  size_t bytes[2] = {0};
  uint32_t count = 0;
  for (struct hz3_magazine *at = newest; at != NULL; count++) {
    uint32_t older = at->next;
    bytes[at->is_own] += bytes_of(size_class, at);
    __atomic_store_n(&at->next, oldest == NULL ? 0 : oldest->index, __ATOMIC_RELAXED);
    oldest = at;
    at = older == 0 ? NULL : hz3_magazine_at(older);
  }
  for (int is_own = 0; is_own < 2; is_own++) add_warm(cpu, is_own, 0 - bytes[is_own]);
  if (count > 1) hz3_stack_push(&cool[shard_of(cpu)][size_class].stack, hz3_magazine_at(oldest->next), newest, count - 1, true);
  return oldest;
}

static unsigned fullest_cpu(unsigned shard, unsigned size_class) {
  unsigned fullest = first_cpu(shard);
  for (unsigned cpu = fullest + 1; cpu < end_cpu(shard); cpu++) {
    if (height_of(&cpus[cpu].warm[size_class]) > height_of(&cpus[fullest].warm[size_class])) fullest = cpu;
  }
  return fullest;
}

// For a CPU that found nothing of its own, nor anything cool. The stacks of others are looked at only where one may hold what they do not want back,
// and their bytes summed up only where there is something of this class, for those lines change with each exchange of any. What is put down
// at that moment may be overlooked until the next one is.
static struct hz3_magazine *turn_fullest_over(unsigned shard, unsigned size_class) {
  if (!__atomic_load_n(&cool[shard][size_class].may_cool, __ATOMIC_RELAXED)) return NULL;
  unsigned cpu = fullest_cpu(shard, size_class);
  uint32_t height = height_of(&cpus[cpu].warm[size_class]);
  if (height == 0) return NULL;
  size_t bytes = warm_bytes(shard);
  if (bytes == 0) __atomic_store_n(&cool[shard][size_class].may_cool, false, __ATOMIC_RELAXED);
  return height > HZ3_STACK_MAX / 2 || bytes >= HZ3_COOL_BYTES ? turn_over(size_class, cpu) : NULL;
}

static struct hz3_magazine *pop_from(unsigned shard, unsigned size_class) {
  struct hz3_magazine *magazine = pop_cool(shard, size_class);
  return magazine != NULL ? magazine : turn_fullest_over(shard, size_class);
}

static struct hz3_magazine *take_from(unsigned shard, unsigned size_class) {
  struct hz3_magazine *magazine = pop_cool(shard, size_class);
  return magazine != NULL ? magazine : pop_warm(size_class, fullest_cpu(shard, size_class));
}

// One other shard is asked, and the same again while it has something: to ask all would read lines of every CPU for each exchange.
static struct hz3_magazine *ask_away(unsigned cpu, unsigned size_class, struct hz3_magazine *(*ask)(unsigned shard, unsigned size_class)) {
  if (shard_count == 1) return NULL;
  unsigned away = __atomic_load_n(&cpus[cpu].away[size_class], __ATOMIC_RELAXED);
  struct hz3_magazine *magazine = ask((shard_of(cpu) + 1 + away) % shard_count, size_class);
  if (magazine == NULL) __atomic_store_n(&cpus[cpu].away[size_class], (uint16_t)((away + 1) % (shard_count - 1)), __ATOMIC_RELAXED);
  return magazine;
}

// The newest of this CPU, else what its shard gives when it is asked, else what one other does.
HZ3_INLINE struct hz3_magazine *nearest(unsigned size_class, struct hz3_magazine *(*ask)(unsigned shard, unsigned size_class)) {
  unsigned cpu = own_cpu();
  struct hz3_magazine *magazine = pop_warm(size_class, cpu);
  if (magazine == NULL) magazine = ask(shard_of(cpu), size_class);
  return magazine != NULL ? magazine : ask_away(cpu, size_class, ask);
}

struct hz3_magazine *hz3_depot_pop(unsigned size_class) { return nearest(size_class, pop_from); }
struct hz3_magazine *hz3_depot_take_own(unsigned size_class) { return nearest(size_class, pop_cool); }

struct hz3_magazine *hz3_depot_take_any(unsigned size_class) {
  struct hz3_magazine *magazine = NULL;
  unsigned own_shard = shard_of(own_cpu());
  for (unsigned i = 0; magazine == NULL && i < shard_count; i++) magazine = take_from((own_shard + i) % shard_count, size_class);
  return magazine;
}

static uint32_t take_low_water(struct hz3_stack *stack) {
  uint32_t unused = __atomic_load_n(&stack->low_water, __ATOMIC_RELAXED), height = height_of(stack);
  if (height != unused) __atomic_store_n(&stack->low_water, height, __ATOMIC_RELAXED);
  return unused;
}

void hz3_depot_take_low_water(uint32_t unused[HZ3_CLASS_COUNT]) {
  for (unsigned c = 0; c < HZ3_CLASS_COUNT; c++) unused[c] = 0;
  for (unsigned i = 0; i < cpu_count; i++) {
    // Most CPUs of a big machine have nothing: one line of theirs is read instead of all.
    const size_t *bytes = cpus[i].warm_bytes;
    if (__atomic_load_n(&bytes[false], __ATOMIC_RELAXED) == 0 && __atomic_load_n(&bytes[true], __ATOMIC_RELAXED) == 0) continue;
    for (unsigned c = 0; c < HZ3_CLASS_COUNT; c++) unused[c] += take_low_water(&cpus[i].warm[c]);
  }
  for (unsigned i = 0; i < shard_count; i++) {
    for (unsigned c = 0; c < HZ3_CLASS_COUNT; c++) unused[c] += take_low_water(&cool[i][c].stack);
  }
}

static size_t objects_on(const struct hz3_stack *stack) {
  size_t objects = 0;
  // Acquire: pairs with the release in hz3_stack_push, so that the magazines and their slabs are there.
  uint64_t word = __atomic_load_n(&stack->word, __ATOMIC_ACQUIRE);
  uint32_t index = hz3_stack_index(word);
  for (uint32_t left = hz3_stack_height(word); left > 0 && index != 0; left--) {
    const struct hz3_magazine *magazine = hz3_magazine_seen_at(index);
    if (magazine == NULL) break;  // the walk has come off the stack
    objects += __atomic_load_n(&magazine->count, __ATOMIC_RELAXED);
    index = __atomic_load_n(&magazine->next, __ATOMIC_RELAXED);
  }
  return objects;
}

size_t hz3_depot_objects(unsigned size_class) {
  size_t objects = 0;
  for (unsigned i = 0; i < cpu_count; i++) objects += objects_on(&cpus[i].warm[size_class]);
  for (unsigned i = 0; i < shard_count; i++) objects += objects_on(&cool[i][size_class].stack);
  return objects;
}

void hz3_remote_fork_prepare(void) { hz3_lock_acquire_for_fork(&carve_lock); }
void hz3_remote_fork_release(void) { hz3_lock_release_for_fork(&carve_lock); }
