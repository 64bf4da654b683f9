#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the benchmark tool from `bazel run`, on the libraries and programs that Bazel built.
# Called by: //bench:ssot and //bench:attribute.
# Needs: .venv of tools/setup, because the tool uses numpy, scipy, matplotlib, jinja2 and rich.
set -euo pipefail
runfiles=${RUNFILES_DIR:-$(cd "$(dirname "$0")" && pwd)/$(basename "$0").runfiles}
root=${BUILD_WORKSPACE_DIRECTORY:-$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)}
python=$root/.venv/bin/python
if [ ! -x "$python" ]; then
  echo "ssot: $root/.venv is missing: run tools/setup first" >&2
  exit 2
fi
cd "${BUILD_WORKING_DIRECTORY:-$PWD}"
export BUILD_WORKSPACE_DIRECTORY=$root SSOT_RUNFILES=$runfiles/hz3 PYTHONPATH=$root
exec "$python" -m bench.ssot "$@"
