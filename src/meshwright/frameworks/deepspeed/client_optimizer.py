"""The Trainer's optimizer beside offloaded optimizer states: Accelerate puts one of DeepSpeed's in its place."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.trainer import Arguments
from meshwright.frameworks.trainer_fields import is_trainer
from meshwright.frameworks.types import ProgramArguments, Settings
from meshwright.rules.rule import Finding

OPTIMIZER, PLAIN = "optim", "adamw_torch"
DEVICE, STAGE = "zero_optimization.offload_optimizer.device", "zero_optimization.stage"
FORCED = "zero_force_ds_cpu_optimizer"
REPLACED = (
    *("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "paged_adamw_8bit", "lion_8bit"),
    *("paged_lion_8bit", "adafactor", "sgd", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)
"""Optimizers in whose place map_pytorch_optim_to_deepspeed of accelerate/utils/deepspeed.py puts Adam in fp32."""


def replaced_optimizer(settings: Settings, arguments: Arguments, program: ProgramArguments) -> Iterator[Finding]:
    """Yield a finding for an optimizer of the Trainer that does not run because its states are offloaded."""
    named = arguments.get(OPTIMIZER)
    if named is None or named.unresolved or not is_trainer(arguments) or not _is_forced(settings):
        return
    stated = str(named.value)
    if stated not in REPLACED:
        return
    in_code = named.file.endswith(".py")
    decays = _decays(arguments) and "adamw" in stated
    weight_decay = ", with an L2 penalty in place of decoupled weight decay" if decays else ""
    device = settings[DEVICE]
    yield Finding(
        "key.unused",
        "warning",
        OPTIMIZER,
        f"{'' if in_code else '--'}{OPTIMIZER} {stated} has no effect: {device.location} offloads the optimizer "
        f"states, and Accelerate then runs DeepSpeedCPUAdam with fp32 states{weight_decay}; {PLAIN} runs as AdamW",
        program.formatted(OPTIMIZER, PLAIN) if in_code else (f"--{OPTIMIZER} {PLAIN}",),
        file=named.file,
        line=named.line,
    )


def _decays(arguments: Arguments) -> bool:
    """Return whether weights decay: the Trainer's default is that they do not."""
    stated = arguments.get("weight_decay")
    return stated is not None and str(stated.value) not in ("0", "0.0")


def _is_forced(settings: Settings) -> bool:
    """Return whether states are offloaded, the config names no optimizer, and DeepSpeed's replaces another one."""
    device, stage, forced = (settings.get(key) for key in (DEVICE, STAGE, FORCED))
    if device is None or device.unresolved or str(device.value) not in ("cpu", "nvme"):
        return False
    has_own = any(key == "optimizer" or key.startswith("optimizer.") for key in settings)
    return not has_own and (stage is None or stage.value != 0) and (forced is None or forced.value is True)
