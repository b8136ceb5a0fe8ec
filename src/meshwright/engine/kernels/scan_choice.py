"""Which kernels run Mamba-2 and gated-delta layers: our own in Triton or in torch operations, or those of fla."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from meshwright.engine.kernels import fla_scan
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.kernels.fla_scan import FIELD
from meshwright.errors import InputError
from meshwright.recipes.types import Kernels

AUTO_TRITON = True  # whether kernels.scan=auto takes our Triton kernels on GPUs
SHARED_MEMORY = 160 << 10  # bytes per thread block: datacenter GPUs since the A100 have them, others 99 KiB


def scan_kernel(kernels: Kernels, device_type: str, compute: str = "bf16") -> str:
    """Return which scans run on a device: "triton", "fla" or "torch"; raise if the requested ones cannot run.

    `compute` is the format of activations.

    A dry run models our own kernels whatever is requested.
    """
    reason = _unusable(kernels.scan, device_type, compute)
    if reason:
        raise InputError(reason, field=FIELD, value=kernels.scan, fix=(f"{FIELD}=torch",))
    if device_type in ("cpu", "cuda") and fla_scan.may_run(kernels) and not fla_scan.unusable(device_type):
        return "fla"
    return "triton" if may_run_triton(kernels) and not triton_unusable(device_type, compute) else "torch"


def _unusable(requested: str, device_type: str, compute: str) -> str:
    """Return why the requested kernels do not run; empty if they do, or if none are requested. A dry run has no fla."""
    if requested == "triton":
        return triton_unusable(device_type, compute)
    return fla_scan.unusable(device_type) if requested == "fla" and device_type in ("cpu", "cuda") else ""


def may_run_triton(kernels: Kernels) -> bool:
    """Return whether a recipe's run may take our Triton kernels, if its machine has them."""
    return kernels.scan == "triton" or (kernels.scan == "auto" and AUTO_TRITON)


def triton_unusable(device_type: str, compute: str = "bf16") -> str:
    """Return why our Triton scans do not run here; empty if they do. A dry run's GPU has Triton."""
    if compute != "bf16":
        return f"our Triton kernels of scans compute in bf16, and precision.compute is {compute}"
    if device_type == DRY:
        return ""
    if device_type != "cuda":
        return f"our Triton kernels need a CUDA GPU, and this run is on {device_type.upper()}"
    if torch.version.hip:
        return "our Triton kernels of scans need more shared memory than AMD GPUs have"
    if (found := _shared_memory()) < SHARED_MEMORY:
        need = f"{SHARED_MEMORY >> 10} KiB of shared memory"
        return f"our Triton kernels of scans need {need} per thread block, and this GPU has {found >> 10} KiB"
    return "" if find_spec("triton") else "Triton is not installed; run: pip install triton"


def _shared_memory() -> int:
    """Return the bytes of shared memory of a thread block on this machine's GPU."""
    if not torch.cuda.is_available():
        return SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties()
    return int(properties.shared_memory_per_block_optin)


def missing_note(kernels: Kernels, device_type: str) -> str:
    """Return one line on what is slower without the kernels that `auto` would take; empty where nothing is missing."""
    if device_type != "cuda":
        return ""
    if may_run_triton(kernels) and (reason := triton_unusable(device_type)):
        return f"Mamba-2 and gated-delta layers run torch operations, slower than our Triton kernels: {reason}"
    if fla_scan.may_run(kernels) and (reason := fla_scan.unusable(device_type)):
        return f"Mamba-2 and gated-delta layers run our own kernels, which are slower than fla's: {reason}"
    return ""
