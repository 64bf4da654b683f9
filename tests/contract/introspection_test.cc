// SPDX-License-Identifier: Apache-2.0
//
// What the allocator says about itself is its own and true: mallinfo, mallinfo2, malloc_info, malloc_stats, malloc_trim,
// mallopt and hz3_stats_json follow what the program did. Blocks of 1 KiB, because glibc's answers to larger ones would
// look right even if only its heap were asked.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "hz3/hz3.h"
#include "tests/support/malloc_names.h"
#include "tests/support/support.h"

namespace {

constexpr size_t kBlock = 1024;
constexpr size_t kTotal = size_t{64} << 20;

class Load {
 public:
  Load() {
    for (size_t i = 0; i < kTotal / kBlock; i++) {
      blocks_.push_back(malloc(kBlock));
      memset(blocks_.back(), 1, kBlock);
    }
  }
  ~Load() { drop(); }
  void drop() {
    for (void* p : blocks_) free(p);
    blocks_.clear();
  }

 private:
  std::vector<void*> blocks_;
};

// What a function writes to standard error.
template <typename Body>
std::string stderr_of(Body body) {
  fflush(stderr);
  char path[] = "/tmp/introspection_XXXXXX";
  int file = mkstemp(path), saved = dup(2);
  EXPECT_GE(file, 0);
  unlink(path);
  dup2(file, 2);
  body();
  fflush(stderr);
  dup2(saved, 2);
  close(saved);
  std::string text(static_cast<size_t>(lseek(file, 0, SEEK_END)), '\0');
  EXPECT_EQ(pread(file, &text[0], text.size(), 0), static_cast<ssize_t>(text.size()));
  close(file);
  return text;
}

TEST(Introspection, Mallinfo2FollowsTheProgram) {
  struct mallinfo2 before = mallinfo2();
  Load load;
  struct mallinfo2 during = mallinfo2();
  EXPECT_GE(during.uordblks, before.uordblks + kTotal * 9 / 10);
  EXPECT_LE(during.uordblks, before.uordblks + kTotal * 13 / 10);
  EXPECT_GE(during.arena + during.hblkhd, during.uordblks);
  load.drop();
  malloc_trim(0);
  struct mallinfo2 after = mallinfo2();
  EXPECT_LE(after.uordblks, before.uordblks + kTotal / 10);
}

TEST(Introspection, Mallinfo2CountsLargeBlocks) {
  struct mallinfo2 before = mallinfo2();
  void* p = malloc(256 << 20);
  ASSERT_NE(p, nullptr);
  struct mallinfo2 during = mallinfo2();
  EXPECT_GE(during.uordblks + during.hblkhd, before.uordblks + before.hblkhd + (256 << 20));
  free(p);
  struct mallinfo2 after = mallinfo2();
  EXPECT_LE(after.uordblks, before.uordblks + (16 << 20));
}

TEST(Introspection, MallinfoIsTheSameInInts) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  Load load;
  struct mallinfo narrow = mallinfo();
#pragma GCC diagnostic pop
  struct mallinfo2 wide = mallinfo2();
  EXPECT_GE(static_cast<size_t>(narrow.uordblks), kTotal * 9 / 10);
  EXPECT_NEAR(static_cast<double>(narrow.uordblks), static_cast<double>(wide.uordblks), 1 << 20);
}

TEST(Introspection, MallinfoSaysNoMoreThanAnIntHolds) {
  void* p = malloc(size_t{3} << 30);
  if (p == nullptr) GTEST_SKIP() << "there is too little memory";
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  struct mallinfo narrow = mallinfo();
#pragma GCC diagnostic pop
  free(p);
  EXPECT_EQ(narrow.hblkhd, INT_MAX);
}

// Every element that opens also closes, in order.
bool is_well_formed(const std::string& xml) {
  std::vector<std::string> open;
  for (size_t at = xml.find('<'); at != std::string::npos; at = xml.find('<', at + 1)) {
    size_t end = xml.find('>', at);
    if (end == std::string::npos) return false;
    std::string tag = xml.substr(at + 1, end - at - 1);
    std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag[0] == '?') continue;
    if (tag[0] == '/') {
      if (open.empty() || "/" + open.back() != tag) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
  }
  return open.empty() && xml.find("<malloc version=") != std::string::npos;
}

TEST(Introspection, MallocInfoIsXmlWithTrueFigures) {
  std::string texts[2];
  for (std::string& text : texts) {
    static Load* load = nullptr;
    if (&text == &texts[1]) load = new Load;
    char* buffer = nullptr;
    size_t length = 0;
    FILE* stream = open_memstream(&buffer, &length);
    ASSERT_EQ(malloc_info(0, stream), 0);
    fclose(stream);
    text.assign(buffer, length);
    free(buffer);
    delete load;
    EXPECT_TRUE(is_well_formed(text)) << text;
  }
  EXPECT_NE(texts[0], texts[1]);
  errno = 0;
  EXPECT_EQ(malloc_info(1, stdout), EINVAL) << "there are no options";
  EXPECT_EQ(errno, 0);
}

// The number that follows the name.
size_t figure(const char* text, const char* name) {
  const char* at = strstr(text, name);
  EXPECT_NE(at, nullptr) << name;
  if (at == nullptr) return 0;
  at += strlen(name);
  return strtoull(at + strcspn(at, "0123456789"), nullptr, 10);
}

// With blocks in use, cached, free, and large: no two of the figures are the same.
TEST(Introspection, EveryFormTellsTheSameFigures) {
  Load load, gone;
  gone.drop();
  void* large = malloc(40 << 20);
  char json[1 << 14], *xml = nullptr;
  size_t length = 0;
  FILE* stream = open_memstream(&xml, &length);
  ASSERT_LT(hz3_stats_json(json, sizeof json), sizeof json);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  struct mallinfo narrow = mallinfo();
#pragma GCC diagnostic pop
  struct mallinfo2 wide = mallinfo2();
  ASSERT_EQ(malloc_info(0, stream), 0);
  fclose(stream);
  free(large);

  const size_t mapped = figure(json, "\"mapped_bytes\""), live = figure(json, "\"live_bytes\""), cached = figure(json, "\"cached_bytes\"");
  const size_t unused = figure(json, "\"free_bytes\""), dirty = figure(json, "\"dirty_bytes\""), metadata = figure(json, "\"metadata_bytes\"");
  const size_t blocks = figure(json, "\"large_blocks\""), bytes = figure(json, "\"large_bytes\"");
  size_t cached_by_class = 0, object_bytes, objects;
  for (const char* at = json; (at = strstr(at, "{\"bytes\":")) != nullptr; at++) {
    ASSERT_EQ(sscanf(at, "{\"bytes\":%zu,\"live\":%*u,\"cached\":%zu", &object_bytes, &objects), 2) << at;
    cached_by_class += object_bytes * objects;
  }
  EXPECT_EQ(cached, cached_by_class);
  EXPECT_EQ(blocks, 1u);

  EXPECT_EQ(wide.hblks, blocks);
  EXPECT_EQ(wide.hblkhd, bytes);
  EXPECT_EQ(wide.arena, mapped - bytes);
  EXPECT_EQ(wide.uordblks, live - bytes);
  EXPECT_EQ(wide.fordblks, wide.arena - wide.uordblks);
  EXPECT_EQ(wide.keepcost, dirty);
  const size_t both[][2] = {{wide.hblks, static_cast<size_t>(narrow.hblks)},       {wide.hblkhd, static_cast<size_t>(narrow.hblkhd)},
                            {wide.arena, static_cast<size_t>(narrow.arena)},       {wide.uordblks, static_cast<size_t>(narrow.uordblks)},
                            {wide.fordblks, static_cast<size_t>(narrow.fordblks)}, {wide.keepcost, static_cast<size_t>(narrow.keepcost)}};
  for (auto& pair : both) EXPECT_EQ(std::min<size_t>(pair[0], INT_MAX), pair[1]);  // of the tests before, `checked` may hold back much

  const char *rest = strstr(xml, "<total type=\"rest\""), *mmap = strstr(xml, "<total type=\"mmap\"");
  ASSERT_TRUE(rest != nullptr && mmap != nullptr);
  EXPECT_EQ(figure(rest, "count="), figure(json, "\"heaps\""));
  EXPECT_EQ(figure(rest, "size="), cached + unused);
  EXPECT_EQ(figure(mmap, "count="), blocks);
  EXPECT_EQ(figure(mmap, "size="), bytes);
  EXPECT_EQ(figure(xml, "<system type=\"current\""), mapped);
  EXPECT_EQ(figure(xml, "<aspace type=\"total\""), mapped + metadata);
  size_t from, to, total, count;
  for (const char* at = xml; (at = strstr(at, "<size from=")) != nullptr; at++) {
    ASSERT_EQ(sscanf(at, "<size from=\"%zu\" to=\"%zu\" total=\"%zu\" count=\"%zu\"", &from, &to, &total, &count), 4) << at;
    EXPECT_EQ(count, total / to);
    if (hz3_test::lane() == "checked") continue;  // where blocks are not what is asked for
    void *least = malloc(from), *below = malloc(from - 1);
    EXPECT_EQ(malloc_usable_size(least), to);
    EXPECT_EQ(malloc_usable_size(below), std::max<size_t>(from - 1, 16)) << "of no bytes it is as for one";
    free(least);
    free(below);
  }
  free(xml);

  std::string text = stderr_of([&json] {
    hz3_stats_json(json, sizeof json);
    malloc_stats();
  });
  const struct { const char *line, *name; } kLines[] = {
      {"system bytes", "\"mapped_bytes\""}, {"in use bytes", "\"live_bytes\""},         {"cached bytes", "\"cached_bytes\""},
      {"free bytes ", "\"free_bytes\""},    {"dirty free bytes", "\"dirty_bytes\""},    {"metadata bytes", "\"metadata_bytes\""},
      {"max mmap bytes", "\"large_bytes\""}, {"max mmap regions", "\"large_blocks\""}};
  for (auto& row : kLines) EXPECT_EQ(figure(text.c_str(), row.line), figure(json, row.name)) << row.line;
}

TEST(Introspection, MallocStatsHasTheLinePeopleParse) {
  std::string text = stderr_of([] { malloc_stats(); });
  EXPECT_NE(text.find("max mmap bytes"), std::string::npos) << text;
  EXPECT_NE(text.find("hz3"), std::string::npos) << text;
  EXPECT_NE(text.find("lane=" + hz3_test::lane()), std::string::npos) << text;
}

TEST(Introspection, MallocTrimReleasesAndSaysSo) {
  malloc_trim(0);
  long before = hz3_test::status_kb("RssAnon");
  Load load;
  EXPECT_GE(hz3_test::status_kb("RssAnon") - before, static_cast<long>(kTotal >> 10) * 9 / 10);
  load.drop();
  malloc_trim(0);
  EXPECT_LE(hz3_test::status_kb("RssAnon") - before, static_cast<long>(kTotal >> 10) / 16);
  // Nothing was used since: there is nothing to release.
  malloc_trim(0);
  EXPECT_EQ(malloc_trim(0), 0);
}

// Blocks that live keep their spans, and what they say; there is nothing to release twice.
TEST(Introspection, MallocTrimReleasesBetweenBlocks) {
  if (hz3_test::lane() == "checked") GTEST_SKIP() << "what is free keeps its pattern";
  constexpr size_t kEach = 12 << 10, kCount = 2048;
  std::vector<char*> live, gone;
  for (size_t i = 0; i < kCount; i++) {
    live.push_back(static_cast<char*>(malloc(kEach)));
    gone.push_back(static_cast<char*>(malloc(kEach)));
    memset(live[i], 1, kEach);
    memset(gone[i], 1, kEach);
  }
  malloc_trim(0);
  malloc_trim(0);
  EXPECT_EQ(malloc_trim(0), 0);
  long before = hz3_test::status_kb("RssAnon");
  for (char* p : gone) free(p);
  EXPECT_EQ(malloc_trim(0), 1);
  EXPECT_LE(hz3_test::status_kb("RssAnon") - before, -static_cast<long>(kCount * kEach >> 10) / 2);
  EXPECT_EQ(malloc_trim(0), 0);
  for (char* p : live) {
    for (size_t i = 0; i < kEach; i++) ASSERT_EQ(p[i], 1);
    free(p);
  }
}

TEST(Introspection, MalloptAcceptsWhatItUnderstands) {
  EXPECT_EQ(mallopt(M_ARENA_MAX, 1), 1);
  EXPECT_EQ(mallopt(M_ARENA_MAX, 64), 1);
  for (int parameter : {M_MXFAST, M_NLBLKS, M_GRAIN, M_KEEP, M_TRIM_THRESHOLD, M_PERTURB}) EXPECT_EQ(mallopt(parameter, 0), 1) << parameter;
  for (int parameter : {M_MXFAST - 1, M_KEEP + 1, M_ARENA_MAX - 1, 1000}) EXPECT_EQ(mallopt(parameter, 1), 0) << parameter;
  void* p = malloc(10);
  EXPECT_NE(p, nullptr);
  free(p);
}

// A JSON reader that only says whether the text is one value, strictly by the grammar.
class Json {
 public:
  explicit Json(const std::string& text) : at_(text.c_str()) {}
  bool valid() { return value() && (space(), *at_ == 0); }

 private:
  void space() { at_ += strspn(at_, " \t\r\n"); }
  bool take(const char* token) {
    space();
    size_t length = strlen(token);
    if (strncmp(at_, token, length) != 0) return false;
    at_ += length;
    return true;
  }
  bool string() {
    if (!take("\"")) return false;
    for (; *at_ != '"'; at_++) {
      if (static_cast<unsigned char>(*at_) < 0x20) return false;
      if (*at_ == '\\' && strchr("\"\\/bfnrtu", *++at_) == nullptr) return false;
    }
    at_++;
    return true;
  }
  bool number() {
    char* end;
    if (*at_ != '-' && (*at_ < '0' || *at_ > '9')) return false;
    strtod(at_, &end);
    bool moved = end != at_;
    at_ = end;
    return moved;
  }
  bool list(const char* close, bool keyed) {
    if (take(close)) return true;
    do {
      if (keyed && !(string() && take(":"))) return false;
      if (!value()) return false;
    } while (take(","));
    return take(close);
  }
  bool value() {
    space();
    if (*at_ == '"') return string();
    if (take("{")) return list("}", true);
    if (take("[")) return list("]", false);
    return take("true") || take("false") || take("null") || number();
  }
  const char* at_;
};

TEST(Introspection, StatsJsonParses) {
  std::string text(1 << 16, '\0');
  size_t length = hz3_stats_json(&text[0], text.size());
  ASSERT_GT(length, 2u);
  ASSERT_LT(length, text.size());
  text.resize(length);
  EXPECT_EQ(strlen(text.c_str()), length);
  EXPECT_TRUE(Json(text).valid()) << text;
  EXPECT_NE(text.find("lane=" + hz3_test::lane()), std::string::npos) << text;
}

// One snapshot: its sums are those of its parts, whatever other threads do meanwhile.
TEST(Introspection, StatsJsonAddsUp) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      std::vector<void*> blocks(1000);
      for (size_t i = 0; i < blocks.size(); i++) blocks[i] = malloc(i * 10);
      for (void* block : blocks) free(block);
    }
  });
  for (int i = 0; i < 200; i++) {
    char text[1 << 14];
    ASSERT_LT(hz3_stats_json(text, sizeof text), sizeof text);
    size_t total = 0, large = 0, sum = 0, bytes, live;
    ASSERT_EQ(sscanf(strstr(text, "\"live_bytes\""), "\"live_bytes\":%zu", &total), 1) << text;
    ASSERT_EQ(sscanf(strstr(text, "\"large_bytes\""), "\"large_bytes\":%zu", &large), 1) << text;
    for (const char* at = text; (at = strstr(at, "{\"bytes\":")) != nullptr; at++) {
      ASSERT_EQ(sscanf(at, "{\"bytes\":%zu,\"live\":%zu", &bytes, &live), 2) << at;
      sum += bytes * live;
    }
    ASSERT_EQ(total, sum + large) << text;
  }
  stop = true;
  other.join();
}

// A small buffer is filled no further than it reaches, and the needed length is told.
TEST(Introspection, StatsJsonRespectsItsBuffer) {
  char buffer[64], whole[1 << 14];
  const size_t needed = hz3_stats_json(whole, sizeof whole);
  for (size_t size : {size_t{0}, size_t{1}, size_t{2}, size_t{17}, size_t{32}}) {
    memset(buffer, 0x7f, sizeof buffer);
    size_t length = hz3_stats_json(buffer, size);
    EXPECT_EQ(length, needed);
    EXPECT_TRUE(size == 0 || (buffer[size - 1] == '\0' && memcmp(buffer, whole, size - 1) == 0)) << size;
    for (size_t i = size; i < sizeof buffer; i++) ASSERT_EQ(buffer[i], 0x7f) << size << " at " << i;
  }
}

TEST(Introspection, NothingIsPrintedUnasked) {
  EXPECT_EQ(stderr_of([] {
    Load load;
    errno = 0;
    volatile size_t huge = SIZE_MAX;
    EXPECT_EQ(malloc(huge), nullptr);
    free(malloc(100 << 20));
    malloc_trim(0);
  }), "");
}

}  // namespace
