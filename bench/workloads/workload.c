// SPDX-License-Identifier: Apache-2.0
//
// The shared half of the benchmark programs; the contract is in workload.h.
//
// Called by: the programs of this folder.
// Owns: the static output buffer, so that stdio does not ask the allocator
//   under test for one.
#include "workload.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static const char* program_name = "workload";
static char output_buffer[1 << 16];

// ---- Failing -------------------------------------------------------------

static void complain(const char* what, const char* format, va_list values) {
  fflush(stdout);
  fprintf(stderr, "%s: %s", program_name, what);
  vfprintf(stderr, format, values);
}

void wl_fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  complain("self-check failed: ", format, values);
  va_end(values);
  fputc('\n', stderr);
  // Other threads may still run: no destructors, no atexit handlers.
  _exit(1);
}

void wl_out_of_memory(size_t size) {
  wl_fail("no memory for %zu bytes", size);
}

void wl_usage_error(const struct wl_program* program, const char* format, ...) {
  va_list values;
  va_start(values, format);
  complain("", format, values);
  va_end(values);
  fprintf(stderr, " (see %s --help)\n", program->name);
  exit(2);
}

// ---- Arguments -----------------------------------------------------------

static void print_help(const struct wl_program* program) {
  printf("usage: %s [options]", program->name);
  for (size_t i = 0; i < program->arg_count; i++) {
    printf(" [%s]", program->args[i].name);
  }
  printf("%s%s\n\n%s\n\n", program->mode_help ? " " : "",
         program->mode_help ? program->mode_help : "", program->about);
  if (program->arg_count > 0) {
    printf("Numbers are given in this order or as name=value:\n");
  }
  for (size_t i = 0; i < program->arg_count; i++) {
    const struct wl_arg* arg = &program->args[i];
    printf("  %-14s %s (default %" PRIu64 ")\n", arg->name, arg->help,
           arg->value);
  }
  printf("\nOptions:\n");
  if (program->offers_latency) {
    printf(
        "  --latency      time every malloc and free by itself and print\n"
        "                 percentiles; ops/s is then that of the timed loop\n");
  }
  printf(
      "  --settle S     wait S seconds after the last free and report the\n"
      "                 resident memory again\n"
      "  --help         print this\n\nExample: %s %s\n",
      program->name, program->example);
}

bool wl_parse_number(const char* text, uint64_t* value) {
  char* end;
  if (*text < '0' || *text > '9') {
    return false;
  }
  errno = 0;
  *value = strtoull(text, &end, 0);
  return errno == 0 && *end == '\0';
}

static void set_arg(const struct wl_program* program, struct wl_arg* arg,
                    const char* text) {
  uint64_t value;
  if (!wl_parse_number(text, &value) || value < arg->min || value > arg->max) {
    wl_usage_error(program,
                   "%s: '%s' is not a number from %" PRIu64 " to %" PRIu64,
                   arg->name, text, arg->min, arg->max);
  }
  arg->value = value;
}

static bool set_named_arg(const struct wl_program* program, const char* word) {
  const char* equals = strchr(word, '=');
  if (equals == NULL) {
    return false;
  }
  size_t length = (size_t)(equals - word);
  for (size_t i = 0; i < program->arg_count; i++) {
    struct wl_arg* arg = &program->args[i];
    if (strlen(arg->name) == length && strncmp(arg->name, word, length) == 0) {
      set_arg(program, arg, equals + 1);
      return true;
    }
  }
  wl_usage_error(program, "there is no argument named '%.*s'", (int)length,
                 word);
}

// Handles an option at argv[*index], advancing over its value.
static void set_option(struct wl_program* program, int argc, char** argv,
                       int* index) {
  const char* word = argv[*index];
  if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
    print_help(program);
    exit(0);
  }
  if (strcmp(word, "--latency") == 0 && program->offers_latency) {
    program->latency = true;
    return;
  }
  if (strcmp(word, "--settle") == 0) {
    const char* text = *index + 1 < argc ? argv[++*index] : "";
    struct wl_arg settle = {.name = "--settle", .max = 3600};
    set_arg(program, &settle, text);
    program->settle_seconds = settle.value;
    return;
  }
  wl_usage_error(program, "unknown option '%s'", word);
}

void wl_parse(struct wl_program* program, int argc, char** argv) {
  setvbuf(stdout, output_buffer, _IOFBF, sizeof(output_buffer));
  program_name = program->name;
  size_t position = 0;
  for (int i = 1; i < argc; i++) {
    if (argv[i][0] == '-') {
      set_option(program, argc, argv, &i);
    } else if (set_named_arg(program, argv[i])) {
      continue;
    } else if (program->mode_help != NULL &&
               (position == program->arg_count || argv[i][0] < '0' ||
                argv[i][0] > '9')) {
      program->mode = &argv[i];
      program->mode_count = argc - i;
      return;
    } else if (position < program->arg_count) {
      set_arg(program, &program->args[position++], argv[i]);
    } else {
      wl_usage_error(program, "too many arguments: '%s'", argv[i]);
    }
  }
}

// ---- Memory of the program itself ----------------------------------------

void* wl_map(size_t bytes) {
  if (bytes == 0) {
    bytes = 1;
  }
  void* memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    wl_out_of_memory(bytes);
  }
  return memory;
}

void wl_unmap(void* memory, size_t bytes) {
  munmap(memory, bytes == 0 ? 1 : bytes);
}

// ---- Clock and seeds -----------------------------------------------------

uint64_t wl_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void wl_sleep_ns(uint64_t nanoseconds) {
  struct timespec left = {.tv_sec = (time_t)(nanoseconds / 1000000000u),
                          .tv_nsec = (long)(nanoseconds % 1000000000u)};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
}

uint64_t wl_stream_seed(uint64_t seed, uint64_t index) {
  // The finaliser of splitmix64 decorrelates neighbouring streams.
  uint64_t z = seed + (index + 1) * UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  z ^= z >> 31;
  return z != 0 ? z : 1;
}

// ---- Threads -------------------------------------------------------------

struct team {
  pthread_barrier_t start_line;
  void (*body)(unsigned, void*);
  void* context;
};

struct member {
  struct team* team;
  pthread_t thread;
  unsigned index;
  uint64_t started;
  uint64_t ended;
};

static void* member_main(void* argument) {
  struct member* self = argument;
  pthread_barrier_wait(&self->team->start_line);
  self->started = wl_now_ns();
  self->team->body(self->index, self->team->context);
  self->ended = wl_now_ns();
  return NULL;
}

uint64_t wl_run_threads(unsigned count, void (*body)(unsigned, void*),
                        void* context) {
  struct team team = {.body = body, .context = context};
  struct member* members = wl_map(count * sizeof(*members));
  pthread_barrier_init(&team.start_line, NULL, count);
  for (unsigned i = 0; i < count; i++) {
    members[i].team = &team;
    members[i].index = i;
    int error = pthread_create(&members[i].thread, NULL, member_main,
                               &members[i]);
    WL_CHECK(error == 0, "pthread_create of thread %u: %s", i, strerror(error));
  }
  // The threads stamp the clock themselves: with more threads than processors
  // the creating thread may only run again when some have finished.
  uint64_t first = UINT64_MAX;
  uint64_t last = 0;
  for (unsigned i = 0; i < count; i++) {
    pthread_join(members[i].thread, NULL);
    first = members[i].started < first ? members[i].started : first;
    last = members[i].ended > last ? members[i].ended : last;
  }
  pthread_barrier_destroy(&team.start_line);
  wl_unmap(members, count * sizeof(*members));
  return last - first;
}

uint64_t wl_run(unsigned count, void (*body)(unsigned, void*), void* context) {
  if (count > 1) {
    return wl_run_threads(count, body, context);
  }
  uint64_t start = wl_now_ns();
  body(0, context);
  return wl_now_ns() - start;
}

// ---- Latency -------------------------------------------------------------

void wl_histogram_merge(struct wl_histogram* into,
                        const struct wl_histogram* from) {
  for (unsigned i = 0; i < WL_BUCKETS; i++) {
    into->counts[i] += from->counts[i];
  }
  into->max = from->max > into->max ? from->max : into->max;
}

// Nanoseconds per tick, measured against the system clock for 20 ms, which
// bounds the error of the ratio to a few parts in 100,000.
static double nanoseconds_per_tick(void) {
  static double ratio;
  if (ratio == 0) {
    uint64_t ns = wl_now_ns();
    uint64_t ticks = wl_ticks();
    wl_sleep_ns(20000000);
    ns = wl_now_ns() - ns;
    ratio = (double)ns / (double)(wl_ticks() - ticks);
  }
  return ratio;
}

static uint64_t clock_cost_ticks(void) {
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 1000; i++) {
    uint64_t start = wl_ticks();
    uint64_t cost = wl_ticks() - start;
    best = cost < best ? cost : best;
  }
  return best;
}

// The largest value that falls into `bucket`.
static uint64_t bucket_limit(unsigned bucket) {
  if (bucket < 2 * WL_SUB_BUCKETS) {
    return bucket;
  }
  unsigned shift = bucket / WL_SUB_BUCKETS - 1;
  uint64_t leading = WL_SUB_BUCKETS + bucket % WL_SUB_BUCKETS;
  return ((leading + 1) << shift) - 1;
}

static uint64_t percentile(const struct wl_histogram* histogram, uint64_t total,
                           double fraction) {
  uint64_t rank = (uint64_t)((double)total * fraction);
  uint64_t seen = 0;
  for (unsigned i = 0; i < WL_BUCKETS; i++) {
    seen += histogram->counts[i];
    if (seen > rank) {
      uint64_t limit = bucket_limit(i);
      return limit < histogram->max ? limit : histogram->max;
    }
  }
  return histogram->max;
}

void wl_print_latency(const char* op, const struct wl_histogram* histogram) {
  static const struct {
    const char* name;
    double fraction;
  } points[] = {{"p10", 0.10},   {"p25", 0.25},     {"p50", 0.50},
                {"p75", 0.75},   {"p90", 0.90},     {"p95", 0.95},
                {"p99", 0.99},   {"p99.9", 0.999},  {"p99.99", 0.9999}};
  double scale = nanoseconds_per_tick();
  uint64_t total = 0;
  for (unsigned i = 0; i < WL_BUCKETS; i++) {
    total += histogram->counts[i];
  }
  printf("[LATENCY] op=%s count=%" PRIu64, op, total);
  for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++) {
    printf(" %s_ns=%.1f", points[i].name,
           scale * (double)percentile(histogram, total, points[i].fraction));
  }
  printf(" max_ns=%.1f clock_ns=%.1f\n", scale * (double)histogram->max,
         scale * (double)clock_cost_ticks());
}

// ---- Result --------------------------------------------------------------

// Reads a file of /proc into `text` without asking malloc for a buffer.
static void read_proc(const char* path, char* text, size_t size) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t length = file < 0 ? -1 : read(file, text, size - 1);
  WL_CHECK(length > 0, "%s cannot be read: %s", path, strerror(errno));
  close(file);
  text[length] = '\0';
}

static uint64_t status_field(const char* text, const char* field) {
  const char* found = strstr(text, field);
  WL_CHECK(found != NULL, "/proc/self/status has no %s", field);
  return strtoull(found + strlen(field), NULL, 10);
}

struct wl_memory_status wl_read_memory_status(void) {
  char text[4096];
  read_proc("/proc/self/status", text, sizeof(text));
  return (struct wl_memory_status){
      .rss_kib = status_field(text, "VmRSS:"),
      .peak_rss_kib = status_field(text, "VmHWM:")};
}

uint64_t wl_rss_bytes(void) {
  char text[256];
  char* end;
  read_proc("/proc/self/statm", text, sizeof(text));
  strtoull(text, &end, 10);
  return strtoull(end, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

void wl_trace_add(struct wl_trace* trace, uint64_t ns, uint64_t total_ns,
                  uint64_t live_bytes) {
  if (trace->count > WL_TRACE_SAMPLES ||
      ns < trace->count * (total_ns / WL_TRACE_SAMPLES)) {
    return;
  }
  trace->samples[trace->count].ns = ns;
  trace->samples[trace->count].rss_bytes = wl_rss_bytes() - trace->own_bytes;
  trace->samples[trace->count].live_bytes = live_bytes;
  trace->count++;
}

void wl_print_trace(const char* name, const struct wl_trace* trace,
                    uint64_t ops, double time) {
  double mean = 0;
  double worst = 0;
  unsigned count = 0;
  printf("[RSS_LIVE_TRACE]");
  for (unsigned i = 0; i < trace->count; i++) {
    uint64_t rss = trace->samples[i].rss_bytes;
    uint64_t live = trace->samples[i].live_bytes;
    printf(" %.3f:%" PRIu64 ":%" PRIu64, wl_seconds(trace->samples[i].ns),
           rss / 1024, live / 1024);
    if (i >= trace->count / 2 && live > 0) {
      double ratio = (double)rss / (double)live;
      mean += ratio;
      worst = ratio > worst ? ratio : worst;
      count++;
    }
  }
  unsigned last = trace->count - 1;
  printf("\n%s: ops=%" PRIu64
         " time=%.6f ops/s=%.2f rss_per_live=%.4f worst_rss_per_live=%.4f"
         " end_live_kib=%" PRIu64 " end_rss_kib=%" PRIu64 "\n",
         name, ops, time, (double)ops / time, mean / count, worst,
         trace->samples[last].live_bytes / 1024,
         trace->samples[last].rss_bytes / 1024);
}

int wl_finish(const struct wl_program* program) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  struct wl_memory_status status = wl_read_memory_status();
  printf("[RESOURCES] peak_rss_kib=%" PRIu64 " end_rss_kib=%" PRIu64
         " minor_faults=%ld major_faults=%ld voluntary_switches=%ld"
         " involuntary_switches=%ld user_s=%ld.%06ld system_s=%ld.%06ld",
         status.peak_rss_kib, status.rss_kib, usage.ru_minflt, usage.ru_majflt,
         usage.ru_nvcsw, usage.ru_nivcsw, (long)usage.ru_utime.tv_sec,
         (long)usage.ru_utime.tv_usec, (long)usage.ru_stime.tv_sec,
         (long)usage.ru_stime.tv_usec);
  if (program->settle_seconds > 0) {
    wl_sleep_ns(program->settle_seconds * 1000000000u);
    printf(" settle_s=%" PRIu64 " settled_rss_kib=%" PRIu64,
           program->settle_seconds, wl_read_memory_status().rss_kib);
  }
  printf("\n");
  WL_CHECK(fflush(stdout) == 0, "the result could not be written");
  return 0;
}
