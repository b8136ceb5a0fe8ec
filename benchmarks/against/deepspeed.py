"""DeepSpeed 0.19.8: its config class, its schedulers, and what its optimizers take; nothing is compiled."""

from __future__ import annotations

import inspect
import json
import logging
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.against import MISSING, Config, Framework, Verdict

from meshwright.frameworks.mapping import nest

WORLD = 8  # where nobody says the GPUs
DRAWN = 600
SEED = 6


def judge(config: Config, folder: Path) -> Verdict:
    """What DeepSpeed says of a file on so many GPUs: the first error of reading it and of building what it names."""
    if not config.path.endswith(".json"):
        return Verdict(None, "a command, which its launcher hands on unread")
    from deepspeed.runtime import config as theirs

    try:
        given = json.loads(config.text, object_pairs_hook=theirs.dict_raise_error_on_duplicate_keys)
        given = as_trainer_fills(given)
        world = config.world or _world(given)
        with (
            mock.patch.object(theirs.dist, "get_world_size", return_value=world),
            mock.patch.object(theirs.dist, "get_rank", return_value=0),
        ):
            read = theirs.DeepSpeedConfig(given)
        _build(read)
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Verdict(True)


def as_trainer_fills(given: Any) -> Any:
    """The config with what transformers' Trainer puts in the place of auto, or takes out."""
    if not isinstance(given, dict):
        return given
    filled = {key: as_trainer_fills(value) for key, value in given.items() if value != "auto"}
    if given.get("train_micro_batch_size_per_gpu") == "auto":
        filled["train_micro_batch_size_per_gpu"] = 1
    for key, value in {"warmup_max_lr": 1e-4, "warmup_min_lr": 0, "total_num_steps": 1000, "lr": 1e-4}.items():
        if given.get(key) == "auto":
            filled[key] = value
    return filled


def _world(given: Mapping[str, Any]) -> int:
    """The GPUs that a file's three numbers mean."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (given.get(name) for name in names)
    if all(isinstance(value, int) and value > 0 for value in (total, micro, steps)) and total % (micro * steps) == 0:
        return int(total // (micro * steps))
    return WORLD


def _build(read: Any) -> None:
    """The optimizer's arguments and the scheduler, as the engine takes them."""
    import torch
    from deepspeed.runtime import lr_schedules

    weight = torch.nn.Parameter(torch.zeros(4, 4))
    params = dict(read.optimizer_params or {})
    if "max_grad_norm" in params:
        raise ValueError("'max_grad_norm' is not supported as an optimizer parameter")
    if read.optimizer_name is not None and (made := _optimizer(read.optimizer_name, params)) is not None:
        inspect.signature(made).bind([weight], **params)
        for key in {"lr", "eps", "weight_decay"} & params.keys():
            float(params[key] + 0)  # a text is no number
    if read.scheduler_name is not None:
        steps = torch.optim.SGD([weight], lr=0.1)
        getattr(lr_schedules, read.scheduler_name)(steps, **(read.scheduler_params or {}))


def _optimizer(name: str, params: dict[str, Any]) -> Any:
    """The class that the engine would take; None where its arguments are not known without building it."""
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lion import FusedLion

    if name in ("adam", "adamw"):
        torchs = params.pop("torch_adam", False)
        for key in ("adam_w_mode", "fp32_optimizer_states"):
            params.pop(key, None)
        return torch.optim.AdamW if torchs else FusedAdam
    if name in ("muon", "adagrad", "lamb", "muadam", "muadamw", "musgd"):
        return None
    return FusedLion if name == "lion" else getattr(torch.optim, name)


CHOICES: Mapping[str, tuple[Any, ...]] = {
    "train_batch_size": (64, 48, 63, "64"),
    "train_micro_batch_size_per_gpu": (1, 2, 3, 0),
    "gradient_accumulation_steps": (1, 4, 8, 0),
    "gradient_clipping": (0.0, 1.0, "1"),
    "zero_optimization.stage": (0, 1, 2, 3, 4, "3"),
    "zero_optimization.overlap_comm": (True, "yes", 3),
    "zero_optimization.reduce_bucket_size": (500000000, 5e8, -1, "big"),
    "zero_optimization.offload_optimizer.device": ("cpu", "nvme", "gpu", "none"),
    "zero_optimization.offload_param.device": ("cpu", "disk"),
    "zero_optimization.offload_optimizer.pin_memory": (True, "x"),
    "zero_optimization.offload_optimizer.ratio": (0.5, 1.5),
    "zero_optimization.cpu_offload": (True,),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True,),
    "zero_optimization.zero_hpz_partition_size": (2, 8, -1),
    "zero_optimization.mics_shard_size": (2,),
    "zero_optimization.contigous_gradients": (True,),
    "bf16.enabled": (True, False, "true", 1),
    "bf16.enable": (True,),
    "bf16.bf16_master_weights_and_grads": (True,),
    "bf16.bf16_optimizer_states": (True,),
    "fp16.enabled": (True, False),
    "fp16.loss_scale": (0, 128, -1, "dynamic"),
    "fp16.fp16_master_weights_and_grads": (True,),
    "fp16.initial_scale_power": (16, -1, 2.5),
    "data_types.grad_accum_dtype": ("fp32", "bf16", "fp8"),
    "communication_data_type": ("bf16", "fp32", "int8"),
    "gradient_allreduce_op": ("mean", "sum", "max"),
    "optimizer.type": ("AdamW", "Adam", "Lion", "SGD", "adamw", "Nadamw", "OneBitAdam", "sgd"),
    "optimizer.params.lr": (1e-4, "1e-4"),
    "optimizer.params.betas": ([0.9, 0.95],),
    "optimizer.params.momentum": (0.9,),
    "scheduler.type": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "Cosine", "OneCycle"),
    "scheduler.params.warmup_num_steps": (100, 0, "100"),
    "scheduler.params.total_num_steps": (1000, 10),
    "scheduler.params.warmup_type": ("log", "linear", "cosine"),
    "tensor_parallel.autotp_size": (2, 3),
    "tensor_parallel.tp_size": (2,),
    "expert_parallel.enabled": (True,),
    "elasticity.enabled": (True,),
    "compile.deepcompile": (True,),
    "activation_checkpointing.partition_activations": (True,),
    "checkpoint.tag_validation": ("Warn", "Ignore", "strict"),
    "steps_per_print": (10, "inf"),
    "wall_clock_breakdown": (True, "no"),
    "flops_profiler.enabled": (True,),
    "amp.enabled": (True,),
    "sparse_gradients": (True,),
    "zero_allow_untested_optimizer": (True,),
    "torch_autocast.enabled": (True,),
    "torch_autocast.dtype": ("bfloat16", "bf16"),
}


def draws() -> Iterator[Config]:
    """Small configs with up to five settings from right and wrong values."""
    dice = random.Random(SEED)
    for number in range(DRAWN):
        names = dice.sample(list(CHOICES), dice.randint(1, 5))
        changes = {key: dice.choice(CHOICES[key]) for key in names}
        start = {"train_micro_batch_size_per_gpu": 1}
        if any(key.startswith("optimizer.") for key in changes):
            start |= {"optimizer.type": "AdamW", "optimizer.params.lr": 1e-4}
        if any(key.startswith("scheduler.") for key in changes):
            start |= {"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 1000}
        text = json.dumps(nest({**start, **changes}), indent=1)
        said = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        yield Config(f"{number}: {said}", "draw", "ds_config.json", text, gpus="8xH100", world=8)


def quiet() -> None:
    logging.disable(logging.CRITICAL)


def _sections() -> Mapping[str, Any]:
    """Its sections that are checked key by key, each with its model."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
        "tensor_parallel.tp": TPConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": HybridEngineConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
    }


def keys() -> Mapping[str, Any]:
    """Every field of its models by its dotted name, under its alias as well."""
    found: dict[str, Any] = {}
    sections = _sections()
    for section, model in sections.items():
        for name, field in model.model_fields.items():
            default = MISSING if field.is_required() or field.default_factory is not None else field.default
            default = getattr(default, "value", default)
            for key in {name, field.alias or name}:
                if f"{section}.{key}" not in sections:
                    found[f"{section}.{key}"] = default
    return found


def _in_a_section(key: str) -> bool:
    return any(key.startswith(f"{section}.") for section in _sections())


FRAMEWORK = Framework(
    framework="deepspeed",
    needs="deepspeed==0.19.8",
    module="deepspeed.runtime.config",
    judge=judge,
    asks="DeepSpeedConfig with the number of ranks given, then its scheduler and the arguments of its optimizer; "
    "auto is filled as transformers' Trainer would",
    draws=draws,
    keys=keys,
    speaks=_in_a_section,
    prepare=quiet,
    later={
        "deepspeed.quoted-value": "a text where a number is compared: TypeError in the first step",
        "deepspeed.gradient-dtype": "refused when the engine is built on the model",
        "deepspeed.no-nvme-path": "refused when the first tensor is swapped out",
        "deepspeed.scheduler": "starts, and the rate falls where it should rise",
        "deepspeed.pipeline-zero-stage": "refused by the pipeline engine",
        "deepspeed.contiguous-checkpoints": "refused by the first checkpointed layer",
        "deepspeed.auto-not-filled": "auto was filled in here, which no program does for this key",
        "value.refused": "read without a look; refused, or taken for nothing, where it is used",
        "heads.": "refused when the model is cut over tensor ranks",
    },
    other_keys={
        "zero_optimization.legacy_stage1": "still a field, and refused when the engine starts",
        "zero_optimization.zenflow": "a section of its own, left open here",
        "tensor_parallel.tensor_parallel": "the field behind tp, which may be typed as well",
    },
)
