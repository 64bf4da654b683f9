# SPDX-License-Identifier: Apache-2.0
"""Where built things lie: in the runfiles of `bazel run`, or below bazel-bin of a checkout.

Called by: most modules. Owns: nothing.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from bench.ssot.errors import UserError

ROOT = Path(
    os.environ.get("BUILD_WORKSPACE_DIRECTORY") or Path(__file__).resolve().parents[2]
).resolve()
BUILT = Path(os.environ.get("SSOT_RUNFILES") or ROOT / "bazel-bin").absolute()

HINT = "bazel build -c opt //bench:ssot"


def built(relative: str, hint: str = HINT) -> Path:
    """Path of a build output; a UserError naming the build command when it is missing."""
    path = BUILT / relative
    if not path.exists():
        raise UserError(f"{relative} is not built: run '{hint}' first")
    return path


def writable(folder: Path) -> Path:
    """The folder, made if need be; a UserError when nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise UserError(f"cannot write into {folder} ({e.strerror}): give another --out") from e
    return folder


def git(*arguments: str, cwd: Path = ROOT) -> str:
    """Output of a git command in the checkout, or an empty string when git fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def bazel_build(
    bazel: str, targets: list[str], flags: list[str], links: Path, cwd: Path = ROOT
) -> Path:
    """Builds targets and returns the directory that holds the outputs (as bazel-bin does).

    `links` is a prefix of its own for the convenience links, so the checkout's bazel-bin
    keeps pointing at what the user built.
    """
    command = [*bazel.split(), "build", "-c", "opt", f"--symlink_prefix={links}-", *flags, *targets]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as e:
        raise UserError(f"cannot start '{bazel}' ({e.strerror}): give --bazel") from e
    if done.returncode != 0:
        # What a rule of this repository refuses stands behind "Error in fail:", below the first ERROR.
        lines = done.stderr.splitlines()
        why = [line for word in ("Error in fail:", "ERROR") for line in lines if word in line][:1]
        raise UserError(f"'{' '.join(command)}' failed: {why[0] if why else done.stderr[-300:]}")
    return Path(f"{links}-bin").resolve()


def build_peers(bazel: str, labels: list[str]) -> Path:
    """Builds peers that an ordinary build leaves out; returns the directory of the outputs."""
    print(f"building {', '.join(labels)} (minutes the first time)", flush=True)
    return bazel_build(bazel, labels, [], ROOT / "bazel-peers")
