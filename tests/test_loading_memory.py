"""What loading holds beside the homes: two layers and what a first use costs, the page cache of the files included.

A process of its own loads a model. Where the machine lets it, it does so in a memory cgroup of its own, which counts
page cache and pinned pages; else its resident set counts, which has no page cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_equal, closed_later
from model_zoo import make_model
from torch import nn

import megatrain as mt
from megatrain.store.memory import HostMemory

ROOT = Path(__file__).parent.parent

CHILD = """
import json, os, pathlib, sys, threading, torch
import megatrain as mt
import megatrain.load.deferral
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from megatrain.execute.engine import engine_of

how, folder = sys.argv[1:]
torch.set_num_threads(1)
megatrain.load.deferral.PLAIN_BYTES = 0

def own_group():
    rows = dict(line.strip().split(":", 2)[1:] for line in open("/proc/self/cgroup"))
    places = [("/sys/fs/cgroup/memory", rows.get("memory"), "memory.usage_in_bytes"),
              ("/sys/fs/cgroup", rows.get(""), "memory.current")]
    for root, path, usage in places:
        group = pathlib.Path(f"{root}{path}/megatrain-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / usage).read_text()
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return group, group / usage
        except OSError:
            group.rmdir()
    return None, None

def used_bytes():
    if usage is None:
        rows = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        return 1024 * sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    if how != "loaded":
        return int(usage.read_text())
    # What plain loading leaves in the page cache is the system's to take back.
    rows = dict(line.split() for line in open(group / "memory.stat"))
    return int(usage.read_text()) - int(rows.get("cache", rows.get("file"))) + int(rows["shmem"])

def leave_cache(folder):
    for path in pathlib.Path(folder).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

def load(config, folder):
    if how == "from_config":
        return mt.from_config(config, dtype="float32")
    if how == "from_pretrained":
        return mt.from_pretrained(folder, dtype="float32")
    mt.init(device="cpu", defer_loading=how == "deferred")
    return mt.stream(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"))

tiny = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                   num_key_value_heads=2, vocab_size=64, head_dim=16)
mt.init(device="cpu")
group, usage = own_group()
LlamaForCausalLM(tiny).save_pretrained(folder + "-tiny")
load(tiny, folder + "-tiny")  # what a first use costs is there already
config = LlamaConfig.from_pretrained(folder)
leave_cache(folder)
before, peak, done = used_bytes(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, used_bytes())

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
model = load(config, folder)
done.set()
watcher.join()
after = used_bytes()
homes = engine_of(model).homes
sizes = [home.wire.nbytes + home.low.nbytes for home in homes]
for path in pathlib.Path(folder).glob("*.safetensors"):
    path.read_bytes()
print(json.dumps({"account": "resident set" if usage is None else str(usage), "cache": used_bytes() - after,
                  "peak": max(peak, after) - before, "homes": sum(sizes), "layer": max(sizes)}))
if group is not None:
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """380 MB in bf16, in shards of 20 MB; 755 MB of fp32 homes. Its values are zeros: they are not looked at."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
                         num_key_value_heads=4, vocab_size=4096, dtype="bfloat16")  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("large") / "model"
    values = {name: torch.zeros(value.shape, dtype=torch.bfloat16) for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=values, max_shard_size="20MB")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize("how", ["from_pretrained", "deferred", "from_config", "loaded"])
def test_memory_is_homes_and_two_layers(how: str, large_model: Path) -> None:
    assert len(list(large_model.glob("*.safetensors"))) > 15
    command = [sys.executable, "-c", CHILD, how, str(large_model)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    allowance_bytes = 48 * 2**20
    print(figures)
    assert figures["homes"] > 700e6
    assert figures["peak"] <= figures["homes"] + 2 * figures["layer"] + allowance_bytes, figures
    if figures["account"] != "resident set" and how != "loaded":
        assert figures["cache"] > 300e6, "the account does not see the page cache"


# A model that is loaded already


def num_held_bytes(model: nn.Module) -> int:
    return sum(parameter.data.nbytes for parameter in model.parameters())


def test_pages_are_locked_home_by_home_as_weights_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked pages are taken at once: all homes before all weights would be the model twice."""
    model, plain = make_model("llama"), make_model("llama")
    plain.load_state_dict(model.state_dict())
    parameters, held, locked = list(model.parameters()), [], []

    def record(self: HostMemory, tensor: torch.Tensor, mapping: Any) -> None:
        locked.append(tensor.nbytes)
        held.append(sum(parameter.data.nbytes for parameter in parameters))

    init = HostMemory.__init__
    monkeypatch.setattr(HostMemory, "__init__", lambda self, **given: init(self, **{**given, "pin": True}))
    monkeypatch.setattr(HostMemory, "_page_lock", record)
    total = num_held_bytes(model)
    closed_later(mt.stream(model))
    assert len(locked) >= 5
    # A home is the weights that it took, up to a page for each of its parameters, and nothing but it is taken.
    for index, left in enumerate(held):
        assert sum(locked[: index + 1]) + left <= total + 4096 * len(parameters), (locked, held, total)
    assert held[0] > total / 2 and held[-1] == 0
    assert_equal(plain.state_dict(), model.state_dict())


def test_parameters_that_share_one_storage() -> None:
    """Each is given up as it moves, and their memory when the last one has."""
    model, plain = make_model("llama"), make_model("llama")
    plain.load_state_dict(model.state_dict())
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    parameters = list(model.parameters())
    closed_later(mt.stream(model))
    assert_equal(plain.state_dict(), model.state_dict())
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
