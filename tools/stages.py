# SPDX-License-Identifier: Apache-2.0
# Stages of tests: what Bazel runs in one go, and how its test cases are counted.
# Called by: tools/test, tools/nightly and ci_test.py.
# Invariant: the counts are those of the test cases in the tests' reports, of which Bazel writes one, with one
# case, where the test itself wrote none; what did not even build, or has no case to show, counts as failed.
"""Runs stages and counts their test cases."""

import collections
import json
import pathlib
import subprocess
import tempfile
import time
import urllib.parse
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Tests that see the allocator, so that the lane matters to them.
LANE_TESTS = ["//hz3/...", "//tests/..."]
SANITIZER_STAGES = [
    (name + " on the boxes' unit tests", ["//hz3/...", "--build_tests_only", "--config=" + name])
    for name in ("asan", "ubsan", "tsan")
]
CLANG_STAGE = ("clang, with the layering check",
               ["//hz3/...", "--config=clang"])


def case_outcome(case):
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None or case.get("status") == "notrun" or case.get("result") == "skipped":
        return "skipped"
    return "passed"


def count_report(path, status):
    """Outcomes of one test's XML report; of the test as a whole if that failed and the report does not tell."""
    counts = collections.Counter()
    try:
        for case in xml.etree.ElementTree.parse(path).iter("testcase"):
            counts[case_outcome(case)] += 1
    except (OSError, xml.etree.ElementTree.ParseError):
        pass
    # A test that was killed leaves a partial report, or an old one.
    if not counts or status != "PASSED" and not counts["failed"]:
        counts["failed"] = 1
    return counts


def last_results(events):
    """Label and shard of each test that ran, with its last result: a retry replaces the first."""
    results = {}
    for event in events:
        key = event["id"].get("testResult")
        if key and "testResult" in event:
            results[key["label"], key.get("run"), key.get("shard")] = event["testResult"]
    return results


def not_run(events, ran):
    """Test targets that were asked for and have no result, because something did not build."""
    configured = {event["id"]["targetConfigured"]["label"] for event in events
                  if "targetConfigured" in event["id"]
                  and event.get("configured", {}).get("targetKind", "").endswith("_test rule")}
    return sorted(configured - {label for label, _, _ in ran})


def count_stage(events):
    counts, failed = collections.Counter(), []
    results = last_results(events)
    for (label, _, _), result in sorted(results.items(), key=str):
        files = {output["name"]: output.get("uri", "") for output in result.get("testActionOutput", [])}
        path = urllib.parse.unquote(urllib.parse.urlparse(files.get("test.xml", "")).path)
        found = count_report(path, result.get("status"))
        counts += found
        if found["failed"]:
            failed.append(label + " (passed, but its report does not say so)" * (result.get("status") == "PASSED"))
    for label in not_run(events, results):
        counts["failed"] += 1
        failed.append(label + " (was not run)")
    return counts, failed


def run_stage(name, arguments):
    print("== %s" % name, flush=True)
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="hz3_events_") as events_file:
        status = subprocess.call(
            ["bazel", "test", "--keep_going", "--show_progress_rate_limit=10", "--color=no",
             "--test_summary=terse", "--build_event_json_file=" + events_file.name] + arguments,
            cwd=ROOT, stdin=subprocess.DEVNULL)
        events = [json.loads(line) for line in events_file.read().splitlines()]
    counts, failed = count_stage(events)
    # 4: there are no tests here, only things to build.
    if status not in (0, 4) and not counts["failed"]:
        counts["failed"] += 1
        failed.append("bazel, with exit status %d" % status)
    say_stage(name, counts, start)
    return counts, ["%s: %s" % (name, label) for label in failed]


def say_stage(name, counts, start):
    print("== %s: %d passed, %d failed, %d skipped, %.0f s"
          % (name, counts["passed"], counts["failed"], counts["skipped"], time.monotonic() - start),
          flush=True)


def sum_up(outcomes):
    """Prints the total of all stages' counts and failures; the exit status."""
    total, failed = collections.Counter(), []
    for counts, labels in outcomes:
        total += counts
        failed += labels
    if total["skipped"]:
        print("%d skipped" % total["skipped"])
    for line in failed:
        print("failed: " + line)
    print("%d passed, %d failed" % (total["passed"], total["failed"]), flush=True)
    return 1 if total["failed"] or not total["passed"] else 0
