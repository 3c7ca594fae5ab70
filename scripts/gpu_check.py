"""What only a GPU can show: the stream equals its serial twin and plain PyTorch there, memory stays flat, then figures.

    python scripts/gpu_check.py correctness
    python scripts/gpu_check.py flat
    python scripts/gpu_check.py attention
    python scripts/gpu_check.py layer
    python scripts/gpu_check.py long
    python scripts/gpu_check.py figures --only 3B

Prints one line a check and exits with 1 if one failed. Figures are JSON objects of `megatrain bench`.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flipping import check_flips
from gpu_attention import run_attention
from gpu_compiled import check_compiled, check_kept_in_part, run_layer
from gpu_figures import FIGURES, OFFLOAD_DIR, run_figures
from gpu_link import check_throttle, check_waits
from gpu_long import run_long
from gpu_loss import check_compiled_pieces, check_loss_code, check_sums
from gpu_merging import check_merged
from gpu_models import gemma, llama, mixtral
from gpu_running import run_checks
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain as mt
from megatrain.api import stream
from megatrain.base.config import StreamOptions
from megatrain.execute.engine import engine_of
from megatrain.plan.placement import CPU, HBM, STREAM, Place


def batches(vocabulary: int, lengths: tuple[int, ...] = (70, 120, 96, 33)) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(0, vocabulary, (2, n), generator=generator).cuda() for n in lengths]
    return [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in made]


def plain_gradients(model: torch.nn.Module, data: list[dict], seeds: list[int]) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model).cuda().train()
    total = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in data)
    for batch, seed in zip(data, seeds, strict=True):
        torch.manual_seed(seed)
        model(**batch, num_items_in_batch=total).loss.backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(make: Callable[[], torch.nn.Module]) -> str:
    """fp32, layer-major accumulation: bit-equal to plain accumulation on the GPU."""
    torch.manual_seed(0)
    model = make()
    data = batches(model.config.vocab_size)
    torch.manual_seed(5)
    seeds = torch.randint(2**62, (len(data),)).tolist()
    expected = plain_gradients(model, data, seeds)
    mt.init(precision="fp32")
    model = mt.stream(copy.deepcopy(model)).train()
    torch.manual_seed(5)
    mt.accumulate(model, data)
    got = dict(mt.named_gradients(model))
    different = [name for name in expected if not torch.equal(expected[name], got[name])]
    worst = max((float((expected[n] - got[n]).abs().max()) for n in expected), default=0.0)
    assert got.keys() == expected.keys()
    return "" if not different else f"{len(different)} of {len(expected)} gradients differ, at most {worst:.2e}"


def trained(
    make: Callable, precision: str, options: StreamOptions, data: list[dict] | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Weights and moments after four steps. settings: of mt.init."""
    torch.manual_seed(0)
    model = make()
    mt.init(precision=precision, **{"hbm_home_gb": 0, **settings})
    stream(model, options=options)
    clips_layers = settings.get("clip") == "layer"
    max_norm = {"max_norm": 0.5} if clips_layers else {}
    optimizer = mt.optim.AdamW(model, lr=1e-3, weight_decay=0.1, **max_norm)
    data = data or batches(model.config.vocab_size)
    torch.manual_seed(7)
    for _ in range(4):
        mt.accumulate(model, data)
        if not clips_layers:
            mt.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    moments = {f"{i} {name}": t.cpu() for i, of in optimizer.state_dict()["state"].items() for name, t in of.items()}
    state = mt.full_state_dict(model) | moments
    engine_of(model).close()
    return state


def check_twin(make: Callable, precision: str) -> str:
    """Four steps: the lanes, with delays and poisoned slots, bit-equal to the serial twin."""
    truth = trained(make, precision, StreamOptions(serial=True))
    for num_slots, max_drains in ((1, 1), (3, 2), (5, 3)):
        options = StreamOptions(
            num_slots=num_slots,
            max_drains=max_drains,
            poison=True,
            lane_delay_seconds=0.005,
            activation_bytes=None if num_slots == 3 else num_slots * 2**18,
        )
        state = trained(make, precision, options)
        different = [name for name in truth if not torch.equal(truth[name], state[name])]
        if different:
            return f"{len(different)} weights differ with {num_slots} slots: {different[:3]}"
    return ""


def check_places(precision: str, **settings: Any) -> str:
    """Homes on the device, or streamed through it for their update, by Triton: bit-equal to those of the CPU."""
    truth = trained(llama, precision, StreamOptions(serial=True), **settings)
    mixed = {"model.embed_tokens": "hbm", "model.layers.0": "hbm", "model.layers.1": "stream"}
    tiers = {
        "model.embed_tokens": Place(moments="disk", gradients="disk"),
        "model.layers.0": Place(moments="hbm", update="device"),
        "model.layers.1": "disk",
        "model.layers.2": Place(weights="disk"),
        "resident": Place(moments="hbm", update="device"),
    }
    for places in ("hbm", "stream", mixed, "disk", tiers):
        options = StreamOptions(places=places, poison=True, lane_delay_seconds=0.002)
        state = trained(llama, precision, options, offload_dir=OFFLOAD_DIR, **settings)
        different = [name for name in truth if not torch.equal(truth[name], state[name])]
        if different:
            return f"{len(different)} weights and moments differ with places={places}: {different[:3]}"
    return ""


def check_moved(**settings: Any) -> str:
    """Homes that move to the device and back between two steps, and slots that come and go: bit-equal to homes that
    stay. Prints device memory before the moves, with homes there and after."""
    everywhere = {"model.embed_tokens": HBM, **{f"model.layers.{n}": HBM for n in range(6)}, "lm_head": HBM}
    some = {"model.layers.0": STREAM, "model.layers.1": CPU, "model.layers.2": Place(moments="hbm", update="device")}
    moves = [({}, 2), (everywhere, 3), (some, 4), (dict.fromkeys(everywhere, CPU), 2), ({"model.layers.3": HBM}, 2)]
    states = []
    for is_moved in (False, True):
        torch.manual_seed(0)
        mt.init(precision="bf16", hbm_home_gb=0, **settings)
        options = StreamOptions(num_slots=2, poison=True, lane_delay_seconds=0.002, activation_bytes=2**20)
        model = stream(llama(), options=options)
        clips_layers = settings.get("clip") == "layer"
        optimizer = mt.optim.AdamW(model, lr=1e-3, **({"max_norm": 0.5} if clips_layers else {}))
        engine, data, figures = engine_of(model), batches(1000), []
        for places, num_slots in moves:
            if is_moved:
                assert engine.mover.is_free()
                engine.mover.move([places.get(home.name, home.place) for home in engine.homes])
                engine.mover.resize_slots(num_slots)
            torch.cuda.empty_cache()
            figures.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
            for _ in range(2):
                mt.accumulate(model, data)
                optimizer.step()
                optimizer.zero_grad()
        moments = optimizer.state_dict()["state"]
        named = {f"{i} {name}": tensor.cpu() for i, of in moments.items() for name, tensor in of.items()}
        states.append(mt.full_state_dict(model) | named)
        engine.close()
    print("     reserved and allocated after each move:", [f"{a >> 20}, {b >> 20} MiB" for a, b in figures], flush=True)
    (truth, moved), allocated = states, [num_bytes for _, num_bytes in figures]
    different = [name for name in truth if not torch.equal(truth[name], moved[name])]
    if different:
        return f"{len(different)} weights and moments differ: {different[:3]}"
    return "" if allocated[1] > max(allocated[0], allocated[3]) else "device memory did not come and go with the homes"


def check_activations() -> str:
    """Boundary activations on the host, or in one room with gradients on the device, large and without delays, so that
    their memory is reused at once."""

    def wide() -> torch.nn.Module:
        return LlamaForCausalLM(
            LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
                        num_key_value_heads=8, vocab_size=1000, attn_implementation="eager")
        )  # fmt: skip

    data = batches(1000, (700, 800, 900, 800))
    states = []
    on_device = {f"model.layers.{n}": "hbm" for n in range(6)}
    for options in (
        StreamOptions(serial=True),
        StreamOptions(activation_bytes=0),
        StreamOptions(activation_bytes=2**26),
        StreamOptions(activation_bytes=2**26, places=on_device, room_bytes=2**28, device_room_bytes=2**28),
        StreamOptions(activation_bytes=2**25, places=on_device, room_bytes=2**28, device_room_bytes=2**27, poison=True),
    ):
        states.append(trained(wide, "bf16", options, data=data))
    truth, *others = states
    different = [name for state in others for name in truth if not torch.equal(truth[name], state[name])]
    return f"{len(different)} weights differ: {different[:3]}" if different else ""


def check_kept(make: Callable, precision: str, **settings: Any) -> str:
    """Blocks that keep what they compute inside, and groups of micro-batches: bit-equal to recomputing all at once."""
    truth = trained(make, precision, StreamOptions(serial=True), **settings)
    blocks = make().config.num_hidden_layers
    for first, group in ((0, None), (1, 1), (0, 3)):
        kept = {f"model.layers.{number}": "all" for number in range(first, blocks)}
        options = StreamOptions(kept_layers=kept, micro_batches_a_visit=group, num_slots=1, poison=True)
        state = trained(make, precision, options, **settings)
        different = [name for name in truth if not torch.equal(truth[name], state[name])]
        if different:
            return f"{len(different)} weights differ with {group or 'all'} micro-batches at a time: {different[:3]}"
    return ""


def check_pieces() -> str:
    """Head and loss in pieces: losses and weights near those of whole logits."""
    truth = trained(llama, "fp32", StreamOptions(), logits_in_pieces=False)
    state = trained(llama, "fp32", StreamOptions(), logits_in_pieces=True)
    weights = [name for name in truth if name.startswith(("model.", "lm_head."))]
    worst = max(float((truth[n] - state[n]).norm() / truth[n].norm().clamp(min=1e-6)) for n in weights)
    return "" if worst < 1e-3 else f"relative difference {worst:.1e}"


def check_verified() -> str:
    """verify_transfers: bit-equal to off, also where one bit flips on each kind of way."""
    options = StreamOptions(places={"model.layers.1": "stream"}, activation_bytes=0)
    return check_flips(lambda verifies: trained(llama, "bf16", options, verify_transfers=verifies))


def run_correctness() -> bool:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    checks = {
        "gradients llama fp32": lambda: check_gradients(llama),
        "gradients llama fp32 dropout": lambda: check_gradients(lambda: llama(0.1)),
        "gradients gemma3 fp32": lambda: check_gradients(gemma),
        "gradients mixtral fp32, router loss": lambda: check_gradients(mixtral),
        "twin llama fp32": lambda: check_twin(llama, "fp32"),
        "twin llama bf16 dropout": lambda: check_twin(lambda: llama(0.1), "bf16"),
        "twin mixtral bf16": lambda: check_twin(mixtral, "bf16"),
        "activations and gradients in one room": check_activations,
        "places fp32": lambda: check_places("fp32"),
        "places split": lambda: check_places("bf16"),
        "places bf16 master, 4bit": lambda: check_places("bf16", master="bf16", optimizer_compression="4bit"),
        "places split, 8bit, clip by layer": lambda: check_places("bf16", optimizer_compression="8bit", clip="layer"),
        "homes moved at a step boundary": lambda: check_moved(optimizer_compression="8bit"),
        "homes moved at a step boundary, clip by layer": lambda: check_moved(clip="layer"),
        "kept insides and groups fp32": lambda: check_kept(llama, "fp32"),
        "kept insides and groups bf16 dropout": lambda: check_kept(lambda: llama(0.1), "bf16"),
        "kept insides and groups mixtral bf16": lambda: check_kept(mixtral, "bf16"),
        "head and loss in pieces": check_pieces,
        "products added to a sum in fp32": check_sums,
        "compiled loss": check_loss_code,
        "compiled head and loss in pieces fp32": lambda: check_compiled_pieces("fp32", is_tied=False),
        "compiled head and loss in pieces bf16": lambda: check_compiled_pieces("bf16", is_tied=False),
        "compiled head and loss in pieces bf16, tied": lambda: check_compiled_pieces("bf16", is_tied=True),
        "merged micro-batches fp32": lambda: check_merged("fp32"),
        "merged micro-batches bf16": lambda: check_merged("bf16"),
        "verify_transfers": check_verified,
        "throttled link": lambda: check_throttle(trained),
        "no wait for the device in a step": lambda: check_waits(batches(1000)),
        "compiled llama bf16": lambda: check_compiled(trained),
        "compiled llama bf16, kept in part": lambda: check_kept_in_part(trained),
    }
    return run_checks(checks)


FLAT_STEPS, FLAT_WARM_UP = 500, 100
FLAT_TOLERANCE = 0.02
"""Of reserved device memory: the allocator rounds sizes that it sees for the first time."""


def flat_batch(length: int) -> dict[str, Any]:
    ids = torch.randint(0, 1000, (4, length), device="cuda")
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def look_up(model: torch.nn.Module, folder: str) -> None:
    """What comes between steps: eval, generate, a save."""
    model.eval()
    with torch.no_grad():
        model(**flat_batch(512))
    model.generate(flat_batch(16)["input_ids"], max_new_tokens=8, do_sample=False, pad_token_id=0)
    model.save_pretrained(folder)
    model.train()


def flat_figures(engine: Any) -> dict[str, int]:
    """Bytes now: of the device's allocator, and of the host."""
    reserved_bytes = torch.cuda.memory_reserved()
    return {
        "reserved": reserved_bytes,
        "max_reserved": torch.cuda.max_memory_reserved(),
        "reserved_less_allocated": reserved_bytes - torch.cuda.memory_allocated(),
        "host": engine.memory.ram_bytes,
        "pinned": engine.memory.pinned_bytes,
    }


def run_flat() -> bool:
    """Random lengths and micro-batches, part of the activations on the host, eval, generate and saves in between."""
    torch.manual_seed(0)
    model = llama()
    mt.init(precision="bf16", hbm_home_gb=0)
    places = {f"model.layers.{n}": "hbm" for n in range(2)}
    stream(model, options=StreamOptions(activation_bytes=2**22, places=places, device_room_bytes=2**23))
    engine, optimizer = engine_of(model), mt.optim.AdamW(model, lr=1e-3)
    draws, seen = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FLAT_STEPS):
            # The most that comes is the first step.
            lengths = [draws.randint(32, 512) for _ in range(draws.randint(1, 4))] if number else [512] * 4
            mt.accumulate(model, [flat_batch(length) for length in lengths])
            mt.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number % 50 == 25:
                look_up(model, folder)
            engine.wait()
            seen.append(flat_figures(engine))
            if number % 50 == 0:
                print(number, {name: f"{value / 2**20:.1f} MiB" for name, value in seen[-1].items()}, flush=True)
    first, later = seen[FLAT_WARM_UP : 2 * FLAT_WARM_UP], seen[2 * FLAT_WARM_UP :]
    passed = engine.activations.num_offloaded > FLAT_STEPS
    for name in seen[0]:
        before, after = (max(figures[name] for figures in part) for part in (first, later))
        room = 0 if name in ("host", "pinned") else FLAT_TOLERANCE * max(figures["reserved"] for figures in first)
        is_flat = after <= before + room
        passed &= is_flat
        print(f"{'ok  ' if is_flat else 'FAIL'} flat {name}: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB at most")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    checks = {"correctness": run_correctness, "flat": run_flat, "attention": run_attention, "layer": run_layer}
    checks["long"] = run_long
    parser.add_argument("what", choices=(*checks, "figures"))
    parser.add_argument("--only", nargs="*", choices=FIGURES, default=["3B", "7B", "7B-24GB"])
    parser.add_argument("--to", type=Path, help="figures: a file that gets a line of JSON for each")
    args = parser.parse_args()
    checks["figures"] = lambda: run_figures(args.only, args.to)
    sys.exit(0 if checks[args.what]() else 1)


if __name__ == "__main__":
    main()
