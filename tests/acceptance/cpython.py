# SPDX-License-Identifier: Apache-2.0
# Part of CPython's own test suite, on its own small-object allocator and on malloc for everything.
# Called by: acceptance_test.py.
# Invariant: one case for each test module; its result is how it ended, and how each of its tests.
"""CPython's test suite, as cases."""

import re
import sys
import xml.etree.ElementTree as ElementTree

from runner import Broken, Case, Observed

# What depends on nothing but the interpreter: no network, no terminal, no locale.
MODULES = (
    "test_array test_ast test_bisect test_bytes test_bz2 test_collections test_compile test_coroutines test_copy "
    "test_csv test_ctypes test_datetime test_decimal test_deque test_dict test_enumerate test_exceptions test_float "
    "test_fork1 test_format test_functools test_generators test_hashlib test_heapq test_index test_iter "
    "test_itertools test_json test_list test_long test_lzma test_memoryview test_mmap test_ordered_dict test_pickle "
    "test_queue test_random test_re test_set test_slice test_sort test_string test_struct test_thread "
    "test_threadedtempfile test_threading test_tokenize test_tuple test_unicode test_userdict test_weakref "
    "test_xml_etree test_xml_etree_c test_zlib").split()

PACKAGE = "libpython%d.%d-testsuite" % sys.version_info[:2]
# A pattern, for it is no program but a file.
NEEDS = (("/usr/lib/python%d.%d/test/test_dic*.py" % sys.version_info[:2], PACKAGE),
         ("/usr/bin/python3.[0-9]*[0-9]", "python3"))


def outcome(case):
    for tag in ("failure", "error", "skipped"):
        if case.find(tag) is not None:
            return tag
    return case.get("result", "?")


def tests_by_module(report):
    """From the suite's own report: which tests ran in each module, and how they ended."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # "test.test_json.test_dump.TestCDump.test_dump" is of test_json.
        module = (case.get("name", "") + ".").split(".")[1]
        found.setdefault(module, set()).add("%s: %s" % (case.get("name"), outcome(case)))
    return found


def suite(malloc):
    def run(side):
        side.env["PYTHONMALLOC"] = malloc
        report = side.folder / "report.xml"
        # Status 2 says that tests failed: which ones is what is compared.
        text = side.shell("/usr/bin/python3 -m test -j2 --timeout 200 --junit-xml=%s %s || [ $? = 2 ]"
                          % (report, " ".join(MODULES)))
        # "0:00:07 load avg: 0.94 [6/7/1] test_fork1 passed (1 min 2 sec)"
        endings = dict(re.findall(r"load avg: \S+ \[[\d/ ]+\] (\w+) ([a-z ]+)", text))
        if not report.exists():
            raise Broken("no report\n" + text[-3000:])
        tests = tests_by_module(report)
        return {module: Observed(ending.strip() == "passed",
                                 "\n".join([ending.strip()] + sorted(tests.get(module, ()))))
                for module, ending in endings.items()}
    return run


CASES = [Case("cpython", NEEDS, suite("default"), limit=300),
         Case("cpython_on_malloc", NEEDS, suite("malloc"), limit=400)]
