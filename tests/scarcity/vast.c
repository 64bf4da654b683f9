// SPDX-License-Identifier: Apache-2.0
//
// A library to preload: a process with 64 TiB of address space, none of it accessible. Under strict overcommit a process may
// commit the less the vaster it is (vm.user_reserve_kbytes), so the limit is near for it and far for all others.
// Called by: machine_test.py.
#include <sys/mman.h>
#include <unistd.h>

__attribute__((constructor)) static void become_vast(void) {
  if (mmap(NULL, (size_t)64 << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED) _exit(125);
}
