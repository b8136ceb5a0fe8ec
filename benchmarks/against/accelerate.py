"""Accelerate 1.15: the launcher's config parsing, and the plugins that a program builds from it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.against import MISSING, Config, ReferenceParser, Verdict

RANDOM_CONFIGS = 400
SEED = 6


def evaluate(config: Config, folder: Path) -> Verdict:
    """Return the first error of the launcher or of the plugins."""
    if not config.path.endswith((".yaml", ".yml")):
        return Verdict(None, "a command, which cannot be checked without running it")
    with (
        mock.patch.dict(os.environ),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            _start(str(folder / config.path))
        except SystemExit as error:
            return Verdict(False, f"exit {error.code}")
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Verdict(True)


def _start(path: str) -> None:
    from accelerate.commands import launch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils import launch as environment

    parsed = launch.launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args, defaults, warned = launch._validate_launch_command(parsed)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if warned else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        os.environ.update(environment.prepare_deepspeed_cmd_env(args)[1])
        if args.use_parallelism_config:
            _mesh(args)
        return
    if not (args.use_fsdp or args.multi_gpu or args.use_megatron_lm):
        environment.prepare_simple_launcher_cmd_env(args)
        return
    os.environ.update(environment.prepare_multi_gpu_env(args))
    if args.use_fsdp:
        FullyShardedDataParallelPlugin()
    if args.use_parallelism_config:
        _mesh(args)


def _mesh(args: Any) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    plain = DistributedType.FSDP if args.use_fsdp else DistributedType.MULTI_GPU
    distributed_type = DistributedType.DEEPSPEED if args.use_deepspeed else plain
    program = SimpleNamespace(
        num_processes=int(args.num_processes),
        is_fsdp2=args.use_fsdp and str(args.fsdp_version) == "2",
        multi_device=args.multi_gpu,
        distributed_type=distributed_type,
        is_main_process=True,
    )
    ParallelismConfig()._validate_accelerator(program)


CHOICES: Mapping[str, tuple[str, ...]] = {
    "distributed_type": ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO", "MEGATRON_LM", "fsdp", "TPU"),
    "num_processes": ("8", "16", "1", "'8'"),
    "num_machines": ("1", "2"),
    "machine_rank": ("0", "1"),
    "mixed_precision": ("bf16", "fp16", "fp8", "'no'", "no", "bfloat16"),
    "main_process_ip": ("10.0.0.1", "null"),
    "main_process_port": ("29500", "null"),
    "gradient_accumulation_steps": ("4",),
    "use_cpu": ("true", "false"),
    "debug": ("true",),
    "rdzv_backend": ("static", "c10d"),
    "num_procs": ("8",),
    "fsdp_config.fsdp_version": ("1", "2", "3"),
    "fsdp_config.fsdp_sharding_strategy": ("FULL_SHARD", "HYBRID_SHARD", "1", "FULL"),
    "fsdp_config.fsdp_reshard_after_forward": ("true", "false", "FULL_SHARD"),
    "fsdp_config.fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "WRAP"),
    "fsdp_config.fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED"),
    "fsdp_config.fsdp_backward_prefetch": ("BACKWARD_PRE", "NO_PREFETCH", "PRE"),
    "fsdp_config.fsdp_sync_module_states": ("true", "false"),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": ("true", "false"),
    "fsdp_config.fsdp_offload_params": ("true", "false"),
    "fsdp_config.fsdp_use_orig_params": ("true", "false"),
    "fsdp_config.fsdp_min_num_params": ("1000", "1e6"),
    "fsdp_config.fsdp_activation_checkpointing": ("true", "yes"),
    "fsdp_config.fsdp_forward_prefetch": ("true",),
    "deepspeed_config.zero_stage": ("2", "3", "5"),
    "deepspeed_config.offload_optimizer_device": ("cpu", "none", "gpu"),
    "deepspeed_config.gradient_accumulation_steps": ("4", "auto"),
    "deepspeed_config.deepspeed_multinode_launcher": ("standard", "pdsh"),
    "parallelism_config.parallelism_config_tp_size": ("2", "4"),
    "parallelism_config.parallelism_config_dp_shard_size": ("2", "4", "8"),
    "parallelism_config.parallelism_config_dp_replicate_size": ("2",),
    "parallelism_config.parallelism_config_cp_size": ("2",),
    "dynamo_config.dynamo_backend": ("INDUCTOR", "inductor", "FAST"),
}


def random_configs() -> Iterator[Config]:
    """Yield configs for FSDP, DeepSpeed or DDP with up to five valid or invalid settings."""
    rng = random.Random(SEED)
    for number in range(RANDOM_CONFIGS):
        names = rng.sample(list(CHOICES), rng.randint(1, 5))
        changes = {key: rng.choice(CHOICES[key]) for key in names}
        start = {"distributed_type": "FSDP", "num_processes": "8", "mixed_precision": "bf16"}
        if any(key.startswith("deepspeed") for key in changes):
            start |= {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": "2"}
        elif any(key.startswith("parallelism") for key in changes):
            start |= {"fsdp_config.fsdp_version": "2"}
        settings = {**start, **changes}
        settings.setdefault("fsdp_config.fsdp_version", "2") if settings["distributed_type"] == "FSDP" else None
        text = _yaml(settings)
        title = ", ".join(f"{key}={value}" for key, value in changes.items())
        yield Config(f"{number}: {title}", "draw", "config.yaml", text)


def _yaml(settings: Mapping[str, str]) -> str:
    lines = [f"{key}: {value}" for key, value in settings.items() if "." not in key]
    for section in dict.fromkeys(key.split(".")[0] for key in settings if "." in key):
        lines += [
            f"{section}:",
            *(
                f"  {key.partition('.')[2]}: {value}"
                for key, value in settings.items()
                if key.startswith(f"{section}.")
            ),
        ]
    return "\n".join(lines) + "\n"


def keys() -> Mapping[str, Any]:
    """Return the top-level keys, and the launcher flags that the sections set."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    found: dict[str, Any] = {
        field.name: MISSING for field in dataclasses.fields(ClusterConfig) if not field.name.endswith("_config")
    }
    for action in launch_command_parser()._actions:
        for section, start in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
            if action.dest.startswith(start):
                found[f"{section}.{action.dest}"] = _plain(action.default)
    return found


def _plain(default: Any) -> Any:
    """Return a command-line default as a config value."""
    if isinstance(default, str):
        return {"true": True, "false": False}.get(default.lower(), int(default) if default.isdigit() else default)
    return MISSING if default is None else default


def silence() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _is_in_section(key: str) -> bool:
    return "." not in key or key.startswith(("fsdp_config.", "parallelism_config."))


REFERENCE = ReferenceParser(
    framework="accelerate",
    needs="accelerate==1.15.0",
    module="accelerate.commands.launch",
    evaluate=evaluate,
    runs_code="the launcher's parser and checks, the environment it would set, then FullyShardedDataParallelPlugin and "
    "ParallelismConfig on it",
    random_configs=random_configs,
    keys=keys,
    covers_key=_is_in_section,
    prepare=silence,
    detected_later={
        "accelerate.machines": "starts, then waits for missing machines or leaves some idle",
        "accelerate.processes": "fails when a process selects its GPU",
        "accelerate.gpu-ids": "fails when a process selects its GPU",
        "accelerate.no-nvme-path": "passed through; DeepSpeed rejects it",
        "accelerate.config-file-conflict": "passed through; DeepSpeedPlugin rejects it in the program",
        "accelerate.degrees": "passed through; Megatron-LM rejects it in the program",
        "value.invalid": "passed through; DeepSpeed or torch's rendezvous rejects it",
    },
    not_config_errors={"no available devices found": "needs a GPU"},
    other_keys={
        "fp16": "converted by its loader, not a field",
        "dynamo_backend": "converted by its loader, not a field",
        "tpu_cluster": "a field of the TPU section",
        "fsdp_config.fsdp_ignored_modules": "an argument of the plugin, not of the launcher",
        "fsdp_config.fsdp_backward_prefetch_policy": "the old name, converted by its loader",
        "fsdp_config.fsdp_cpu_offload": "in the key map as ignored",
    },
)
