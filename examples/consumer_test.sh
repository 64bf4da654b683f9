#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves that a project outside of this workspace can use hz3 by deps, by malloc = and by
# --custom_malloc, and choose the lane; and that without any of them it does not get hz3.
# Called by: Bazel.
# Needs: a second Bazel, with an output base of its own.
set -euo pipefail
root=$(dirname "$(realpath WORKSPACE)")
work=$(mktemp -d)
nested() { bazel --max_idle_secs=60 --output_base="$work/out" "$@"; }
finish() {
  nested shutdown >/dev/null 2>&1 || true
  chmod -R u+w "$work"
  rm -rf "$work"
}
trap finish EXIT
export HOME=$work

cp -r "$root/examples/consumer" "$work/consumer"
cd "$work/consumer"
sed -i "s|\"../..\"|\"$root\"|" WORKSPACE
sed -i "s|=../../|=$root/|" .bazelrc
[ ! -e "$root/.bazelrc.local" ] || cat "$root/.bazelrc.local" >>.bazelrc

# check EXPECTED TARGET OPTIONS...: builds, runs, looks at what malloc_stats() says.
check() {
  local expected=$1 target=$2 said
  shift 2
  nested build --color=no --noshow_progress --nosandbox_debug "$target" "$@" || exit 1
  said=$("bazel-bin/${target#:}" 2>&1)
  grep -q "^400000 words" <<<"$said" || { echo "wrong result: $said"; exit 1; }
  said=$(grep -o "hz3 build: .* lane=[a-z]*" <<<"$said" | grep -o "lane=.*" || echo "not hz3")
  [ "$said" = "$expected" ] || { echo "$target $*: $said, expected $expected"; exit 1; }
  echo "ok: $target $* ($said)"
}

check "not hz3" :by_flag
check "lane=fast" :by_flag --custom_malloc=@hz3//hz3:malloc
check "lane=fast" :by_deps
check "lane=fast" :by_malloc
check "lane=scale" :by_malloc --config=scale
