"""What the lines of `quality.py` say: a table for each experiment, and a plot.

Each format is compared with the exact one of the same compute precision, seed by seed (the same initial weights and
data): fp32 masters with fp32/fp32, all others with split/fp32. It is "outside" when its mean held-out loss is worse by
more than the spread, which is what another seed changes: the largest minus the smallest loss of the exact format.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
Format = tuple[str, str]
"""(master, moments)."""
Runs = dict[Format, dict[int, Line]]
"""By format and seed."""

EXACT_FP32, EXACT_BF16 = ("fp32", "fp32"), ("split", "fp32")
COLORS = {"fp32": "black", "8bit": "tab:blue", "4bit": "tab:orange", "2bit": "tab:red", "bf16": "tab:green"}
"""By moments."""
DASHES = {"fp32": ":", "split": "-", "bf16": "--", "lora": "-."}
"""By master."""


class Comparison(NamedTuple):
    """A format beside its exact one, over the seeds that both have."""

    difference: float
    """Mean over the seeds of its loss minus that of the exact one."""
    standard_error: float
    """Of that mean; NaN where there is none."""
    spread: float
    """Of the exact one."""
    verdict: str


def print_report(lines: list[Line]) -> None:
    """A Markdown table for each experiment, with what it was run with."""
    for experiment, runs in by_experiment(lines):
        some = next(iter(next(iter(runs.values())).values()))
        settings = ", ".join(f"{name} {value}" for name, value in some["settings"].items())
        print(f"### {experiment}\n\n{settings}; {some['environment']}\n")
        print("| master | moments | seeds | held-out loss | spread of seeds | minus exact, by seed | verdict |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for format_, seeds in runs.items():
            print("| " + " | ".join(row(format_, seeds, runs)) + " |")
        noise = statistics.mean(line["stderr"] for seeds in runs.values() for line in seeds.values())
        start = statistics.mean(line["curve"][0][2] for seeds in runs.values() for line in seeds.values())
        print(
            f"\nHeld-out loss before the first step: {start:.4f}. Its standard error from the choice of text, the same"
        )
        print(f"text for all and so not in the differences, is {noise:.4f} at the end.\n")


def by_experiment(lines: list[Line]) -> Iterator[tuple[str, Runs]]:
    """Exits where lines of one experiment cannot be compared: other settings, text or machine."""
    experiments: dict[str, Runs] = {}
    shared: dict[str, tuple[Any, ...]] = {}
    for line in lines:
        experiment = line["experiment"]
        conditions = line["settings"], line["data"], line["environment"]
        if shared.setdefault(experiment, conditions) != conditions:
            sys.exit(
                f"{experiment}: results of different settings, texts or machines are in one file, and they cannot be "
                f"compared:\n  {shared[experiment]}\n  {conditions}\nKeep them in files of their own (--output)"
            )
        format_ = line["master"], line["moments"]
        experiments.setdefault(experiment, defaultdict(dict))[format_][line["seed"]] = line
    order = list(DASHES), [*COLORS, "lossless"]
    for experiment, runs in sorted(experiments.items(), reverse=True):
        keys = sorted(runs, key=lambda pair: (order[0].index(pair[0]), order[1].index(pair[1])))
        yield experiment, {key: runs[key] for key in keys}


def row(format_: Format, seeds: dict[int, Line], runs: Runs) -> list[str]:
    losses = [line["loss"] for line in seeds.values()]
    cells = [*format_, str(len(seeds)), f"{statistics.mean(losses):.4f}"]
    cells.append(f"{spread_of(seeds):.4f}" if len(seeds) > 1 else "")
    compared = compare(format_, runs)
    if compared is None:
        return [*cells, "", "nothing to compare with"]
    if format_ == exact_of(format_):
        return [*cells, "", "exact"]
    difference = f"{compared.difference:+.4f}"
    if not math.isnan(compared.standard_error):
        difference += f" ± {compared.standard_error:.4f}"
    return [*cells, difference, compared.verdict]


def spread_of(seeds: dict[int, Line]) -> float:
    """Largest minus smallest loss over the seeds; 0 for less than two."""
    losses = [line["loss"] for line in seeds.values()]
    return max(losses) - min(losses) if losses else 0.0


def exact_of(format_: Format) -> Format:
    """The exact format of the same compute precision."""
    return EXACT_FP32 if format_[0] == "fp32" else EXACT_BF16


def compare(format_: Format, runs: Runs) -> Comparison | None:
    """None where the exact format has no run of a seed that this one has."""
    mine, exact = runs[format_], runs.get(exact_of(format_), {})
    seeds = sorted(mine.keys() & exact.keys())
    if not seeds:
        return None
    differences = [mine[seed]["loss"] - exact[seed]["loss"] for seed in seeds]
    difference = statistics.mean(differences)
    # Before Python 3.12 `stdev` fails on a loss that is not a number.
    has_error = len(seeds) > 1 and math.isfinite(difference)
    error = statistics.stdev(differences) / math.sqrt(len(seeds)) if has_error else math.nan
    spread = spread_of(exact)
    if format_[1] == "lossless":
        is_same = all(mine[seed]["weights"] == exact[seed]["weights"] for seed in seeds)
        verdict = "same weights, bit for bit" if is_same else "NOT the same weights"
    elif len(exact) < 2:
        verdict = "needs a second seed"
    else:
        # Written so that a loss that is not a number is outside.
        verdict = "within" if difference <= spread else "outside"
    return Comparison(difference, error, spread, verdict)


# The plot


def plot(lines: list[Line], path: Path) -> None:
    """Held-out loss by step, and under it the difference to the exact format; bands reach from seed to seed.

    What is in the dotted lines below is within the spread; what is far outside of them leaves the picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    from matplotlib.figure import Figure

    experiments = list(by_experiment(lines))
    figure = Figure(figsize=(6 * len(experiments), 8), layout="constrained")
    axes = figure.subplots(2, len(experiments), squeeze=False)
    for column, (experiment, runs) in enumerate(experiments):
        axes[0][column].set(title=experiment, ylabel="held-out loss (nats a token)")
        axes[1][column].set(xlabel="step", ylabel="minus the exact format, by seed")
        draw_experiment(axes[0][column], axes[1][column], runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def draw_experiment(loss_axes: Any, difference_axes: Any, runs: Runs) -> None:
    for format_, seeds in runs.items():
        draw(loss_axes, format_, [curve(line) for line in seeds.values()], band_alpha=0.03)
        exact = runs.get(exact_of(format_), {})
        pairs = [minus(curve(seeds[seed]), curve(exact[seed])) for seed in sorted(seeds.keys() & exact.keys())]
        if pairs and format_ != exact_of(format_):
            draw(difference_axes, format_, pairs, band_alpha=0.12)
    loss_axes.legend(fontsize=7, ncols=2)
    spread = spread_of(runs.get(EXACT_BF16, {}))
    for level in (-spread, 0.0, spread):
        difference_axes.axhline(level, color="black", linewidth=0.8, linestyle="-" if level == 0 else ":")
    if spread > 0:
        difference_axes.set_ylim(-2.5 * spread, 2.5 * spread)


def draw(axes: Any, format_: Format, curves: list[dict[int, float]], band_alpha: float) -> None:
    """The mean over the seeds, in a band from the smallest to the largest."""
    master, moments = format_
    steps = sorted(set.intersection(*(set(one) for one in curves)))
    by_step = [[one[step] for one in curves] for step in steps]
    color = "tab:purple" if master == "lora" else COLORS.get(moments, "tab:gray")
    axes.plot(
        steps,
        [statistics.mean(values) for values in by_step],
        color=color,
        linestyle=DASHES[master],
        linewidth=1.2,
        label=f"{master} / {moments}",
    )
    low, high = [min(values) for values in by_step], [max(values) for values in by_step]
    axes.fill_between(steps, low, high, color=color, alpha=band_alpha, linewidth=0)


def curve(line: Line) -> dict[int, float]:
    """Step -> held-out loss."""
    return {step: heldout for step, _, heldout in line["curve"]}


def minus(mine: dict[int, float], exact: dict[int, float]) -> dict[int, float]:
    return {step: mine[step] - exact[step] for step in mine.keys() & exact.keys()}
