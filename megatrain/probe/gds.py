"""GPUDirect storage: from a file into device memory without host memory. Measured only if it works.

Rule: in a process of its own. NVIDIA's library, where it is half installed, may end the process it is used in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from megatrain.base.paths import existing_parent
from megatrain.base.units import MIB
from megatrain.probe.disk import FREE_SHARE
from megatrain.probe.facts import BYTES_PER_SECOND, Rate, first_line
from megatrain.probe.timing import median_seconds

NUM_BYTES = 256 * MIB
SECONDS = 1.0
TIMEOUT_SECONDS = 30.0


def measure_gds(folder: Path, label: str) -> list[Rate]:
    """Rows for reading and writing."""
    values: tuple[float | None, float | None] = (None, None)
    try:
        # Made and removed here, whatever becomes of the other process.
        with tempfile.TemporaryDirectory(dir=existing_parent(folder), prefix=".megatrain-doctor-") as inside:
            command = [sys.executable, "-m", __name__, inside]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        words = done.stdout.split()
        if done.returncode == 0 and len(words) >= 2:
            values, note = (float(words[-2]), float(words[-1])), ""
        else:
            note = f"does not work: {(done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        note = first_line(error)
    return [
        Rate(
            key=f"gds_{name}:{label}",
            label=f"GPUDirect storage {name}, {label}",
            unit=BYTES_PER_SECOND,
            value=value,
            note=note,
        )
        for name, value in zip(("read", "write"), values, strict=True)
    ]


def main(folder: str) -> None:
    """Print bytes a second, read and written."""
    import torch

    if psutil.disk_usage(folder).free < FREE_SHARE * NUM_BYTES:
        raise ValueError("too little is free on the disk")
    storage = torch.ones(NUM_BYTES, dtype=torch.uint8, device="cuda").untyped_storage()
    file = torch.cuda.gds.GdsFile(str(Path(folder) / "probe"), os.O_CREAT | os.O_RDWR)
    torch.cuda.gds.gds_register_buffer(storage)
    write = NUM_BYTES / median_seconds(lambda: file.save_storage(storage, offset=0), SECONDS)
    read = NUM_BYTES / median_seconds(lambda: file.load_storage(storage, offset=0), SECONDS)
    torch.cuda.gds.gds_deregister_buffer(storage)
    print(read, write)


if __name__ == "__main__":
    main(sys.argv[1])
