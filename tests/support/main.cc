// SPDX-License-Identifier: Apache-2.0
//
// main for every GoogleTest under tests/: see test_main in support.h.
#include "tests/support/support.h"

int main(int argc, char** argv) { return hz3_test::test_main(argc, argv); }
