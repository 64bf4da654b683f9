#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts what one warm malloc and free hit executes and compares it with fast_path.golden.

Called by: bazel test //hz3/hot:fast_path_test. After a deliberate change, write the golden file anew by
  bazel run //hz3/hot:fast_path_test -- --update
Needs: fast_path_probe (which executes the hit step by step), libhz3_LANE.so of every lane but `checked`, which has no fast path, objdump.
How it counts: from the jump in the caller's PLT to the return, both included. Loads and stores are those of memory
  operands, and those that push, pop, call and ret make on the stack.
Invariant: the golden figures hold for the compiler that the file names; the budgets below for every compiler.
"""

import os
import re
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "fast_path.golden")
PROBE = os.path.join(HERE, "fast_path_probe")
LANES = ["fast", "scale", "tiny"]
CALLS = [("malloc", 64), ("malloc", 32768), ("free", 64), ("free", 32768), ("new", 64), ("delete", 64)]
COUNTS = ["instructions", "loads", "stores", "branches", "calls", "locked"]
UNMAPPED = "objdump has no instruction at %s+%#x"

# At most so much in the lanes that are meant to be fast.
BUDGET_LANES = ["fast", "scale"]
BUDGETS = {
    "malloc": {"instructions": 20, "loads": 8, "stores": 2, "calls": 0, "locked": 0},
    "free": {"instructions": 44, "loads": 15, "stores": 5, "calls": 0, "locked": 0},
}
BUDGETS["new"] = BUDGETS["malloc"]
BUDGETS["delete"] = BUDGETS["free"]

# Instructions that write their last operand without reading it, or read it only.
WRITE_ONLY = re.compile(r"^(mov|set|cmov|vmov|stos|movap|movup|movdq)")
READ_ONLY = re.compile(r"^(cmp(?!xchg)|test|bt[bwlq]?$|ucomis|comis|ptest|vptest)")


def library(lane):
    return os.path.join(HERE, os.pardir, "libhz3_%s.so" % lane)


def disassemble(path):
    """{offset: instruction text}"""
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", "-M", "suffix", path], check=True,
                          stdout=subprocess.PIPE, text=True).stdout
    found = re.findall(r"^ *([0-9a-f]+):\t([^#\n]+)", text, re.MULTILINE)
    return {int(offset, 16): " ".join(instruction.split()) for offset, instruction in found}


def split_operands(text):
    """Splits at commas outside of parentheses."""
    return re.findall(r"(?:[^,(]|\([^)]*\))+", text)


def is_memory(operand):
    return "(" in operand or operand.startswith("%fs:") or re.match(r"^\*?0x[0-9a-f]+$", operand) is not None


def classify(instruction):
    """The counts of one instruction."""
    counts = dict.fromkeys(COUNTS, 0)
    counts["instructions"] = 1
    words = instruction.split()
    while words[0] in ("lock", "rep", "repz", "repnz", "bnd", "notrack", "data16", "cs", "xacquire", "xrelease"):
        counts["locked"] += words.pop(0) == "lock"
    name, operands = words[0], split_operands(" ".join(words[1:]))
    if name.startswith("j"):
        counts["branches"] = 1
        counts["loads"] = int(bool(operands) and operands[0].startswith("*") and is_memory(operands[0]))
    elif name.startswith("call"):
        counts["calls"] = counts["stores"] = 1
        counts["loads"] = int(operands[0].startswith("*") and is_memory(operands[0]))
    elif name.startswith("ret"):
        counts["loads"] = 1
    elif name.startswith(("push", "pop")):
        counts["stores" if name.startswith("push") else "loads"] += 1
    elif not name.startswith(("lea", "nop", "endbr", "prefetch")) and any(map(is_memory, operands)):
        to_memory = is_memory(operands[-1])
        if name.startswith("xchg"):
            counts["locked"] = 1
        counts["loads"] += int(not (to_memory and WRITE_ONLY.match(name)))
        counts["stores"] += int(to_memory and not READ_ONLY.match(name))
    return counts


def run_probe(lane, what, size, *more):
    environment = dict(os.environ, LD_PRELOAD=library(lane), LD_BIND_NOW="1")
    return subprocess.run([PROBE, what, str(size), *more], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)


def steps_of(lane, what, size):
    """[(module, offset)] from the PLT to the return."""
    run = run_probe(lane, what, size)
    if run.returncode != 0:
        raise RuntimeError("fast_path_probe %s %d in lane %s failed: %s" % (what, size, lane, run.stderr))
    steps = [(line.split()[0], int(line.split()[1], 16)) for line in run.stdout.splitlines()]
    inside = [number for number, step in enumerate(steps) if step[0] != "program"]
    return steps[:inside[-1] + 1]


class Lane:
    """The figures of one lane's library."""

    def __init__(self, name):
        self.name = name
        self.modules = {"program": disassemble(PROBE)}
        path = library(name)
        with open(path, "rb") as file:
            found = re.search(rb"hz3 build: [ -~]*", file.read())
        self.build = found.group(0).decode()
        self.rows = [self.row(what, size) for what, size in CALLS]

    def row(self, what, size):
        total = dict.fromkeys(COUNTS, 0)
        for module, offset in steps_of(self.name, what, size):
            if module not in self.modules:
                self.modules[module] = disassemble(module)
            if offset not in self.modules[module]:
                raise RuntimeError(UNMAPPED % (module, offset))
            for key, value in classify(self.modules[module][offset]).items():
                total[key] += value
        total["object"] = "untouched" if run_probe(self.name, what, size, "untouched").returncode == 0 else "touched"
        return "%s %s(%d): %s" % (self.name, what, size, " ".join("%s=%s" % item for item in total.items()))

    def compiler(self):
        """`gcc 12` of `compiler=gcc 12.2.0`."""
        return re.search(r"compiler=(\w+ \d+)", self.build).group(1)

    def is_plain(self):
        return " overridden=none lto=off " in self.build


def is_instrumented():
    symbols = subprocess.run(["objdump", "-T", library("fast")], check=True, stdout=subprocess.PIPE, text=True).stdout
    return re.search(r"__(asan|tsan|ubsan|gcov|llvm_gcov)_|__sanitizer_", symbols) is not None


def golden_text(lanes):
    head = ["# What one warm hit executes, from the PLT jump to the return: see fast_path_test.py.",
            "# compiler: " + lanes[0].compiler()]
    return "\n".join(head + [row for lane in lanes for row in lane.rows]) + "\n"


class FastPathTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lanes = [Lane(name) for name in LANES]

    def test_golden(self):
        with open(GOLDEN) as file:
            golden = file.read()
        if "# compiler: %s\n" % self.lanes[0].compiler() not in golden:
            self.skipTest("the golden file is for another compiler than " + self.lanes[0].compiler())
        if not all(lane.is_plain() for lane in self.lanes):
            self.skipTest("the golden file is for the lanes as they are, without options")
        self.maxDiff = None
        self.assertEqual(golden_text(self.lanes), golden, "after a deliberate change: "
                         "bazel run //hz3/hot:fast_path_test -- --update")

    def test_budgets(self):
        for lane in self.lanes:
            for row in lane.rows if lane.name in BUDGET_LANES else []:
                self.assertIn("object=untouched", row)
                counts = dict(re.findall(r"(\w+)=(\d+)", row))
                for key, most in BUDGETS[row.split()[1].split("(")[0]].items():
                    self.assertLessEqual(int(counts[key]), most, "%s in: %s" % (key, row))

    def test_frees_in_even_steps_prefetch_ahead(self):
        # Sixteen of 4,096 bytes would be in the next slice, which may be another thread's.
        for size, expected in ((64, ["16", "-16", "0"]), (4096, ["0", "0", "0"])):
            for lane in BUDGET_LANES:
                for what in ("free", "delete"):
                    run = run_probe(lane, what, size, "ahead")
                    self.assertEqual(run.stdout.splitlines(), expected, "%s %s(%d) %s" % (lane, what, size, run.stderr))

    def test_both_sizes_take_one_path(self):
        for lane in self.lanes:
            for what in ("malloc", "free"):
                rows = [row.split(": ")[1] for row in lane.rows if row.startswith("%s %s(" % (lane.name, what))]
                if lane.name in BUDGET_LANES:
                    self.assertEqual(len(set(rows)), 1, rows)


class ClassifyTest(unittest.TestCase):
    """The counting itself."""

    def check(self, instruction, **expected):
        counts = {key: value for key, value in classify(instruction).items() if value and key != "instructions"}
        self.assertEqual(counts, expected, instruction)

    def test_instructions(self):
        self.check("movq %fs:(%rax),%rax", loads=1)
        self.check("movzwl (%rcx,%rdx,2),%edx", loads=1)
        self.check("movq %rcx,0x8(%rdx)", stores=1)
        self.check("addq 0xd886(%rip),%rax", loads=1)
        self.check("addq %rax,0x8(%rdx)", loads=1, stores=1)
        self.check("cmpq 0x10(%rax),%rdx", loads=1)
        self.check("cmpq $0x0,(%rax)", loads=1)
        self.check("cmpq %rdx,0x10(%rax)", loads=1)
        self.check("leaq 0x815c(%rip),%rcx")
        self.check("nopl 0x0(%rax)")
        self.check("subq $0x8,%rdx")
        self.check("jmpq *0x2f5a(%rip)", loads=1, branches=1)
        self.check("bnd jmpq *0x2f5a(%rip)", loads=1, branches=1)
        self.check("jmpq *%rax", branches=1)
        self.check("je 16e0 <malloc.cold>", branches=1)
        self.check("callq 16e0 <malloc.cold>", calls=1, stores=1)
        self.check("retq", loads=1)
        self.check("pushq %rbx", stores=1)
        self.check("popq %rbx", loads=1)
        self.check("lock cmpxchgq %rcx,(%rdx)", loads=1, stores=1, locked=1)
        self.check("xchgl %eax,(%rdx)", loads=1, stores=1, locked=1)
        self.check("xchgw %ax,%ax")
        self.check("movups %xmm0,(%rax)", stores=1)


def main():
    if is_instrumented():
        print("skipped: the library is instrumented, its counts mean nothing")
        return
    if sys.argv[1:] == ["--update"]:
        path = os.path.join(os.environ["BUILD_WORKSPACE_DIRECTORY"], "hz3", "hot", "fast_path.golden")
        with open(path, "w") as file:
            file.write(golden_text([Lane(name) for name in LANES]))
        print("wrote " + path)
        return
    unittest.main()


if __name__ == "__main__":
    main()
