// SPDX-License-Identifier: Apache-2.0
//
// The program that suffers: plain C, so that nothing but its own calls reaches the allocator. It checks every block it
// gets and every refusal (NULL with ENOMEM, old block kept), and exits 0 only if all of that held.
//   lane          prints the lane of the allocator
//   fill SIZE...    for each size: allocates and writes until NULL, prints "SIZE BYTES", frees all; limit MB SIZE...: the same after
//                   limiting its own address space; grow STEP...: the same with one block that grows; gaps SIZE: allocates until NULL,
//                   frees a block in five, allocates until NULL, and is refused from then on
//   crowd MB SIZE... for each size: kCrowd threads allocate until NULL while there may be MB more of data, "SIZE BYTES" at the first NULL
//   lock MB         locks all memory, present and future, then uses MB of blocks
//   beyond          asks for more than any commit limit allows, then works
//   maps            works with almost all mappings of the process taken
//   faults          passes a listener for its memory system calls to descriptor 3, works while some of them fail, says
//                   so with a marker, then expects everything to succeed and prints what it still holds
// Called by: limit_test.cc, fault_test.cc, machine_test.py.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/scarcity/victim.h"

#define REQUIRE(condition) ((condition) ? (void)0 : fail(__LINE__, #condition))

enum { kBlocks = 360 };

struct block {
  unsigned char *bytes;
  size_t size;
};

// While faults are injected a refusal is legal; afterwards it is not.
static int refusals_allowed;

static void fail(int line, const char *condition) {
  dprintf(2, "victim.c:%d: failed: %s (errno %d)\n", line, condition, errno);
  _exit(1);
}

static long status_kb(const char *field) {
  char text[4096];
  int fd = open("/proc/self/status", O_RDONLY);
  ssize_t length = read(fd, text, sizeof text - 1);
  close(fd);
  REQUIRE(length > 0);
  text[length] = 0;
  char *line = strstr(text, field);
  return line ? strtol(line + strlen(field) + 1, NULL, 10) : -1;
}

static void *granted(void *p) {
  if (p == NULL) REQUIRE(refusals_allowed && errno == ENOMEM);
  return p;
}

static unsigned char mark(const struct block *block) { return (unsigned char)(block->size * 7 + 3); }

// The ends and a sample between: large blocks shall not be dominated by memset.
static void write_marks(struct block *block) {
  size_t step = block->size / 32 + 1;
  for (size_t i = 0; i < block->size; i += step) block->bytes[i] = mark(block);
  if (block->size > 0) block->bytes[block->size - 1] = mark(block);
}

static void check_marks(const struct block *block) {
  size_t step = block->size / 32 + 1;
  for (size_t i = 0; i < block->size; i += step) REQUIRE(block->bytes[i] == mark(block));
  if (block->size > 0) REQUIRE(block->bytes[block->size - 1] == mark(block));
}

static size_t size_of(int i) {
  if (i % 30 == 7) return ((size_t)1 << 20) + (size_t)i * 20000;
  if (i % 7 == 3) return 3000 + (size_t)i * 700;
  return (size_t)(i * 37 % 2100);
}

static void make_block(struct block *block, int i) {
  size_t size = size_of(i);
  void *p = NULL;
  errno = 0;
  switch (i % 5) {
    case 0:
      p = granted(calloc(1, size));
      for (size_t at = 0; p != NULL && at < size; at += size / 64 + 1) REQUIRE(((char *)p)[at] == 0);
      break;
    case 1: {
      int result = posix_memalign(&p, (size_t)64 << (i % 12), size);
      if (result != 0) REQUIRE(refusals_allowed && result == ENOMEM && p == NULL && errno == 0);
      break;
    }
    default:
      p = granted(malloc(size));
  }
  block->bytes = p;
  block->size = p != NULL ? size : 0;
  if (p != NULL) {
    REQUIRE(malloc_usable_size(p) >= size);
    write_marks(block);
  }
}

// Growth in place, by remapping and by copying; the old block must survive a refusal.
static void grow_block(struct block *block, size_t size) {
  if (block->bytes == NULL) return;
  unsigned char kept = block->size > 0 ? block->bytes[0] : 0;
  errno = 0;
  unsigned char *p = realloc(block->bytes, size);
  if (p == NULL) {
    REQUIRE(refusals_allowed && errno == ENOMEM);
    check_marks(block);
    return;
  }
  size_t common = block->size < size ? block->size : size;
  if (common > 0) REQUIRE(p[0] == kept);
  // Marks are sparse, but the last byte of the old block has one.
  if (common > 0 && common == block->size) REQUIRE(p[common - 1] == kept);
  block->bytes = p;
  block->size = size;
  write_marks(block);
}

static void work(void) {
  static __thread struct block blocks[kBlocks];
  for (int i = 0; i < kBlocks; i++) make_block(&blocks[i], i);
  for (int i = 0; i < kBlocks; i += 3) grow_block(&blocks[i], blocks[i].size * 2 + 100);
  for (int i = 0; i < kBlocks; i += 2) {
    check_marks(&blocks[i]);
    errno = 4711;
    free(blocks[i].bytes);
    REQUIRE(errno == 4711);
  }
  for (int i = 0; i < kBlocks; i += 2) make_block(&blocks[i], kBlocks - i);
  grow_block(&blocks[1], 5 << 20);
  grow_block(&blocks[1], 40 << 20);
  grow_block(&blocks[1], 300);
  for (int i = 0; i < kBlocks; i++) {
    check_marks(&blocks[i]);
    free(blocks[i].bytes);
  }
  malloc_trim(0);
}

static void *work_in_thread(void *unused) {
  work();
  return unused;
}

static void work_with_threads(void) {
  pthread_t threads[2];
  int made[2];
  work();
  for (int i = 0; i < 2; i++) {
    made[i] = pthread_create(&threads[i], NULL, work_in_thread, NULL) == 0;
    REQUIRE(made[i] || refusals_allowed);
  }
  for (int i = 0; i < 2; i++) {
    if (made[i]) REQUIRE(pthread_join(threads[i], NULL) == 0);
  }
}

// Weak: the allocator may be linked in, preloaded, or neither.
extern const char *hz3_version(void) __attribute__((weak));

static void print_lane(void) {
  const char *(*version)(void) = hz3_version;
  const char *lane = version != NULL ? strstr(version(), "lane=") : NULL;
  REQUIRE(lane != NULL);
  dprintf(1, "%.*s\n", (int)strcspn(lane + 5, " "), lane + 5);
}

// A list through the blocks themselves, so that the count of blocks needs no memory.
static void fill(size_t size) {
  void **list = NULL, **p;
  size_t total = 0;
  while (errno = 0, (p = malloc(size)) != NULL) {
    size_t usable = malloc_usable_size(p);
    memset(p, 0x5c, usable);
    total += usable;
    *p = list;
    list = p;
  }
  REQUIRE(errno == ENOMEM);
  dprintf(1, "%zu %zu\n", size, total);
  for (size_t part = size / 3; list != NULL; part = size) {
    void **next = *list;
    if (part != size) REQUIRE((list = realloc(list, part)) != NULL);  // what shrinks needs no memory
    REQUIRE(((unsigned char *)list)[part - 1] == 0x5c);
    free(list);
    list = next;
  }
}

static void grow(size_t step) {
  unsigned char *block = NULL, *bigger;
  size_t bytes = 0;
  while (errno = 0, (bigger = realloc(block, bytes + step)) != NULL) {
    REQUIRE(bytes == 0 || (bigger[0] == 0x5c && bigger[bytes / 2] == 0x5c && bigger[bytes - 1] == 0x5c));
    block = bigger;
    memset(block + bytes, 0x5c, step);
    bytes += step;
  }
  REQUIRE(errno == ENOMEM);
  dprintf(1, "%zu %zu\n", step, bytes);
  for (size_t i = 0; i < bytes; i++) REQUIRE(block[i] == 0x5c);
  free(block);
}

// Each block holds the address of the next.
static void free_list(void **list) {
  while (list != NULL) {
    void **next = *list;
    free(list);
    list = next;
  }
}

enum { kCrowd = 64 };
static pthread_barrier_t crowd_is_ready;
static size_t crowd_size, crowd_bytes, crowd_bytes_at_first_null;

static void *fill_in_crowd(void *unused) {
  void **list = NULL, **p;
  pthread_barrier_wait(&crowd_is_ready);
  while (errno = 0, (p = malloc(crowd_size)) != NULL) {
    __atomic_fetch_add(&crowd_bytes, malloc_usable_size(p), __ATOMIC_RELAXED);
    *p = list;
    list = p;
  }
  REQUIRE(errno == ENOMEM);
  size_t none = 0, bytes = __atomic_load_n(&crowd_bytes, __ATOMIC_RELAXED);
  __atomic_compare_exchange_n(&crowd_bytes_at_first_null, &none, bytes, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  free_list(list);
  return unused;
}

static void fill_by_crowd(size_t size, rlim_t more_bytes) {
  pthread_t threads[kCrowd];
  crowd_size = size;
  crowd_bytes = crowd_bytes_at_first_null = 0;
  REQUIRE(pthread_barrier_init(&crowd_is_ready, NULL, kCrowd + 1) == 0);
  for (int i = 0; i < kCrowd; i++) REQUIRE(pthread_create(&threads[i], NULL, fill_in_crowd, NULL) == 0);
  malloc_trim(0);
  rlim_t bytes = ((rlim_t)status_kb("VmData:") << 10) + more_bytes;
  struct rlimit limit = {bytes, RLIM_INFINITY};
  REQUIRE(setrlimit(RLIMIT_DATA, &limit) == 0);
  pthread_barrier_wait(&crowd_is_ready);
  for (int i = 0; i < kCrowd; i++) REQUIRE(pthread_join(threads[i], NULL) == 0);
  dprintf(1, "%zu %zu\n", size, crowd_bytes_at_first_null);
  limit.rlim_cur = RLIM_INFINITY;
  REQUIRE(setrlimit(RLIMIT_DATA, &limit) == 0);
}

static void lock_and_use(size_t bytes) {
  free(malloc(100));
  if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) _exit(77);
  size_t made = 0;
  void **list = NULL;
  for (size_t i = 0; made < bytes; i++) {
    size_t size = i % 100 == 0 ? 300000 : i % 10 == 0 ? 20000 : 200;
    void **p = malloc(size);
    REQUIRE(p != NULL);
    *p = list;
    list = p;
    made += size;
  }
  dprintf(1, "%zu %ld\n", made, status_kb("VmLck"));
  free_list(list);
  work_with_threads();
}

static void use_up_maps(void) {
  long limit = 65530;
  FILE *file = fopen("/proc/sys/vm/max_map_count", "r");
  if (file != NULL) {
    REQUIRE(fscanf(file, "%ld", &limit) == 1);
    fclose(file);
  }
  if (limit > 300000) _exit(77);
  // Alternating protections keep neighbours from merging: each page is a mapping.
  char *area = mmap(NULL, (size_t)limit * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  REQUIRE(area != MAP_FAILED);
  long page = 0;
  while (page < limit && mprotect(area + page * 4096, 4096, PROT_READ) == 0) page += 2;
  REQUIRE(page < limit);
  refusals_allowed = 1;
  for (int round = 0; round < 10; round++) work_with_threads();
  refusals_allowed = 0;
  REQUIRE(munmap(area, (size_t)limit * 4096) == 0);
  for (int round = 0; round < 3; round++) work_with_threads();
}

// Without strict overcommit these would be granted: they are untouched address space.
static void ask_beyond(void) {
  const size_t kBeyond = (size_t)32 << 40;
  struct block kept = {NULL, 0};
  make_block(&kept, 37);
  void *p = &kept;
  REQUIRE((errno = 0, malloc(kBeyond)) == NULL && errno == ENOMEM);
  REQUIRE((errno = 0, calloc(1, kBeyond)) == NULL && errno == ENOMEM);
  REQUIRE((errno = 0, realloc(kept.bytes, kBeyond)) == NULL && errno == ENOMEM);
  REQUIRE(posix_memalign(&p, 1 << 21, kBeyond) == ENOMEM && p == &kept);
  check_marks(&kept);
  free(kept.bytes);
  work_with_threads();
}

// Hands every memory system call of this process to a supervisor. Runs before any constructor.
static void install_listener(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 5, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munmap, 4, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mremap, 3, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(77);
  int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
  if (listener < 0) _exit(77);
  char byte = 0, control[CMSG_SPACE(sizeof listener)];
  struct iovec data = {&byte, 1};
  struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
  memset(control, 0, sizeof control);
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof listener);
  memcpy(CMSG_DATA(header), &listener, sizeof listener);
  if (sendmsg(3, &message, 0) != 1) _exit(78);
  close(listener);
}

static void before_everything(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "faults") == 0) install_listener();
}
__attribute__((section(".preinit_array"), used)) static void (*const preinit)(int, char **) = before_everything;

static void work_under_faults(void) {
  refusals_allowed = 1;
  work_with_threads();
  // The marker: an advice that no kernel knows, for the supervisor to see.
  madvise(NULL, 0, kVictimMarker);
  refusals_allowed = 0;
  for (int round = 0; round < 2; round++) work_with_threads();
  malloc_trim(0);
  dprintf(1, "%ld %ld\n", status_kb("VmSize"), status_kb("RssAnon"));
}

// Everything was given to those who asked before the first refusal, so with nothing freed in between there are no others after it. What was
// freed lies between blocks that live: no memory can be given back.
static void fill_gaps(size_t size) {
  enum { kMost = 2000000, kGap = 5 };
  void **blocks = mmap(NULL, kMost * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(blocks != MAP_FAILED);
  size_t count = 0, again = 0;
  while (count < kMost && (blocks[count] = malloc(size)) != NULL) count++;
  REQUIRE(count > 1000 && count < kMost);
  for (size_t i = 0; i < count; i += kGap) free(blocks[i]);
  while (malloc(size) != NULL) again++;
  for (int i = 0; i < 1000; i++) REQUIRE(malloc(size) == NULL && errno == ENOMEM);
  REQUIRE(again > count / kGap * 9 / 10);
}

int main(int argc, char **argv) {
  REQUIRE(argc >= 2);
  if (strcmp(argv[1], "lane") == 0) {
    print_lane();
  } else if (strcmp(argv[1], "fill") == 0) {
    for (int i = 2; i < argc; i++) fill(strtoul(argv[i], NULL, 10));
  } else if (strcmp(argv[1], "grow") == 0) {
    for (int i = 2; i < argc; i++) grow(strtoul(argv[i], NULL, 10));
  } else if (strcmp(argv[1], "gaps") == 0) {
    fill_gaps(strtoul(argv[2], NULL, 10));
  } else if (strcmp(argv[1], "limit") == 0) {
    free(malloc(100));
    rlim_t bytes = strtoul(argv[2], NULL, 10) << 20;
    struct rlimit limit = {bytes, bytes};
    REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
    for (int i = 3; i < argc; i++) fill(strtoul(argv[i], NULL, 10));
  } else if (strcmp(argv[1], "crowd") == 0) {
    for (int i = 3; i < argc; i++) fill_by_crowd(strtoul(argv[i], NULL, 10), strtoul(argv[2], NULL, 10) << 20);
  } else if (strcmp(argv[1], "lock") == 0) {
    lock_and_use(strtoul(argv[2], NULL, 10) << 20);
  } else if (strcmp(argv[1], "beyond") == 0) {
    ask_beyond();
  } else if (strcmp(argv[1], "maps") == 0) {
    use_up_maps();
  } else if (strcmp(argv[1], "faults") == 0) {
    work_under_faults();
  } else {
    return 2;
  }
  return 0;
}
