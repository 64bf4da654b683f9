#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves that a peer library, preloaded, is the allocator it is said to be, and in the version
# that is said. Usage: identity_test.sh PROBE LIBRARY PEER EXPECTED
# Called by: Bazel.
set -euo pipefail
probe=$1 library=$2 peer=$3 expected="$4 in $(basename "$2")"

if "$probe" "$peer" >/dev/null; then
  echo "the probe claims $peer without any preload: it proves nothing"
  exit 1
fi
# Without the tunable, glibc keeps restartable sequences to itself; others do not look at it.
found=$(GLIBC_TUNABLES=glibc.pthread.rseq=0 LD_PRELOAD=$PWD/$library "$probe" "$peer")
echo "found: $found"
[ "$found" = "$expected" ] || { echo "expected: $expected"; exit 1; }
