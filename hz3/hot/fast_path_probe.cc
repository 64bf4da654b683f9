// SPDX-License-Identifier: Apache-2.0
// What it is: runs one warm malloc or free hit instruction by instruction and prints the address of each.
// Called by: fast_path_test.py, with the library under test preloaded. x86-64 Linux only.
// How: the trap flag makes the processor raise SIGTRAP after every instruction; the handler notes where. Between calls of
//   the two, the page of the block is made inaccessible, so that an access to the block ends the program.
// Usage: fast_path_probe malloc|free|new|delete BYTES [untouched]
#include <link.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace {

enum { kMaxSteps = 4096, kWarmBlocks = 200, kProbes = 4, kPage = 4096 };
uintptr_t steps[kMaxSteps];
size_t step_count;

void NoteStep(int, siginfo_t *, void *context) {
  uintptr_t at = static_cast<uintptr_t>(static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP]);
  if (step_count < kMaxSteps) steps[step_count++] = at;
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
