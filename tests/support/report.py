# SPDX-License-Identifier: Apache-2.0
# The report of a test whose cases are programs: what tools/stages.py counts.
# Called by: acceptance_test.py, machine_test.py.
"""Counts the cases, and writes the XML that Bazel keeps of a test."""

import os
import xml.etree.ElementTree as ElementTree


def finish(suite_name, rows):
    """Reports rows of (name, outcome, text, seconds), outcome one of passed, failed, skipped; returns the exit status."""
    write_xml(suite_name, rows)
    counts = {outcome: sum(row[1] == outcome for row in rows) for outcome in ("passed", "failed", "skipped")}
    print("%(skipped)d skipped\n%(passed)d passed, %(failed)d failed" % counts)
    return 1 if counts["failed"] else 0


def write_xml(suite_name, rows):
    """The rows to $XML_OUTPUT_FILE, if set."""
    if not os.environ.get("XML_OUTPUT_FILE"):
        return
    suite = ElementTree.Element("testsuite", name=suite_name, tests=str(len(rows)))
    for name, outcome, text, seconds in rows:
        case = ElementTree.SubElement(suite, "testcase", name=name, classname=suite_name, time="%.1f" % seconds)
        if outcome == "failed":
            # XML knows no control characters.
            clean = "".join(c for c in text if c >= " " or c in "\n\t")
            ElementTree.SubElement(case, "failure", message=clean[:200]).text = clean
        if outcome == "skipped":
            ElementTree.SubElement(case, "skipped", message=text)
    document = ElementTree.Element("testsuites")
    document.append(suite)
    ElementTree.ElementTree(document).write(os.environ["XML_OUTPUT_FILE"], encoding="utf-8", xml_declaration=True)
