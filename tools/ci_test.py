#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# .ci/run sets up and tests when it is given nothing, and starts neither for --help or a mistake. What tools/test
# counts as passed has a report that says so.
# Called by: Bazel.
"""Runs a copy of .ci/run beside a set-up and a test run that only say that they were started; counts given reports."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import source_tree
import stages


class ContinuousIntegration(unittest.TestCase):
    def ran(self, *arguments):
        """(exit status, stdout, lines of stderr) of the copy."""
        with tempfile.TemporaryDirectory() as name:
            tree = pathlib.Path(name)
            shutil.copytree(source_tree.workspace_root() / ".ci", tree / ".ci")
            (tree / "tools").mkdir()
            for tool in ("setup", "test"):
                (tree / "tools" / tool).write_text("#!/bin/sh\necho %s started\n" % tool)
                (tree / "tools" / tool).chmod(0o755)
            done = subprocess.run([tree / ".ci" / "run", *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr.splitlines()

    def test_without_arguments_it_sets_up_and_tests(self):
        self.assertEqual(self.ran(), (0, "setup started\ntest started\n", []))

    def test_help_starts_nothing(self):
        for option in ("--help", "-h"):
            status, said, errors = self.ran(option)
            self.assertEqual((status, errors), (0, []))
            self.assertRegex(said, r"^usage: \.ci/run .*\n$")

    def test_a_mistake_starts_nothing(self):
        status, said, errors = self.ran("--fast")
        self.assertEqual((status, said, len(errors)), (2, "", 1))
        self.assertIn("'--fast'", errors[0])


class Counting(unittest.TestCase):
    CASES = "<testsuites><testcase/><testcase><failure/></testcase><testcase status='notrun'/></testsuites>"
    GENERATED = "<testsuites><testcase>%s</testcase></testsuites>"  # by Bazel, for a test without a report of its own

    def counted(self, status, report):
        """((passed, failed, skipped), the labels that failed) of one test."""
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "a report.xml"
            if report is not None:
                path.write_text(report)
            output = [{"name": "test.xml", "uri": path.as_uri()}]
            counts, failed = stages.count_stage([
                {"id": {"testResult": {"label": "//a:b"}}, "testResult": {"status": status, "testActionOutput": output}}])
        return tuple(counts[word] for word in ("passed", "failed", "skipped")), failed

    def test_cases_are_counted(self):
        self.assertEqual(self.counted("FAILED", self.CASES), ((1, 1, 1), ["//a:b"]))
        self.assertEqual(self.counted("PASSED", self.GENERATED % ""), ((1, 0, 0), []))
        self.assertEqual(self.counted("FAILED", self.GENERATED % "<error/>"), ((0, 1, 0), ["//a:b"]))

    def test_a_test_that_was_killed_failed_whatever_is_in_its_report(self):
        self.assertEqual(self.counted("TIMEOUT", self.GENERATED % ""), ((1, 1, 0), ["//a:b"]))

    def test_without_a_case_in_a_report_that_can_be_read_it_failed(self):
        for status, label in (("PASSED", "//a:b (passed, but its report does not say so)"), ("FAILED", "//a:b")):
            for report in (None, "", "<testsuites><testcase/>", "<testsuites/>"):
                self.assertEqual(self.counted(status, report), ((0, 1, 0), [label]), report)


if __name__ == "__main__":
    unittest.main()
