"""How the CPU kernel becomes a shared library: the compiler, its flags, and a hash of what it was built from.

Used by `kernel.py` on first use and by `setup.py` when a wheel is built, so that both compile the same way. For the
latter's sake it imports nothing but the standard library, and nothing of this package.

Rule: no flag that relaxes the arithmetic. `-ffp-contract=off` keeps a multiplication and an addition two roundings.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY_NAME = "_kernel.so"
"""The name of the library beside its source, in a wheel or an editable install."""

# -O3 also turns on the vectoriser, in gcc and clang. No -march: each function names its own instruction set.
FLAGS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno"),
    *("-pthread", "-fPIC", "-shared", "-fvisibility=hidden"),
)

_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_SECONDS = 60.0  # it takes about five seconds; a compiler that hangs must not hang the training


class CompileError(RuntimeError):
    """No compiler was found, or none of those found made the library."""


def build_hash() -> str:
    """16 hex digits that change with `kernel.c` and with the flags; a library says which it was built from."""
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]


def find_compilers() -> list[str]:
    """Paths of the C compilers on this machine, the preferred one first, each once."""
    found = [shutil.which(name) for name in _COMPILERS]
    return list(dict.fromkeys(path for path in found if path))


def compile_kernel(target: Path) -> None:
    """Compile `kernel.c` into the shared library `target`.

    The file appears whole or not at all, so several processes may do this at once. Raises CompileError, with what each
    compiler said, and OSError when the folder of `target` cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    messages = []
    for compiler in find_compilers():
        # Written beside the target, then renamed. In a folder, so that it gets the permissions that any new file gets.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            part = Path(folder) / target.name
            message = _run(compiler, part)
            if message is None:
                os.replace(part, target)
                return
        messages.append(f"{compiler}: {message}")
    raise CompileError("; ".join(messages) or f"no C compiler found (looked for {', '.join(_COMPILERS)})")


def _run(compiler: str, target: Path) -> str | None:
    """Run one compiler. Returns None when it made `target`, else what went wrong in one line."""
    define = f'-DBUILD_HASH="{build_hash()}"'
    command = [compiler, *FLAGS, define, "-o", str(target), str(SOURCE), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return lines[0] if lines else f"exit status {done.returncode}"
