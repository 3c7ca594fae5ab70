"""`megatrain plan`: what it prints, writes and refuses. No GPU, no network, no weights."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from command_helpers import command
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from planning_helpers import llama_config

import megatrain as mt
from megatrain.base.errors import UserError
from megatrain.plan.machines import MACHINES
from megatrain.probe import measure
from megatrain.spec.builtin import BUILTIN

WIDE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, vocab_size=32000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights, under a name that a terminal could take for markup."""
    llama_config(**WIDE).save_pretrained(tmp_path / "[bold]model")
    return tmp_path / "[bold]model"


def data(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    code, out, err = command(capsys, "plan", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_built_in_shape_is_planned_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "plan", "qwen2.5-7b", "--machine", "h200-128gb")
    assert (code, err) == (0, "")
    assert "7.616B parameters, 28 blocks" in out and "149 GB device" in out
    lines = {line.split("  ")[1].strip(): line.split() for line in out.splitlines() if line.startswith("  ")}
    # Weights, gradients and moments of conventional training: 4 + 4 + 8 bytes a parameter.
    assert [lines[row][-1] for row in ("weights", "gradients", "moments")] == ["30.5", "30.5", "60.9"]
    for words in (
        "step ",
        "tokens a second",
        "as published (6 x parameters x tokens)",
        "bottleneck",
        "largest context",
    ):
        assert words in out
    assert "\x1b" not in out


def test_rows_of_the_json_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "command-r-plus", "--machine", "h200-1.5tb")
    memory, time = found["memory"], found["time"]
    for tier, peak in memory["peak"].items():
        assert sum(row[tier] for row in memory["rows"].values()) == peak <= memory["budget"][tier]
    state = {name: memory["conventional"][name] for name in ("weights", "gradients", "moments")}
    assert sum(state.values()) == 16 * found["model"]["parameters"]
    assert time["tokens_per_second"] == pytest.approx(64 * 1024 / time["step_seconds"])
    assert len(found["plan"]["places"]) == 66


def test_a_folder_and_a_config_file_are_one_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = ("--machine", "rtx4090", "--tokens", "4x256")
    first, second = (data(capsys, path, *options) for path in (folder, folder / "config.json"))
    assert first["model"]["blocks"] == 8
    assert first["time"] == second["time"] and first["memory"] == second["memory"]


@pytest.mark.parametrize(
    ("options", "step"),
    [(("64",), "1x64"), (("4096",), "4x1024"), (("64", "--seq", "32"), None), (("4x64",), None)],
)
def test_a_length_that_is_assumed_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path, options: tuple[str, ...], step: str | None
) -> None:
    code, out, _ = command(capsys, "plan", folder, "--machine", "a100", "--tokens", *options)
    assert code == 0
    told = f"how long a sequence is: {step} is assumed; give BxT, or --seq"
    assert (told in " ".join(out.split())) == (step is not None), out


def test_every_setting_reaches_the_plan(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = ("--machine", "h200-128gb", "--tokens", "2048", "--seq", "256")
    exact = data(capsys, folder, *options)
    assert exact["workload"] == {"sequences": 8, "length": 256, "tokens": 2048}
    changed = data(
        capsys, folder, *options, "--rows", "2", "--exact", "--master", "bf16", "--compression", "4bit",
        "--clip", "layer", "--vram-gb", "4", "--ram-gb", "6",
    )  # fmt: skip
    assert changed["plan"]["rows"] == 2
    assert changed["formats"] == {"precision": "bf16", "master": "bf16", "moments": "4bit", "clip": "layer"}
    assert changed["memory"]["peak"]["hbm"] <= 4e9 and changed["memory"]["peak"]["ram"] <= 6e9
    fp32 = data(capsys, folder, *options, "--precision", "fp32")
    assert fp32["time"]["step_seconds"] > exact["time"]["step_seconds"]
    # Of so few tokens the host binds, which compiled code does not change.
    many = ("--machine", "h200-128gb", "--tokens", "262144", "--seq", "256")
    seconds = [data(capsys, folder, *many, *more)["time"]["step_seconds"] for more in ((), ("--compile",))]
    assert seconds[1] < seconds[0]


def test_what_if_changes_one_thing_at_a_time(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = ("--machine", "h200-128gb", "--tokens", "4x256", "--what-if")
    found = data(capsys, folder, *options)
    changes = {row["change"]: row for row in found["what_if"]}
    assert {"8bit moments", "4bit moments", 'clip="layer"', "half the host memory", "twice the host memory"} <= set(
        changes
    )
    assert changes["a 24 GB card's memory"]["peak"]["hbm"] <= 24e9
    code, out, _ = command(capsys, "plan", folder, *options)
    assert code == 0
    assert all(change in out for change in ["as planned", *changes])
    assert "[bold]model" in out


def test_the_plan_is_printed_before_what_if_is_looked_at(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[str] = []

    def looked_at(*args: object, **how: object) -> list[object]:
        before.append(capsys.readouterr().out)
        return []

    monkeypatch.setattr("megatrain.plan.what_if.what_if", looked_at)
    code, out, _ = command(capsys, "plan", folder, "--machine", "rtx4090", "--tokens", "4x256", "--what-if")
    assert code == 0
    assert "largest context" in before[0] and "largest context" not in out
    assert re.search("step s +tokens/s +speed +device", out) and "what if" in out


def test_the_trace_is_one_that_chrome_opens(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "lanes.json"
    code, out, _ = command(capsys, "plan", folder, "--machine", "rtx4090", "--tokens", "4x256", "--trace", file)
    assert code == 0 and str(file) in out
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    work = [event for event in events if event["ph"] == "X"]
    assert {"compute"} <= set(lanes.values()) and {event["tid"] for event in work} <= set(lanes)
    for lane in lanes:
        mine = sorted((event["ts"], event["dur"]) for event in work if event["tid"] == lane)
        assert all(start + length <= later + 1e-3 for (start, length), (later, _) in zip(mine, mine[1:], strict=False))


# Machines


def test_this_machine_is_the_profile_that_doctor_keeps(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    code, _, err = command(capsys, "plan", folder)
    assert code == 2 and "no GPU" in err and "megatrain doctor" in err
    (tmp_path / "cache").mkdir()
    profile = tmp_path / "cache" / "machine.json"
    profile.write_text(MACHINES["a6000"].to_json())
    assert data(capsys, folder, "--tokens", "4x256")["machine"]["name"] == "a6000"
    assert data(capsys, folder, "--tokens", "4x256", "--machine", profile)["machine"]["name"] == "a6000"


def test_a_machine_without_a_profile_is_measured_quickly(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(measure, "measure_machine", lambda folders, effort: "facts")
    monkeypatch.setattr(measure, "machine_of", lambda facts, date: dataclasses.replace(MACHINES["a100"], disk_bytes=0))
    code, out, _ = command(capsys, "plan", folder, "--tokens", "4x256")
    assert code == 0
    assert "warning: measured for this plan alone" in out and "`megatrain doctor`" in out
    assert " GB disk" not in out


# The Hub


def answer(kind: type[Exception]) -> Exception:
    """An error of the Hub's without the response that it is made from, whose class differs from version to version."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no route"), "cannot be had (the Hub: no answer, OSError: no route)"),
        (answer(RepositoryNotFoundError), "the Hub, which was asked, has no model of that name"),
        (answer(GatedRepoError), "nobody/nothing is gated"),
    ],
)
def test_a_hub_that_has_no_config_is_asked_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    asked = []

    def model_info(self: object, name: str, **_: object) -> None:
        asked.append(name)
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    code, _, err = command(capsys, "plan", "nobody/nothing", "--machine", "a100")
    assert (code, asked) == (2, ["nobody/nothing"])
    assert message in err and err.count("\n") == 1


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc"], "there is no folder or file abc, no built-in shape of that name, and the Hub was not asked"),
        (["qwen2.5-7"], "did you mean 'qwen2.5-7b' or "),
        (["./nowhere"], "there is no folder or file ./nowhere"),
        (["MODEL", "--machine", "abacus"], "there is no machine 'abacus': use one of h200-128gb"),
        (["MODEL", "--tokens", "many"], "--tokens many is neither SEQUENCESxLENGTH"),
        (["MODEL", "--tokens", "1000", "--seq", "300"], "not a whole number of sequences of 300"),
        (["MODEL", "--tokens", "4x128", "--seq", "256"], "say different lengths"),
        (["MODEL", "--tokens", "4x128", "--rows", "5"], "more than the 4 of the step"),
        (["MODEL", "--master", "fp32"], "master='fp32' does not go with precision='bf16'"),
        (["MODEL", "--compression", "2bit"], "refused: it fails the quality test"),
        (["MODEL", "--clip", "never"], "--clip never is not known: use one of global, layer\n"),
        (["MODEL", "--master", "fp8"], "--master fp8 is not known: use one of fp32, split, bf16\n"),
        (["MODEL", "--precision", "fp8"], "--precision fp8 is not known: use one of fp32, bf16\n"),
        (["MODEL", "--compression", "3bit"], "3bit is not known: use one of fp32, lossless, 4bit, 8bit, bf16\n"),
        (["MODEL", "--vram-gb", "0"], "--vram-gb 0 must be a positive number"),
        (["MODEL", "--ram-gb", "nan"], "--ram-gb nan must be a positive number"),
        (["MODEL", "--trace", "nowhere/lanes.json"], "--trace: nowhere/lanes.json cannot be written"),
        (["MODEL", "--ram-gb", "2", "--no-disk", "--vram-gb", "2"], "is enough: "),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], message: str
) -> None:
    written = [str(folder) if word == "MODEL" else word for word in arguments]
    machine = [] if "--machine" in written else ["--machine", "h200-128gb"]
    code, out, err = command(capsys, "plan", *written, *machine)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "names no model_type"),
        ("{", "is no config.json"),
        ("{}", "names no model_type"),
        (
            '{"model_type": "lama"}',
            "unknown model_type 'lama', transformers has none of that name; did you mean 'llama'",
        ),
        ('{"model_type": "abacus"}', "unknown model_type 'abacus'"),
        ('{"model_type": 3}', "unknown model_type 3"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    for path in (file, tmp_path):
        code, _, err = command(capsys, "plan", path, "--machine", "a100")
        assert code == 2 and message in err and err.count("\n") == 1 and len(err) < 400
    file.write_bytes(b"\xff\xfe\xfa")
    code, _, err = command(capsys, "plan", file, "--machine", "a100")
    assert code == 2 and "is no config.json" in err


IMPOSSIBLE = [
    {"num_attention_heads": 3},
    {"intermediate_size": 1.5},
    {"num_attention_heads": 0},
    {"hidden_size": 0},
    {"vocab_size": -5},
    {"hidden_act": "abacus"},
    {"num_hidden_layers": 0},
]


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
def test_a_config_that_transformers_refuses_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**llama_config().to_dict(), **change}))
    for path in (file, tmp_path):
        code, _, err = command(capsys, "plan", path, "--machine", "a100")
        assert code == 2, err
        told = [line for line in err.splitlines() if not line.startswith("[transformers]")]
        assert len(told) == 1 and told[0].startswith("error: ") and len(told[0]) < 600
    if change != {"hidden_size": 0}:  # a model can be made of that; there is nothing in it to plan
        with pytest.raises(UserError):
            mt.from_config(tmp_path)


def test_a_folder_without_a_config_is_refused_with_what_can_be_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = command(capsys, "plan", tmp_path, "--machine", "a100")
    assert code == 2 and "has no config.json" in err
    named = {f"{of}-{size}" for of, sizes in re.findall(r"([\w.]+)-\{(.*?)\}", err) for size in sizes.split(",")}
    assert all(name in named or name in err for name in BUILTIN)


def test_a_profile_that_is_none_is_refused_with_what_it_lacks(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "machine.json"
    good = json.loads(MACHINES["a100"].to_json())
    lacking = {name: value for name, value in good.items() if name not in ("name", "hbm_bytes")}
    for content, message in (
        (json.dumps(lacking).encode(), "it lacks name, hbm_bytes"),
        (json.dumps({**good, "colour": 1}).encode(), "it has the unknown colour"),
        (json.dumps({**good, "num_cores": 1.5}).encode(), "num_cores is 1.5"),
        (b"[]", "it is no JSON object"),
        (b"\xff\xfe\xfa", "is no profile of a machine"),
    ):
        file.write_bytes(content)
        code, _, err = command(capsys, "plan", folder, "--machine", file)
        assert code == 2 and message in err and "__init__" not in err and err.count("\n") == 1


# What is printed


def test_small_models_are_printed_in_units_that_show_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    llama_config(max_position_embeddings=128).save_pretrained(tmp_path)
    code, out, _ = command(
        capsys, "plan", tmp_path, "--machine", "a100", "--tokens", "8x256", "--rows", "3", "--what-if"
    )
    assert code == 0
    assert "memory, MB, each tier" in out and "device MB" in out and " GB, each" not in out
    weights = next(line for line in out.splitlines() if line.startswith("  weights")).split()
    parameters = data(capsys, tmp_path, "--machine", "a100")["model"]["parameters"]
    assert float(weights[-1]) == pytest.approx(4e-6 * parameters, abs=0.05)
    tflops = next(line for line in out.splitlines() if line.strip().startswith("TFLOPS")).split()
    assert 0 < float(tflops[1]) < 1
    assert "3 micro-batches of up to 3 x 256 tokens" in out
    assert "the model's config allows 128 positions, fewer than 256" in out
    largest = next(line for line in out.splitlines() if "largest context" in line)
    assert largest.endswith("the model's config allows 128 positions")


def test_a_machine_that_is_not_known_is_told_before_a_model_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.planning.outline_model", lambda name: pytest.fail("a model was built"))
    code, _, err = command(capsys, "plan", "llama-3-8b", "--machine", "rtx5090")
    assert code == 2 and "there is no machine 'rtx5090'" in err


def test_all_layers_are_counted_alike(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("--machine", "rtx4090", "--tokens", "8x1024", "--clip", "layer", "--compression", "4bit")
    words = data(capsys, "llama-3-70b", *call)["plan"]["words"]
    assert "all 82 layers stream" in words and "moments of 82 layers on disk" in words
