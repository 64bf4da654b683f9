# SPDX-License-Identifier: Apache-2.0
# Limits that only the kernel can set for a whole machine or a group: strict overcommit, memory cgroups.
# Called by: machine_test.py.
# Needs: the right to set them, which is root's; else Unavailable says what is missing.
# Invariant: whatever ends this process, what was changed is undone, by a process that waits for that alone.
"""Strict overcommit and a memory cgroup, for the time of a with statement."""

import contextlib
import errno
import os
import pathlib
import select
import signal
import time

VM = pathlib.Path("/proc/sys/vm")
# How much more than a vast process (vast.c) any other may commit: a 32nd of the address space of the former.
OTHERS_KIB = 2 << 30
LONGEST_S = 600


class Unavailable(Exception):
    """This machine or user cannot set the limit; the text says why."""


@contextlib.contextmanager
def undoing(undo):
    """Runs `undo` at the end, also if this process is killed before: in a process of its own, in a group of its own."""
    reader, writer = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.close(writer)
            select.select([reader], [], [], LONGEST_S)  # until nobody has the other end any more
            undo()
            status = 0
        finally:
            os._exit(status)
    os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        if os.waitpid(keeper, 0)[1] != 0:
            raise RuntimeError("a limit of this machine could not be undone")


# ---- strict overcommit ----

def read_vm(name):
    return int((VM / name).read_text())


def write_vm(name, value):
    (VM / name).write_text("%d\n" % value)


def overcommit_settings():
    return {name: read_vm(name) for name in
            ("overcommit_memory", "overcommit_kbytes", "overcommit_ratio", "user_reserve_kbytes")}


def restore_overcommit(former):
    write_vm("overcommit_memory", former["overcommit_memory"])
    write_vm("user_reserve_kbytes", former["user_reserve_kbytes"])
    # Each of the two sets the other to 0.
    name = "overcommit_kbytes" if former["overcommit_kbytes"] else "overcommit_ratio"
    write_vm(name, former[name])


def committed_kib():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Committed_AS:"):
            return int(line.split()[1])
    raise Unavailable("/proc/meminfo has no Committed_AS")


@contextlib.contextmanager
def strict_overcommit(mebibytes):
    """vm.overcommit_memory=2, where vast processes may commit so much together, and all others 2 TiB more."""
    names = ("overcommit_memory", "overcommit_kbytes", "user_reserve_kbytes")
    barred = [str(VM / name) for name in names if not os.access(str(VM / name), os.W_OK)]
    if barred:
        raise Unavailable("needs root, and not in a container: cannot write " + ", ".join(barred))
    former = overcommit_settings()
    with undoing(lambda: restore_overcommit(former)):
        write_vm("user_reserve_kbytes", OTHERS_KIB)
        write_vm("overcommit_kbytes", committed_kib() + OTHERS_KIB + mebibytes * 1024)
        write_vm("overcommit_memory", 2)
        yield
    if overcommit_settings() != former:
        raise RuntimeError("overcommit: %s before, %s now" % (former, overcommit_settings()))


# ---- memory cgroups ----

def own_path(controller):
    """The path of this process in the hierarchy of a controller, "" for the unified one; None if there is no such."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return None


def mounts(kind):
    lines = [line.split() for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
    return [(pathlib.Path(fields[1]), fields[3].split(",")) for fields in lines if fields[2] == kind]


def parent_group():
    """The folder in which a group with a limit of its own can be made, and its files: limit, swap, both optional."""
    for folder, options in mounts("cgroup"):
        if "memory" in options and own_path("memory") is not None:
            return folder / own_path("memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    for folder, _ in mounts("cgroup2"):
        place = folder / (own_path("") or "")
        # Groups with processes of their own cannot have limited children; the next one above that has such already can.
        for candidate in [place, *place.parents]:
            delegated = candidate / "cgroup.subtree_control"
            if delegated.is_file() and "memory" in delegated.read_text().split():
                return candidate, "memory.max", "memory.swap.max"
            if candidate == folder:
                break
    raise Unavailable("no hierarchy of cgroups with a memory controller that is delegated to this user is mounted")


def remove_group(group):
    for _ in range(50):
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.1)
    raise RuntimeError("%s does not empty" % group)


@contextlib.contextmanager
def memory_cgroup(mebibytes):
    """A group with this limit and no swap; yields what a child calls before exec to get into it."""
    parent, limit, swap = parent_group()
    group = parent / ("hz3_scarcity_%d" % os.getpid())
    try:
        group.mkdir()
    except OSError as error:
        raise Unavailable("needs root, or a delegated group: mkdir below %s: %s" % (parent, error.strerror))
    with undoing(lambda: remove_group(group)):
        (group / limit).write_text("%d" % (mebibytes << 20))
        if (group / swap).exists():
            (group / swap).write_text("0" if swap == "memory.swap.max" else "%d" % (mebibytes << 20))
        procs = os.open(str(group / "cgroup.procs"), os.O_WRONLY)
        try:
            yield lambda: os.write(procs, b"0")
        finally:
            os.close(procs)
    if group.exists():
        raise RuntimeError("%s was not removed" % group)
