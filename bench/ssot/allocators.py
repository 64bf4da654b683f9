# SPDX-License-Identifier: Apache-2.0
"""Finds the allocator libraries to measure and says what each one is.

Called by: most modules. Owns: the table of peers.
Invariant: an Allocator's environment is the only thing its child gets beyond BASE_ENV.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.ssot import places
from bench.ssot.errors import UserError
from bench.ssot.machine import glibc_version

# The name becomes part of file names, and of text in which brackets are markup.
_LIB = re.compile(r"(?P<name>[\w.+-]+)=(?P<path>.+)")
SUBJECT, PEER, CONTROL, FLOOR = "subject", "peer", "control", "floor"
BASE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C", "HOME": "/nonexistent"}


@dataclass(frozen=True)
class Allocator:
    """One library under test; `path` is empty for the system's own malloc."""

    name: str
    role: str
    path: str = ""
    sha256: str = ""
    version: str = ""
    lane: str = "-"
    env: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def child_env(self) -> dict[str, str]:
        """What the child sees beyond BASE_ENV."""
        preload = {"LD_PRELOAD": self.path} if self.path else {}
        return {**preload, **self.env}

    def as_dict(self) -> dict:
        return asdict(self)


# name -> (Bazel label, manual target that only --peers NAME or all builds)
PEERS = {
    "tcmalloc": ("//third_party/gperftools:libtcmalloc_minimal.so", False),
    "mimalloc2": ("//third_party/mimalloc:libmimalloc_v2.so", True),
    "mimalloc3": ("//third_party/mimalloc:libmimalloc_v3.so", True),
    "jemalloc": ("//third_party/jemalloc:libjemalloc.so", True),
    "snmalloc": ("//third_party/snmalloc:libsnmalloc.so", True),
    "google": ("//third_party/google_tcmalloc:libgoogle_tcmalloc.so", True),
    "rpmalloc": ("//third_party/rpmalloc:librpmalloc.so", True),
}
DEFAULT_PEERS = "system,tcmalloc"


def add_arguments(p: argparse.ArgumentParser, default_peers: str = DEFAULT_PEERS) -> None:
    """The options that say which allocators."""
    p.add_argument("--lib", action="append", default=[], metavar="NAME=PATH",
                   help="this library instead of hz3 (may be repeated)")
    p.add_argument("--lanes", default="", metavar="fast,scale",
                   help="lanes of hz3, side by side (default: the one of --config)")
    p.add_argument("--peers", default=default_peers, metavar="NAMES",
                   help=f"system, {', '.join(PEERS)}, all or none (default {default_peers}); "
                   "all needs tools/setup --peers once")
    p.add_argument("--bazel", default="bazel", metavar="CMD", help="Bazel, with startup options")


def output_of(label: str) -> str:
    """'//a/b:c' -> 'a/b/c', the path below bazel-bin."""
    return label.removeprefix("//").replace(":", "/")


def _defined_symbols(path: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        raise UserError("nm is missing: install the package binutils") from e
    if done.returncode != 0:
        raise UserError(f"{path} is not a shared library that nm can read")
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.strip()}


def _embedded_strings(path: Path, pattern: bytes) -> str:
    found = re.search(pattern, path.read_bytes())
    return found.group(0).decode("ascii", "replace") if found else ""


def load(name: str, path: str | Path, role: str, env: dict[str, str] | None = None) -> Allocator:
    """Checks that the file is a library that defines malloc and free, and identifies it."""
    real = Path(path).expanduser().resolve()
    if not real.is_file():
        raise UserError(f"library of '{name}' not found: {path} (give --lib {name}=/path/to/lib.so)")
    if not {"malloc", "free"} <= _defined_symbols(real):
        raise UserError(f"{path} does not define malloc and free, so '{name}' would measure nothing")
    build_info = _embedded_strings(real, rb"hz3 build: [ -~]{8,2000}")
    lane = re.search(r"lane=(\w+)", build_info)
    return Allocator(
        name=name,
        role=role,
        path=str(real),
        sha256=hashlib.sha256(real.read_bytes()).hexdigest(),
        version=build_info or _embedded_strings(real, rb"(gperftools|jemalloc|mimalloc)[ -]\d[\w.]+|\d+\.\d+\.\d+-\d+-g[0-9a-f]{8}"),
        lane=lane.group(1) if lane else "-",
        env=env or {},
    )


def system() -> Allocator:
    """The C library's own malloc."""
    version = "glibc " + ".".join(map(str, glibc_version()))
    return Allocator("system", PEER, version=version)


def peer_names(spec: str) -> list[str]:
    """Expands --peers ('all', 'none', or names separated by commas)."""
    if spec == "none":
        return []
    names = ["system", *PEERS] if spec == "all" else [n for n in spec.split(",") if n]
    for name in names:
        if name != "system" and name not in PEERS:
            raise UserError(f"unknown peer '{name}': known are system, {', '.join(PEERS)}, all, none")
    return names


def peers(spec: str, bazel: str) -> list[Allocator]:
    """The peers of --peers; manual targets are built."""
    names = peer_names(spec)
    manual = [PEERS[n][0] for n in names if n in PEERS and PEERS[n][1]]
    extra_bin = places.build_peers(bazel, manual) if manual else None
    found = []
    for name in names:
        if name == "system":
            found.append(system())
            continue
        label, is_manual = PEERS[name]
        path = extra_bin / output_of(label) if is_manual else places.built(output_of(label))
        found.append(_with_settings(load(name, path, PEER)))
    return found


def _with_settings(allocator: Allocator) -> Allocator:
    if allocator.name == "google" and glibc_version() >= (2, 35):
        return replace(
            allocator,
            env={"GLIBC_TUNABLES": "glibc.pthread.rseq=0"},
            note="runs with GLIBC_TUNABLES=glibc.pthread.rseq=0: glibc's own registration of rseq "
            "would otherwise switch its per-CPU caches off",
        )
    return allocator


def lane_names(spec: str) -> list[str]:
    """Each lane named in --lanes, or the one that --config= chose (empty spec)."""
    if not spec:
        spec = load("hz3", places.built("hz3/libhz3.so"), SUBJECT).lane
    known = [path.stem.removeprefix("libhz3_") for path in places.BUILT.glob("hz3/libhz3_*.so")]
    names = spec.split(",")
    for lane in names:
        if known and lane not in known:
            raise UserError(f"unknown lane '{lane}': known are {', '.join(sorted(known))}")
    return names


def lanes(spec: str) -> list[Allocator]:
    """Subjects: the lanes of --lanes."""
    found = []
    for lane in lane_names(spec):
        library = load(f"hz3-{lane}", places.built(f"hz3/libhz3_{lane}.so"), SUBJECT)
        if library.lane != lane:
            raise UserError(f"{library.path} says lane={library.lane}: build it again")
        found.append(library)
    return found


def subjects(libs: list[str], lane_spec: str) -> list[Allocator]:
    """The libraries of --lib NAME=PATH, or else the lanes of hz3."""
    if not libs:
        return lanes(lane_spec)
    found = []
    for text in libs:
        match = _LIB.fullmatch(text)
        if not match:
            raise UserError(f"--lib '{text}': write --lib name=/path/to/library.so, the name of letters, digits, _ . + -")
        found.append(load(match["name"], match["path"], SUBJECT))
    return found


def floors() -> list[Allocator]:
    """The null allocators that measure what the harness itself costs."""
    return [
        load(name, places.built(f"bench/workloads/lib{name}.so"), FLOOR)
        for name in ("floor_bump", "floor_lifo")
    ]


def control_of(subject: Allocator) -> Allocator:
    """The same library once more under another name: the A/A control."""
    return replace(subject, name=f"{subject.name}=again", role=CONTROL)
