"""Model TFLOPS and host memory over model size: this library's rows and its peers', as one plot and one table.

    python benchmarks/sizes.py benchmarks/results/speed.jsonl --plot docs/images/sizes.png

Lines are written by `scripts/gpu_check.py figures --to FILE`, one a row of `megatrain bench`. By hand come `commit`,
and `plot` for those that are to be in it: the name of their series. A peer's line has `peer`. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

GIB = 2**30
MARKS = {"planner's choice": "o-", "state in host memory": "s--"}
PEER_MARKS = ("^", "v", "D", "P", "X")

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Those with figures: a row that has none says why not."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line for line in lines if line["figures"]]


def print_table(lines: list[Line]) -> None:
    print(
        "| run | step seconds (predicted) | TFLOPS | counted | device GiB (predicted) | host GiB (predicted) | commit |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for line in (line for line in lines if "peer" not in line):
        print("| " + " | ".join(_cells(line)) + " |")


def _cells(line: Line) -> list[str]:
    figures, seconds = line["figures"], line["figures"]["step_seconds"]
    predicted = figures.get("predicted") or {}
    expected = f" ({predicted['step_seconds']:.3g})" if predicted else ""
    return [
        f"`{line['name']}`",
        f"{figures['median_seconds']:.3g} ({min(seconds):.3g}-{max(seconds):.3g}){expected}",
        f"{figures['tflops_published']:.0f}",
        f"{figures['tflops_counted']:.0f}",
        _gib(figures["peak_device_bytes"], predicted.get("device_bytes")),
        _gib(figures["peak_host_bytes"], predicted.get("host_bytes")),
        line.get("commit", ""),
    ]


def _gib(num_bytes: float, expected: float | None) -> str:
    return f"{num_bytes / GIB:.1f}" + ("" if expected is None else f" ({expected / GIB:.1f})")


def plot(lines: list[Line], path: Path) -> None:
    """Two panels over billions of parameters: TFLOPS, and GiB of host memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, key, scale, panel in (
        ("model TFLOPS (6 x parameters x tokens / time)", "tflops_published", 1, panels[0]),
        ("host memory, GiB", "peak_host_bytes", GIB, panels[1]),
    ):
        for label, mark, points in _series(lines, key):
            x, y = zip(*((size, value / scale) for size, value in sorted(points)), strict=True)
            panel.plot(x, y, mark, label=label)
        panel.set(xscale="log", xlabel="parameters, billions", ylabel=name, ylim=(0, None))
        panel.set_xticks([3, 7, 14, 32, 70], labels=["3", "7", "14", "32", "70"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.suptitle("One H200, Qwen2.5 shapes, sequences of 1024 tokens")
    figure.savefig(path, dpi=110)


def _series(lines: list[Line], key: str) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """(label, mark, points) of the lines that are to be in the plot: those with a `plot`, the name of their series."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if line.get("plot") and line["figures"].get(key) is not None:
            points[line["plot"]].append((line["billions"], line["figures"][key]))
    peers = [label for label in points if label not in MARKS]
    marks = MARKS | dict(zip(peers, PEER_MARKS, strict=False))
    return [(label, marks[label], of) for label, of in points.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    lines = read(args.lines)
    print_table(lines)
    if args.plot is not None:
        plot(lines, args.plot)


if __name__ == "__main__":
    main()
