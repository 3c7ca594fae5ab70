"""GPUDirect storage: from a file into device memory without host memory. Measured only if it works.

Rule: in a process of its own. NVIDIA's library, where it is half installed, may end the process it is used in.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from megatrain.base.paths import existing_parent
from megatrain.base.units import MIB
from megatrain.probe.facts import BYTES_PER_SECOND, Rate
from megatrain.probe.timing import median_seconds

NUM_BYTES = 256 * MIB
SECONDS = 1.0
TIMEOUT_SECONDS = 30.0


def measure_gds(folder: Path, label: str) -> list[Rate]:
    """Rows for reading and writing."""
    labels = {name: f"GPUDirect storage {name}, {label}" for name in ("read", "write")}
    try:
        command = [sys.executable, "-m", __name__, str(existing_parent(folder))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        told = done.stdout.strip().splitlines()
        values = [float(word) for word in told[-1].split()] if done.returncode == 0 and told else []
        note = "" if values else f"does not work: {(done.stderr.strip().splitlines() or [done.returncode])[-1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        values, note = [], str(error)
    found = dict(zip(labels, values or (None, None), strict=True))
    return [
        Rate(key=f"gds_{name}:{label}", label=text, unit=BYTES_PER_SECOND, value=found[name], note=note)
        for name, text in labels.items()
    ]


def main(folder: str) -> None:
    """Print bytes a second, read and written."""
    import torch

    path = Path(folder) / f".megatrain-doctor-{secrets.token_hex(8)}"
    storage = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda").untyped_storage()
    try:
        file = torch.cuda.gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
        torch.cuda.gds.gds_register_buffer(storage)
        write = NUM_BYTES / median_seconds(lambda: file.save_storage(storage, offset=0), SECONDS)
        read = NUM_BYTES / median_seconds(lambda: file.load_storage(storage, offset=0), SECONDS)
        torch.cuda.gds.gds_deregister_buffer(storage)
        print(read, write)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1])
