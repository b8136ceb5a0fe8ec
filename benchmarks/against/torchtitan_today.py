"""torchtitan 0.3: its command line, and its trainer setup on fake ranks with meta tensors."""

from __future__ import annotations

import dataclasses
import random
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.against import Config, ReferenceParser, Verdict
from benchmarks.against.torchtitan import WORLD, check_batch, last, mock_capability, mock_gpus, silence

from meshwright.frameworks import content_of
from meshwright.frameworks.torchtitan.commands import parse_flags, preset_of_command, runs
from meshwright.frameworks.torchtitan.parse import CURRENT_DAY, OPEN_SECTIONS
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.torchtitan import (
    CONTEXT_LENGTH,
    LOCAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCH_TOKENS,
    SAMPLE_KEYS,
    STEP_TOKENS,
    TOKEN_KEYS,
)

STAGES = "parallelism.num_pp_microbatches"


def evaluate(config: Config, folder: Path) -> Verdict:
    """Return the first error of parsing the command and setting up the trainer."""
    with silence() as output:
        try:
            mock_capability(config.gpus)
            start(_job(_argv(config)), config.world or WORLD)
        except SystemExit:
            return Verdict(False, last(output.getvalue()))
        except Exception as error:
            return Verdict(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Verdict(True)


def _argv(config: Config) -> list[str]:
    """Return the program's arguments; torchtitan's script prepends the preset."""
    run = next(runs(content_of(config.text, config.path)))
    typed = [str(argument.value) for argument in run.args]
    if run.by_script:
        named = preset_of_command(run, parse_flags(run.args)[0])
        assert named is not None
        typed = ["--module", str(named.module.value), "--config", str(named.config.value), *typed]
    return _in_samples(typed)


def _in_samples(typed: list[str]) -> list[str]:
    """Convert token-based batch flags of the main branch to samples."""
    rest, tokens = [], {}
    position = 0
    while position < len(typed):
        name, equals, value = typed[position].partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in TOKEN_KEYS:
            position += 0 if equals else 1
            tokens[key] = int(value if equals else typed[position])
        else:
            rest.append(typed[position])
        position += 1
    if not tokens:
        return rest
    length = tokens.get(CONTEXT_LENGTH) or _preset(rest).training.seq_len
    samples = {"training.seq_len": length}
    micro = -(-tokens[MICRO_BATCH_TOKENS] // length) if MICRO_BATCH_TOKENS in tokens else None
    if STAGES in tokens:
        samples |= {MICRO_BATCH: micro or 1, LOCAL_BATCH: (micro or 1) * tokens[STAGES]}
    elif micro is not None:
        samples[LOCAL_BATCH] = micro
    if STEP_TOKENS in tokens:
        samples["training.global_batch_size"] = (
            tokens[STEP_TOKENS] // length if tokens[STEP_TOKENS] % length == 0 else 1
        )
    position = next((i for i, word in enumerate(rest) if word.startswith("activation-checkpoint:")), len(rest))
    return [*rest[:position], *(f"--{key}={value}" for key, value in samples.items()), *rest[position:]]


def _preset(typed: list[str]) -> Any:
    """Return the config of a command's preset."""
    named = {name: typed[typed.index(name) + 1] for name in ("--module", "--config")}
    return _job([word for pair in named.items() for word in pair])


def _job(typed: list[str]) -> Any:
    from torchtitan.config.manager import ConfigManager

    return ConfigManager().parse_args(typed)


def start(job: Any, world: int) -> None:
    """Run the trainer setup before the first step, with meta tensors."""
    import torch
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed
    from torchtitan.tools import utils
    from torchtitan.trainer import Trainer

    distributed.init_fake_mode(world)
    try:
        trainer = object.__new__(Trainer)
        trainer.config = job
        layout = job.parallelism
        dims: ParallelDims = trainer.init_distributed()
        parts = (dims.tp if layout.enable_sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
        if job.training.seq_len % parts:
            raise ValueError(f"Training sequence length ({job.training.seq_len}) must be divisible by {parts}")
        _without_sharding()
        distributed.set_spmd_backend(layout.spmd_backend)
        spec = job.model_spec
        spec.model.update_from_config(config=job)
        job._validate_cuda_graphs()
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
            model = spec.model.build()
        loss = job.loss.build(compile_config=job.compile)
        check_batch(job, dims)
        shared = {
            "parallel_dims": dims,
            "training": job.training,
            "parallelism": layout,
            "compile_config": job.compile,
            "ac_config": job.activation_checkpoint,
            "dump_folder": job.dump_folder,
        }
        if dims.pp_enabled:
            if not spec.pipelining_fn:
                raise RuntimeError(f"Pipeline Parallel is enabled but {spec.name} does not support pipelining")
            _, models, _, _ = spec.pipelining_fn(
                model,
                **shared,
                device=torch.device("cpu"),
                model_config=spec.model,
                parallelize_fn=spec.parallelize_fn,
                loss_fn=loss,
            )
        else:
            models = [spec.parallelize_fn(model, **shared)]
        optimizers = job.optimizer.build(model_parts=models)
        job.lr_scheduler.build(optimizers=optimizers, training_steps=job.training.steps)
    finally:
        torch.distributed.destroy_process_group()


def _unsharded(module: Any, *args: Any, **options: Any) -> Any:
    for one, name in ((one, name) for one in (module if isinstance(module, list) else [module]) for name in METHODS):
        object.__setattr__(one, name, lambda modules: None)
    return module


METHODS = ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_reshard_after_backward")


def _without_sharding() -> None:
    """Mock fully_shard, which needs a newer torch; everything before it runs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and hasattr(module, "fully_shard"):
            module.fully_shard = _unsharded


def keys() -> Mapping[str, Any]:
    """Return every flag for the Llama 3 8B preset; defaults are those of the classes."""
    job = _job(["--module", "llama3", "--config", "llama3_8b"])
    return {
        **dict(_flags("", job)),
        **{key: current for key, current in _flags("", type(job)()) if "param_groups" not in key},
    }


def _flags(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        if not field.init or "Suppress" in repr(getattr(hints[field.name], "__metadata__", "")):
            continue
        name, current = f"{prefix}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(current):
            yield from _flags(f"{name}.", current)
        elif isinstance(current, list) and current and dataclasses.is_dataclass(current[0]):
            yield from _flags(f"{name}.0.", current[0])
        elif isinstance(current, dict):
            yield from ((f"{name}.{key}", one) for key, one in current.items())
        elif not OPEN_SECTIONS.match(name) or name in config_keys("torchtitan"):
            yield name, current


RANDOM_CONFIGS = 200
SEED = 6
PRESETS = (
    ("llama3", "llama3_debugmodel"), ("llama3", "llama3_debugmodel_varlen_attn"), ("qwen3", "qwen3_debugmodel"),
    ("qwen3", "qwen3_moe_debug"), ("deepseek_v3", "deepseek_v3_debugmodel"), ("llama3", "llama3_8b"),
)  # fmt: skip
CHOICES: Mapping[str, tuple[str, ...]] = {
    "--parallelism.tensor_parallel_degree": ("2", "4", "3", "16"),
    "--parallelism.context_parallel_degree": ("2", "4"),
    "--parallelism.pipeline_parallel_degree": ("2", "4"),
    "--parallelism.data_parallel_shard_degree": ("2", "4", "0"),
    "--parallelism.data_parallel_replicate_degree": ("2", "16"),
    "--parallelism.expert_parallel_degree": ("2", "4", "3"),
    "--parallelism.expert_tensor_parallel_degree": ("2",),
    "--parallelism.pipeline_parallel_schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "zb1p"),
    "--parallelism.pipeline_parallel_layers_per_stage": ("1", "2"),
    "--parallelism.pipeline_parallel_microbatch_size": ("2", "3", "0"),
    "--parallelism.spmd_backend": ("full_dtensor", "dtensor"),
    "--parallelism.no-enable-sequence-parallel": ("",),
    "--training.disable_cuda_graphs": ("",),
    "--training.local_batch_size": ("4", "6"),
    "--training.global_batch_size": ("64", "72"),
    "--training.seq_len": ("2047", "4096", "262144"),
    "--training.dtype": ("bfloat16", "float16"),
    "--training.mixed_precision_reduce": ("bfloat16",),
    "--training.enable_cpu_offload": ("",),
    "--compile.enable": ("",),
    "--compile.enable_async_tensor_parallel": ("",),
    "--compile.components": ("loss", "model,loss"),
    "--checkpoint.enable": ("",),
    "--checkpoint.keep_latest_k": ("1", "2"),
    "--checkpoint.async_mode": ("async", "sync"),
    "--checkpoint.last_save_in_hf": ("",),
    "--lr_scheduler.decay_type": ("cosine", "exp"),
    "--lr_scheduler.total_steps": ("5", "100"),
    "--debug.seed": ("1",),
    "--debug.batch_invariant": ("",),
    "--debug.spmd_typechecking": ("",),
    "--job.dump_folder": ("out",),
    "--optimizer.lr": ("1e-4",),
    "--optimizer.param-groups.0.optimizer-kwargs.lr": ("1e-4",),
}  # fmt: skip
RECOMPUTE = (
    "",
    "activation-checkpoint:full",
    "activation-checkpoint:selective",
    "activation-checkpoint:none",
    "activation-checkpoint:memory-budget",
)


def random_configs() -> Iterator[Config]:
    """Yield commands for its debug models with up to four flags."""
    rng = random.Random(SEED)
    for number in range(RANDOM_CONFIGS):
        module, config = rng.choice(PRESETS)
        names = rng.sample(list(CHOICES), rng.randint(1, 4))
        typed = [f"{name} {rng.choice(CHOICES[name])}".strip() for name in names]
        if not any(one.startswith(tuple(f"--{key} " for key in SAMPLE_KEYS)) for one in typed):
            typed.append("--training.global_batch_size -1")  # marks it as a command for 0.3.0
        typed.append(rng.choice(RECOMPUTE))
        launcher = "torchrun --nnodes 2 --nproc_per_node 8 -m torchtitan.train"
        text = " ".join([launcher, "--module", module, "--config", config, *typed]) + "\n"
        yield Config(f"{number}: {config} {' '.join(typed)}", "draw", "run.sh", text, gpus="2x8xH100", world=16)


def _is_current(key: str) -> bool:
    word = config_keys("torchtitan")[key]
    in_samples = key in SAMPLE_KEYS
    return in_samples or (
        not (word.until and word.until <= CURRENT_DAY) and not (word.since and word.since > CURRENT_DAY)
    )


REFERENCE = ReferenceParser(
    framework="torchtitan",
    needs="torchtitan==0.3.0",
    module="torchtitan.trainer",
    evaluate=evaluate,
    runs_code="ConfigManager, then the trainer setup on fake ranks with meta tensors; commands of the main branch are "
    "converted to batches in samples, as in 0.3.0",
    random_configs=random_configs,
    accepts_config=lambda config: config.path.endswith(".sh"),
    exported="run_0.3.0.sh",
    keys=keys,
    covers_key=_is_current,
    prepare=mock_gpus,
    not_config_errors={
        "flash_attn": "the attention kernels of the GPU are not installed",
        "mine.recipes": "the case names a user module that is not installed",
    },
    detected_later={
        "torchtitan.context-attention": "rejected by the main branch; 0.3.0 accepts it",
        "torchtitan.total-steps": "fails, or the learning rate rises again after that step",
        "value.invalid": "a name that is only looked up with a pipeline",
        "torchtitan.toml-removed": "starts, but reads a different config than the named file",
        "torchtitan.other-version": "the command mixes flags of 0.3.0 and the main branch, converted to samples",
        "heads.": "fails in the first forward pass",
        "moe.forced-balance": "starts, but the router has no effect",
    },
    other_keys={
        **dict.fromkeys(TOKEN_KEYS, "on the main branch, which counts tokens"),
        "module": "read from the command before its flags",
        "config": "read from the command before its flags",
        "activation_checkpoint.": "exists for another recompute mode than the preset's",
    },
)
