# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, as inline SVG whose colours follow the page's theme.

Called by: history, report, sweep. Owns: the colour names that the page's style sheet defines.
Each function takes the content of results.json and returns SVG text, or '' when there is
nothing to draw. Colours are drawn as stand-ins and then replaced by CSS variables, because
matplotlib can only write fixed ones.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator  # noqa: E402
import numpy as np  # noqa: E402

from bench.ssot import results, stats  # noqa: E402

_THEME = {
    name: f"#ab10{i:02x}"
    for i, name in enumerate(("ink", "muted", "grid", "win", "loss", "tie", "paper"))
}
_SERIES = [f"#ab20{i:02x}" for i in range(10)]  # two lanes and eight peers
MARKERS = "osD^vP*Xp<"

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "ssot",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _THEME["muted"],
        "axes.labelcolor": _THEME["muted"],
        "axes.titlecolor": _THEME["ink"],
        "axes.titlesize": 12,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _THEME["grid"],
        "grid.linewidth": 0.8,
        "xtick.color": _THEME["muted"],
        "ytick.color": _THEME["muted"],
        "xtick.labelcolor": _THEME["ink"],
        "ytick.labelcolor": _THEME["ink"],
        "text.color": _THEME["ink"],
        "legend.frameon": False,
        "legend.labelcolor": _THEME["ink"],
        "lines.linewidth": 2.0,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
)


def _svg(figure: Figure, label: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.05,
                   metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = buffer.getvalue()[buffer.getvalue().index("<svg"):]
    for name, stand_in in _THEME.items():
        text = text.replace(stand_in, f"var(--{name})")
    for i, stand_in in enumerate(_SERIES):
        text = text.replace(stand_in, f"var(--s{i})")
    # Ids must be unique in the page, sizes must come from it, and so must the font.
    prefix = re.sub(r"\W+", "-", label) + "-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", text)
    text = re.sub(r"font: (\d+\.?\d*)px [^;\"]*", r"font-size: \1px", text)
    # A hundredth of a point is fine enough; what is written between the tags stays.
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt" viewBox="([^"]+)"[^>]*>',
                  rf'<svg role="img" aria-label="{label}" viewBox="\3" '
                  r'style="max-width:calc(\1px * 1.34)">', text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)


def _ratio_axis(axis, low: float, high: float) -> None:
    axis.set_xscale("log")
    span = max(1 / low, high)
    low, high = min(low / 1.05, 1 / 1.12), max(high * 1.05, 1.12)
    if span < 2.2:
        near = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2]
    elif span < 12:
        near = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    else:
        near = [0.01, 0.1, 1, 10, 100]
    axis.set_xlim(low, high)
    axis.xaxis.set_major_locator(matplotlib.ticker.FixedLocator([t for t in near if low < t < high]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.axvline(1.0, color=_THEME["ink"], linewidth=1.2)


VERDICT_MARK = {"WIN": ("win", "^"), "LOSS": ("loss", "v"), "TIE": ("tie", "o"), "FEW": ("tie", "x")}


def forest(result: dict, subject: str, peer: str) -> str:
    """Ratios of one pair with their 95 % intervals, best on top, below the geometric mean,
    as wide as its spread over the cases."""
    rows = [c for c in result["comparisons"] if (c["subject"], c["peer"]) == (subject, peer)]
    rows.sort(key=lambda c: c["ratio"])
    means = [m for m in result["geometric_means"] if (m["subject"], m["peer"]) == (subject, peer)]
    if not rows or not means:
        return ""
    mean = means[0]
    figure, axis = plt.subplots(figsize=(6.6, 0.27 * len(rows) + 1.2))
    for y, c in enumerate(rows):
        name, marker = VERDICT_MARK[c["verdict"]]
        axis.plot([c["low"], c["high"]], [y, y], color=_THEME[name], linewidth=2.2)
        axis.plot(c["ratio"], y, marker, color=_THEME[name], markersize=7)
    if len(rows) >= stats.MIN_CASES:
        width = [mean["low"], mean["ratio"], mean["high"], mean["ratio"]]
        axis.fill(width, [-1.4, -1.05, -1.4, -1.75], color=_THEME["ink"])
    else:
        axis.plot(mean["ratio"], -1.4, "D", color=_THEME["ink"], markersize=7)
    labels = ["geometric mean", *(c["case"] for c in rows)]
    axis.set_yticks([-1.4, *range(len(rows))], labels)
    axis.set_ylim(-2.1, len(rows) - 0.4)
    axis.grid(axis="y", visible=False)
    _ratio_axis(axis, min(c["low"] for c in rows), max(c["high"] for c in rows))
    axis.set_xlabel(f"{subject} ÷ {peer}: right of 1 the subject is faster")
    return _svg(figure, f"forest {subject} {peer}")


def _style(names: list[str], name: str) -> tuple[str, str]:
    i = names.index(name)
    return _SERIES[i % len(_SERIES)], MARKERS[i % len(MARKERS)]


def scatter(result: dict) -> str:
    """Time per op against peak RSS, each relative to the best allocator of the case."""
    names = results.compared(result)
    found = sorted(results.standings(result), key=lambda s: names.index(s["allocator"]))
    if not found:
        return ""
    figure, axis = plt.subplots(figsize=(6.6, 5.4))
    for s in found:
        color, marker = _style(names, s["allocator"])
        xy = np.array(s["points"])
        axis.plot(xy[:, 0], xy[:, 1], marker, color=color, alpha=0.28, markersize=5, linestyle="")
        axis.plot(s["time"], s["rss"], marker, color=color, markersize=13, label=s["allocator"], linestyle="",
                  markeredgecolor=_THEME["paper"], markeredgewidth=1.5)
    for scale, axis_part in ((axis.set_xscale, axis.xaxis), (axis.set_yscale, axis.yaxis)):
        scale("log")
        axis_part.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        axis_part.set_minor_formatter(NullFormatter())
        axis_part.set_major_locator(matplotlib.ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_xlabel("time, relative to the fastest of the case")
    axis.set_ylabel("peak RSS, relative to the leanest")
    _legend(figure, axis, len(found))
    return _svg(figure, "time and memory")


def _legend(figure: Figure, axis, count: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    top = 1.0 if figure.get_layout_engine() else 0.89
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, top),
                  ncol=min(count, 4), handletextpad=0.3, columnspacing=1.2)


def _panels(count: int, height: float = 2.9):
    rows = (count + 1) // 2
    figure, axes = plt.subplots(rows, min(count, 2), figsize=(8.2 if count > 1 else 6.6,
                                height * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def _si(value: float, _=None) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{suffix}"
    return f"{value:g}"


def scaling(result: dict) -> str:
    """Operations per second over the number of threads, one panel per workload."""
    names = results.compared(result)
    families: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    threads_of = {c["name"]: c["threads"] for c in result["cases"]}
    for cell in result["cells"]:
        family = re.sub(r"/t\d+", "", cell["case"])
        if not cell["error"] and family != cell["case"] and cell["allocator"] in names:
            families[family][cell["allocator"]][threads_of[cell["case"]]] = cell["rate"]
    shown = {f: v for f, v in families.items() if max(len(p) for p in v.values()) >= 2}
    if not shown:
        return ""
    figure, axes = _panels(len(shown))
    for axis, (family, series) in zip(axes, sorted(shown.items())):
        for name in (n for n in names if n in series):
            color, marker = _style(names, name)
            xs = sorted(series[name])
            axis.plot(xs, [series[name][x] for x in xs], marker=marker, color=color, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({x for s in series.values() for x in s}))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(FuncFormatter(_si))
        axis.set_title(family)
        axis.set_xlabel("threads")
        axis.set_ylabel("ops/s")
    _legend(figure, axes[0], len(names))
    return _svg(figure, "scaling")


def traces(result: dict) -> str:
    """Resident memory over the seconds of the memory workloads."""
    names = results.compared(result)
    cases: dict[str, list[dict]] = defaultdict(list)
    for d in result["details"]:
        if d["kind"] == "memory" and d["trace"] and not d["error"]:
            cases[d["case"]].append(d)
    if not cases:
        return ""
    figure, axes = _panels(len(cases))
    for axis, (case, found) in zip(axes, sorted(cases.items())):
        for d in sorted(found, key=lambda d: names.index(d["allocator"])):
            xy = np.array([point[:2] for point in d["trace"]])
            axis.plot(xy[:, 0], xy[:, 1] / 1024, color=_style(names, d["allocator"])[0],
                      label=d["allocator"])
        axis.set_ylim(bottom=0)
        axis.set_title(case)
        axis.set_xlabel("seconds")
        axis.set_ylabel("RSS in MiB")
    _legend(figure, axes[0], len(names))
    return _svg(figure, "RSS over time")


QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999, 0.9999)


def latency(result: dict) -> str:
    """Nanoseconds of single calls over the percentile, the tail drawn out."""
    names = results.compared(result)
    panels: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for d in result["details"]:
        if d["kind"] == "latency" and not d["error"]:
            for op in ("malloc", "free"):
                if d[op][0] is not None:
                    panels[(d["case"], op)].append(d)
    if not panels:
        return ""
    figure, axes = _panels(len(panels))
    xs = [1 / (1 - q) for q in QUANTILES]
    for axis, ((case, op), found) in zip(axes, panels.items()):
        for d in sorted(found, key=lambda d: names.index(d["allocator"])):
            color, marker = _style(names, d["allocator"])
            axis.plot(xs, d[op][: len(xs)], marker=marker, markersize=4, color=color,
                      label=d["allocator"])
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks([2, 10, 100, 1000, 10000], ["50 %", "90 %", "99 %", "99.9 %", "99.99 %"])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(_si))
        axis.set_title(f"{op} in {case}")
        axis.set_ylabel("ns")
    _legend(figure, axes[0], len(names))
    return _svg(figure, "latency")


def heat_map(result: dict) -> str:
    """Every cell relative to the best of its case: full colour is half its speed or less."""
    names = results.compared(result)
    rates = {(c["case"], c["allocator"]): c["rate"] for c in result["cells"] if not c["error"]}
    failed = {(c["case"], c["allocator"]) for c in result["cells"] if results.has_failed(c)}
    cases = [c["name"] for c in result["cases"]]
    if not rates:
        return ""
    figure, axis = plt.subplots(figsize=(2.2 + 0.85 * len(names), 0.27 * len(cases) + 0.7))
    for y, case in enumerate(reversed(cases)):
        row = {n: rates[(case, n)] for n in names if (case, n) in rates}
        for x, name in enumerate(names):
            if name not in row:
                text, color = ("failed", "loss") if (case, name) in failed else ("–", "muted")
                axis.text(x, y, text, ha="center", va="center", color=_THEME[color], size=9)
                continue
            share = row[name] / max(row.values())
            strength = min(1.0, max(0.0, -np.log2(share)))
            best = share == 1.0
            axis.add_patch(plt.Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, linewidth=0,
                           facecolor=_THEME["win" if best else "loss"],
                           alpha=0.55 if best else 0.62 * strength))
            axis.text(x, y, f"{share:.2f}", ha="center", va="center", size=9,
                      weight="bold" if best else "normal")
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_ylim(-0.5, len(cases) - 0.5)
    axis.set_xticks(range(len(names)), names, rotation=25, ha="left")
    axis.set_yticks(range(len(cases)), reversed(cases))
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.grid(False)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return _svg(figure, "heat map")


def history(series: dict[str, list[tuple[str, float, float, float]]],
            changes: dict[str, list[int]]) -> str:
    """Ratio over commits: name -> [(label, ratio, low, high)], changed levels marked."""
    if not series:
        return ""
    figure, axes = _panels(len(series), 2.6)
    for axis, (name, points) in zip(axes, series.items()):
        xs = range(len(points))
        axis.fill_between(xs, [p[2] for p in points], [p[3] for p in points],
                          color=_SERIES[0], alpha=0.2, linewidth=0)
        axis.plot(xs, [p[1] for p in points], marker="o", color=_SERIES[0])
        axis.axhline(1.0, color=_THEME["ink"], linewidth=1)
        for x in changes.get(name, []):
            axis.axvline(x - 0.5, color=_THEME["loss"], linestyle="--", linewidth=1.5)
        step = max(1, len(points) // 6)
        axis.set_xticks(list(xs)[::step], [p[0] for p in points][::step], rotation=30, ha="right")
        axis.set_title(name)
    return _svg(figure, "history")


def sweep(curves: dict[str, dict[int, float]], classes: list[int], boxes: dict[int, str],
          steps: list) -> str:
    """Nanoseconds over bytes, both logarithmic; classes dotted, boxes dashed, steps ringed."""
    figure, axis = plt.subplots(figsize=(9.6, 5.4))
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    for size in (c for c in classes if low <= c <= high and c not in boxes):
        axis.axvline(size, color=_THEME["grid"], linewidth=0.7, linestyle=":")
    for size, name in boxes.items():
        if low <= size <= high:
            axis.axvline(size, color=_THEME["muted"], linewidth=1, linestyle="--")
            axis.text(size, 0.99, f" {name}", rotation=90, va="top", size=8, color=_THEME["muted"],
                      transform=axis.get_xaxis_transform())
    names = list(curves)
    for name, curve in curves.items():
        sizes = sorted(curve)
        axis.plot(sizes, [curve[s] for s in sizes], color=_style(names, name)[0], linewidth=1.3, label=name)
    for step in steps:
        axis.plot(step.above, step.after_ns, "o", markersize=9, markerfacecolor="none",
                  markeredgecolor=_style(names, step.allocator)[0])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [1 << k for k in range(3, 64, 3) if low <= 1 << k <= high]
    axis.set_xticks(ticks, [_binary(t) for t in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(_si))
    axis.grid(axis="x", visible=False)
    axis.set_xlabel("size of the block")
    axis.set_ylabel("ns per malloc and free")
    _legend(figure, axis, len(names))
    return _svg(figure, "sweep")


def _binary(value: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value >> power} {unit}"
    return f"{value} B"
