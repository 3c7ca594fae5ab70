"""Stand-ins for the two steps of transformers' `from_pretrained` that read and finish the weights.

`from_pretrained` itself runs as ever: it finds the class and the files, builds the model on the meta device, reads the
generation config. The stand-ins ask who is to load: the loader of this thread (`mt.from_pretrained`), else the one of
the process (`mt.init`), else, or where that one declines, transformers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from transformers import PreTrainedModel

from megatrain.load.units import PATCHING

_STEPS = ("_load_pretrained_model", "_finalize_model_loading")


class Loader(Protocol):
    """Stands in for transformers."""

    def load(self, model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any) -> Any | None:
        """transformers' report of the loading; None: transformers is to load this model."""

    def finalize(self, model: Any, load_config: Any, loading_info: Any) -> Any | None:
        """The final report; None: transformers is to finish this model."""


class _Loaders(threading.local):
    """Who loads in this thread."""

    own: Loader | None = None


_of_thread = _Loaders()
_of_process: list[Loader] = []
_num_active = 0
_originals: dict[str, Any] = {}


@contextlib.contextmanager
def loading_by(loader: Loader) -> Iterator[None]:
    """In this thread alone: models that others load meanwhile are loaded as before.

    One at a time: transformers puts stand-ins for methods of its own while it loads, which two would put back wrongly.
    """
    with PATCHING:
        before = _of_thread.own
        _activate()
        _of_thread.own = loader
        try:
            yield
        finally:
            _of_thread.own = before
            _deactivate()


def set_process_loader(loader: Loader | None) -> None:
    """Who loads wherever no `loading_by` is active, from now on. None: transformers, whose functions are put back."""
    with PATCHING:
        before = list(_of_process)
        if loader is not None:
            _activate()
        _of_process[:] = [] if loader is None else [loader]
        if before:
            _deactivate()


def _activate() -> None:
    global _num_active
    with PATCHING:
        _num_active += 1
        if _num_active == 1:
            for name in _STEPS:
                _originals[name] = vars(PreTrainedModel)[name]
            PreTrainedModel._load_pretrained_model = staticmethod(_load)
            PreTrainedModel._finalize_model_loading = staticmethod(_finalize)


def _deactivate() -> None:
    global _num_active
    with PATCHING:
        _num_active -= 1
        if _num_active == 0:
            for name in _STEPS:
                setattr(PreTrainedModel, name, _originals[name])


def _loader() -> Loader | None:
    return _of_thread.own or next(iter(_of_process), None)


def _load(
    model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Under the names that transformers calls it with."""
    loader = _loader()
    info = None if loader is None else loader.load(model, state_dict, checkpoint_files, load_config)
    if info is not None:
        return info, None
    return _original("_load_pretrained_model")(model, state_dict, checkpoint_files, load_config, *args, **kwargs)


def _finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
    loader = _loader()
    info = None if loader is None else loader.finalize(model, load_config, loading_info)
    return info if info is not None else _original("_finalize_model_loading")(model, load_config, loading_info)


def _original(name: str) -> Any:
    return _originals[name].__func__
