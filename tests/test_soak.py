"""Two minutes of benchmarks/soak.py: runs that are killed, stopped and damaged at random lose no bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_two_minutes_of_random_faults_lose_no_bit(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--minutes", "2", "--seed", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=540, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = [line for line in done.stdout.splitlines() if line.startswith("{")]
    counts = {name: int(number) for name, number in re.findall(r"'([\w ]+)': (\d+)", rounds[-1].partition("}")[0])}
    assert counts["rounds"] == len(rounds) >= 2, done.stdout
    assert counts["rounds that lost bits"] == counts["rounds that left litter"] == 0
    assert counts.get("SIGKILL", 0) + counts.get("SIGTERM", 0) >= counts["rounds"], "nothing was ended"
    assert list(tmp_path.iterdir()) == []
