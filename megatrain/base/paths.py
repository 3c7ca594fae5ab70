"""Folders that do not exist yet."""

from __future__ import annotations

import os
from pathlib import Path


def existing_parent(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists. Symbolic links are followed."""
    folder = Path(os.path.realpath(folder))
    return next(parent for parent in (folder, *folder.parents) if parent.exists())
