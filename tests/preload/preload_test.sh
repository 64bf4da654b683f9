#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs everyday programs with and without the library preloaded; output, errors, exit status and
# the files that they leave must be the same. Usage: preload_test.sh LIBRARY
# Called by: Bazel.
# Invariant: the two runs start from equal folders, at paths of equal length.
set -euo pipefail
library=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HOME=$work LC_ALL=C GIT_CONFIG_NOSYSTEM=1 PYTHONDONTWRITEBYTECODE=1
export GIT_AUTHOR_DATE="2001-01-01T00:00:00Z" GIT_COMMITTER_DATE="2001-01-01T00:00:00Z"
git config --global user.name "A Tester"
git config --global user.email tester@example.org
git config --global init.defaultBranch main
failures=0

# same NAME COMMAND: a shell command, run in two folders, one of them on hz3.
same() {
  local name=$1 command=$2 side preload status
  for side in plain hz3..; do
    mkdir -p "$work/$side"
    preload=
    [ $side = plain ] || preload=$library
    status=0
    (cd "$work/$side" && LD_PRELOAD=$preload timeout 120 bash -c "$command" \
      >"$work/$side.out" 2>"$work/$side.err") || status=$?
    echo "exit status $status" >>"$work/$side.out"
  done
  if cmp "$work/plain.out" "$work/hz3...out" && cmp "$work/plain.err" "$work/hz3...err" &&
    diff -r "$work/plain" "$work/hz3.." && grep -qx "exit status 0" "$work/plain.out"; then
    echo "ok: $name"
  else
    echo "FAILED: $name"
    tail -n 5 "$work"/*.out "$work"/*.err
    failures=$((failures + 1))
  fi
}

# Without this, a library that ld.so cannot load would pass everything below.
LD_PRELOAD=$library python3 -c 'import ctypes; ctypes.CDLL(None).malloc_stats()' 2>&1 |
  grep -o "hz3 build: .*" || { echo "the preload has no effect"; exit 1; }

# A million lines in random order, made once: shuffling is not what is tested.
python3 - "$work" <<'EOF'
import json, random, sys
random.seed(1)
with open(sys.argv[1] + "/lines", "w") as lines:
    for _ in range(1000000):
        lines.write("%d %s\n" % (random.randrange(10**9), "x" * random.randrange(60)))
with open(sys.argv[1] + "/json", "w") as out:
    json.dump([{"key %d" % i: [i, str(i), {"deep": [None] * (i % 9)}]} for i in range(30000)], out)
EOF

same "ls" 'ls -laR --time-style=+ /usr/include/linux'
same "python3 -m json.tool" 'python3 -m json.tool --sort-keys ../json'
same "gcc" 'printf "#include <stdio.h>\nint main(void) { return puts(\"built\") < 0; }\n" >a.c &&
  gcc -O2 -Wall -c a.c -o a.o && gcc a.o -o a -Wl,--build-id=none && ./a'
same "g++" 'printf "#include <map>\n#include <regex>\nint main() { return std::map<int, int>().size(); }\n" >b.cc &&
  g++ -std=c++17 -O2 -c b.cc -o b.o'
same "git" 'git init -q r && cd r && for i in 1 2 3 4 5 6 7 8; do
  seq $i 3000 >f$((i % 3)) && git add . && git commit -qm "change $i"; done &&
  git log --stat && git gc -q && git fsck --strict 2>&1 && rm -rf .git/index'
same "sort in memory" 'sort -S 300M --parallel=2 ../lines | md5sum'
same "sort with spills" 'sort -S 8M -n --parallel=2 -T . ../lines | md5sum'
same "perl" 'perl -e "my %h; \$h{\$_ % 70000} .= \"\$_,\" for 1..700000;
  my \$n = 0; \$n += length for values %h; print \"\$n \", scalar(keys %h), \"\\n\""'

[ $failures -eq 0 ] || { echo "$failures failed"; exit 1; }
