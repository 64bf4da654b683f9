// SPDX-License-Identifier: Apache-2.0
//
// What every benchmark program shares: arguments, clock, generators, threads
// that start together, latency histograms, and the closing report.
//
// Called by: the programs of this folder, one per file.
// Needs: libc and pthreads only. Nothing here calls malloc, so the allocator
//   under test serves the workload and nothing else.
// Invariant: exit status 0 means every self-check held, 1 that one failed or
//   memory ran out, 2 that the arguments were wrong.
#ifndef BENCH_WORKLOADS_WORKLOAD_H_
#define BENCH_WORKLOADS_WORKLOAD_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#define WL_DEFAULT_SEED 0x12345678u
#define WL_CACHE_LINE 64
#define WL_MAX_THREADS 4096
#define WL_ALWAYS_INLINE inline __attribute__((always_inline))
#define WL_PRINTF(text, values) __attribute__((format(printf, text, values)))
#define WL_NORETURN __attribute__((noreturn))

#ifdef __cplusplus
extern "C" {
#endif

// ---- Arguments -----------------------------------------------------------

// One number of the command line. It is given by position or as name=value.
struct wl_arg {
  const char* name;
  const char* help;
  uint64_t value;  // the default, replaced by what the user gave
  uint64_t min;
  uint64_t max;
};

struct wl_program {
  const char* name;
  const char* about;
  const char* example;  // arguments of a short run
  struct wl_arg* args;
  size_t arg_count;
  bool offers_latency;
  const char* mode_help;  // NULL: no words are accepted after the numbers
  // Filled by wl_parse.
  bool latency;
  uint64_t settle_seconds;
  char** mode;  // the words from the first one that is not a number
  int mode_count;
};

// Reads the command line into `program`; prints help or a complaint and exits
// when that is all there is to do.
void wl_parse(struct wl_program* program, int argc, char** argv);

// Complains about a combination of arguments and exits with status 2.
WL_NORETURN void wl_usage_error(const struct wl_program* program,
                                const char* format, ...) WL_PRINTF(2, 3);

// Parses a whole decimal, 0x or 0 number; false when `text` is anything else.
bool wl_parse_number(const char* text, uint64_t* value);

// ---- Failing -------------------------------------------------------------

// Reports a self-check that did not hold and exits with status 1.
WL_NORETURN void wl_fail(const char* format, ...) WL_PRINTF(1, 2);
WL_NORETURN void wl_out_of_memory(size_t size);

#define WL_CHECK(condition, ...) \
  do {                           \
    if (!(condition)) {          \
      wl_fail(__VA_ARGS__);      \
    }                            \
  } while (0)

// ---- Memory of the program itself ----------------------------------------

// Zeroed pages that come straight from the kernel and are touched lazily.
void* wl_map(size_t bytes);
void wl_unmap(void* memory, size_t bytes);

// Makes the compiler forget what it knows about `pointer`, at no cost, so that
// an allocation that is freed at once is not optimised away.
static WL_ALWAYS_INLINE void* wl_opaque(void* pointer) {
  __asm__ volatile("" : "+r"(pointer) : : "memory");
  return pointer;
}

// ---- Clock ---------------------------------------------------------------

uint64_t wl_now_ns(void);
static inline double wl_seconds(uint64_t nanoseconds) {
  return (double)nanoseconds * 1e-9;
}
void wl_sleep_ns(uint64_t nanoseconds);

// ---- Generators ----------------------------------------------------------

static inline uint64_t wl_xorshift64(uint64_t* state) {
  uint64_t x = *state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return *state = x;
}

// Below `bound`, which is at most 2^32, each number about as often.
static inline uint64_t wl_below(uint64_t* state, uint64_t bound) {
  return (wl_xorshift64(state) >> 32) % bound;
}

// So many times in a hundred.
static inline bool wl_is_chance(uint64_t* state, unsigned percent) {
  return wl_below(state, 100) < percent;
}

// The same, without a draw for what is never done.
static inline bool wl_is_chance_if_any(uint64_t* state, unsigned percent) {
  return percent > 0 && wl_is_chance(state, percent);
}

// Of the first byte of every cache line.
static inline uint64_t wl_sum_of_lines(const unsigned char* bytes,
                                       uint64_t size) {
  uint64_t sum = 0;
  for (uint64_t at = 0; at < size; at += WL_CACHE_LINE) {
    sum += bytes[at];
  }
  return sum;
}

static inline uint32_t wl_xorshift32(uint32_t* state) {
  uint32_t x = *state;
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return *state = x;
}

// A non-zero generator state of its own for stream `index` of `seed`.
uint64_t wl_stream_seed(uint64_t seed, uint64_t index);

// ---- Threads -------------------------------------------------------------

// Runs body(index, context) on `count` threads that leave one barrier together
// and returns the nanoseconds from the first start to the last return. Thread
// creation and exit are outside of that time.
uint64_t wl_run_threads(unsigned count, void (*body)(unsigned, void*),
                        void* context);

// The same, but one body runs in the calling thread: the process has no other
// one then, and libc takes no locks.
uint64_t wl_run(unsigned count, void (*body)(unsigned, void*), void* context);

// ---- Latency of single operations ----------------------------------------

// 32 buckets per doubling: a bucket is at most 3.2 % wide.
#define WL_SUB_BUCKET_BITS 5
#define WL_SUB_BUCKETS (1u << WL_SUB_BUCKET_BITS)
#define WL_BUCKETS ((64u - WL_SUB_BUCKET_BITS + 1) * WL_SUB_BUCKETS)

struct wl_histogram {
  uint64_t max;
  uint64_t counts[WL_BUCKETS];
};

// Time stamps are in ticks of the cheapest clock of the machine.
static inline uint64_t wl_ticks(void) {
#if defined(__x86_64__)
  unsigned cpu;
  return __rdtscp(&cpu);
#else
  return wl_now_ns();
#endif
}

static inline unsigned wl_bucket_of(uint64_t ticks) {
  if (ticks < WL_SUB_BUCKETS) {
    return (unsigned)ticks;
  }
  unsigned shift = 63u - (unsigned)__builtin_clzll(ticks) - WL_SUB_BUCKET_BITS;
  return shift * WL_SUB_BUCKETS + (unsigned)(ticks >> shift);
}

static inline void wl_histogram_add(struct wl_histogram* histogram,
                                    uint64_t ticks) {
  histogram->counts[wl_bucket_of(ticks)]++;
  if (ticks > histogram->max) {
    histogram->max = ticks;
  }
}

// Adds `from` to `into`.
void wl_histogram_merge(struct wl_histogram* into,
                        const struct wl_histogram* from);

// Prints `[LATENCY] op=<op> …` in nanoseconds. The cost of reading the clock
// is part of every sample and printed beside them.
void wl_print_latency(const char* op, const struct wl_histogram* histogram);

// ---- Result --------------------------------------------------------------

struct wl_memory_status {
  uint64_t rss_kib;
  uint64_t peak_rss_kib;
};
struct wl_memory_status wl_read_memory_status(void);

// Resident bytes by the cheapest way to ask, for sampling while a test runs.
uint64_t wl_rss_bytes(void);

// What a run holds over time.
#define WL_TRACE_SAMPLES 200u

struct wl_trace {
  struct {
    uint64_t ns;
    uint64_t rss_bytes;
    uint64_t live_bytes;
  } samples[WL_TRACE_SAMPLES + 1];
  unsigned count;
  uint64_t own_bytes;  // resident before the run, not counted
};

// Takes a sample if the next one is due, `ns` nanoseconds into a run of
// `total_ns`.
void wl_trace_add(struct wl_trace* trace, uint64_t ns, uint64_t total_ns,
                  uint64_t live_bytes);

// Prints `[RSS_LIVE_TRACE] seconds:rss_kib:live_kib …` and the result line.
// Resident per live byte is taken over the second half of the run, where the
// memory has been cut up already.
void wl_print_trace(const char* name, const struct wl_trace* trace,
                    uint64_t ops, double time);

// Prints the trailer `[RESOURCES] …` and flushes everything. Call it after all
// memory was freed; returns the exit status of main.
int wl_finish(const struct wl_program* program);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // BENCH_WORKLOADS_WORKLOAD_H_
