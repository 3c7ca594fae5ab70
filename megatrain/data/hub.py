"""Datasets of the Hugging Face Hub.

Rule: a Hub that cannot be reached costs seconds and one line, not a screen of retries. Therefore it is asked once, with
a timeout; if it is silent, only the copy that an earlier download left is looked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatrain.base.errors import UserError
from megatrain.base.hub import HUB_TIMEOUT_SECONDS, silence

HUB_PREFIX = "hf:"


def load_hub_dataset(source: str) -> Any:
    """The dataset of `hf:NAME[:CONFIG[:SPLIT]]`. Raises UserError when there is none, here or there."""
    name, _, rest = source.removeprefix(HUB_PREFIX).partition(":")
    config, _, split = rest.partition(":")
    from datasets import load_dataset

    silent = _silence(name)
    try:
        with _switched_off() if silent else contextlib.nullcontext():
            return load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the library raises a dozen unrelated kinds: offline, unknown name, unknown split
        why = f"the Hub: {silent}, and no copy of it is here" if silent else f"{type(error).__name__}: {error}"
        raise UserError(
            f"data: {source} could not be loaded ({why}); check {HUB_PREFIX}NAME[:CONFIG[:SPLIT]] and the network, "
            "or name local files"
        ) from error


def _silence(name: str) -> str | None:
    """Why the Hub does not answer; None if it does, whatever it says of the dataset."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return None
    except Exception as error:  # the HTTP library under huggingface_hub differs from version to version
        return silence(error)
    return None


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    """As HF_HUB_OFFLINE=1, which both libraries read when they are imported."""
    import datasets
    import huggingface_hub

    places = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
