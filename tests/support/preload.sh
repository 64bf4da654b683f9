#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Runs a program with a library preloaded, after proving that the library can be.
# Usage: preload.sh LIBRARY PROGRAM [ARGUMENT]...
set -eu
library=$(realpath "$1")
shift
if ! LD_PRELOAD=$library grep -qF "${library##*/}" /proc/self/maps; then
  echo "preload.sh: $library was not loaded" >&2
  exit 1
fi
LD_PRELOAD=$library exec "$@"
