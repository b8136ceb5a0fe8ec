"""NeMo AutoModel against its own config code: YAML, typed sections, meshes over ranks that move nothing, stages, steps.

What its recipe for language models does before a model is made, in its order. Besides torch and transformers:
torchdata, megatron-fsdp, datasets. A model's own checks (heads, plans, experts) come when it is built: not asked.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.against import MISSING, Config, Framework, Verdict

from meshwright import frameworks, models

SECTIONS = (
    "freeze_config", "wandb", "mlflow", "comet", "step_scheduler", "lr_scheduler", "optimizer", "dataloader",
    "validation_dataloaders", "loss_fn", "mtp", "prewarm", "checkpoint",
)  # fmt: skip
VARIABLES = {"RUNS": "runs", "BATCH": "64"}
VISION = "FinetuneRecipeForVLM"
LANGUAGE = ("", "TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction")


def judge(config: Config, folder: Path) -> Verdict:
    """Loads, types, lays out and counts."""
    if not config.path.endswith((".yaml", ".yml")):
        return Verdict(None, "a command, not a config")
    try:
        with _quiet():
            _machine()
            other = _setup(config, folder / config.path)
    except Exception as error:  # whatever it raises is what a user would see
        return Verdict(False, f"{type(error).__name__}: {error}"[:300])
    return Verdict(None, other) if other else Verdict(True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _machine() -> None:
    """Packages that need a GPU are there by name; variables that files leave open have a value."""
    import nemo_automodel
    from nemo_automodel.components.models.common import utils  # noqa: F401  # before there is a Transformer Engine
    from nemo_automodel.recipes.llm import train_ft  # noqa: F401

    nemo_automodel.NeMoAutoModelForCausalLM  # noqa: B018  # is imported when it is asked for

    class FusedAdam:
        def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None: ...

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers", "dion")
    made = {name: ModuleType(name) for name in names}
    for name in ("FusedAdam", "Muon", "Dion", "Dion2", "NorMuon"):
        for module in made.values():
            setattr(module, name, FusedAdam)
    for whole, _, part in (name.rpartition(".") for name in names if "." in name):
        setattr(made[whole], part, made[f"{whole}.{part}"])
    sys.modules.update(made)
    os.environ.update(VARIABLES)


def _setup(config: Config, path: Path) -> str:
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._typed_config import RecipeConfig

    raw = load_yaml_config(str(path))
    if _recipe_of(raw) not in (*LANGUAGE, VISION):
        return f"{_recipe_of(raw)} has a setup of its own"
    cfg = RecipeConfig(raw)
    for name in SECTIONS:
        if _recipe_of(raw) != VISION or "dataloader" not in name:
            getattr(cfg, name, None)
    with _ranks(config.world or 8):
        setup = _distributed(cfg, config.world or 8)
        if setup.pipeline_config is not None and setup.mesh_context.pp_size > 1:
            _stages(cfg, setup, _layers(config))
        _steps(cfg, setup, config.world or 8)
    _model_sections(cfg)
    return ""


def _recipe_of(raw: Any) -> str:
    recipe = raw.get("recipe", "") or ""
    target = recipe if isinstance(recipe, str) else getattr(recipe, "_target_", recipe)
    return str(getattr(target, "__name__", target)).rpartition(".")[2]


@contextlib.contextmanager
def _ranks(world: int) -> Iterator[None]:
    """A process group that moves nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _distributed(cfg: Any, world: int) -> Any:
    from nemo_automodel.recipes._dist_utils import create_distributed_setup_from_config

    return create_distributed_setup_from_config(cfg, world_size=world)


def _layers(config: Config) -> int | None:
    """The model's layers, as far as the file or the case names a model that we know."""
    if config.model:
        return len(models.find(config.model).layers)
    result = frameworks.check(frameworks.framework("automodel"), frameworks.content_of(config.text, config.path))
    return None if result.model is None else len(result.model.layers)


def _stages(cfg: Any, setup: Any, layers: int | None) -> None:
    """The checks between the config and the stages of a model."""
    from nemo_automodel.components.distributed.pipelining import functional
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    pipeline, pp = setup.pipeline_config, setup.mesh_context.pp_size
    batch = cfg.get("step_scheduler.local_batch_size", 1)
    micro = cfg.get("distributed.pipeline.pp_microbatch_size", 1)
    assert batch // micro >= pp, f"local_batch_size {batch} // pp_microbatch_size {micro} must be >= pp_size {pp}"
    schedule = get_schedule_class(pipeline.pp_schedule)
    if batch % micro:
        raise ValueError(f"Batch size {batch} must be divisible by {micro}")
    if layers is not None:
        single = issubclass(schedule, PipelineScheduleSingle)
        rounded = pipeline.round_virtual_stages_to_pp_multiple
        stages, _ = functional.calculate_virtual_stages(layers, pipeline.layers_per_stage, pp, single, rounded)
        functional.generate_hf_model_fqn_per_model_part(stages, layers)


def _steps(cfg: Any, setup: Any, world: int) -> None:
    """The micro-batches of a step."""
    loader = [None] * 100
    ranks = setup.mesh_context.dp_size or world
    cfg.step_scheduler.build(loader, ranks, cfg.get("step_scheduler.local_batch_size", 1))


def _model_sections(cfg: Any) -> None:
    """Blocks that are taken apart just before the model is made."""
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.quantization.fp8 import build_fp8_config

    if cfg.get("peft", None) is not None:
        cfg.peft.instantiate()
    if cfg.get("fp8", None) is not None:
        build_fp8_config(cfg.fp8)
    backend = cfg.get("model.backend", None)
    if backend is not None and hasattr(backend, "to_dict"):
        BackendConfig(**{key: value for key, value in backend.to_dict().items() if key != "_target_"})


def keys() -> Mapping[str, Any]:
    """The fields of the classes that sections become, with their defaults."""
    from nemo_automodel.components._peft.lora import PeftConfig
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from nemo_automodel.components.distributed import config as distributed
    from nemo_automodel.components.distributed.pipelining.config import PipelineConfig
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.optim.optimizer import LRSchedulerConfig
    from nemo_automodel.components.quantization.fp8 import FP8Config
    from nemo_automodel.components.training.step_scheduler import StepSchedulerConfig
    from nemo_automodel.recipes._dist_utils import _PARALLELISM_DEFAULTS

    sections = {
        "step_scheduler": (StepSchedulerConfig,),
        "lr_scheduler": (LRSchedulerConfig,),
        "checkpoint": (CheckpointingConfig,),
        "distributed": (distributed.FSDP2Config, distributed.MegatronFSDPConfig, distributed.DDPConfig),
        "distributed.pipeline": (PipelineConfig,),
        "distributed.moe": (distributed.MoEParallelizerConfig,),
        "model.backend": (BackendConfig,),
        "peft": (PeftConfig,),
        "fp8": (FP8Config,),
    }
    found = {f"distributed.{name}": default for name, default in _PARALLELISM_DEFAULTS.items()}
    for section, classes in sections.items():
        for each in classes:
            found |= {f"{section}.{one.name}": _default(one) for one in fields(each) if one.init}
    return found


def _default(one: Field[Any]) -> Any:
    if one.default is not NO_DEFAULT and isinstance(one.default, bool | int | float | str | None):
        return one.default
    return MISSING


FRAMEWORK = Framework(
    framework="automodel",
    needs="nemo-automodel==0.7.0",
    module="nemo_automodel.recipes._dist_utils",
    judge=judge,
    asks="its YAML loader, typed sections, distributed setup and meshes, stages, steps and the model's blocks",
    keys=keys,
    later={
        "sequence_parallel.": "refused when the model is cut",
        "automodel.expert-plan": "refused when the model is cut",
        "automodel.cp-packing": "refused when the model is built",
        "dispatch.": "fails on that GPU",
        "moe.experts-divide": "refused when the model is cut",
        "moe.forced-balance": "starts, and its router learns nothing: there is no benchmark of models with a tower",
        "automodel.mesh": "starts, with ranks that belong to no mesh",
        "automodel.micro-batch-rounds": "refused by the schedule of the stages",
        "automodel.async-tensor-parallel": "refused when the model is cut",
        "automodel.cp-attention": "refused when the model is built",
        "automodel.packing-undetected": "starts, and attends over samples that are not its own",
        "automodel.optimizer-argument": "TypeError when the optimizer is built",
        "automodel.learning-rate": "refused when the schedule is built",
    },
    beyond={
        "'trainable_only'": "a key of a later version",
        "NeMoAutoModelForBiencoder": "that class needs packages that are not here",
    },
    other_defaults={
        "model.backend.experts": "torch_mm where there is a GPU",
        "model.backend.dispatcher": "deepep where there is a GPU and the package",
        "distributed.dp_replicate_size": "none there, which is one",
        "distributed.pipeline.pp_recv_buffer_pool": "on in a later version",
        "fp8.recipe_name": "none there, which is tensorwise",
    },
    other_keys={
        "distributed.mp_policy": "here by its parts",
        "distributed.moe.mp_policy": "here by its parts",
        **dict.fromkeys(
            (
                "recipe",
                "seed",
                "dist_env",
                "model.",
                "loss_fn",
                "dataset",
                "packed_sequence",
                "distributed.",
                "step_scheduler.",
                "optimizer",
                "dataloader",
                "compile",
                "rng",
                "fp8",
                "peft",
                "clip_grad_norm",
                "checkpoint",
                "lr_scheduler",
                "validation_",
                "tokenizer",
                "wandb",
                "mlflow",
                "comet",
                "qat",
                "slurm",
                "quantization",
                "freeze_config",
            ),
            "not a field of one of the classes that were listed",
        ),
    },
)
