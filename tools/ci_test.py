#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# .ci/run sets up and tests when it is given nothing, and starts neither for --help or a mistake.
# Called by: Bazel.
"""Runs a copy of .ci/run beside a set-up and a test run that only say that they were started."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import source_tree


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


if __name__ == "__main__":
    unittest.main()
