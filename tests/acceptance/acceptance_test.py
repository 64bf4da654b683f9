#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Real programs on hz3 and on the system's allocator; one test case for each, in $XML_OUTPUT_FILE.
# Called by: Bazel, or by hand: acceptance_test.py LIBRARY [PATTERN]...
# Invariant: a case passes only if the program worked on both sides with equal results; what is
# not installed is skipped with the name of its Debian package.
"""Runs real programs with and without a preloaded allocator and compares what they do."""

import argparse
import difflib
import fnmatch
import os
import pathlib
import shutil
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))
import cpython
import programs
import report
import runner
import servers


def sees_a_difference(side):
    """Not a case: what proves that the two sides are told apart."""
    statistics = 'python3 -c "import ctypes; ctypes.CDLL(None).malloc_stats()" 2>&1'
    return side.shell(statistics + ' | grep "hz3 build" || echo none')


def missing_packages(case):
    return sorted({package for program, package in case.needs if not runner.is_there(program)})


def beyond_reach(case, library):
    """Programs that ld.so would not preload the library into, so that nothing would be tested."""
    found = [runner.find(program) for program, _ in case.needs if runner.find(program)]
    return [path for path in found if runner.is_elf(path) and not runner.takes_preload(path, library)]


def differences(name, plain, preloaded):
    lines = list(difflib.unified_diff(plain.splitlines(), preloaded.splitlines(), "system", "hz3", lineterm="", n=1))
    return "%s differs:\n%s" % (name, "\n".join(lines[:60]))


def no_result(observed):
    """Why a part has no result, where the whole side broke."""
    return "no result; " + "; ".join(other.text[-3000:] for other in observed.values() if not other.healthy)


def judge(case, work, library):
    """Results of a case: list of (name, outcome, text), outcome one of passed, failed, skipped."""
    missing = missing_packages(case)
    if missing:
        return [(case.name, "skipped", "not installed; Debian package: " + ", ".join(missing))]
    out_of_reach = beyond_reach(case, library)
    if out_of_reach:
        return [(case.name, "failed", "LD_PRELOAD does not reach " + ", ".join(out_of_reach))]
    plain = runner.observe(case, work, None)
    preloaded = runner.observe(case, work, library)
    results = []
    for name in sorted(set(plain) | set(preloaded)):
        full_name = case.name + ("." + name if name else "")
        expected, found = plain.get(name), preloaded.get(name)
        if expected is None or not expected.healthy:
            text = expected.text if expected else no_result(plain)
            results.append((full_name, "failed", "does not work with the system's allocator either:\n" + text[-3000:]))
        elif found is None:
            results.append((full_name, "failed", no_result(preloaded)))
        elif not found.healthy or expected.text != found.text:
            results.append((full_name, "failed", differences(full_name, expected.text, found.text)))
        else:
            results.append((full_name, "passed", ""))
    return results


def run_all(cases, work, library):
    rows = []
    for case in cases:
        start = time.monotonic()
        results = judge(case, work, library)
        seconds = (time.monotonic() - start) / len(results)
        for name, outcome, text in results:
            print("%s: %s%s" % (outcome, name, " (%s)" % text if outcome == "skipped" else ""), flush=True)
            if outcome == "failed":
                print(text, flush=True)
            rows.append((name, outcome, text, seconds))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", help="libhz3.so")
    parser.add_argument("patterns", nargs="*", help="names of cases, such as 'redis*'; all if left out")
    options = parser.parse_args()
    patterns = options.patterns or [os.environ.get("TESTBRIDGE_TEST_ONLY") or "*"]
    cases = [case for case in programs.CASES + cpython.CASES + servers.CASES
             if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)]
    if not cases:
        sys.exit("no case is called " + " or ".join(patterns))
    runner.adopt_orphans()
    # Not below $TEST_TMPDIR, where an unprivileged user may not look.
    work = pathlib.Path(tempfile.mkdtemp(prefix="hz3_accept_", dir="/tmp"))
    try:
        work.chmod(0o755)
        library = work / "libhz3.so"
        shutil.copyfile(options.library, library)
        library.chmod(0o755)
        sanity = runner.Case("self check", (), sees_a_difference, limit=30)
        seen = [runner.observe(sanity, work, preload)[""].text for preload in (None, library)]
        if "hz3 build" in seen[0] or "hz3 build" not in seen[1]:
            sys.exit("the preload has no effect: %r" % seen)
        print(seen[1].strip(), flush=True)
        rows = run_all(cases, work, library)
    finally:
        runner.end_descendants()
        shutil.rmtree(work, ignore_errors=True)
    return report.finish("acceptance_test", rows)


if __name__ == "__main__":
    sys.exit(main())
