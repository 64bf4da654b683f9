// SPDX-License-Identifier: Apache-2.0
//
// A static program in C that is linked without the sections that nobody uses, as with -c opt: nothing of the C++ runtime
// that came along with the operators may be left over in halves.
#include <stdlib.h>
#include <string.h>

int main(void) {
  char *block = malloc(100);
  if (block == NULL) return 1;
  memset(block, 1, 100);
  free(block);
  return 0;
}
