"""The Hugging Face Hub when it does not answer."""

from __future__ import annotations

from typing import Any

from megatrain.base.errors import UserError

HUB_TIMEOUT_SECONDS = 10.0


def silence(error: Exception) -> str:
    """`switched off by HF_HUB_OFFLINE`, or the kind of failure and its first line."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "switched off by HF_HUB_OFFLINE"
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"no answer, {type(error).__name__}: {first_line}".rstrip(": ")


def must_be_cached(name: str, *, revision: str | None = None, token: Any = None, cache_dir: Any = None) -> bool:
    """Whether the Hub, asked once, is silent, so that its cache has to do: whoever asks it for files would retry.

    Raises UserError when there is no such model, or neither an answer nor a copy.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi(token=token).model_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
        return False
    except GatedRepoError:
        return False  # a copy may be there, and who asks for the files says how to get access
    except HFValidationError as error:
        raise UserError(f"{name}: there is no such folder, and it cannot be a name on the Hub") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{name}: there is no such folder, and the Hub has no such model (or it is private): check the spelling, "
            "or run `hf auth login`"
        ) from error
    except Exception as error:  # The HTTP library under huggingface_hub differs from version to version.
        if getattr(error, "response", None) is not None:
            return False  # it answers something, a mirror perhaps that has files alone
        check_cached(name, f"the Hub: {silence(error)}", revision=revision, cache_dir=cache_dir)
        return True


def check_cached(name: str, why: str, *, revision: str | None = None, cache_dir: Any = None) -> None:
    """Raises UserError when the Hub's cache on this machine has nothing of a model. why: nobody else can be asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"{name}: there is no such folder, and no copy in the Hub's cache ({why}): give a folder that "
            "save_pretrained wrote, or connect to the Hub (HF_ENDPOINT names a mirror)"
        ) from error
