// SPDX-License-Identifier: Apache-2.0
// What it is: libc's statistics and tuning calls, and hz3's own JSON: all answered by this allocator, truthfully.
// Called by: the application.
// Needs: hz3/hot statistics; snprintf on the stack, so nothing here allocates (malloc_info writes to the caller's FILE).
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

#include "hz3/base/fatal.h"
#include "hz3/base/size_class.h"
#include "hz3/build_info.h"
#include "hz3/hot/hot.h"
#include "hz3/hz3.h"

enum { TEXT_BYTES = 512 };

// What glibc's malloc.h says, which other libcs do not, and glibc before 2.33 in part: mallinfo2 came then. What is never set is
// unused here.
struct mallinfo {
  int arena, unused_1[2], hblks, hblkhd, unused_2[2], uordblks, fordblks, keepcost;
};
struct mallinfo2 {
  size_t arena, unused_1[2], hblks, hblkhd, unused_2[2], uordblks, fordblks, keepcost;
};
enum { M_MXFAST = 1, M_KEEP = 4, M_TRIM_THRESHOLD = -1, M_ARENA_MAX = -8 };

HZ3_EXPORT const char *hz3_version(void) { return hz3_build_info; }

HZ3_EXPORT struct mallinfo2 mallinfo2(void) {
  struct hz3_stats stats;
  hz3_get_stats(&stats);
  struct mallinfo2 info = {0};
  info.hblks = stats.large_blocks;
  info.hblkhd = stats.large_bytes;
  info.arena = stats.mapped_bytes - stats.large_bytes;
  info.uordblks = stats.live_bytes - stats.large_bytes;
  info.fordblks = info.arena - hz3_min(info.uordblks, info.arena);  // which were read at different times
  info.keepcost = stats.dirty_bytes;
  return info;
}

static int clamp_to_int(size_t value) { return value > (size_t)__INT_MAX__ ? __INT_MAX__ : (int)value; }

HZ3_EXPORT struct mallinfo mallinfo(void) {
  struct mallinfo2 wide = mallinfo2();
  struct mallinfo info = {0};
  info.hblks = clamp_to_int(wide.hblks);
  info.hblkhd = clamp_to_int(wide.hblkhd);
  info.arena = clamp_to_int(wide.arena);
  info.uordblks = clamp_to_int(wide.uordblks);
  info.fordblks = clamp_to_int(wide.fordblks);
  info.keepcost = clamp_to_int(wide.keepcost);
  return info;
}

__attribute__((format(printf, 1, 2))) static void print_stderr(const char *format, ...) {
  char text[TEXT_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  hz3_write_text(STDERR_FILENO, text);
}

HZ3_EXPORT void malloc_stats(void) {
  struct hz3_stats stats;
  hz3_get_stats(&stats);
  hz3_write_text(STDERR_FILENO, hz3_build_info);
  print_stderr("\nsystem bytes     = %10zu\nin use bytes     = %10zu\ncached bytes     = %10zu\nfree bytes       = %10zu\n",
               stats.mapped_bytes, stats.live_bytes, stats.cached_bytes, stats.free_bytes);
  print_stderr("dirty free bytes = %10zu\nmetadata bytes   = %10zu\nmax mmap regions = %10zu\nmax mmap bytes   = %10zu\n",
               stats.dirty_bytes, stats.metadata_bytes, stats.large_blocks, stats.large_bytes);
}

HZ3_EXPORT int malloc_info(int options, FILE *stream) {
  if (options != 0) return EINVAL;  // none is defined; glibc returns the code and leaves errno alone
  struct hz3_stats stats;
  hz3_get_stats(&stats);
  fprintf(stream, "<malloc version=\"1\">\n<heap nr=\"0\">\n<sizes>\n");
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    const struct hz3_class_stats *class = &stats.classes[c];
    if (class->spans == 0) continue;
    size_t free_bytes = class->span_bytes - hz3_min(class->span_bytes, class->live_objects * class->object_bytes);
    fprintf(stream, "<size from=\"%zu\" to=\"%zu\" total=\"%zu\" count=\"%zu\"/>\n",
            stats.classes[c - 1].object_bytes + 1, class->object_bytes, free_bytes, free_bytes / class->object_bytes);
  }
  fprintf(stream, "</sizes>\n</heap>\n<total type=\"rest\" count=\"%zu\" size=\"%zu\"/>\n", stats.heaps,
          stats.cached_bytes + stats.free_bytes);
  fprintf(stream, "<total type=\"mmap\" count=\"%zu\" size=\"%zu\"/>\n", stats.large_blocks, stats.large_bytes);
  fprintf(stream, "<system type=\"current\" size=\"%zu\"/>\n<aspace type=\"total\" size=\"%zu\"/>\n</malloc>\n",
          stats.mapped_bytes, stats.mapped_bytes + stats.metadata_bytes);
  return 0;
}

HZ3_EXPORT int malloc_trim(size_t pad) {
  (void)pad;
  return hz3_trim();
}

// Accepted and ignored: hz3 has no arenas, thresholds or fill bytes to set at run time. 1 means success.
HZ3_EXPORT int mallopt(int parameter, int value) {
  (void)value;
  return (parameter >= M_MXFAST && parameter <= M_KEEP) || (parameter >= M_ARENA_MAX && parameter <= M_TRIM_THRESHOLD);
}

// Appends to a snprintf-style buffer: `length` counts what is needed, also past the end.
struct json {
  char *buffer;
  size_t size, length;
};

__attribute__((format(printf, 2, 3))) static void append(struct json *json, const char *format, ...) {
  size_t left = json->length < json->size ? json->size - json->length : 0;
  va_list arguments;
  va_start(arguments, format);
  int added = vsnprintf(left == 0 ? NULL : json->buffer + json->length, left, format, arguments);
  va_end(arguments);
  if (added > 0) json->length += (size_t)added;
}

HZ3_EXPORT size_t hz3_stats_json(char *buffer, size_t size) {
  struct hz3_stats stats;
  hz3_get_stats(&stats);
  struct json json = {buffer, size, 0};
  append(&json, "{\"build\":\"");
  for (const char *at = hz3_build_info; *at != '\0'; at++) append(&json, *at == '"' || *at == '\\' ? "\\%c" : "%c", *at);
  append(&json, "\",\"mapped_bytes\":%zu,\"live_bytes\":%zu,\"cached_bytes\":%zu,\"free_bytes\":%zu,", stats.mapped_bytes,
         stats.live_bytes, stats.cached_bytes, stats.free_bytes);
  append(&json, "\"dirty_bytes\":%zu,\"metadata_bytes\":%zu,\"large_blocks\":%zu,\"large_bytes\":%zu,", stats.dirty_bytes,
         stats.metadata_bytes, stats.large_blocks, stats.large_bytes);
  append(&json, "\"purges\":%zu,\"heaps\":%zu,\"classes\":[", stats.purges, stats.heaps);
  const char *separator = "";
  for (unsigned c = 1; c < HZ3_CLASS_COUNT; c++) {
    const struct hz3_class_stats *class = &stats.classes[c];
    if (class->spans == 0 && class->live_objects + class->cached_objects == 0) continue;  // its only span may be changing homes
    append(&json, "%s{\"bytes\":%zu,\"live\":%zu,\"cached\":%zu,\"spans\":%zu}", separator, class->object_bytes,
           class->live_objects, class->cached_objects, class->spans);
    separator = ",";
  }
  append(&json, "]}");
  return json.length;
}
