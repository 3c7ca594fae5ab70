"""Cross entropy of a piece of logits in compiled code: fp32 inside the kernels, and on a GPU not in memory.

Logits come in in the dtype of the head, and their gradient goes out over them: two bytes a logit in bf16. The matrix
products around are not compiled. Every loss that a `LossRule` can say has such code, made at its first use: one for the
losses alone, and one for losses and gradient.

- The number of tokens is dynamic, so lengths of batches make no new code. Pieces of fewer than two tokens run the same
  functions uncompiled: a compiler takes sizes of 0 and 1 for constants.
- Numbers between head and loss (a soft-cap, a scale) are constants of the code. Where they change from call to call,
  there would be no end of it: losses after the first `MOST_KINDS` run as without compilation, and a warning says so.

Numbers: between head and loss eager PyTorch rounds each step to the dtype of the logits; here nothing is rounded before
the end. The gradient is computed in fp32 and rounded to that dtype once, as eager's is behind a cast to fp32: these two
are equal but for the last place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from megatrain.execute.templates import Compiler, compiled

if TYPE_CHECKING:
    from megatrain.execute.loss_in_pieces import LossRule

MOST_KINDS = 8
"""Of losses with compiled code, for one head."""

_log = logging.getLogger(__name__)


class LossCodes:
    """Compiled code of one head's losses, by what they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: dict[Hashable, LossCode] = {}
        self._is_told = False

    def find(self, rule: LossRule, dtype: torch.dtype) -> LossCode | None:
        """dtype: of the logits. None where there are too many kinds."""
        key = *_key(rule), dtype
        if key not in self._found and len(self._found) < MOST_KINDS:
            self._found[key] = LossCode(rule, f"loss{len(self._found)}")
        elif key not in self._found and not self._is_told:
            self._is_told = True
            _log.warning(
                "%s: losses of more than %d kinds (numbers between head and loss that change from call to call?); "
                "others than the first are not compiled",
                self._name,
                MOST_KINDS,
            )
        return self._found.get(key)


class LossCode:
    """Of single tokens. The arguments, where N are tokens and V is the vocabulary:

    logits: (N, V), in the dtype of the head.
    targets: (N,) int64.
    weights: of the classes (V,), or none.
    """

    def __init__(self, rule: LossRule, name: str) -> None:
        self._forward = token_losses(rule)
        self._compiled_forward = compiled(self._forward, f"{name}_forward", Compiler())
        self._both = _with_gradient(self._forward)
        self._compiled_both = compiled(self._both, f"{name}_gradient", Compiler())

    def losses(self, logits: torch.Tensor, targets: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """(N,), in fp32 at least."""
        if len(targets) < 2:
            return self._forward(logits, targets, *weights)
        _any_length(logits, targets)
        return self._compiled_forward(logits, targets, *weights)

    def with_gradient_(
        self, logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        """The losses, (N,); the logits become the gradient of their sum.

        Args:
            scale: what each loss is multiplied by in the sum, (N,).
        """
        if len(targets) < 2:
            return self._both(logits, targets, scale, *weights)
        _any_length(logits, targets, scale)
        return self._compiled_both(logits, targets, scale, *weights)


def token_losses(rule: LossRule) -> Callable[..., torch.Tensor]:
    """A function of logits (N, V), targets (N,) and, if there are any, weights of the classes (V,) that gives each
    token's loss, (N,) in fp32 at least. 0 for targets that are none.

    It does what `cross_entropy` does, in operations on single numbers and sums over the vocabulary alone, so that it
    and its gradient become one kernel or two; a gather's gradient would be a scatter into zeros.
    """
    steps = [(step.func, step.args, step.kwargs) for step in rule.steps]
    ignored, smoothing = rule.ignored, rule.smoothing

    def losses(logits: torch.Tensor, targets: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for func, args, kwargs in steps:
            logits = func(logits, *args, **kwargs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        is_target = targets != ignored
        is_class = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
        # The gradient of a maximum that is subtracted again is zero.
        highest = logits.detach().amax(-1)
        log_sum = (logits - highest[:, None]).exp().sum(-1).log()
        found = log_sum - (torch.where(is_class, logits, 0).sum(-1) - highest)
        of_classes = weights[0].to(logits.dtype) if weights else None
        if of_classes is not None:
            found = found * torch.where(is_class, of_classes, 0).sum(-1)
        if smoothing:
            below, of_all = logits - highest[:, None], logits.shape[-1] * log_sum
            if of_classes is not None:
                below, of_all = below * of_classes, of_classes.sum() * log_sum
            of_all = of_all - below.sum(-1)
            found = (1 - smoothing) * found + smoothing / logits.shape[-1] * of_all
        return found.where(is_target, 0)

    return losses


def _key(rule: LossRule) -> tuple[Hashable, ...]:
    """Equal for rules whose losses of single tokens are computed alike."""
    steps = tuple((step.func, step.args, tuple(step.kwargs.items())) for step in rule.steps)
    return steps, rule.ignored, rule.smoothing


def _with_gradient(losses: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def both(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        found, pull_back = torch.func.vjp(lambda logits: losses(logits, targets, *weights), logits)
        logits.copy_(pull_back(scale.to(found.dtype))[0])
        return found

    return both


def _any_length(*tensors: torch.Tensor) -> None:
    """Tell the compiler that the first dimension varies, before it sees it vary: else the first length has code of its
    own."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
