# SPDX-License-Identifier: Apache-2.0
"""Builds hz3 twice, for --ab: with and without build settings, or at two git revisions.

Called by: cli. Owns: the copies of both libraries in the session folder's libs/.
Invariant: the subject is the new thing (the setting, or the present checkout), the peer the old.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.ssot import allocators, places
from bench.ssot.allocators import PEER, SUBJECT, Allocator
from bench.ssot.errors import UserError

_SETTING = re.compile(r"^(\w+)=([\w.-]+)$")


def parse(spec: str) -> tuple[list[str], list[str]]:
    """'a=1,b=2' -> Bazel flags; 'rev=X' -> revisions [X]; 'rev=X..Y' -> [X, Y]."""
    if spec.startswith("rev="):
        revisions = spec[4:].split("..")
        if len(revisions) > 2 or not all(revisions):
            raise UserError(f"--ab '{spec}': write rev=OLD or rev=OLD..NEW")
        return [], revisions
    flags = []
    for part in spec.split(","):
        match = _SETTING.match(part)
        if not match:
            raise UserError(f"--ab '{part}': write name=value or rev=GITREV")
        if match[1] == "lane":  # the library of a lane is of this lane whatever the setting says
            raise UserError(f"--ab '{part}': compare lanes with --lanes, as in --lanes fast,checked")
        flags.append(f"--//hz3:{match[1]}={match[2]}")
    return flags, []


def names(spec: str, lane: str) -> tuple[str, str]:
    """What subject and peer are called; a UserError, before anything is made or built, for what is no
    setting and no revision."""
    flags, revisions = parse(spec)
    base = f"hz3-{lane}"
    if flags:
        return f"{base}:{spec}", base
    for revision in revisions:
        _sha(revision)
    old, *new = [f"{base}@{revision}".replace("/", "_") for revision in revisions]
    return new[0] if new else base, old


def _sha(revision: str) -> str:
    sha = places.git("rev-parse", "--verify", f"{revision}^{{commit}}")
    if not sha:
        raise UserError(f"--ab: there is no git revision '{revision}'")
    return sha


class Builder:
    """Builds one lane of hz3 in this checkout or in a temporary git worktree."""

    def __init__(self, bazel: str, lane: str, folder: Path):
        self.bazel, self.lane = bazel, lane
        self.libs = places.writable(folder / "libs")

    def build(
        self, name: str, role: str, flags: list[str], cwd: Path = places.ROOT, bazel: str = ""
    ) -> Allocator:
        """The library built with flags, copied away before the next build replaces it."""
        label = f"//hz3:libhz3_{self.lane}.so"
        with tempfile.TemporaryDirectory() as links:
            out = places.bazel_build(bazel or self.bazel, [label], flags, Path(links) / "bazel", cwd)
            target = self.libs / f"libhz3_{re.sub(r'[^A-Za-z0-9_.=-]', '_', name)}.so"
            shutil.copyfile(out / allocators.output_of(label), target)
        return allocators.load(name, target, role)

    def build_revision(self, name: str, role: str, revision: str) -> Allocator:
        """The library of another git revision."""
        sha = _sha(revision)
        with tempfile.TemporaryDirectory() as parent:
            tree = Path(parent) / "tree"
            bazel = f"{self.bazel} --output_base={parent}/base"
            _git("worktree", "add", "--detach", str(tree), sha)
            try:
                _reuse_archives(tree)
                return self.build(name, role, [], tree, bazel)
            finally:
                # Ends the server of that output base too.
                subprocess.run([*bazel.split(), "clean", "--expunge"], cwd=tree, check=False,
                               capture_output=True)
                _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(
        ["git", *arguments], cwd=places.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UserError(f"git {arguments[0]} {arguments[1]} failed: {done.stderr.strip()}")


def _reuse_archives(tree: Path) -> None:
    for name in (".distdir", ".bazelrc.local"):
        if (places.ROOT / name).exists():
            (tree / name).symlink_to(places.ROOT / name)


def pair(spec: str, bazel: str, lane: str, folder: Path) -> list[Allocator]:
    """[subject, peer] of an --ab run, built, identified and not the same."""
    subject, peer = _built(spec, bazel, lane, folder)
    if subject.sha256 == peer.sha256:
        raise UserError(f"--ab '{spec}': both builds are byte for byte the same, so there is nothing "
                        "to measure: name a setting or a revision that changes the library")
    return [subject, peer]


def _built(spec: str, bazel: str, lane: str, folder: Path) -> list[Allocator]:
    flags, revisions = parse(spec)
    subject, peer = names(spec, lane)
    builder = Builder(bazel, lane, folder)
    if flags:
        return [builder.build(subject, SUBJECT, flags), builder.build(peer, PEER, [])]
    old = builder.build_revision(peer, PEER, revisions[0])
    if len(revisions) == 1:
        return [builder.build(subject, SUBJECT, []), old]
    return [builder.build_revision(subject, SUBJECT, revisions[1]), old]
