"""DeepSpeed 0.19.8: its config class, schedulers and optimizer signatures; nothing is compiled."""

from __future__ import annotations

import inspect
import json
import logging
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.against import MISSING, Config, ReferenceParser, Verdict

from meshwright.frameworks.mapping import nest

WORLD = 8  # if the number of GPUs is unknown
RANDOM_CONFIGS = 600
SEED = 6


def evaluate(config: Config, folder: Path) -> Verdict:
    """Return the first error of parsing a file and building its optimizer and scheduler."""
    if not config.path.endswith(".json"):
        return Verdict(None, "a command, which the launcher passes through unread")
    from deepspeed.runtime import config as theirs

    try:
        config_dict = json.loads(config.text, object_pairs_hook=theirs.dict_raise_error_on_duplicate_keys)
        config_dict = fill_auto(config_dict)
        world = config.world or _world(config_dict)
        with (
            mock.patch.object(theirs.dist, "get_world_size", return_value=world),
            mock.patch.object(theirs.dist, "get_rank", return_value=0),
        ):
            read = theirs.DeepSpeedConfig(config_dict)
        _build(read)
    except Exception as error:
        return Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Verdict(True)


def fill_auto(config_dict: Any) -> Any:
    """Replace or drop auto values as transformers' Trainer does."""
    if not isinstance(config_dict, dict):
        return config_dict
    filled = {key: fill_auto(value) for key, value in config_dict.items() if value != "auto"}
    if config_dict.get("train_micro_batch_size_per_gpu") == "auto":
        filled["train_micro_batch_size_per_gpu"] = 1
    for key, value in {"warmup_max_lr": 1e-4, "warmup_min_lr": 0, "total_num_steps": 1000, "lr": 1e-4}.items():
        if config_dict.get(key) == "auto":
            filled[key] = value
    return filled


def _world(config_dict: Mapping[str, Any]) -> int:
    """Return the world size implied by the three batch sizes."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (config_dict.get(name) for name in names)
    if all(isinstance(value, int) and value > 0 for value in (total, micro, steps)) and total % (micro * steps) == 0:
        return int(total // (micro * steps))
    return WORLD


def _build(read: Any) -> None:
    """Bind the optimizer arguments and build the scheduler as the engine does."""
    import torch
    from deepspeed.runtime import lr_schedules

    weight = torch.nn.Parameter(torch.zeros(4, 4))
    params = dict(read.optimizer_params or {})
    if "max_grad_norm" in params:
        raise ValueError("'max_grad_norm' is not supported as an optimizer parameter")
    if read.optimizer_name is not None and (optimizer_class := _optimizer(read.optimizer_name, params)) is not None:
        inspect.signature(optimizer_class).bind([weight], **params)
        for key in {"lr", "eps", "weight_decay"} & params.keys():
            float(params[key] + 0)  # a string raises TypeError
    if read.scheduler_name is not None:
        steps = torch.optim.SGD([weight], lr=0.1)
        getattr(lr_schedules, read.scheduler_name)(steps, **(read.scheduler_params or {}))


def _optimizer(name: str, params: dict[str, Any]) -> Any:
    """Return the optimizer class, or None if its arguments are unknown without building it."""
    import torch
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lion import FusedLion

    if name in ("adam", "adamw"):
        use_torch = params.pop("torch_adam", False)
        for key in ("adam_w_mode", "fp32_optimizer_states"):
            params.pop(key, None)
        return torch.optim.AdamW if use_torch else FusedAdam
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


def random_configs() -> Iterator[Config]:
    """Yield small configs with up to five valid or invalid settings."""
    rng = random.Random(SEED)
    for number in range(RANDOM_CONFIGS):
        names = rng.sample(list(CHOICES), rng.randint(1, 5))
        changes = {key: rng.choice(CHOICES[key]) for key in names}
        start = {"train_micro_batch_size_per_gpu": 1}
        if any(key.startswith("optimizer.") for key in changes):
            start |= {"optimizer.type": "AdamW", "optimizer.params.lr": 1e-4}
        if any(key.startswith("scheduler.") for key in changes):
            start |= {"scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 1000}
        text = json.dumps(nest({**start, **changes}), indent=1)
        title = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        yield Config(f"{number}: {title}", "draw", "ds_config.json", text, gpus="8xH100", world=8)


def silence() -> None:
    logging.disable(logging.CRITICAL)


def _sections() -> Mapping[str, Any]:
    """Return the sections validated by a pydantic model."""
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
    """Return every model field by dotted name, and by alias."""
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


def _is_in_section(key: str) -> bool:
    return any(key.startswith(f"{section}.") for section in _sections())


REFERENCE = ReferenceParser(
    framework="deepspeed",
    needs="deepspeed==0.19.8",
    module="deepspeed.runtime.config",
    evaluate=evaluate,
    runs_code="DeepSpeedConfig with the given world size, then its scheduler and optimizer arguments; "
    "auto is replaced as transformers' Trainer does",
    random_configs=random_configs,
    keys=keys,
    covers_key=_is_in_section,
    prepare=silence,
    detected_later={
        "deepspeed.quoted-value": "a string is compared with a number: TypeError in the first step",
        "deepspeed.no-type": "DeepSpeed creates no scheduler or optimizer, and the Trainer leaves them to it",
        "deepspeed.gradient-dtype": "rejected when the engine is built",
        "deepspeed.no-nvme-path": "rejected when the first tensor is swapped out",
        "deepspeed.scheduler": "starts, but the learning rate falls instead of rising",
        "deepspeed.pipeline-zero-stage": "rejected by the pipeline engine",
        "deepspeed.contiguous-checkpoints": "rejected by the first checkpointed layer",
        "deepspeed.auto-not-filled": "auto was replaced here, which no program does for this key",
        "value.invalid": "not validated; rejected or ignored where it is used",
        "heads.": "rejected when the model is sharded over TP ranks",
    },
    other_keys={
        "zero_optimization.legacy_stage1": "still a field, rejected when the engine starts",
        "zero_optimization.zenflow": "a separate section, not checked here",
        "tensor_parallel.tensor_parallel": "the field behind the alias tp",
    },
)
