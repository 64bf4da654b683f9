// SPDX-License-Identifier: Apache-2.0
//
// Blocks that libc makes for the program and blocks that the program makes for libc: a missing entry point would mix
// two heaps, and show here as a wrong usable size, a crash in free, or an overlap.
#include <dirent.h>
#include <glob.h>
#include <iconv.h>
#include <limits.h>
#include <locale.h>
#include <malloc.h>
#include <netdb.h>
#include <regex.h>
#include <search.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <wchar.h>

#include <string>

#include "gtest/gtest.h"
#include "tests/support/support.h"

#ifdef __GLIBC__
extern "C" {
void* __libc_malloc(size_t bytes);
void __libc_free(void* block);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t align, size_t bytes);
void* __libc_valloc(size_t bytes);
void* __libc_pvalloc(size_t bytes);
}
#endif

namespace {

// The block is ours if its usable size holds the text, survives to the last byte and realloc keeps it.
void expect_ours(char* text, size_t size) {
  ASSERT_NE(text, nullptr);
  size_t usable = malloc_usable_size(text);
  ASSERT_GE(usable, size);
  ASSERT_LE(usable, size * 2 + 4096);
  std::string copy(text, size);
  memset(text + size, 0x33, usable - size);
  text = static_cast<char*>(realloc(text, usable * 3 + 1));
  ASSERT_NE(text, nullptr);
  EXPECT_EQ(copy, std::string(text, size));
  free(text);
}

TEST(Libc, Strings) {
  for (size_t length : {0, 1, 15, 16, 100, 1000, 5000, 40000, 300000, 3000000}) {
    std::string text(length, 'x');
    expect_ours(strdup(text.c_str()), length + 1);
    expect_ours(strndup(text.c_str(), length / 2), length / 2 + 1);
    char* formatted = nullptr;
    ASSERT_EQ(asprintf(&formatted, "%s-%d", text.c_str(), 7), static_cast<int>(length) + 2);
    expect_ours(formatted, length + 3);
    std::wstring wide(length, L'y');
    wchar_t* copy = wcsdup(wide.c_str());
    expect_ours(reinterpret_cast<char*>(copy), (length + 1) * sizeof(wchar_t));
  }
}

TEST(Libc, Getline) {
  char name[] = "/tmp/libc_test_XXXXXX";
  FILE* file = fdopen(mkstemp(name), "w+");
  ASSERT_NE(file, nullptr);
  unlink(name);
  for (int i = 0; i < 18; i++) fprintf(file, "%s\n", std::string(size_t{1} << i, 'z').c_str());
  rewind(file);
  char* line = nullptr;
  size_t capacity = 0;
  for (int i = 0; i < 18; i++) {
    ASSERT_EQ(getline(&line, &capacity, file), (1 << i) + 1);
    ASSERT_GE(malloc_usable_size(line), capacity);
  }
  expect_ours(line, capacity);
  // A buffer of the program's own, grown by libc.
  rewind(file);
  line = static_cast<char*>(malloc(4));
  capacity = 4;
  for (int i = 0; i < 18; i++) ASSERT_EQ(getline(&line, &capacity, file), (1 << i) + 1);
  expect_ours(line, capacity);
  fclose(file);
}

TEST(Libc, MemoryStreams) {
  char* text = nullptr;
  size_t length = 0;
  FILE* stream = open_memstream(&text, &length);
  for (int i = 0; i < 20000; i++) fprintf(stream, "%d,", i);
  fclose(stream);
  ASSERT_EQ(strncmp(text, "0,1,2,", 6), 0);
  expect_ours(text, length + 1);
}

TEST(Libc, Paths) {
  expect_ours(realpath("/proc/self/../self/root", nullptr), 2);
  char* directory = getcwd(nullptr, 0);
  ASSERT_NE(directory, nullptr);
  expect_ours(directory, strlen(directory) + 1);
  struct dirent** entries = nullptr;
  int count = scandir("/dev", &entries, nullptr, alphasort);
  ASSERT_GT(count, 2);
  for (int i = 0; i < count; i++) {
    ASSERT_GE(malloc_usable_size(entries[i]), sizeof(struct dirent) - sizeof entries[i]->d_name);
    free(entries[i]);
  }
  free(entries);
  glob_t found;
  ASSERT_EQ(glob("/dev/*", 0, nullptr, &found), 0);
  globfree(&found);
}

TEST(Libc, BuffersLocalesAndTables) {
  FILE* file = tmpfile();
  char* buffer = static_cast<char*>(malloc(100000));
  ASSERT_EQ(setvbuf(file, buffer, _IOFBF, 100000), 0);
  for (int i = 0; i < 50000; i++) fprintf(file, "%d\n", i);
  fclose(file);
  free(buffer);
  locale_t locale = newlocale(LC_ALL_MASK, "C.UTF-8", nullptr);
  if (locale != nullptr) freelocale(locale);
  iconv_t converter = iconv_open("UTF-16", "UTF-8");
  ASSERT_NE(converter, reinterpret_cast<iconv_t>(-1));
  iconv_close(converter);
  regex_t pattern;
  ASSERT_EQ(regcomp(&pattern, "^(a|b)*c{2,40}[[:alpha:]]+$", REG_EXTENDED), 0);
  EXPECT_EQ(regexec(&pattern, "ababccxyz", 0, nullptr, 0), 0);
  regfree(&pattern);
  ASSERT_NE(hcreate(1000), 0);
  hdestroy();
}

TEST(Libc, EnvironmentAndSort) {
  for (int i = 0; i < 500; i++) {
    ASSERT_EQ(setenv(("HZ3_TEST_VARIABLE_" + std::to_string(i % 50)).c_str(), std::string(i, 'v').c_str(), 1), 0);
  }
  EXPECT_STREQ(getenv("HZ3_TEST_VARIABLE_49"), std::string(499, 'v').c_str());
  std::string numbers(size_t{3} << 20, '\0');
  hz3_test::Random random(5);
  for (char& c : numbers) c = static_cast<char>(random.next());
  qsort(&numbers[0], numbers.size() / 32, 32, [](const void* a, const void* b) { return memcmp(a, b, 32); });
  for (size_t i = 32; i < numbers.size(); i += 32) ASSERT_LE(memcmp(&numbers[i - 32], &numbers[i], 32), 0);
}

TEST(Libc, AddressInfo) {
  struct addrinfo hints = {}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST;
  ASSERT_EQ(getaddrinfo("127.0.0.1", "80", &hints, &found), 0);
  freeaddrinfo(found);
}

#ifdef __GLIBC__
// Programs that wrap malloc call glibc's own names of it, and free by the others.
TEST(Libc, ItsOwnNamesAreTheSameAllocator) {
  for (void* block : {__libc_malloc(100), __libc_calloc(10, 10), __libc_realloc(malloc(10), 100), __libc_memalign(64, 100), __libc_valloc(100),
                      __libc_pvalloc(100)}) {
    memset(block, 1, 100);
    expect_ours(static_cast<char*>(block), 100);
  }
  void* whole = __libc_pvalloc(100);
  EXPECT_GE(malloc_usable_size(whole), static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  __libc_free(whole);
  __libc_free(malloc(100));
  __libc_free(strdup("text"));
}
#endif

}  // namespace
