#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Proves that every #include is backed by a direct dep, and that the proof would fail if not:
# each kind of forbidden include is planted in a copy of the tree and must be found.
# Called by: Bazel.
"""Include test, with planted violations."""

import pathlib
import shutil
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import include_check
import source_tree

ROOT = source_tree.workspace_root()


class IncludeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.copy = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "hz3", self.copy / "hz3")

    def plant(self, path, line):
        source = self.copy / path
        source.write_text(line + "\n" + source.read_text())

    def errors(self):
        return "\n".join(include_check.errors(self.copy))

    def test_tree_is_clean(self):
        found = include_check.errors(ROOT)
        if found:
            self.fail("\n" + "\n".join(found))

    def test_private_header_is_rejected(self):
        self.plant("hz3/small/small.c", '#include "hz3/pages/pages_internal.h"')
        self.assertIn("hz3/small/small.c: hz3/pages/pages_internal.h is private to //hz3/pages:pages",
                      self.errors())

    def test_header_of_a_sibling_is_rejected(self):
        self.plant("hz3/small/small.c", '#include "hz3/large/large.h"')
        self.assertIn("which is not a direct dep of //hz3/small:small", self.errors())

    def test_transitive_header_is_rejected(self):
        # hot may use pages; the public face reaches it only through hot.
        self.plant("hz3/malloc.c", '#include "hz3/pages/pages.h"')
        self.assertIn("hz3/malloc.c: hz3/pages/pages.h comes from //hz3/pages:pages", self.errors())

    def test_unlisted_header_is_rejected(self):
        (self.copy / "hz3/small/stray.h").write_text("")
        self.plant("hz3/small/small.c", '#include "hz3/small/stray.h"')
        self.assertIn("hz3/small/stray.h belongs to no target", self.errors())

    def test_header_from_nowhere_is_rejected(self):
        self.plant("hz3/base/os.c", '#include "jemalloc/jemalloc.h"')
        self.assertIn("jemalloc/jemalloc.h is nowhere in the workspace", self.errors())


if __name__ == "__main__":
    unittest.main()
