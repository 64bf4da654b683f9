# SPDX-License-Identifier: Apache-2.0
# One side of a comparison: a folder, an environment, a time limit, and no process left behind.
# Called by: acceptance_test.py and the lists of cases.
# Invariant: both sides of a case run at the same path with the same environment but LD_PRELOAD,
# and when a side is over, every process that it started is dead, daemons included.
"""Runs programs under a time limit and ends all of them."""

import collections
import ctypes
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import typing

PR_SET_CHILD_SUBREAPER = 36
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Observed = collections.namedtuple("Observed", ["healthy", "text"])


@dataclasses.dataclass(frozen=True)
class Case:
    """`run` takes a Side; it returns a text to compare, or a dictionary of name to Observed for parts of their own."""

    name: str
    needs: typing.Tuple[typing.Tuple[str, str], ...]
    run: typing.Callable
    limit: int = 120
    # PostgreSQL does not run as root.
    unprivileged: bool = False


class Broken(Exception):
    """The program did not work."""


def find(program):
    """The path of a program; the newest of them for a pattern such as a folder with a version."""
    if "*" in program:
        found = sorted(pathlib.Path("/").glob(program.lstrip("/")))
        return str(found[-1]) if found else None
    return shutil.which(program, path=SYSTEM_FOLDERS)


def is_there(program):
    return find(program) is not None


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def takes_preload(path, library):
    listed = subprocess.run(["ldd", path], env={"LD_PRELOAD": str(library), "PATH": SYSTEM_FOLDERS}, check=False,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    return str(library) in listed.stdout


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def adopt_orphans():
    """Daemons become children of this process, so that they are found; an end by SIGTERM ends them too."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def descendants():
    parents = {}
    for entry in os.listdir("/proc"):
        try:
            with open("/proc/%s/stat" % entry, "rb") as stat:
                parents[int(entry)] = int(stat.read().rpartition(b")")[2].split()[1])
        except (ValueError, OSError):
            continue
    found, look = set(), {os.getpid()}
    while look:
        look = {pid for pid, parent in parents.items() if parent in look} - found
        found |= look
    return found


def end_descendants():
    """Kills until there are none: one that was just forked is found the next time."""
    for _ in range(1000):
        pids = descendants()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)
    raise RuntimeError("processes do not die: %s" % sorted(descendants()))


class Side:
    """What a case is given to run its program with."""

    def __init__(self, folder, library, limit, as_nobody):
        self.folder = folder
        self.library = library
        self.deadline = time.monotonic() + limit
        self.limit = limit
        # Equal for both sides but for the preload; no settings of the user reach the programs.
        self.env = {"HOME": str(folder), "PATH": SYSTEM_FOLDERS, "LC_ALL": "C", "TZ": "UTC", "TMPDIR": str(folder),
                    "GIT_CONFIG_NOSYSTEM": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if library:
            self.env["LD_PRELOAD"] = str(library)
        self.identity = {"user": 65534, "group": 65534, "extra_groups": []} if as_nobody else {}

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def popen(self, arguments, **options):
        return subprocess.Popen(arguments, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL,
                                start_new_session=True, **self.identity, **options)

    def run(self, arguments, expect=0):
        """Output and errors of a program that must end in time with the expected status."""
        output_path = self.folder / ".output"
        with open(output_path, "wb") as output:
            process = self.popen(arguments, stdout=output, stderr=subprocess.STDOUT)
            try:
                status = process.wait(timeout=max(1, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = "none within %d s" % self.limit
        text = output_path.read_text(errors="replace")
        output_path.unlink()
        if status != expect:
            raise Broken("%s: exit status %s\n%s" % (" ".join(arguments)[:200], status, text[-3000:]))
        return text

    def shell(self, command):
        return self.run(["bash", "-euo", "pipefail", "-c", command])

    def serve(self, arguments, ready):
        """Starts a server and waits until `ready()`; the library must be in its memory."""
        log = open(self.folder / "server.log", "ab")
        server = self.popen(arguments, stdout=log, stderr=subprocess.STDOUT)
        log.close()
        while not ready():
            if server.poll() is not None or time.monotonic() > self.deadline:
                log_text = (self.folder / "server.log").read_text(errors="replace")
                raise Broken("%s did not start: %s" % (arguments[0], log_text[-2000:]))
            time.sleep(0.05)
        if self.library and self.library.name not in pathlib.Path("/proc/%d/maps" % server.pid).read_text():
            raise Broken("the library is not loaded into " + arguments[0])
        return server

    def stop(self, server, signal_number):
        server.send_signal(signal_number)
        try:
            status = server.wait(timeout=max(1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = "none within %d s" % self.limit
        if status != 0:
            log_text = (self.folder / "server.log").read_text(errors="replace")
            raise Broken("server: exit status %s\n%s" % (status, log_text[-2000:]))

    def accepts(self, port):
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0


def observe(case, work, library):
    """Runs one side of a case in a fresh folder; a dictionary of part to Observed."""
    folder = work / "run"
    folder.mkdir()
    as_nobody = case.unprivileged and os.getuid() == 0
    if as_nobody:
        os.chown(folder, 65534, 65534)
    try:
        result = case.run(Side(folder, library, case.limit, as_nobody))
        return result if isinstance(result, dict) else {"": Observed(True, result)}
    except Broken as error:
        return {"": Observed(False, str(error))}
    finally:
        end_descendants()
        shutil.rmtree(folder)
