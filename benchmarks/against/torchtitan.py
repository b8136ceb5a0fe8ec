"""torchtitan 0.2: its parser, and its trainer setup on fake ranks with meta tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.against import Config, ReferenceParser, Verdict

from meshwright.clusters import cluster
from meshwright.frameworks.mapping import nest
from meshwright.recipes.key_maps import config_keys

WORLD = 64  # if the number of GPUs is unknown


def evaluate(config: Config, folder: Path) -> Verdict:
    """Return the first error of parsing the file and setting up the trainer."""
    with silence() as output:
        try:
            mock_capability(config.gpus)
            job = _job(folder / config.path)
            with own_modules(job, folder):
                start(job, config.world or WORLD, folder)
        except SystemExit:
            return Verdict(False, last(output.getvalue()))
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Verdict(True)


@contextlib.contextmanager
def own_modules(job: Any, folder: Path) -> Iterator[None]:
    """Import the module that registers an export's own model, from the folder in which its run starts."""
    name = job.experimental.custom_import
    sys.path.insert(0, str(folder))
    try:
        if name:
            importlib.import_module(name)
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def _job(path: Path) -> Any:
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--job.config_file", str(path)])


def start(job: Any, world: int, folder: Path) -> None:
    """Run the trainer setup before the first step, with meta tensors."""
    import torch
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import init_fake_mode
    from torchtitan.hf_datasets.text_datasets import _validate_dataset
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools import utils

    layout = job.parallelism
    dims = ParallelDims(
        dp_shard=layout.data_parallel_shard_degree,
        dp_replicate=layout.data_parallel_replicate_degree,
        cp=layout.context_parallel_degree,
        tp=layout.tensor_parallel_degree,
        pp=layout.pipeline_parallel_degree,
        ep=layout.expert_parallel_degree,
        etp=layout.expert_tensor_parallel_degree,
        world_size=world,
    )
    init_fake_mode(world)
    try:
        dims.build_mesh()
        spec = get_train_spec(job.model.name)
        if job.model.name != "flux":
            _validate_dataset(job.training.dataset, job.training.dataset_path)
        shape = spec.model_args[job.model.flavor]
        shape.update_from_config(job)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
            model = spec.model_cls(shape)
        build_model_converters(job, dims).convert(model)
        loss = spec.build_loss_fn(job, parallel_dims=dims)
        check_batch(job, dims)
        if dims.pp_enabled and spec.pipelining_fn is None:
            raise RuntimeError(f"Pipeline Parallel is enabled but {job.model.name} does not support pipelining")
        if dims.pp_enabled:
            device = torch.device("cpu")
            _, parts, _, _ = spec.pipelining_fn(model, dims, job, device, shape, spec.parallelize_fn, loss)
        else:
            parts = [spec.parallelize_fn(model, dims, job)]
        optimizers = spec.build_optimizers_fn(parts, job.optimizer, dims)
        schedulers = spec.build_lr_schedulers_fn(optimizers, job.lr_scheduler, job.training.steps)
        saves = dataclasses.replace(job.checkpoint, enable_ft_dataloader_checkpoints=False, async_mode="disabled")
        CheckpointManager(
            dataloader=None,
            model_parts=parts,
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            checkpoint_config=saves,
            sd_adapter=spec.state_dict_adapter(shape, None) if spec.state_dict_adapter else None,
            base_folder=str(folder),
        )
        _check_hf_save(job.checkpoint)
    finally:
        torch.distributed.destroy_process_group()


def check_batch(job: Any, dims: Any) -> None:
    """Repeat the batch-size check from the trainer's constructor."""
    local, total = job.training.local_batch_size, job.training.global_batch_size
    ranks = dims.dp_replicate * dims.dp_shard
    if total >= 0 and (total == 0 or total % (local * ranks)):
        raise AssertionError(
            f"global batch size must be multiple of local batch size times data-parallel degree {ranks}"
        )


def _check_hf_save(saves: Any) -> None:
    """Repeat the checks made when a checkpoint is saved."""
    if saves.enable and saves.last_save_in_hf and not saves.last_save_model_only:
        raise AssertionError("Only model can be saved when saving in HF safetensors format.")


@contextlib.contextmanager
def silence() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output


def last(text: str) -> str:
    lines = [line.strip("│╭╮╰╯─ ") for line in text.splitlines()]
    return " ".join(line for line in lines if line)[:300]


def mock_gpus() -> None:
    """Make CPU ranks look like GPUs."""
    import torch

    logging.disable(logging.CRITICAL)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device=None: "NVIDIA H100"


def mock_capability(gpus: str | None) -> None:
    """Mock the compute capability of the GPU."""
    major_here, minor_here = divmod(round(10 * cluster(gpus).gpu.capability if gpus else 90), 10)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "has_cuda_capability"):
            module.has_cuda_capability = lambda major, minor: (major, minor) <= (major_here, minor_here)


RANDOM_CONFIGS = 400
SEED = 6
MODELS = (
    ("llama3", "debugmodel"), ("llama3", "debugmodel_flex_attn"), ("llama3", "debugmodel_varlen_attn"),
    ("qwen3", "debugmodel"), ("qwen3", "debugmodel_moe"), ("deepseek_v3", "debugmodel"), ("gpt_oss", "debugmodel"),
)  # fmt: skip
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "parallelism.tensor_parallel_degree": (2, 4, 3, 16, 0),
    "parallelism.context_parallel_degree": (2, 4),
    "parallelism.pipeline_parallel_degree": (2, 4, 8),
    "parallelism.data_parallel_shard_degree": (1, 2, 4, 8, 0, -2),
    "parallelism.data_parallel_replicate_degree": (2, 4, 16),
    "parallelism.expert_parallel_degree": (2, 4, 8, 3),
    "parallelism.expert_tensor_parallel_degree": (2, 4),
    "parallelism.expert_parallel_comm_backend": ("deepep", "hybridep"),
    "parallelism.pipeline_parallel_schedule": (
        "gpipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS", "zb1p",
    ),
    "parallelism.pipeline_parallel_layers_per_stage": (1, 2, 3),
    "parallelism.pipeline_parallel_first_stage_less_layers": (0, 2),
    "parallelism.pipeline_parallel_microbatch_size": (2, 3),
    "parallelism.context_parallel_load_balancer": ("ptrr", "", "none"),
    "parallelism.context_parallel_rotate_method": ("alltoall", "ring"),
    "parallelism.fsdp_reshard_after_forward": ("never", "sometimes"),
    "parallelism.enable_async_tensor_parallel": (True,),
    "parallelism.disable_loss_parallel": (True,),
    "training.local_batch_size": (1, 4, 6, 16),
    "training.global_batch_size": (64, 48, 0, -1, 1024),
    "training.seq_len": (2047, 4096, 2050),
    "training.dtype": ("bfloat16", "float16"),
    "training.mixed_precision_param": ("float32", "float16"),
    "training.mixed_precision_reduce": ("bfloat16",),
    "training.enable_cpu_offload": (True,),
    "training.dataset": ("c4", "wikitext"),
    "training.steps": (100, 0),
    "training.gc_freq": (0,),
    "optimizer.name": ("Adam", "SGD", "Muon"),
    "optimizer.implementation": ("foreach", "fast"),
    "optimizer.early_step_in_backward": (True,),
    "optimizer.lr": (0.0, 1e-3),
    "lr_scheduler.decay_type": ("cosine", "exp"),
    "lr_scheduler.decay_ratio": (0.2, 1.5),
    "lr_scheduler.warmup_steps": (0, 20000),
    "lr_scheduler.total_steps": (100, 20000),
    "activation_checkpoint.mode": ("full", "none", "memory_budget", "partial"),
    "activation_checkpoint.selective_ac_option": ("op", "3", "0", "x"),
    "compile.enable": (True,),
    "compile.components": (["loss"], ["model"], []),
    "model.converters": (["quantize.linear.float8"], ["quantize.linear.mx"], ["quantize.grouped_mm.float8"], ["fp8"]),
    "quantize.linear.float8.recipe_name": ("rowwise", "tensorwise", "blockwise"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (True,),
    "checkpoint.enable": (True,),
    "checkpoint.keep_latest_k": (0, 1, 2),
    "checkpoint.async_mode": ("async", "async_with_pinned_mem", "sync"),
    "checkpoint.last_save_in_hf": (True,),
    "checkpoint.last_save_model_only": (False,),
    "checkpoint.export_dtype": ("bfloat16", "fp16"),
    "validation.enable": (True,),
    "validation.steps": (0, 10),
    "comm.mode": ("fake_backend", "nccl"),
}  # fmt: skip
"""Valid and invalid values to draw from."""


def random_configs() -> Iterator[Config]:
    """Yield configs of its debug models with up to five changed settings."""
    import tomlkit

    rng = random.Random(SEED)
    for number in range(RANDOM_CONFIGS):
        name, flavor = rng.choice(MODELS)
        settings = {"model.name": name, "model.flavor": flavor, "training.local_batch_size": 8}
        names = rng.sample([*CHOICES, *LAYOUT, *LAYOUT], rng.randint(1, 5))
        changes = {key: rng.choice(CHOICES[key]) for key in names}
        text = tomlkit.dumps(nest({**settings, "parallelism.tensor_parallel_degree": 1, **changes}))
        title = ", ".join(f"{key}={value}" for key, value in changes.items())
        yield Config(f"{number}: {name} {flavor}, {title}", "draw", "drawn.toml", text, gpus="2x8xH100", world=16)


LAYOUT = tuple(key for key in CHOICES if key.startswith("parallelism.") and key.endswith("_degree"))


def keys() -> Mapping[str, Any]:
    """Return every config field by dotted name."""
    from torchtitan.config.job_config import JobConfig

    return dict(fields_of("", JobConfig()))


def fields_of(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        name, current = f"{prefix}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            yield from fields_of(f"{name}.", current)
        else:
            yield name, current


def _is_in_this_version(key: str) -> bool:
    return config_keys("torchtitan")[key].since == ""


REFERENCE = ReferenceParser(
    framework="torchtitan",
    needs="torchtitan==0.2.2",
    module="torchtitan.config.job_config",
    evaluate=evaluate,
    runs_code="ConfigManager, then the trainer setup on fake ranks with meta tensors",
    random_configs=random_configs,
    accepts_config=lambda config: config.path.endswith(".toml"),
    keys=keys,
    covers_key=_is_in_this_version,
    prepare=mock_gpus,
    detected_later={
        "value.invalid": "not an allowed value: flags are validated, TOML files are not; the code that reads "
        "the value fails or misinterprets it",
        "torchtitan.total-steps": "fails, or the learning rate rises again after that step",
        "learning_rate.decay-inside-warmup": "starts with a shorter warm-up than configured",
        "torchtitan.load-balancer": "fails in the first step, where the name is looked up",
        "offload.params-strategy": "starts; the weights stay on the CPU",
        "heads.": "fails in the first forward pass",
        "moe.forced-balance": "starts, but the router has no effect",
    },
    not_config_errors={
        "No module named 'mine'": "the case names a user module that is not installed",
        "not kernel arguments": "the installed torchao and triton do not match",
        "torchao installation does not have MoE": "the installed torchao does not match this version",
        "MXLinearConfig": "the installed torchao is newer than this version expects",
    },
)
