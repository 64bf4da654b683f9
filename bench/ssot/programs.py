# SPDX-License-Identifier: Apache-2.0
"""Real programs as cases: what they need, how they are prepared, and how one run goes.

Called by: cli, runner. Owns: the inputs it generates, in one temporary folder per invocation.
Invariant: a program that is not installed is never measured as something else; it is skipped
with the name of its package.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

from bench.ssot.allocators import BASE_ENV, Allocator
from bench.ssot.registry import Case


@dataclass(frozen=True)
class Real:
    """How to run one real program. `command(size)` prepares the input and returns the command;
    `needs` are executables and the Debian package that has them."""

    needs: tuple[tuple[str, str], ...]
    command: Callable[[int], list[str]]
    env: tuple[tuple[str, str], ...] = ()


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ssot-real-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _sqlite(size: int) -> list[str]:
    script = _folder() / f"speed{size}.sql"
    if not script.exists():
        script.write_text(
            "CREATE TABLE t(a INTEGER PRIMARY KEY, b INTEGER, c TEXT);\nBEGIN;\n"
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<{size})\n"
            "INSERT INTO t SELECT i, (i*7919)%100003, printf('row %d of %x', i, i*i) FROM n;\n"
            "COMMIT;\nCREATE INDEX tb ON t(b);\n"
            "SELECT count(*), sum(length(c)) FROM t WHERE b BETWEEN 1000 AND 50000;\n"
            "SELECT max(s) FROM (SELECT group_concat(c) AS s FROM t GROUP BY b%997);\n"
            "UPDATE t SET c = c || upper(c) WHERE b%3 = 0;\n"
            "SELECT count(DISTINCT substr(c, 1, 9)) FROM t;\nDELETE FROM t WHERE b%2;\n",
            encoding="utf-8",
        )
    return [str(shutil.which("sqlite3")), ":memory:", f".read {script}"]


_PYTHON = """
import json, re, collections
rows = [{"id": i, "name": f"row {i}", "tags": [str(i % k) for k in range(1, 9)]} for i in range(SIZE)]
text = json.dumps(rows)
assert json.loads(text) == rows
words = collections.Counter(re.findall(r"[a-z]+ [0-9]+", text))
tree = {}
for row in rows:
    node = tree
    for tag in row["tags"]:
        node = node.setdefault(tag, {})
lines = sorted((line[::-1] for line in text.split("}")), key=len)
assert len(words) == SIZE and len(lines) == SIZE + 1
"""


def _python(size: int) -> list[str]:
    script = _folder() / f"work{size}.py"
    script.write_text(_PYTHON.replace("SIZE", str(size)), encoding="utf-8")
    # The interpreter itself: a shim or a virtual environment would add processes of its own.
    return ["/usr/bin/python3", "-I", "-S", str(script)]


def _gcc(size: int) -> list[str]:
    source = _folder() / f"large{size}.c"
    if not source.exists():
        source.write_text("struct s { int a, b; struct s *n; };\n" + "".join(
            f"int f{i}(struct s *p, int k) {{ int r = {i}; while (p) {{ r += p->a * k - p->b / {i + 1};"
            f" if (r & {i % 31 + 1}) p = p->n; else r ^= f{max(0, i - 1)}(p->n, r % 7); "
            f"if (r > {i}) break; }} return r; }}\n" for i in range(size)
        ), encoding="utf-8")
    return [str(shutil.which("gcc")), "-O1", "-c", str(source), "-o", str(_folder() / "large.o")]


def _git(size: int) -> list[str]:
    """A repository of loose history from fast-import; each run packs a fresh copy."""
    origin = _folder() / f"origin{size}"
    git = str(shutil.which("git"))
    if not origin.exists():
        subprocess.run([git, "init", "-q", "--bare", str(origin)], env=BASE_ENV, check=True)
        stream = "".join(
            f"commit refs/heads/main\ncommitter a <a@b> {1000000000 + i} +0000\ndata 2\nc\n"
            f"M 644 inline d{i % 37}/f{i % 211}\ndata {len(body)}\n{body}\n"
            for i in range(size)
            for body in ["\n".join(f"line {j} {(i * j) % 977}" for j in range(60))]
        )
        subprocess.run([git, "-C", str(origin), "fast-import", "--quiet"], input=stream, text=True,
                       env=BASE_ENV, check=True)
    copy = _folder() / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(origin, copy)
    return [git, "-C", str(copy), "-c", "gc.autoDetach=false", "gc", "--quiet", "--aggressive"]


def _redis(_: int) -> list[str]:
    socket = _folder() / "redis.sock"
    return [str(shutil.which("redis-server")), "--port", "0", "--unixsocket", str(socket),
            "--save", "", "--appendonly", "no", "--dir", str(_folder()), "--loglevel", "warning"]


REAL = {
    "real:redis": Real((("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")), _redis),
    "real:sqlite3": Real((("sqlite3", "sqlite3"),), _sqlite),
    "real:python3": Real((("/usr/bin/python3", "python3"),), _python, (("PYTHONMALLOC", "malloc"),)),
    "real:gcc": Real((("gcc", "gcc"),), _gcc),
    "real:git_gc": Real((("git", "git"),), _git),
}


def present(cases: list[Case]) -> tuple[list[Case], list[str]]:
    """(cases whose programs are installed, one line per skipped case naming the package)."""
    kept, missing = [], []
    for case in cases:
        lacking = [
            package
            for program, package in (REAL[case.program].needs if case.is_real else ())
            if not shutil.which(program)
        ]
        if lacking:
            missing.append(f"skipped {case.name}: install the package {lacking[0]}")
        else:
            kept.append(case)
    return kept, missing


def run(case: Case, argument: str, allocator: Allocator, sample, launch) -> None:
    """Fills `sample` from one run; the metric is wall seconds, or requests per second for redis."""
    real = REAL[case.program]
    count = int(argument)
    dressed = replace(allocator, env={**allocator.env, **dict(real.env)})
    command = real.command(count)
    if case.program == "real:redis":
        _run_redis(command, count, dressed, sample, launch)
        return
    sample.output, sample.resources, sample.trace, sample.error = launch(command, dressed)
    sample.metrics = {"wall_s": sample.resources.get("wall_s", 0.0)}


def _run_redis(command: list[str], count: int, allocator: Allocator, sample, launch) -> None:
    """The server runs under the allocator; the load generator always on the system's malloc."""
    socket = Path(command[command.index("--unixsocket") + 1])
    socket.unlink(missing_ok=True)
    deadline = time.monotonic() + 10
    tools = {"capture_output": True, "text": True, "env": BASE_ENV, "check": False}
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(launch, command, allocator)
        try:
            while not socket.exists() and not server.done() and time.monotonic() < deadline:
                time.sleep(0.01)
            load = subprocess.run(
                ["redis-benchmark", "-s", str(socket), "-q", "--csv", "-t", "set,get,lpush,spop,hset",
                 "-n", str(count), "-r", "100000", "-d", "100", "-P", "16"], **tools)
        finally:  # the thread that waits for the server would keep an interrupted tool from ending
            subprocess.run(["redis-cli", "-s", str(socket), "shutdown", "nosave"], **tools)
    sample.output, sample.resources, sample.trace, sample.error = server.result()
    sample.output += load.stdout
    rates = [float(line.split(",")[1].strip('"')) for line in load.stdout.splitlines()
             if line.startswith('"') and line.split(",")[1].strip('"')[:1].isdigit()]
    if not sample.error and not rates:
        sample.error = f"redis-benchmark gave no rates: {load.stderr.strip()[:200]}"
    # Equal weight for each command: the harmonic mean of their rates.
    sample.metrics = {"ops/s": len(rates) / sum(1 / r for r in rates)} if rates else {}

