#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs one Python test module of the benchmark tool under Bazel.
# Called by: the sh_tests of bench/BUILD.bazel.
# Needs: .venv of tools/setup in the checkout that the runfiles point to.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f bench/ssot/run_test.sh)")/../.." && pwd)
python=$root/.venv/bin/python
if [ ! -x "$python" ]; then
  echo "$root/.venv is missing: run tools/setup first" >&2
  exit 1
fi
export SSOT_RUNFILES=$PWD PYTHONPATH=$root MPLCONFIGDIR=${TEST_TMPDIR:-/tmp}
exec "$python" -m unittest -v "$@"
