"""A setting that does not exist is refused by name, with the one that was meant."""

from __future__ import annotations

import inspect

import pytest

import megatrain as mt


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_vram", "mt.init has no setting 'max_vram'; did you mean 'max_vram_gb'?"),
        ("optimizer_compresion", "did you mean 'optimizer_compression'?"),
        ("xyzzy", "mt.init has no setting 'xyzzy'; it has offload_dir, max_vram_gb"),
    ],
)
def test_an_unknown_setting_is_refused_by_name(name: str, told: str) -> None:
    with pytest.raises(mt.UserError) as caught:
        mt.init(**{name: 1})
    assert told in str(caught.value)


def test_the_signature_is_still_seen() -> None:
    assert list(inspect.signature(mt.init).parameters)[:2] == ["offload_dir", "max_vram_gb"]
