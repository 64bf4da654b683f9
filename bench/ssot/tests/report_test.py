# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: no console message, every plot drawn, both themes, phone width.

Needs: Debian's chromium for the browser part; it is skipped with that name when missing.
"""

import json
import re
import shutil
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

from bench.ssot import plots, report, results
from bench.ssot.tests import fixture

PLOTS = ["forest-1", "forest-2", "forest-3", "forest-4", "heat-map", "scatter", "scaling", "traces",
         "latency"]
# Leaves what the browser made of the page in the page itself, where --dump-dom shows it.
PROBE = """<script>
const boxes = [...document.querySelectorAll("figure[id] svg")].map(s => {
  const b = s.getBoundingClientRect(); return [s.closest("figure").id, b.width, b.height]; });
document.body.dataset.probe = JSON.stringify({boxes,
  wide: document.documentElement.scrollWidth - window.innerWidth,
  paper: getComputedStyle(document.body).backgroundColor});
</script>"""


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = Path(cls.temporary.name)
        report.write(cls.folder, fixture.result(cls.folder))
        cls.html = (cls.folder / "report.html").read_text()

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def test_it_is_one_file_that_loads_nothing(self):
        loaded = re.findall(r'(?:src|href)="([^"#]+)"', self.html)
        self.assertEqual([x for x in loaded if not x.startswith("data:")], [])
        self.assertNotIn("@import", self.html)
        self.assertNotIn("<script", self.html)

    def test_ids_are_unique(self):
        ids = re.findall(r'\bid="([^"]+)"', self.html)
        self.assertEqual(len(ids), len(set(ids)))

    def test_text_from_results_is_escaped(self):
        self.assertIn("a note &lt;with&gt; markup", self.html)

    def test_markdown_has_one_row_per_cell_and_the_verdicts(self):
        text = (self.folder / "report.md").read_text()
        result = json.loads((self.folder / "results.json").read_text())
        rows = re.findall(r"^\| [\w/]+ \| hz3-(?:fast|scale) \|", text, re.M)
        self.assertEqual(len(rows), 2 * len(result["cases"]))
        self.assertIn("WIN", text)
        self.assertIn("A/A control: **TIE**", text)

    def test_first_of_all_it_says_who_is_fast_and_who_is_lean(self):
        found = results.standings(json.loads((self.folder / "results.json").read_text()))
        self.assertGreater(len(found), 2)
        self.assertEqual(found, sorted(found, key=lambda s: s["time"]))
        rows = [f"| {s['allocator']} | {s['time']:.2f}× | {s['rss']:.2f}× |" for s in found]
        text = (self.folder / "report.md").read_text()
        self.assertIn("\n".join(rows), text)
        self.assertLess(text.index(rows[0]), text.index("subject ÷ peer"))
        self.assertLess(self.html.index("<h2>Standings</h2>"), self.html.index("<h2>Ratios</h2>"))

    def test_standings_are_multiples_of_the_best_of_each_case(self):
        def cell(case, name, rate, rss, error=""):
            return {"case": case, "allocator": name, "rate": rate, "peak_rss_kib": rss, "error": error}

        made = {
            "allocators": [{"name": "slow", "role": "subject"}, {"name": "fast", "role": "peer"},
                           {"name": "null", "role": "floor"}],
            "cells": [cell("one", "slow", 10.0, 100), cell("one", "fast", 20.0, 400), cell("one", "null", 99.0, 1),
                      cell("two", "slow", 8.0, 300), cell("two", "fast", 1.0, 300),
                      cell("three", "slow", 1.0, 1, "crashed"), cell("three", "fast", 1.0, 9)],
        }
        fast, slow = sorted(results.standings(made), key=lambda s: s["allocator"])
        self.assertEqual(slow["points"], [(2.0, 1.0), (1.0, 1.0)])
        self.assertEqual(fast["points"], [(1.0, 4.0), (8.0, 1.0), (1.0, 1.0)])
        self.assertAlmostEqual(slow["time"], 2**0.5)
        self.assertAlmostEqual(fast["rss"], 4 ** (1 / 3))
        self.assertEqual([s["allocator"] for s in results.standings(made)], ["slow", "fast"])

    def test_pictures_stand_alone(self):
        for name in report.IN_DOCUMENTS:
            text = (self.folder / f"{name}.svg").read_text()
            self.assertEqual(xml.etree.ElementTree.fromstring(text).tag, "{http://www.w3.org/2000/svg}svg")
            used = set(re.findall(r"var\((--\w+)\)", text))
            self.assertLess(used, set(re.findall(r"(--\w+):", text)), name)

    def test_labels_keep_their_digits(self):
        steps = [(label, ratio, ratio - 0.001, ratio + 0.001) for label, ratio in (("a", 1.001), ("b", 1.004), ("c", 1.007))]
        labels = re.findall(r">(\d\.\d+)</text>", plots.history({"guard": steps}, {}))
        self.assertGreater(len(labels), 2)
        self.assertEqual(len(labels), len(set(labels)), labels)

    def _browse(self, width: int, *flags: str) -> dict:
        page = self.folder / f"probe{width}{len(flags)}.html"
        page.write_text(self.html.replace("</body>", PROBE + "</body>"))
        done = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             f"--user-data-dir={self.folder}/profile", "--enable-logging=stderr",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},900", *flags,
             "--dump-dom", page.as_uri()],
            capture_output=True, text=True, timeout=200, check=False,
            start_new_session=True,
        )
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        self.assertEqual(console, [])
        probe = re.search(r'data-probe="([^"]+)"', done.stdout)
        self.assertIsNotNone(probe, done.stderr[-2000:])
        return json.loads(probe[1].replace("&quot;", '"'))

    @unittest.skipUnless(shutil.which("chromium"), "install the package chromium")
    def test_every_plot_is_drawn_on_a_desk_and_on_a_phone(self):
        for width in (1280, 500):
            probe = self._browse(width)
            drawn = {name: (w, h) for name, w, h in probe["boxes"]}
            self.assertEqual(sorted(drawn), sorted(PLOTS))
            for name, (w, h) in drawn.items():
                self.assertGreater(min(w, h), 150, name)
            self.assertLessEqual(probe["wide"], 0, "the page scrolls sideways")

    @unittest.skipUnless(shutil.which("chromium"), "install the package chromium")
    def test_dark_theme_is_dark(self):
        light = self._browse(1000)["paper"]
        dark = self._browse(1001, "--blink-settings=preferredColorScheme=0")["paper"]
        self.assertGreater(min(map(int, re.findall(r"\d+", light))), 200)
        self.assertLess(max(map(int, re.findall(r"\d+", dark))), 60)


if __name__ == "__main__":
    unittest.main()
