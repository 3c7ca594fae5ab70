"""Does a compressed format of masters and moments train as well as an exact one? Held-out loss of each, at three seeds.

    python benchmarks/quality.py run --jobs 6                       # both experiments; a line of JSON for each job
    python benchmarks/quality.py run --only 'scratch/*'             # only jobs whose names match
    python benchmarks/quality.py run --model FOLDER                 # SmolLM2-135M where neither Hub nor pip answers
    python benchmarks/quality.py report                             # the table, and docs/images/quality.png

- scratch: a Llama of 3.2M parameters over bytes, trained on the source of Python's standard library.
- finetune: SmolLM2-135M on the same text in its own tokens; beside the formats a LoRA (Hu et al. 2021,
  arXiv:2106.09685) of all linear layers, by PyTorch's AdamW at the larger learning rate that is usual for it.

Seeds choose initial weights (scratch), the order of the data and stochastic rounding. Everything else is the same in
all jobs of an experiment; betas are PyTorch's (0.9, 0.999), whose slow second moment is hard on few bits. On a GPU
PyTorch's deterministic algorithms are on, so that two jobs differ by nothing but what their names say.

A job is named experiment/master/moments/seed. Jobs whose line is in the output already are not run again. Moments in
2 bits are refused by `mt.init`, and measured here all the same, to show why.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from quality_jobs import EXPERIMENTS, Job, Settings, run_job
from quality_report import plot, print_report

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MATRIX = tuple((master, moments) for master in ("fp32", "split", "bf16") for moments in ("fp32", "8bit", "4bit"))
SEEDS = (0, 1, 2)
EXTRA = {
    # Lossless moments must give the same bits as exact ones: one seed shows it.
    "scratch": {("split", "bf16"): SEEDS, ("split", "2bit"): SEEDS, ("split", "lossless"): (0,)},
    "finetune": {("split", "2bit"): SEEDS, ("lora", "fp32"): SEEDS},
}
TINY = {
    "scratch": {"steps": 4, "rows": 4, "length": 32, "heldout_rows": 4, "curve_rows": 4, "log_every": 2, "hidden": 32},
    "finetune": {"steps": 2, "rows": 2, "length": 32, "heldout_rows": 4, "curve_rows": 2, "log_every": 1},
}
"""What --tiny changes."""
OUTPUT = "runs/quality.jsonl"
IMAGE = "docs/images/quality.png"


def main(arguments: list[str] | None = None) -> None:
    """Read the options and run a verb."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="run|report")
    run = verbs.add_parser("run", help="train; a line of JSON a job")
    run.set_defaults(verb=run_all)
    run.add_argument("--output", type=Path, default=Path(OUTPUT), help=f"default: {OUTPUT}")
    run.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="jobs, as 'scratch/split/*/0'")
    run.add_argument("--jobs", type=int, default=1, help="processes that work at once (default: 1)")
    run.add_argument("--threads", type=int, default=2, help="threads of each (default: 2)")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--model", default=MODEL, help=f"to fine-tune: a folder, or a name (default: {MODEL})")
    run.add_argument("--steps", type=int, default=None, help="of each job (default: 300 from scratch, 100 fine-tuning)")
    run.add_argument("--tiny", action="store_true", help="a few tiny steps, to see whether it runs")
    run.add_argument("--list", action="store_true", help="name the jobs that are still to run, and stop")
    report = verbs.add_parser("report", help="print the table, draw the plot")
    report.set_defaults(verb=report_all)
    report.add_argument("--output", type=Path, default=Path(OUTPUT), help=f"what `run` wrote (default: {OUTPUT})")
    report.add_argument("--image", type=Path, default=Path(IMAGE), help=f"default: {IMAGE}")
    options = parser.parse_args(arguments)
    options.verb(options)


# Running


def run_all(options: argparse.Namespace) -> None:
    """Every job that is asked for and not in the output yet; exits with 1 if one failed."""
    jobs = [job for job in all_jobs(options) if any(fnmatch.fnmatch(job.name, one) for one in options.only)]
    done = {same_job(line) for line in read_lines(options.output)}
    jobs = [job for job in jobs if same_job(dataclasses.asdict(job)) not in done]
    if options.list:
        print("\n".join(job.name for job in jobs))
        return
    model = find_model(options.model) if any(job.experiment == "finetune" for job in jobs) else None
    # Before the first use of CUDA: cuBLAS is deterministic only with workspaces of a fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for number, (job, line) in enumerate(run_jobs(jobs, model, options), start=1):
        label = f"[{number}/{len(jobs)}] {job.name}"
        if isinstance(line, str):
            num_failed += 1
            print(f"{label} failed:\n{line}", file=sys.stderr, flush=True)
            continue
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{label}: held-out loss {line['loss']:.4f}, {line['seconds']:.1f} s", flush=True)
    if num_failed:
        sys.exit(1)


def run_jobs(
    jobs: list[Job], model: Path | None, options: argparse.Namespace
) -> Iterator[tuple[Job, dict[str, Any] | str]]:
    """(job, its line or the traceback of its failure), in the order in which they finish.

    A process runs many jobs, one after the other: it imports and starts CUDA once.
    """
    arguments = model, options.device, options.threads
    if options.jobs == 1:
        for job in jobs:
            yield job, attempt(job, *arguments)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        futures = {pool.submit(attempt, job, *arguments): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def attempt(job: Job, model: Path | None, device: str, num_threads: int) -> dict[str, Any] | str:
    """The job's line, or the traceback of its failure: one job that fails does not take the others with it."""
    try:
        return run_job(job, model, device, num_threads)
    except Exception:
        return traceback.format_exc()


def all_jobs(options: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that a run that is cut short has compared every format once."""
    jobs = []
    for seed in SEEDS:
        for experiment, settings in EXPERIMENTS.items():
            changes = dict(TINY[experiment]) if options.tiny else {}
            if options.steps is not None:
                changes["steps"] = options.steps
            settings = dataclasses.replace(settings, **changes)
            formats = [*MATRIX, *(pair for pair, seeds in EXTRA[experiment].items() if seed in seeds)]
            jobs += [make_job(experiment, *pair, seed, settings) for pair in formats]
    return jobs


def make_job(experiment: str, master: str, moments: str, seed: int, settings: Settings) -> Job:
    return Job(experiment=experiment, master=master, moments=moments, seed=seed, settings=settings)


def find_model(name_or_path: str) -> Path:
    """Fetches and converts it on first use (`megatrain/models.py`), before any worker needs it."""
    from megatrain.models import resolve_model

    resolved = resolve_model(name_or_path, say=lambda line: print(line, flush=True))
    print(f"model: {resolved.origin}", flush=True)
    return resolved.path


# Reading


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of all finished jobs; a line that was cut short is none."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"{path}: a line that is not whole is left out", file=sys.stderr)
    return lines


def same_job(line: dict[str, Any]) -> str:
    """Equal for lines of the same job with the same settings."""
    keys = ("experiment", "master", "moments", "seed", "settings")
    return json.dumps([line[key] for key in keys], sort_keys=True)


def report_all(options: argparse.Namespace) -> None:
    """The table on standard output; the plot where matplotlib is installed."""
    lines = read_lines(options.output)
    if not lines:
        sys.exit(f"{options.output} has no results: run `python benchmarks/quality.py run` first")
    print_report(lines)
    plot(lines, options.image)


if __name__ == "__main__":
    main()
