"""Write a recipe as a YAML config for NeMo AutoModel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.automodel.format_override import scalar
from meshwright.frameworks.automodel.model_sizes import size_settings, weights_comment
from meshwright.frameworks.common import KEEP_ALL, random_data_notes
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.mapping import nest, relevant_fields, to_settings, without_defaults
from meshwright.frameworks.model_match import model_path
from meshwright.frameworks.run_tokenizer import lacks_tokenizer
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import ModelSpec
from meshwright.recipes.adapter_targets import ALL_LINEAR, REGEX, STANDARD, groups_of
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.automodel import COMMON_OPTIONS, STRATEGY_OPTIONS
from meshwright.recipes.key_maps.automodel_composite_keys import (
    CHAT_DATASET,
    COLUMN_DATASET,
    MOCK_DATASET,
    TOKEN_DATASET,
    has_random_tokens,
)
from meshwright.recipes.key_maps.local_batch import local_batch
from meshwright.recipes.key_maps.megatron_lm_composite_keys import split_text
from meshwright.recipes.model_changes import label
from meshwright.recipes.types import Recipe, field_value, recipe_fields

RECIPES = {False: "TrainFinetuneRecipeForNextTokenPrediction", True: "FinetuneRecipeForVLM"}
"""Recipe class, by whether samples contain images."""
BENCHMARK = {
    "recipe": "BenchmarkingRecipeForNextTokenPrediction",
    "benchmark.warmup_steps": 10,
    "benchmark.nsys_start": -1,
    "benchmark.nsys_end": -1,
    "benchmark.nsys_ranks": [],
}
DERIVED_FIELDS = ("checkpoint.pretrained", "peft.targets", "data.images", "data.validation")
"""Fields written by this module instead of the key map."""
SECTIONS = (
    "recipe", "benchmark", "step_scheduler", "dist_env", "seed", "model", "distributed", "loss_fn", "dataset",
    "packed_sequence", "dataloader", "validation_dataset", "validation_dataloader", "optimizer", "clip_grad_norm",
    "lr_scheduler", "checkpoint", "peft", "quantization", "fp8", "freeze_config",
)  # fmt: skip
KEEP = frozenset(
    {
        "step_scheduler.global_batch_size", "step_scheduler.local_batch_size", "step_scheduler.max_steps",
        "step_scheduler.num_epochs", "step_scheduler.ckpt_every_steps", "seed",
        "distributed.strategy", "distributed.dp_size",
        "distributed.tp_size", "distributed.pp_size", "distributed.cp_size", "distributed.ep_size",
        "distributed.sequence_parallel", "distributed.activation_checkpointing",
        "distributed.pipeline.pp_schedule", "distributed.pipeline.pp_microbatch_size",
        "packed_sequence.packed_sequence_size", "optimizer.lr", "optimizer.betas", "optimizer.eps",
        "optimizer.weight_decay", "lr_scheduler.lr_decay_style", "lr_scheduler.lr_warmup_steps",
        "lr_scheduler.min_lr", "checkpoint.model_save_format", "checkpoint.save_consolidated", "peft.dim",
        "peft.alpha", "fp8.recipe_name", "model.torch_dtype", "clip_grad_norm.max_norm",
    }
)  # fmt: skip
FIXED_SETTINGS: Mapping[str, Any] = {
    "dist_env.backend": "nccl",
    "dist_env.timeout_minutes": 10,  # the default of one minute is shorter than loading a large model
    "lr_scheduler.init_lr": 0.0,  # the default is a tenth of the peak
}
MP_POLICY: Mapping[str, Any] = {
    "distributed.mp_policy._target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
    "distributed.mp_policy.cast_forward_inputs": True,
}
DATALOADER = "torchdata.stateful_dataloader.StatefulDataLoader"
COLLATER_MODULE = "nemo_automodel.components.datasets.utils"
MUON_KEYS = {"optimizer.eps": "optimizer.epsilon"}


def write(framework: Framework, recipe: Recipe, model: ModelSpec, on: Cluster) -> ExportedConfig:
    """Write the YAML of a recipe and the program that reads it."""
    if model.kind != "causal_lm" and model.vision is None:
        raise InputError("must be a language or vision-language model", field="model", value=model.name)
    derived = (*DERIVED_FIELDS, *(["data.validation_part"] if _has_token_files(recipe) else []))
    fields = [key for key in relevant_fields(recipe, model) if key not in derived]
    settings, unmapped = to_settings(framework, recipe, fields)
    lost = list(unmapped)
    if recipe.checkpoint.keep >= KEEP_ALL:
        settings = {key: value for key, value in settings.items() if key != "checkpoint.max_recent_checkpoints"}
    settings = dict(_strategy_settings(settings, recipe, lost))
    settings |= _model_keys(recipe, model) | _batch_keys(recipe, on) | _data_keys(recipe, model)
    settings |= _expert_keys(recipe) | _adapter_keys(recipe)
    settings = dict(_optimizer_settings(settings, recipe, lost))
    if not _has_torchao(recipe) and settings.pop("fp8.enable_fsdp_float8_all_gather", False):
        lost.append(UnmappedField("precision.fp8_gather", True, "only torchao's FP8 layers gather in FP8"))
    lost += _lost_data_fields(recipe)
    kept = dict(_complete_blocks(without_defaults(framework, settings, KEEP), settings))
    name = f"{recipe.name or 'recipe'}.yaml"
    return ExportedConfig(
        framework=framework.name,
        files={name: _yaml(framework, recipe, model, kept)},
        program=Program(argv=("-m", "nemo_automodel.cli.app", name)),
        unmapped=tuple(lost),
        notes=tuple(_notes(recipe)),
    )


def _complete_blocks(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Complete blocks that replace a whole default, and order keys as in AutoModel's examples."""
    settings_out = {**FIXED_SETTINGS, **kept}
    if any(key.startswith("model.backend.") for key in kept):
        settings_out["model.backend._target_"] = "nemo_automodel.components.models.common.BackendConfig"
    if any(key.startswith("distributed.mp_policy.") for key in kept):
        settings_out |= {key: settings[key] for key in settings if key.startswith("distributed.mp_policy.")}
        settings_out |= {
            **MP_POLICY,
            "distributed.mp_policy.output_dtype": settings_out["distributed.mp_policy.param_dtype"],
        }
    if settings_out.get("dataset._target_") == MOCK_DATASET:
        settings_out["dataset.batch_size"] = settings_out["step_scheduler.local_batch_size"]
    if isinstance(alpha := settings_out.get("peft.alpha"), float) and alpha.is_integer():
        settings_out["peft.alpha"] = int(alpha)
    order = {key: place for place, key in enumerate(config_keys("automodel"))}
    yield from sorted(settings_out.items(), key=lambda item: order.get(item[0], len(order)))


def _has_torchao(recipe: Recipe) -> bool:
    return recipe.precision.matmul in ("fp8_tensor", "fp8_row")


def _strategy_settings(
    settings: Mapping[str, Any], recipe: Recipe, lost: list[UnmappedField]
) -> Iterator[tuple[str, Any]]:
    """Yield the settings that the strategy accepts; it rejects any other option."""
    strategy = recipe.layout.strategy if recipe.layout.strategy in STRATEGY_OPTIONS else "fsdp2"
    table = config_keys("automodel")
    for key, value in settings.items():
        option = key.removeprefix("distributed.").split(".")[0]
        if not key.startswith("distributed.") or option in (*COMMON_OPTIONS, *STRATEGY_OPTIONS[strategy]):
            if key != "distributed.moe.reshard_after_forward":
                yield key, value
            continue
        field = table[key].field
        if field and field_value(recipe, field) != recipe_fields()[field].default:
            lost.append(UnmappedField(field, field_value(recipe, field), f"the {strategy} strategy has no {option}"))


def _optimizer_settings(
    settings: Mapping[str, Any], recipe: Recipe, lost: list[UnmappedField]
) -> Iterator[tuple[str, Any]]:
    """Yield the settings that the optimizer accepts, with its argument names."""
    path = str(settings.get("optimizer._target_", ""))
    unsupported = {"dion.Muon": (), "torch.optim.SGD": ("optimizer.betas", "optimizer.eps", "optimizer.mu")}
    for key, value in settings.items():
        if key not in unsupported.get(path, ("optimizer.mu",)):
            yield MUON_KEYS.get(key, key) if path == "dion.Muon" else key, value
    if path.endswith("SGD"):
        for field in ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"):
            lost.append(UnmappedField(field, field_value(recipe, field), "torch.optim.SGD does not accept it"))


def _model_keys(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    own = model_path(recipe, model)
    name = recipe.checkpoint.pretrained or own or model.hf_id
    if not name:
        reason = "AutoModel builds a model by its Hugging Face id or folder, and this shape has neither"
        raise InputError(reason, field="model", value=label(recipe, recipe.model))
    class_name = "NeMoAutoModelForImageTextToText" if model.vision is not None else "NeMoAutoModelForCausalLM"
    if recipe.goal != "pretrain" or recipe.checkpoint.pretrained:
        path = f"nemo_automodel.{class_name}.from_pretrained"
        return {"model._target_": path, "model.pretrained_model_name_or_path": name}
    return {
        "model._target_": f"nemo_automodel.{class_name}.from_config",
        "model.config._target_": "transformers.AutoConfig.from_pretrained",
        "model.config.pretrained_model_name_or_path": name,
        **size_settings(recipe, model),
    }


def _batch_keys(recipe: Recipe, on: Cluster) -> dict[str, Any]:
    """With a pipeline, one local batch holds the micro batches of one pass, usually all of a step."""
    layout, global_batch = recipe.layout, recipe.train.global_batch_size
    ranks = max(1, on.world // (layout.tp * layout.pp * layout.cp))
    if layout.dp_shard > 0:
        ranks = layout.dp_shard * layout.dp_replicate
    if global_batch % (layout.micro_batch_size * ranks):
        raise InputError(
            f"is not a multiple of {layout.micro_batch_size} × {ranks}: micro batch × data-parallel ranks",
            field="train.global_batch_size",
            value=global_batch,
        )
    return {"step_scheduler.local_batch_size": local_batch(recipe, on.world)} if layout.pp > 1 else {}


def _data_keys(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    data = recipe.data
    settings: dict[str, Any] = {"recipe": RECIPES[data.images], "dataloader._target_": DATALOADER}
    mock = has_random_tokens(recipe)
    if mock:
        settings |= BENCHMARK if recipe.benchmark and not data.images else {}
        settings |= {
            "dataset._target_": MOCK_DATASET,
            "dataset.vocab_size": model.vocab,
            "dataset.num_samples": 1_000_000,
        }
        settings["dataloader.batch_size"] = None
        if not data.tokenizer and not recipe.checkpoint.pretrained and lacks_tokenizer(recipe, model):
            settings["dataset.tokenizer"] = None  # else it is loaded from the model's folder, also for random tokens
    elif _has_token_files(recipe):
        settings |= {"dataset._target_": TOKEN_DATASET, "dataset.splits_to_build": "train"}
        settings["dataset.split"] = split_text(data.validation_part)  # the default trains on nine tenths
        settings["dataloader.collate_fn"] = "torch.utils.data.default_collate"
    else:
        settings["dataset.truncation"] = True
        collater = "packed_sequence_thd_collater" if data.packing else "default_collater"
        settings["dataloader.collate_fn"] = f"{COLLATER_MODULE}.{collater}"
    if data.validation and not mock and recipe.goal != "pretrain":
        is_path = "/" in data.validation or "." in data.validation
        dataset_class = COLUMN_DATASET if data.columns else CHAT_DATASET
        settings |= {
            "validation_dataset._target_": dataset_class,
            "validation_dataset.path_or_dataset_id": data.validation if is_path else data.dataset,
            "validation_dataset.split": data.split if is_path else data.validation,
            "validation_dataloader._target_": DATALOADER,
            "validation_dataloader.collate_fn": f"{COLLATER_MODULE}.default_collater",
        }
    return settings


def _has_token_files(recipe: Recipe) -> bool:
    return recipe.goal == "pretrain" and not has_random_tokens(recipe)


def _lost_data_fields(recipe: Recipe) -> Iterator[UnmappedField]:
    """Yield dataset fields that random tokens and token files do not have."""
    random = has_random_tokens(recipe)
    if not random and recipe.goal != "pretrain":
        return
    source = "random tokens have" if random else "token files have"
    blend = ("data.blend",) if random else ()
    for field in ("data.split", "data.columns", "data.validation", *blend):
        if field_value(recipe, field) != recipe_fields()[field].default:
            yield UnmappedField(field, field_value(recipe, field), f"{source} none")


def _expert_keys(recipe: Recipe) -> dict[str, Any]:
    """Set reshard_after_forward explicitly where null means another value: null reshards layers, but not experts."""
    layout = recipe.layout
    if layout.strategy != "fsdp2":
        return {}
    is_default = layout.reshard_after_forward and layout.ep == 1
    return {"distributed.reshard_after_forward": None if is_default else layout.reshard_after_forward}


def _adapter_keys(recipe: Recipe) -> dict[str, Any]:
    if recipe.goal != "peft":
        return {}
    settings: dict[str, Any] = {"peft._target_": "nemo_automodel.components._peft.lora.PeftConfig"}
    if ALL_LINEAR in recipe.peft.targets:
        settings["peft.match_all_linear"] = True
    else:
        # A pattern has no counterpart: its groups are written, and the difference is reported.
        expanded = (groups_of((one,)) if REGEX.search(one) else (one,) for one in recipe.peft.targets)
        targets = [target for one in expanded for target in one]
        names = (name for target in targets for name in STANDARD.get(target, (target,)))
        settings["peft.target_modules"] = [f"*.{name}" for name in dict.fromkeys(names)]
    if recipe.peft.method == "qlora":
        settings |= {"quantization.bnb_4bit_compute_dtype": "bfloat16", "quantization.bnb_4bit_quant_type": "nf4"}
    return settings


def _notes(recipe: Recipe) -> Iterator[str]:
    yield from random_data_notes(recipe, "MockIterableDataset")
    if _has_token_files(recipe):
        yield "dataset.paths must be Megatron .bin/.idx prefixes made with the model's tokenizer"
    if recipe.data.images:
        yield "set dataset._target_ to the function that builds image samples from your data"
    if recipe.train.eval_every and not recipe.data.validation:
        yield "evaluation requires a validation_dataset block"


def _yaml(framework: Framework, recipe: Recipe, model: ModelSpec, settings: Mapping[str, Any]) -> str:
    goal = {"pretrain": "pretraining", "sft": "fine-tuning", "peft": "adapters"}[recipe.goal]
    head = f"# {recipe.name} ({goal}) for {framework.title} ({framework.version}), written by meshwright export\n"
    head += weights_comment(recipe, model)
    tables = nest(settings)
    ordered = [name for name in SECTIONS if name in tables] + [name for name in tables if name not in SECTIONS]
    return head + "".join(f"\n{_yaml_block(name, tables[name], 0)}" for name in ordered)


def _yaml_block(name: str, value: Any, depth: int) -> str:
    start = "  " * depth + name
    if not isinstance(value, dict):
        return f"{start}: {scalar(value)}\n"
    first = {key: value[key] for key in value if key == "_target_"}
    rest = {key: item for key, item in value.items() if key != "_target_"}
    return f"{start}:\n" + "".join(_yaml_block(key, item, depth + 1) for key, item in {**first, **rest}.items())
