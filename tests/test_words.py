"""What the Python interface says, in the words of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_helpers import command, write_recipe

from megatrain.commands.words import in_recipe_words

WORDS = [
    (
        "TrainingArguments that cannot be honoured:\n  fp16=True is refused: no. Instead: bf16=True, or "
        "megatrain.init(precision='fp32').",
        "training.fp16=true is refused: no. Instead: training.bf16=true, or engine.precision='fp32'.",
    ),
    ("max_vram_gb=-1 must be a number, or None", "engine.max_vram_gb=-1 must be a number, or null"),
    ("engine: max_ram_gb=0 must be a number", "engine.max_ram_gb=0 must be a number"),
    ("training: save_steps=0 must be above 0", "training.save_steps=0 must be above 0"),
    ("raise max_ram_gb, or say mt.init(offload_dir=...)", "raise engine.max_ram_gb, or say engine.offload_dir=..."),
    ("the device and the seed are words; seed=-1 is a setting", "the device and the seed are words; training.seed=-1 is"
     " a setting"),
    ("no such folder: ../output_dir/save_steps", "no such folder: ../output_dir/save_steps"),
    ("a script goes on with trainer.train(resume_from_checkpoint=True); save_steps=0 is not True",
     "a script goes on with trainer.train(resume_from_checkpoint=True); training.save_steps=0 is not true"),
    ("training.eval_strategy is 'no'; set data.seed", "training.eval_strategy is 'no'; set data.seed"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "told"), WORDS)
def test_keys_are_dotted_and_values_are_yaml(message: str, told: str) -> None:
    assert in_recipe_words(message) == told


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("engine.max_vram_gb=0", "engine.max_vram_gb=0 must be"),
        ("engine.max_ram_gb=0.0001", "training LlamaForCausalLM needs"),
        ("engine.device=abacus", "engine.device='abacus' is not known"),
        ("training.fp16=true", "training.fp16=true is refused"),
        ("training.learning_rate=-1", "training.learning_rate=-1"),
        ("training.deepspeed=x.json", "training.deepspeed='x.json' is refused: the weights are already offloaded"),
        ("training.optim=adafactor", "training.optim='adafactor' must be one of 'adamw_torch'"),
        ("training.report_to=wandb", "training.report_to"),
    ],
)
def test_the_command_says_the_key_that_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, start: str
) -> None:
    recipe = write_recipe(tmp_path)
    capsys.readouterr()
    code, out, err = command(capsys, "train", recipe, override)
    assert code == 2
    assert err.startswith(f"error: {start}"), err
    assert err.count("\n") == 1 and "None" not in err and "init(" not in err
