#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# The rules that keep this tree small and readable, as a test. What each rule is against is said
# at the rule; every rule is also tried on a planted violation, so that none is blind.
# Called by: Bazel.
"""Tidy test: one check per rule, run over the checkout's tracked files."""

import ast
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import source_tree

MAX_BANNER_LINES = 15
MAX_FUNCTION_LINES = 70
MAX_OPTIONS = 12
C_LIKE = (".c", ".h", ".cc")
COMMENTED = C_LIKE + (".py", ".sh", ".bzl", ".bazel", ".BUILD", ".lds")

# Who may depend on which box; the same as the visibility that its BUILD file grants.
CALLERS = {
    "hz3/base": {"hz3", "hz3/pages", "hz3/small", "hz3/medium", "hz3/large", "hz3/remote", "hz3/hot"},
    "hz3/pages": {"hz3/small", "hz3/medium", "hz3/large", "hz3/hot"},
    "hz3/small": {"hz3/hot"},
    "hz3/medium": {"hz3/hot"},
    "hz3/large": {"hz3/hot"},
    "hz3/remote": {"hz3/hot"},
    "hz3/hot": {"hz3"},
}

# The headers that the fast path is inlined from: read at every look at the hot path.
HOT_HEADERS = ("hz3/hot/bin.h", "hz3/hot/hot.h", "hz3/pages/tag_map.h")
_NOT_HOT = re.compile(
    r"^\s*#\s*(?:if\b|ifdef|else|elif)|(?<![a-z])(?:un)?lock\w*\(|_fetch_|_exchange|compare_|\bf?printf\(",
    re.MULTILINE)


def tracked_files(root):
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


def code_of(text):
    """C text without comments and strings, line by line in place."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group(0))
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.DOTALL)


def banner_errors(name, text):
    """Every source says in its first lines what it is, in what licence, and is brief about it."""
    lines = text.splitlines()
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    if not lines:
        return []
    if "SPDX-License-Identifier: Apache-2.0" not in lines[0]:
        return ["%s: the first line is not the SPDX line" % name]
    mark = "//" if name.endswith(C_LIKE) else "#"
    banner = 1
    while banner < len(lines) and lines[banner].startswith(mark):
        banner += 1
    if name.endswith(C_LIKE) and banner < 2:
        return ["%s: no banner after the SPDX line" % name]
    if banner > MAX_BANNER_LINES:
        return ["%s: banner of %d lines, at most %d" % (name, banner, MAX_BANNER_LINES)]
    return []


def c_function_errors(name, text):
    """A function that is read without scrolling."""
    errors, start = [], None
    for number, line in enumerate(code_of(text).splitlines(), 1):
        if re.match(r"[A-Za-z_].*\(", line) and not line.rstrip().endswith(";"):
            start = number
        elif line.startswith("}") and start is not None:
            if number - start + 1 > MAX_FUNCTION_LINES:
                errors.append("%s:%d: function of %d lines" % (name, start, number - start + 1))
            start = None
    return errors


def python_function_errors(name, text):
    return ["%s:%d: function of %d lines" % (name, node.lineno, node.end_lineno - node.lineno + 1)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES]


def slicing_errors(name, text):
    """A file is a unit, not a slice of a bigger one."""
    if name.endswith((".inc", ".ipp", ".tcc")):
        return ["%s: text to be included into something else" % name]
    return ["%s: includes the source file %s" % (name, other)
            for other in re.findall(r'#\s*include\s+[<"]([^>"]+\.(?:c|cc))[>"]', text)
            if name.endswith(C_LIKE)]


def hot_header_errors(name, text):
    """Nothing conditional, locked, atomic read-modify-write or printing where malloc is inlined."""
    return ["%s: `%s` in a hot header" % (name, match.group(0).strip())
            for match in _NOT_HOT.finditer(code_of(text))
            if name in HOT_HEADERS]


def dag_errors(targets):
    """Boxes are called from above only, and each by the callers that its design names."""
    errors = []
    for target in targets.values():
        for dep in target.deps:
            box = dep[2:].split(":")[0]
            allowed = CALLERS.get(box, set()) | {box}
            test = target.kind == "hz3_test" or target.attributes.get("testonly")
            # A test may use whatever its own box uses.
            if box in CALLERS and target.package not in allowed and not (test and target.package in CALLERS):
                errors.append("%s must not depend on %s" % (target.label, dep))
        granted = {label[2:].split(":")[0] for label in target.attributes.get("visibility") or []}
        if target.kind == "hz3_box" and target.package in CALLERS and not granted <= CALLERS[target.package]:
            errors.append("%s is visible to more than its callers" % target.label)
    return errors


def option_errors(options_bzl):
    """Every option doubles the variants to test; a lane is where a good value belongs."""
    listed = re.search(r"^OPTIONS = \[(.*?)^\]", options_bzl, re.DOTALL | re.MULTILINE)
    count = len(re.findall(r'"', listed.group(1))) // 2
    return ["%d options, at most %d" % (count, MAX_OPTIONS)] if count > MAX_OPTIONS else []


def dead_file_errors(names, read, targets):
    """A file that no target and no other file names is read by people only, and rots."""
    used = {path for target in targets.values() for path in target.srcs + target.hdrs}
    everything = {name: read(name) for name in names}
    errors = []
    for name in names:
        path = pathlib.PurePosixPath(name)
        if not name.endswith(C_LIKE + (".py", ".sh", ".lds", ".bzl")) or name in used:
            continue
        word = path.stem if path.suffix == ".py" else path.name
        named = any(re.search(r"\b%s\b" % re.escape(word), text)
                    for other, text in everything.items() if other != name)
        if not named and path.name not in ("__init__.py", "__main__.py"):
            errors.append("%s: nothing refers to it" % name)
    return errors


def text_errors(name, text):
    """All rules that look at one file alone."""
    errors = slicing_errors(name, text) + hot_header_errors(name, text)
    shebang = re.match(r"#!.*\b(bash|python3)\n", text) if not pathlib.PurePosixPath(name).suffix else None
    if name.endswith(COMMENTED) or shebang:
        errors += banner_errors(name, text)
    if name.endswith(C_LIKE):
        errors += c_function_errors(name, text)
    if name.endswith(".py") or (shebang and shebang[1] == "python3"):
        errors += python_function_errors(name, text)
    return errors


class TidyTest(unittest.TestCase):
    """The tree as it is."""

    @classmethod
    def setUpClass(cls):
        cls.root = source_tree.workspace_root()
        cls.names = tracked_files(cls.root)
        cls.targets = source_tree.read_targets(cls.root)

    def assertNone(self, errors):
        if errors:
            self.fail("\n" + "\n".join(errors))

    def read(self, name):
        return (self.root / name).read_text(errors="replace")

    def test_there_is_something_to_check(self):
        self.assertIn("hz3/defs.bzl", self.names)
        self.assertIn("//hz3/small:small", self.targets)

    def test_texts(self):
        self.assertNone([error for name in self.names for error in text_errors(name, self.read(name))])

    def test_dependencies(self):
        self.assertNone(dag_errors(self.targets))

    def test_options(self):
        self.assertNone(option_errors(self.read("hz3/options.bzl")))

    def test_no_dead_files(self):
        self.assertNone(dead_file_errors(self.names, self.read, self.targets))


class RuleTest(unittest.TestCase):
    """Each rule sees a violation."""

    SPDX = "// SPDX-License-Identifier: Apache-2.0\n"

    def assertFinds(self, errors, words):
        self.assertTrue(any(words in error for error in errors), errors)

    def test_banner(self):
        self.assertFinds(text_errors("a.c", "int a;\n"), "SPDX")
        self.assertFinds(text_errors("a", "#!/usr/bin/env bash\n:\n"), "SPDX")
        self.assertFinds(text_errors("a.c", self.SPDX + "int a;\n"), "no banner")
        self.assertFinds(text_errors("a.c", self.SPDX + "// x\n" * 15), "banner of 16 lines")
        self.assertEqual(text_errors("a.c", self.SPDX + "// x\n" * 14 + "int a;\n"), [])

    def test_function_length(self):
        body = self.SPDX + "// x\nint f(void)\n{\n%s}\n"
        self.assertFinds(text_errors("a.c", body % ("  g();\n" * 68)), "function of 71 lines")
        self.assertEqual(text_errors("a.c", body % ("  g();\n" * 67)), [])
        python = self.SPDX.replace("//", "#") + "def f():\n" + "    g()\n" * 70
        self.assertFinds(text_errors("a.py", python), "function of 71 lines")
        self.assertFinds(text_errors("a", "#!/usr/bin/env python3\n" + python), "function of 71 lines")

    def test_slices(self):
        self.assertFinds(text_errors("a.inc", ""), "to be included")
        self.assertFinds(text_errors("a.c", self.SPDX + '// x\n#include "b.c"\n'), "source file b.c")

    def test_hot_headers(self):
        for line in ("#ifdef X", "#if X", "hz3_lock(&x);", "atomic_fetch_add(&x, 1);", "printf();"):
            self.assertFinds(text_errors("hz3/hot/bin.h", self.SPDX + "// x\n" + line + "\n"), "hot header")
        self.assertEqual(text_errors("hz3/hot/bin.h", self.SPDX + "// printf()\n#ifndef X\n"), [])

    def test_dependencies(self):
        with tempfile.TemporaryDirectory() as folder:
            for box, dep in (("small", "large"), ("large", "pages")):
                package = pathlib.Path(folder) / "hz3" / box
                package.mkdir(parents=True)
                (package / "BUILD.bazel").write_text(
                    'hz3_box(name="%s", srcs=[], deps=["//hz3/%s"], visibility=["//hz3/remote:__pkg__"])'
                    % (box, dep))
            errors = dag_errors(source_tree.read_targets(folder))
        self.assertFinds(errors, "//hz3/small:small must not depend on //hz3/large:large")
        self.assertFinds(errors, "//hz3/large:large is visible to more")
        self.assertFalse(any("pages" in error for error in errors))

    def test_options(self):
        self.assertFinds(option_errors("OPTIONS = [\n" + '    "x",\n' * 13 + "]\n"), "13 options")

    def test_dead_files(self):
        texts = {"a.c": "", "b.sh": "b.sh", "c.py": "import d", "d.py": ""}
        errors = dead_file_errors(list(texts), texts.get, {})
        self.assertEqual([error.split(":")[0] for error in errors], ["a.c", "b.sh", "c.py"])


if __name__ == "__main__":
    unittest.main()
