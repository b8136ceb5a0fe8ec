"""Run NeMo AutoModel's own config code: YAML, typed sections, meshes over fake ranks, pipeline stages, steps.

Runs the steps of its LLM recipe before the model is built. Needs, besides torch and transformers: torchdata,
megatron-fsdp, datasets. Checks at model build time (heads, plans, experts) are not run.
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
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.against import Config, ReferenceParser, Verdict, default_of

from meshwright import frameworks, models

SECTIONS = (
    "freeze_config", "wandb", "mlflow", "comet", "step_scheduler", "lr_scheduler", "optimizer", "dataloader",
    "validation_dataloaders", "loss_fn", "mtp", "prewarm", "checkpoint",
)  # fmt: skip
VARIABLES = {"RUNS": "runs", "BATCH": "64"}
VISION = "FinetuneRecipeForVLM"
LANGUAGE = ("", "TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction")


def evaluate(config: Config, folder: Path) -> Verdict:
    """Load the config, build typed sections and meshes, and count steps."""
    if not config.path.endswith((".yaml", ".yml")):
        return Verdict(None, "a command, not a config")
    try:
        with _silence():
            _machine()
            other = _setup(config, folder / config.path)
    except Exception as error:  # any exception is what a user would see
        return Verdict(False, f"{type(error).__name__}: {error}"[:300])
    return Verdict(None, other) if other else Verdict(True)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _machine() -> None:
    """Mock packages that need a GPU, and set the environment variables that configs use."""
    import nemo_automodel
    from nemo_automodel.components.models.common import utils  # noqa: F401  # before Transformer Engine is mocked
    from nemo_automodel.recipes.llm import train_ft  # noqa: F401

    nemo_automodel.NeMoAutoModelForCausalLM  # noqa: B018  # lazy import

    class FusedAdam:
        def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None: ...

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers", "dion")
    modules = {name: ModuleType(name) for name in names}
    for name in ("FusedAdam", "Muon", "Dion", "Dion2", "NorMuon"):
        for module in modules.values():
            setattr(module, name, FusedAdam)
    for parent, _, child in (name.rpartition(".") for name in names if "." in name):
        setattr(modules[parent], child, modules[f"{parent}.{child}"])
    sys.modules.update(modules)
    os.environ.update(VARIABLES)


def _setup(config: Config, path: Path) -> str:
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes._typed_config import RecipeConfig

    raw = load_yaml_config(str(path))
    if _recipe_of(raw) not in (*LANGUAGE, VISION):
        return f"{_recipe_of(raw)} has its own setup"
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
    """Open a fake process group."""
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
    """Return the number of layers if the model is known."""
    if config.model:
        return len(models.find(config.model).layers)
    result = frameworks.check(frameworks.framework("automodel"), frameworks.content_of(config.text, config.path))
    return None if result.model is None else len(result.model.layers)


def _stages(cfg: Any, setup: Any, layers: int | None) -> None:
    """Run the checks between the config and the pipeline stages."""
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
    """Parse the sections that are read just before the model is built."""
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
            found |= {f"{section}.{one.name}": default_of(one) for one in fields(each) if one.init}
    return found


REFERENCE = ReferenceParser(
    framework="automodel",
    needs="nemo-automodel==0.7.0",
    module="nemo_automodel.recipes._dist_utils",
    evaluate=evaluate,
    runs_code="its YAML loader, typed sections, distributed setup, meshes, pipeline stages, steps and model sections",
    keys=keys,
    detected_later={
        "sequence_parallel.": "rejected when the model is sharded",
        "automodel.expert-plan": "rejected when the model is sharded",
        "automodel.cp-packing": "rejected when the model is built",
        "dispatch.": "fails on that GPU",
        "moe.experts-divide": "rejected when the model is sharded",
        "moe.forced-balance": "starts, but the router is not trained; no VLM benchmarks exist",
        "automodel.mesh": "starts with ranks outside the mesh",
        "automodel.micro-batch-rounds": "rejected by the pipeline schedule",
        "automodel.async-tensor-parallel": "rejected when the model is sharded",
        "automodel.cp-attention": "rejected when the model is built",
        "automodel.packing-undetected": "starts, but attention crosses sample boundaries",
        "automodel.optimizer-argument": "TypeError when the optimizer is built",
        "automodel.block-ignored": "starts, without the block whose name is misspelled",
        "automodel.learning-rate": "rejected when the schedule is built",
    },
    not_config_errors={
        "'trainable_only'": "a key of a later version",
        "NeMoAutoModelForBiencoder": "the class needs packages that are not installed",
    },
    other_defaults={
        "model.backend.experts": "torch_mm if there is a GPU",
        "model.backend.dispatcher": "deepep if there is a GPU and the package",
        "distributed.dp_replicate_size": "None, which means 1",
        "distributed.pipeline.pp_recv_buffer_pool": "on in a later version",
        "fp8.recipe_name": "None, which means tensorwise",
    },
    other_keys={
        "distributed.mp_policy": "split into its fields here",
        "distributed.moe.mp_policy": "split into its fields here",
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
            "not a field of the listed classes",
        ),
    },
)
