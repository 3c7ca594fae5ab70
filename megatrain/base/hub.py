"""The Hugging Face Hub when it does not answer."""

from __future__ import annotations

HUB_TIMEOUT_SECONDS = 10.0


def silence(error: Exception) -> str:
    """`switched off by HF_HUB_OFFLINE`, or the kind of failure and its first line."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "switched off by HF_HUB_OFFLINE"
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"no answer, {type(error).__name__}: {first_line}".rstrip(": ")
