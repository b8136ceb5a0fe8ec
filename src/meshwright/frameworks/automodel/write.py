"""Writing a recipe as a YAML file for NeMo AutoModel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.automodel.format_override import scalar
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import nest, relevant_fields, to_settings, value_of, without_defaults
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.automodel import COMMON_OPTIONS, STRATEGY_OPTIONS
from meshwright.recipes.key_maps.automodel_composite_keys import (
    CHAT_DATASET,
    COLUMN_DATASET,
    MOCK_DATASET,
    TOKEN_DATASET,
)
from meshwright.recipes.types import Recipe, recipe_fields

RECIPES = {False: "TrainFinetuneRecipeForNextTokenPrediction", True: "FinetuneRecipeForVLM"}
"""By whether samples carry images."""
BENCHMARK = {
    "recipe": "BenchmarkingRecipeForNextTokenPrediction",
    "benchmark.warmup_steps": 10,
    "benchmark.nsys_start": -1,
    "benchmark.nsys_end": -1,
    "benchmark.nsys_ranks": [],
}
FOLLOWS = ("checkpoint.pretrained", "peft.targets", "data.images", "data.validation")
"""Fields that this file writes itself."""
SECTIONS = (
    "recipe", "benchmark", "step_scheduler", "dist_env", "seed", "model", "distributed", "loss_fn", "dataset",
    "packed_sequence", "dataloader", "validation_dataset", "validation_dataloader", "optimizer", "clip_grad_norm",
    "lr_scheduler", "checkpoint", "peft", "quantization", "fp8", "freeze_config",
)  # fmt: skip
KEEP = frozenset(
    {
        "step_scheduler.global_batch_size", "step_scheduler.local_batch_size", "step_scheduler.max_steps",
        "step_scheduler.ckpt_every_steps", "seed", "distributed.strategy", "distributed.dp_size",
        "distributed.tp_size", "distributed.pp_size", "distributed.cp_size", "distributed.ep_size",
        "distributed.sequence_parallel", "distributed.activation_checkpointing",
        "distributed.pipeline.pp_schedule", "distributed.pipeline.pp_microbatch_size",
        "packed_sequence.packed_sequence_size", "optimizer.lr", "optimizer.betas", "optimizer.eps",
        "optimizer.weight_decay", "lr_scheduler.lr_decay_style", "lr_scheduler.lr_warmup_steps",
        "lr_scheduler.min_lr", "checkpoint.model_save_format", "checkpoint.save_consolidated", "peft.dim",
        "peft.alpha", "fp8.recipe_name", "model.torch_dtype", "clip_grad_norm.max_norm",
    }
)  # fmt: skip
LINEARS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "proj": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
    "mamba_in": ("in_proj",),
    "mamba_out": ("mixer.out_proj",),
}
ALWAYS: Mapping[str, Any] = {
    "dist_env.backend": "nccl",
    "dist_env.timeout_minutes": 10,  # one minute, the default, is shorter than loading a large model takes
    "lr_scheduler.init_lr": 0.0,  # a tenth of the peak unless it is said
}
POLICY: Mapping[str, Any] = {
    "distributed.mp_policy._target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
    "distributed.mp_policy.cast_forward_inputs": True,
}
LOADER = "torchdata.stateful_dataloader.StatefulDataLoader"
COLLATERS = "nemo_automodel.components.datasets.utils"
MUON = {"optimizer.eps": "optimizer.epsilon"}


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    """The YAML that trains a recipe, and the program that reads it."""
    if model.kind != "causal_lm" and model.vision is None:
        raise InputError("only language and vision-language models are written", field="model", value=model.name)
    fields = [key for key in relevant_fields(recipe, model) if key not in FOLLOWS]
    settings, unsaid = to_settings(framework, recipe, fields)
    lost = list(unsaid)
    settings = dict(_of_strategy(settings, recipe, lost))
    settings |= _model_keys(recipe, model) | _batch_keys(recipe, on) | _data_keys(recipe, model)
    settings |= _expert_keys(recipe) | _adapter_keys(recipe)
    settings = dict(_of_optimizer(settings, recipe, lost))
    if not _has_torchao(recipe) and settings.pop("fp8.enable_fsdp_float8_all_gather", False):
        lost.append(UnmappedField("precision.fp8_gather", True, "only torchao's 8-bit layers gather in 8 bits"))
    lost += _data_lost(recipe)
    kept = dict(_completed(without_defaults(framework, settings, KEEP), settings))
    name = f"{recipe.name or 'recipe'}.yaml"
    return ExportedConfig(
        framework=framework.name,
        files={name: _document(framework, recipe, kept)},
        program=Program(argv=("-m", "nemo_automodel.cli.app", name)),
        unmapped=tuple(lost),
        notes=tuple(_notes(recipe)),
    )


def _completed(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Blocks that take the place of a whole default are said in full; all in the order of their own examples."""
    found = {**ALWAYS, **kept}
    if any(key.startswith("model.backend.") for key in kept):
        found["model.backend._target_"] = "nemo_automodel.components.models.common.BackendConfig"
    if any(key.startswith("distributed.mp_policy.") for key in kept):
        found |= {key: settings[key] for key in settings if key.startswith("distributed.mp_policy.")}
        found |= {**POLICY, "distributed.mp_policy.output_dtype": found["distributed.mp_policy.param_dtype"]}
    if found.get("dataset._target_") == MOCK_DATASET:
        found["dataset.batch_size"] = found["step_scheduler.local_batch_size"]
    if isinstance(alpha := found.get("peft.alpha"), float) and alpha.is_integer():
        found["peft.alpha"] = int(alpha)
    order = {key: place for place, key in enumerate(config_keys("automodel"))}
    yield from sorted(found.items(), key=lambda item: order.get(item[0], len(order)))


def _has_torchao(recipe: Recipe) -> bool:
    return recipe.precision.matmul in ("fp8_tensor", "fp8_row")


def _of_strategy(settings: Mapping[str, Any], recipe: Recipe, lost: list[UnmappedField]) -> Iterator[tuple[str, Any]]:
    """Settings that the strategy takes: one option too many, and it refuses the file."""
    strategy = recipe.layout.strategy if recipe.layout.strategy in STRATEGY_OPTIONS else "fsdp2"
    table = config_keys("automodel")
    for key, value in settings.items():
        option = key.removeprefix("distributed.").split(".")[0]
        if not key.startswith("distributed.") or option in (*COMMON_OPTIONS, *STRATEGY_OPTIONS[strategy]):
            if key != "distributed.moe.reshard_after_forward":
                yield key, value
            continue
        own = table[key].field
        if own and value_of(recipe, own) != recipe_fields()[own].default:
            lost.append(UnmappedField(own, value_of(recipe, own), f"the {strategy} strategy has no {option}"))


def _of_optimizer(settings: Mapping[str, Any], recipe: Recipe, lost: list[UnmappedField]) -> Iterator[tuple[str, Any]]:
    """Settings that the optimizer takes, by its own names."""
    path = str(settings.get("optimizer._target_", ""))
    unknown = {"dion.Muon": (), "torch.optim.SGD": ("optimizer.betas", "optimizer.eps", "optimizer.mu")}
    for key, value in settings.items():
        if key not in unknown.get(path, ("optimizer.mu",)):
            yield MUON.get(key, key) if path == "dion.Muon" else key, value
    if path.endswith("SGD"):
        for own in ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"):
            lost.append(UnmappedField(own, value_of(recipe, own), "torch.optim.SGD takes none"))


def _model_keys(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    wanted = recipe.checkpoint.pretrained or model.hf_id
    if not wanted:
        raise InputError("the catalogue knows no Hugging Face id for it", field="model", value=model.name)
    kind = "NeMoAutoModelForImageTextToText" if model.vision is not None else "NeMoAutoModelForCausalLM"
    if recipe.goal != "pretrain" or recipe.checkpoint.pretrained:
        path = f"nemo_automodel.{kind}.from_pretrained"
        return {"model._target_": path, "model.pretrained_model_name_or_path": wanted}
    return {
        "model._target_": f"nemo_automodel.{kind}.from_config",
        "model.config._target_": "transformers.AutoConfig.from_pretrained",
        "model.config.pretrained_model_name_or_path": wanted,
    }


def _batch_keys(recipe: Recipe, on: Cluster) -> dict[str, Any]:
    """Under a pipeline, one local batch is all the micro batches of a step."""
    layout, whole = recipe.layout, recipe.train.global_batch_size
    ranks = max(1, on.world // (layout.tp * layout.pp * layout.cp))
    if layout.dp_shard > 0:
        ranks = layout.dp_shard * layout.dp_replicate
    if whole % (layout.micro_batch_size * ranks):
        raise InputError(
            f"is not a multiple of {layout.micro_batch_size} × {ranks}: micro batch × data-parallel ranks",
            field="train.global_batch_size",
            value=whole,
        )
    return {"step_scheduler.local_batch_size": whole // ranks} if layout.pp > 1 else {}


def _data_keys(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    data = recipe.data
    found: dict[str, Any] = {"recipe": RECIPES[data.images], "dataloader._target_": LOADER}
    mock = data.dataset == "mock"
    if mock:
        found |= BENCHMARK if recipe.benchmark and not data.images else {}
        found |= {"dataset._target_": MOCK_DATASET, "dataset.vocab_size": model.vocab, "dataset.num_samples": 1_000_000}
        found["dataloader.batch_size"] = None
    elif recipe.goal == "pretrain":
        found |= {"dataset._target_": TOKEN_DATASET, "dataset.splits_to_build": "train"}
        found["dataloader.collate_fn"] = "torch.utils.data.default_collate"
    else:
        found["dataset.truncation"] = True
        thd = "packed_sequence_thd_collater" if data.packing else "default_collater"
        found["dataloader.collate_fn"] = f"{COLLATERS}.{thd}"
    if data.validation and not mock and recipe.goal != "pretrain":
        place = "/" in data.validation or "." in data.validation
        kind = COLUMN_DATASET if data.columns else CHAT_DATASET
        found |= {
            "validation_dataset._target_": kind,
            "validation_dataset.path_or_dataset_id": data.validation if place else data.dataset,
            "validation_dataset.split": data.split if place else data.validation,
            "validation_dataloader._target_": LOADER,
            "validation_dataloader.collate_fn": f"{COLLATERS}.default_collater",
        }
    return found


def _data_lost(recipe: Recipe) -> Iterator[UnmappedField]:
    """Parts of a set of samples that random tokens and token files do not have."""
    if recipe.data.dataset != "mock" and recipe.goal != "pretrain":
        return
    kind = "random tokens have" if recipe.data.dataset == "mock" else "token files have"
    blend = ("data.blend",) if recipe.data.dataset == "mock" else ()
    for own in ("data.split", "data.columns", "data.validation", *blend):
        if value_of(recipe, own) != recipe_fields()[own].default:
            yield UnmappedField(own, value_of(recipe, own), f"{kind} none")


def _expert_keys(recipe: Recipe) -> dict[str, Any]:
    """Experts do not free gathered parameters by themselves, the other layers do: it is said for both."""
    layout = recipe.layout
    found: dict[str, Any] = {}
    if layout.ep > 1 and layout.strategy == "fsdp2":
        found["distributed.reshard_after_forward"] = layout.reshard_after_forward
    elif layout.strategy == "fsdp2" and not layout.reshard_after_forward:
        found["distributed.reshard_after_forward"] = False
    return found


def _adapter_keys(recipe: Recipe) -> dict[str, Any]:
    if recipe.goal != "peft":
        return {}
    found: dict[str, Any] = {"peft._target_": "nemo_automodel.components._peft.lora.PeftConfig"}
    names = [f"*.{name}" for group in recipe.peft.targets for name in LINEARS[group]]
    found["peft.target_modules"] = names
    if recipe.peft.method == "qlora":
        found |= {"quantization.bnb_4bit_compute_dtype": "bfloat16", "quantization.bnb_4bit_quant_type": "nf4"}
    return found


def _notes(recipe: Recipe) -> Iterator[str]:
    if recipe.goal == "pretrain" and recipe.data.dataset != "mock":
        yield "dataset.paths wants Megatron .bin/.idx prefixes made with the model's tokenizer"
    if recipe.data.images:
        yield "name the function that makes samples with images of your data in dataset._target_"
    if recipe.train.eval_every and not recipe.data.validation:
        yield "evaluation needs a validation_dataset block"


def _document(framework: Framework, recipe: Recipe, settings: Mapping[str, Any]) -> str:
    goal = {"pretrain": "pretraining", "sft": "fine-tuning", "peft": "adapters"}[recipe.goal]
    head = f"# {recipe.name} ({goal}) for {framework.title} ({framework.version}), written by meshwright export\n"
    tables = nest(settings)
    ordered = [name for name in SECTIONS if name in tables] + [name for name in tables if name not in SECTIONS]
    return head + "".join(f"\n{_block(name, tables[name], 0)}" for name in ordered)


def _block(name: str, value: Any, depth: int) -> str:
    start = "  " * depth + name
    if not isinstance(value, dict):
        return f"{start}: {scalar(value)}\n"
    first = {key: value[key] for key in value if key == "_target_"}
    rest = {key: item for key, item in value.items() if key != "_target_"}
    return f"{start}:\n" + "".join(_block(key, item, depth + 1) for key, item in {**first, **rest}.items())
