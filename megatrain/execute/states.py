"""What a run's states are, in words: which are exact, which are lossy, and what would be exact instead."""

from __future__ import annotations

from megatrain.base.config import Config
from megatrain.spec.homes import Formats

MASTERS = {
    "fp32": "fp32 throughout (TF32 off)",
    "split": "bf16 compute, exact fp32 master (split 16+16 bits)",
    "bf16": 'bf16 compute, LOSSY bf16 master (stochastic rounding; exact: master="split")',
}
_ALTERNATIVE = 'exact: optimizer_compression=False, or "lossless"'
MOMENTS = {
    "fp32": "exact fp32 moments",
    "lossless": "exact moments (fp32, losslessly coded)",
    "bf16": f"LOSSY bf16 moments (stochastic rounding; {_ALTERNATIVE})",
    "8bit": f"LOSSY 8-bit moments ({_ALTERNATIVE})",
    "4bit": f"LOSSY 4-bit moments ({_ALTERNATIVE})",
}


def describe_states(formats: Formats, config: Config) -> str:
    """For the run's first line."""
    parts = [MASTERS[formats.master], MOMENTS[config.moments]]
    if formats.gradient_dtype_name == "bf16":
        parts.append('gradients summed in fp32 and sent home in bf16 (exact: grad_dtype="fp32")')
    if config.clip == "layer":
        parts.append('gradients clipped layer by layer and not kept (exact global norm: clip="global")')
    return ", ".join(parts)
