"""Runs checks one after the other, for gpu_check.py and its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megatrain.probe.facts import first_line


def run_checks(checks: Mapping[str, Callable[[], str]]) -> bool:
    """Prints a line for each. A check returns what is wrong, or nothing. Returns whether nothing is."""
    failed = False
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            problem = check()
        except Exception as error:  # noqa: BLE001 - one failing check must not hide the others
            problem = f"{type(error).__name__}: {first_line(error)}"
        failed |= bool(problem)
        print(f"{'FAIL' if problem else 'ok  '} {name} ({time.perf_counter() - started:.1f} s) {problem}", flush=True)
    return not failed
