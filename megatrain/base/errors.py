"""The errors of the library's own.

Rule: every message names the thing that is wrong and what to do instead. Invariants of the code itself are
`assert`s, not these.
"""

from __future__ import annotations


class UserError(ValueError):
    """Bad input or a setting that cannot work. Raised before any work starts."""


class NonFiniteError(RuntimeError):
    """Gradients were infinite or NaN in too many steps in a row. No weight has taken anything from them."""


class PlanError(UserError):
    """No plan fits the workload. The message names the smallest remedies."""


class InterruptedRunError(RuntimeError):
    """The user stopped a run (Ctrl-C). The message says how to go on."""


class StoppedRunError(SystemExit):
    """A signal ended a run behind a checkpoint: the process ends with 0."""

    def __init__(self) -> None:
        super().__init__(0)


class DiskError(RuntimeError):
    """A disk failed in the middle of a run, after retries. The message names folder, place and errno."""


class CorruptionError(RuntimeError):
    """Bytes are not what they were (`mt.init(verify_transfers=True)`): they changed where they lay, or on their way, in
    every one of several tries. The message names the layer and the place."""


class ChangedInTransitError(CorruptionError):
    """Bytes arrived changed; those that were sent are still there."""

    def __init__(self, what: str) -> None:
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.args[0]} arrived changed; if that stays so, go on from the last checkpoint, on other hardware"


class UpdateError(RuntimeError):
    """The update of a layer failed, after retries. The message names the layer and says how to go on."""


class DiskUpdateError(UpdateError, DiskError):
    """As UpdateError, where a disk was why."""


class CorruptUpdateError(UpdateError, CorruptionError):
    """As UpdateError, where bytes had changed."""


def kind_of_update_error(reason: BaseException) -> type[UpdateError]:
    """Which says of what kind its reason was."""
    if isinstance(reason, DiskError):
        return DiskUpdateError
    return CorruptUpdateError if isinstance(reason, CorruptionError) else UpdateError


class RefusedError(RuntimeError):
    """A call that makes no sense on a streamed model (or would do harm silently), refused by name."""


def one_line(error: BaseException | None) -> str:
    """The reason that another library gave, without its details: one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A heading has the reason below it, as in huggingface_hub's strict dataclasses.
    text = lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0] if lines else ""
    if not text or isinstance(error, (LookupError, ArithmeticError, AttributeError)):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= 300 else f"{text[:300]}..."
