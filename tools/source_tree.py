# SPDX-License-Identifier: Apache-2.0
# Reads the BUILD files of a checkout well enough to know which file belongs to which target.
# Called by: ci_test.py, include_test.py, tidy_test.py.
# Needs: Starlark that is also Python, which BUILD files are.
"""A checkout's packages, targets and the files that they name."""

import pathlib
import re

COMPILED = ("cc_library", "cc_binary", "cc_test", "hz3_box", "hz3_test", "hz3_build_info",
            "library_test")
# What a macro adds to the deps that it is called with.
IMPLIED_DEPS = {
    "hz3_test": ["@com_google_googletest//:gtest_main"],
    "library_test": ["//tests/support:main", "//hz3:malloc"],
}


class Target:
    """One rule call: its kind, label and, as workspace paths, its files."""

    def __init__(self, kind, package, attributes):
        self.kind = kind
        self.package = package
        self.name = attributes["name"]
        self.label = "//%s:%s" % (package, self.name)
        self.attributes = attributes
        self.srcs = self._files("srcs") + self._files("textual_hdrs")
        self.hdrs = self._files("hdrs")
        deps = (attributes.get("deps") or []) + IMPLIED_DEPS.get(kind, [])
        self.deps = [absolute_label(dep, package) for dep in deps]

    def _files(self, attribute):
        found = []
        for entry in self.attributes.get(attribute) or []:
            if not entry.startswith(("//", "@", ":")):
                found.append("/".join(filter(None, [self.package, entry])))
        return found


def absolute_label(label, package):
    if label.startswith(":"):
        return "//%s%s" % (package, label)
    if label.startswith("//") and ":" not in label:
        return "%s:%s" % (label, label.rsplit("/", 1)[-1])
    return label


def _glob(folder):
    def glob(include, exclude=(), **_):
        def matches(patterns):
            return {str(path.relative_to(folder)) for pattern in patterns
                    for path in folder.glob(pattern + "/*" if pattern.endswith("**") else pattern)
                    if path.is_file()}
        return sorted(matches(include) - matches(exclude))
    return glob


def _select(branches):
    # Every branch counts: a file used in one configuration is used.
    together = []
    for values in branches.values():
        together += values
    return together


def read_package(root, build_file):
    """Evaluates one BUILD file; returns its targets."""
    package = build_file.parent.relative_to(root).as_posix()
    package = "" if package == "." else package
    text = build_file.read_text()
    targets = []

    def recorder(kind):
        def record(*positional, **attributes):
            if positional:
                attributes.setdefault("name", positional[0])
            if "name" in attributes:
                targets.append(Target(kind, package, attributes))
            return []
        return record

    names = {}
    for call in set(re.findall(r"\b([a-z_][a-z0-9_]*)\(", text)):
        if call not in dir(__builtins__) and call not in __builtins__:
            names[call] = recorder(call)
    # A loaded constant may be any list of words; none names files.
    for constant in re.findall(r'"([A-Z][A-Z0-9_]*)"', text):
        names[constant] = []
    names.update(glob=_glob(build_file.parent), select=_select, load=lambda *_, **__: None,
                 Label=str)
    exec(compile(text, str(build_file), "exec"), names)
    return targets


def read_targets(root):
    """Every target of the checkout's own packages, by label."""
    root = pathlib.Path(root)
    targets = {}
    for build_file in sorted(root.glob("**/BUILD.bazel")):
        inside = build_file.relative_to(root).parts
        if not inside[0].startswith(("bazel-", ".")) and inside[0] != "examples":
            for target in read_package(root, build_file):
                targets[target.label] = target
    return targets


def workspace_root():
    """The checkout that a test run by Bazel was started in (its runfiles are links into it)."""
    return pathlib.Path("WORKSPACE").resolve().parent
