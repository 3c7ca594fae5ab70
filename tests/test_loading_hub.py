"""mt.from_pretrained and mt.from_config with a name: the Hub is asked once, its cache stands in where it is silent."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from comparing import assert_equal, closed_later
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from model_zoo import make_model
from transformers import AutoModelForCausalLM

import megatrain as mt
from megatrain.base.hub import HUB_TIMEOUT_SECONDS

SILENT = ConnectionError("Temporary failure in name resolution\nand more")
LOADERS: list[Callable[..., Any]] = [mt.from_pretrained, mt.from_config]


class FakeHub:
    """Answers or raises. Sockets are counted and go nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: Exception | None = None
        self.asked: list[tuple[Any, ...]] = []
        self.num_connections = 0
        monkeypatch.setattr(huggingface_hub, "HfApi", self._api)
        monkeypatch.setattr(socket.socket, "connect", self._connect)
        monkeypatch.setattr(socket, "getaddrinfo", self._connect)

    def _api(self, token: Any = None) -> FakeHub:
        self._token = token
        return self

    def model_info(self, name: str, *, revision: str | None, timeout: float) -> None:
        self.asked.append((name, revision, self._token, timeout))
        if self.answer is not None:
            raise self.answer

    def _connect(self, *_: Any, **__: Any) -> None:
        self.num_connections += 1
        raise OSError("no network")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(monkeypatch)


def cached(cache: Path) -> Any:
    """A plain model, and a copy in a cache of the Hub under the name owner/tiny."""
    model = make_model("llama")
    folder = cache / "models--owner--tiny"
    model.save_pretrained(folder / "snapshots" / "1234", max_shard_size="20KB")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1234")
    return model


@pytest.mark.parametrize("load", LOADERS)
def test_a_name_that_is_nowhere_is_told_at_once(load: Callable[..., Any], hub: FakeHub, tmp_path: Path) -> None:
    hub.answer = SILENT
    with pytest.raises(mt.UserError) as caught:
        load("does-not-exist", cache_dir=tmp_path, token="secret", revision="v2")
    told = str(caught.value)
    assert "does-not-exist: there is no such folder" in told
    assert "the Hub: no answer, ConnectionError: Temporary failure in name resolution)" in told and "more" not in told
    assert hub.asked == [("does-not-exist", "v2", "secret", HUB_TIMEOUT_SECONDS)]
    assert hub.num_connections == 0


@pytest.mark.parametrize("load", LOADERS)
def test_a_name_that_the_hub_does_not_know(load: Callable[..., Any], hub: FakeHub) -> None:
    hub.answer = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(mt.UserError, match="owner/none: there is no such folder, and the Hub has no such model"):
        load("owner/none")
    assert hub.num_connections == 0


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("name", ["a/b/c", "white space"])
def test_what_cannot_be_a_name(load: Callable[..., Any], name: str) -> None:
    with pytest.raises(mt.UserError, match=f"{name}: there is no such folder, and it cannot be a name"):
        load(name)


@pytest.mark.parametrize("keywords", [{}, {"local_files_only": True}])
def test_the_cache_stands_in_for_a_silent_hub(keywords: dict[str, Any], hub: FakeHub, tmp_path: Path) -> None:
    plain = cached(tmp_path)
    hub.answer = SILENT
    model = closed_later(mt.from_pretrained("owner/tiny", cache_dir=tmp_path, **keywords))
    assert_equal(plain.state_dict(), model.state_dict())
    closed_later(mt.from_config("owner/tiny", cache_dir=tmp_path, **keywords))
    assert len(hub.asked) == (0 if keywords else 2)
    # huggingface_hub fetches a table for its headers, once a process. A file that is asked for is retried five times.
    assert hub.num_connections <= 1


def test_without_the_hub_by_choice(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(mt.UserError, match="there is no such folder.*no copy .*local_files_only=True"):
        mt.from_pretrained("owner/tiny", cache_dir=tmp_path, local_files_only=True)
    assert hub.asked == []


def test_a_hub_that_answers_is_left_to_transformers(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def load(path: Any, **keywords: Any) -> Any:
        given.append(keywords)
        raise OSError("as transformers says it")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    mirror = OSError("501")
    mirror.response = object()  # type: ignore[attr-defined]
    for answer in (None, GatedRepoError.__new__(GatedRepoError), mirror):
        hub.answer = answer
        with pytest.raises(mt.UserError, match="as transformers says it"):
            mt.from_pretrained("owner/tiny", cache_dir=tmp_path)
    assert not any("local_files_only" in keywords for keywords in given) and len(given) == 3


def test_a_folder_is_taken_without_asking(hub: FakeHub, tmp_path: Path) -> None:
    hub.answer = SILENT
    make_model("llama").save_pretrained(tmp_path / "model")
    closed_later(mt.from_pretrained(tmp_path / "model"))
    closed_later(mt.from_config(tmp_path / "model"))
    assert hub.asked == []
