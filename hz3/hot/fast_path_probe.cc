// SPDX-License-Identifier: Apache-2.0
// What it is: runs one warm malloc or free hit instruction by instruction and prints the address of each.
// Called by: fast_path_test.py, with the library under test preloaded. x86-64 Linux only.
// How: the trap flag makes the processor raise SIGTRAP after every instruction; the handler notes where. Between calls of
//   the two, the page of the block is made inaccessible, so that an access to the block ends the program.
// Usage: fast_path_probe malloc|free|new|delete BYTES [untouched]
//        fast_path_probe free|delete BYTES ahead: what a free prefetches, in blocks from its own, after frees that went up evenly, down, or in no order
#include <link.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <functional>

namespace {

enum { kMaxSteps = 4096, kWarmBlocks = 200, kProbes = 4, kPage = 4096 };
uintptr_t steps[kMaxSteps];
size_t step_count;
uintptr_t prefetched;  // by the last call, 0: nothing

// The address of a prefetch: of those that compilers make here, a register, or the sum of two, of which one may be scaled.
void NotePrefetch(const unsigned char *at, const greg_t *registers) {
  static const int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  unsigned extended = (*at & 0xf0) == 0x40 ? *at++ : 0;
  if (at[0] != 0x0f || at[1] != 0x18 || at[2] >> 6 != 0) return;
  auto value = [&](unsigned number, bool high) { return static_cast<uintptr_t>(registers[kRegisters[number % 8 + 8 * high]]); };
  bool has_index = at[2] % 8 == 4;
  prefetched = value(has_index ? at[3] : at[2], (extended & 1) != 0);
  if (has_index) prefetched += value(at[3] / 8, (extended & 2) != 0) << at[3] / 64;
}

void NoteStep(int, siginfo_t *, void *context) {
  const greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  uintptr_t at = static_cast<uintptr_t>(registers[REG_RIP]);
  if (step_count < kMaxSteps) steps[step_count++] = at;
  NotePrefetch(reinterpret_cast<const unsigned char *>(at), registers);
}

// Calls through the program's PLT with the trap flag set from before the call until after the return.
#define TRACED(name, symbol)                                                                                       \
  void *name(void *argument) {                                                                                     \
    void *result;                                                                                                  \
    asm volatile(                                                                                                  \
        "mov %%rsp, %%r12; sub $256, %%rsp; and $-16, %%rsp\n"                                                     \
        "pushfq; orq $0x100, (%%rsp); popfq\n"                                                                     \
        "call " symbol "@plt\n"                                                                                    \
        "pushfq; andq $~0x100, (%%rsp); popfq\n"                                                                   \
        "mov %%r12, %%rsp\n"                                                                                       \
        : "=a"(result), "+D"(argument)                                                                             \
        :                                                                                                          \
        : "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3");   \
    return result;                                                                                                 \
  }
TRACED(TracedMalloc, "malloc")
TRACED(TracedFree, "free")
TRACED(TracedNew, "_Znwm")
TRACED(TracedDelete, "_ZdlPv")

// Prints each step as the module's path and the offset in it.
int PrintStep(dl_phdr_info *module, size_t, void *address) {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  for (int i = 0; i < module->dlpi_phnum; i++) {
    const ElfW(Phdr) &segment = module->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || at - module->dlpi_addr - segment.p_vaddr >= segment.p_memsz) continue;
    printf("%s %zx\n", module->dlpi_name[0] == '\0' ? "program" : module->dlpi_name, size_t{at - module->dlpi_addr});
    return 1;
  }
  return 0;
}

void SetAccess(uintptr_t address, int rights) {
  void *page = reinterpret_cast<void *>(address & ~uintptr_t{kPage - 1});
  if (mprotect(page, kPage, rights) != 0) abort();
}

void *Run(const char *what, void *argument) {
  if (strcmp(what, "malloc") == 0) return TracedMalloc(argument);
  if (strcmp(what, "free") == 0) return TracedFree(argument);
  if (strcmp(what, "new") == 0) return TracedNew(argument);
  if (strcmp(what, "delete") == 0) return TracedDelete(argument);
  fprintf(stderr, "fast_path_probe: what is '%s'?\n", what);
  exit(2);
}

// Notes the steps of one call. False if it was no hit, for another block came back.
bool Probe(const char *what, size_t bytes, bool allocates, bool untouched) {
  // A warm bin that is neither full nor empty, with `block` on top; its page holds nothing else that is in use.
  static void *blocks[kWarmBlocks];
  for (void *&block : blocks) block = malloc(bytes);
  void *block = blocks[kWarmBlocks / 2];
  volatile uintptr_t address = reinterpret_cast<uintptr_t>(block);  // outlives it
  operator delete(operator new(bytes));
  Run(what, allocates ? reinterpret_cast<void *>(bytes) : malloc(bytes));
  free(blocks[0]);
  if (allocates) {
    free(block);
    free(blocks[1]);  // the block freed last waits for the next free
  } else {
    blocks[0] = malloc(bytes);  // there is room
  }
  step_count = 0;
  if (untouched) SetAccess(address, PROT_NONE);
  void *result = Run(what, reinterpret_cast<void *>(allocates ? bytes : address));
  if (untouched) SetAccess(address, PROT_READ | PROT_WRITE);
  return !allocates || result == reinterpret_cast<void *>(address);
}

// False if there are no neighbours of the same distance.
bool PrintPrefetches(const char *what, size_t bytes) {
  static char *blocks[kWarmBlocks];
  for (char *&block : blocks) block = static_cast<char *>(malloc(bytes));
  std::sort(blocks, blocks + kWarmBlocks, std::less<char *>());
  operator delete(operator new(bytes));
  Run(what, malloc(bytes));
  free(blocks[0]);  // there is a bin, and room in it
  char **three = blocks + 1;
  for (auto order : {std::array{0, 1, 2}, {2, 1, 0}, {0, 2, 1}}) {
    while (three + 3 < blocks + kWarmBlocks && three[2] - three[1] != three[1] - three[0]) three++;
    if (three + 3 >= blocks + kWarmBlocks) return false;
    intptr_t distance = three[1] - three[0];
    uintptr_t last = reinterpret_cast<uintptr_t>(three[order[2]]);
    free(three[order[0]]);
    free(three[order[1]]);
    prefetched = 0;
    Run(what, three[order[2]]);
    int16_t ahead = static_cast<int16_t>(prefetched - last);  // it wraps around
    bool is_in_slice = (prefetched ^ last) >> 16 == 0;
    printf("%g%s\n", ahead / static_cast<double>(distance), is_in_slice ? "" : " in another slice");
    three += 3;
  }
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  const char *what = argv[1];
  size_t bytes = strtoul(argv[2], nullptr, 0);
  bool allocates = strcmp(what, "malloc") == 0 || strcmp(what, "new") == 0;
  struct sigaction action = {};
  action.sa_sigaction = NoteStep;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);

  if (argc > 3 && strcmp(argv[3], "ahead") == 0) return PrintPrefetches(what, bytes) ? 0 : 1;

  // The shortest of a few, since a tick may empty the bin in between.
  static uintptr_t shortest[kMaxSteps];
  size_t count = 0;
  for (int i = 0; i < kProbes; i++) {
    if (!Probe(what, bytes, allocates, argc > 3) || (count != 0 && step_count >= count)) continue;
    count = step_count;
    memcpy(shortest, steps, count * sizeof steps[0]);
  }
  for (size_t i = 0; i < count; i++) dl_iterate_phdr(PrintStep, reinterpret_cast<void *>(shortest[i]));
  if (count != 0) return 0;
  fprintf(stderr, "fast_path_probe: no hit, another block came back\n");
  return 1;
}
