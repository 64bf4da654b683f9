// SPDX-License-Identifier: Apache-2.0
//
// A library that takes 32 bytes of the static TLS surplus: copies of it use the surplus up.
// Called by: dlopen_test.cc.
__attribute__((tls_model("initial-exec"))) __thread char tls_filler_area[32];

char *tls_filler_touch(void);
char *tls_filler_touch(void) { return tls_filler_area; }
