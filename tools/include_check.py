# SPDX-License-Identifier: Apache-2.0
# The rule that keeps boxes apart: a file includes its own target's files and the public
# headers of the direct deps, nothing that merely happens to be in reach of the compiler.
# Called by: include_test.py.
"""Compares #include lines with the BUILD files."""

import re

import source_tree

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def _reachable(target, targets):
    paths = set(target.srcs + target.hdrs)
    for dep in target.deps:
        if dep in targets:
            paths.update(targets[dep].hdrs)
    return paths


def _reaches_outside(target, targets):
    """Whether a header from another repository may be meant; which one is left to the compiler."""
    deps = target.deps + [dep for direct in target.deps if direct in targets
                          for dep in targets[direct].deps]
    return any(dep.startswith("@") for dep in deps)


def _resolve(root, path, include):
    """The workspace path that an include means, or None for a header from outside."""
    beside = (root / path).parent / include
    for candidate in (root / include, beside):
        if candidate.is_file():
            return candidate.resolve().relative_to(root.resolve()).as_posix()
    return None


def _why_not(include, found, target, targets):
    owners = [other for other in targets.values() if found in other.srcs + other.hdrs]
    if not owners:
        return "%s belongs to no target" % found
    owner = owners[0]
    if found not in owner.hdrs:
        return "%s is private to %s" % (include, owner.label)
    return "%s comes from %s, which is not a direct dep of %s" % (include, owner.label, target.label)


def errors(root):
    """One line per include that the BUILD files do not allow."""
    targets = source_tree.read_targets(root)
    found_errors = []
    for target in targets.values():
        if target.kind not in source_tree.COMPILED:
            continue
        reachable = _reachable(target, targets)
        outside = _reaches_outside(target, targets)
        for path in target.srcs + target.hdrs:
            if not (root / path).is_file():
                continue  # generated
            for include in _INCLUDE.findall((root / path).read_text()):
                found = _resolve(root, path, include)
                if found is None and not outside:
                    found_errors.append("%s: %s is nowhere in the workspace" % (path, include))
                elif found is not None and found not in reachable:
                    why = _why_not(include, found, target, targets)
                    found_errors.append("%s: %s" % (path, why))
    return found_errors
