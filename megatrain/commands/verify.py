"""`megatrain verify`: whether checkpoints and models are what was written.

Rule: torch is not imported here, and nothing is changed.
"""

from __future__ import annotations

from pathlib import Path

from megatrain.base.errors import UserError
from megatrain.base.paths import check_folder, looking_at, user_path
from megatrain.base.units import format_bytes, format_number
from megatrain.commands.console import make_console, print_fact, print_warning
from megatrain.save.checkpoints import checkpoints_in, damage_of, has_manifest, noted_bytes


def verify(folder: Path) -> bool:
    """Check a checkpoint, a model, or all checkpoints of a run and its model. Returns whether all are sound.

    Raises UserError for a folder without either.
    """
    folder = user_path(folder, "DIR")
    with looking_at("DIR"):
        check_folder(folder, "DIR")
        found = checkpoints_in(folder)
        if has_manifest(folder) or any(folder.glob("*.safetensors")):
            found.append(folder)
    if not found:
        raise UserError(f"DIR: {folder} holds no checkpoint and no model (*.safetensors)")
    console = make_console()
    console.rule(f"[bold]megatrain verify[/] {folder}", align="left")
    is_sound = True
    for one in found:
        damage = damage_of(one)
        if one != folder and not damage and not any(one.iterdir()):
            damage = ["it is empty"]
        is_sound &= not damage
        name = one.absolute().name or str(one)
        if damage:
            print_warning(console, f"{name} is damaged: " + "; ".join(damage))
        else:
            print_fact(console, name, _praise(one))
    return is_sound


def _praise(folder: Path) -> str:
    is_noted = has_manifest(folder)
    sizes = noted_bytes(folder) if is_noted else [path.stat().st_size for path in folder.glob("*.safetensors")]
    size = f"{format_number(len(sizes), 'file')}, {format_bytes(sum(sizes))}"
    if is_noted:
        return f"sound: every file is what was written ({size})"
    return f"can be read ({size} of weights); there is no manifest, so nobody knows whether bits have changed"
