"""`megatrain export`: a checkpoint as a model to give away."""

from __future__ import annotations

from pathlib import Path

from megatrain.base.errors import UserError
from megatrain.base.paths import check_folder, looking_at, user_path
from megatrain.base.units import format_bytes, format_number
from megatrain.commands.console import make_console, print_fact
from megatrain.save.checkpoints import checkpoints_in

DTYPES = ("bf16", "fp32")


def export(checkpoint: Path, target: Path, dtype: str | None) -> None:
    """Raises UserError for a checkpoint, folder or dtype that cannot be."""
    checkpoint, target = user_path(checkpoint, "CHECKPOINT"), user_path(target, "DIR")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not known: use {' or '.join(DTYPES)}, or leave it out")
    with looking_at("CHECKPOINT"):
        check_folder(checkpoint, "CHECKPOINT")
        if not any(checkpoint.glob("*.safetensors")) and (inside := checkpoints_in(checkpoint)):
            raise UserError(f"CHECKPOINT: {checkpoint} holds checkpoints; give one of them, such as {inside[-1]}")
    from megatrain.save.export import export as run

    done = run(checkpoint, target, dtype)
    console = make_console()
    weights = f"{format_number(done.num_tensors, 'tensor')}, {format_bytes(done.num_bytes)}"
    print_fact(console, "exported", f"{target} ({weights}; {done.words})")
    print_fact(console, "load it", f"AutoModelForCausalLM.from_pretrained({str(target)!r})")
