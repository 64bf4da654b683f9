#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves that Bazel itself stops what must not be built: a dep on a sibling box, and a lane that
# does not exist; and that options may be big. (Includes are the matter of include_test.) Each is tried in a copy of the tree.
# Called by: Bazel.
# Needs: a second Bazel, with an output base of its own.
set -euo pipefail
root=$(dirname "$(realpath WORKSPACE)")
work=$(mktemp -d)
finish() {
  nested shutdown >/dev/null 2>&1 || true
  chmod -R u+w "$work"
  rm -rf "$work"
}
trap finish EXIT
export HOME=$work

mkdir "$work/tree"
cd "$work/tree"
cp -r "$root"/{WORKSPACE,BUILD.bazel,.bazelrc,hz3,third_party,tools} .
for optional in .distdir .bazelrc.local; do
  [ ! -e "$root/$optional" ] || cp -r "$root/$optional" .
done

nested() { bazel --max_idle_secs=60 --output_base="$work/out" "$@"; }
analyse() { nested build --nobuild --noshow_progress --color=no "$@" 2>&1; }

rejected() { # rejected WORDS BAZEL-ARGUMENTS...: analysis must fail, and say so
  local words=$1 said
  shift
  if said=$(analyse "$@"); then
    echo "accepted: $*"
    exit 1
  fi
  grep -qE "$words" <<<"$said" || { echo "failed for another reason: $*"; echo "$said"; exit 1; }
  echo "ok, rejected: $*"
}

analyse //hz3:libhz3.so //hz3/small || { echo "the untouched tree must be accepted"; exit 1; }
echo "ok, accepted: the untouched tree"

rejected "'wrong'" //hz3:libhz3.so --config=wrong
rejected "there is no 'wrong'; it is one of: fast, scale" //hz3:libhz3.so --//hz3:lane=wrong
rejected "large_cache: 'of'" //hz3:libhz3.so --//hz3:large_cache=of

gib=1073741824  # of which a multiple is no int
big=()
for option in magazine heap depot cool retain_min retain_max; do big+=("--//hz3:${option}_bytes=$gib"); done
nested build --noshow_progress --color=no //hz3:libhz3.so "${big[@]}" || { echo "big options must be accepted"; exit 1; }
echo "ok, built: ${big[*]}"

sed -i 's|deps = \[|deps = ["//hz3/large", |' hz3/small/BUILD.bazel
rejected "target '//hz3/large:large' is not visible" //hz3/small
