"""Export to Megatron-Bridge: the run command with overrides, and the same as a Python file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import hub_text_notes, pattern_notes, random_data_notes, torchrun
from meshwright.frameworks.environment import REFERENCE, required_variables, variables_in
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.initial_weights import is_hub_id, needs_converted, shell_word
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.frameworks.megatron_bridge.bridged import BRIDGED_SHOWN, is_bridged, loses_windows
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.settings import (
    Difference,
    difference,
    find_counterpart,
    with_distributed_optimizer,
)
from meshwright.frameworks.megatron_lm.tokenizers import SENTENCEPIECE, SENTENCEPIECE_TOKENIZER
from meshwright.frameworks.model_match import model_path
from meshwright.frameworks.run_tokenizer import tokenizer_of
from meshwright.frameworks.types import ExportedConfig, Program, UnmappedField
from meshwright.models import Mamba2, ModelSpec, has_other_weights
from meshwright.recipes.adapter_targets import ALL_LINEAR, as_groups, groups_of
from meshwright.recipes.key_maps.megatron_bridge_composite_keys import SFT_DATASETS, dataset_keys
from meshwright.recipes.key_maps.value_maps import TORCH_DTYPES
from meshwright.recipes.types import Recipe

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w-]*")
SCRIPT = "scripts/training/run_recipe.py"
CHECKPOINT = "checkpoint.pretrained_checkpoint"
CHECKPOINT_VARIABLE = "CONVERTED_CHECKPOINT"
CHECKPOINT_WORD = f"{CHECKPOINT}=${{{CHECKPOINT_VARIABLE}}}"
CONVERT = (
    "convert the weights first, and set CONVERTED_CHECKPOINT to their folder: python "
    'examples/conversion/convert_checkpoints.py import --hf-model {model} --megatron-path "$CONVERTED_CHECKPOINT"; '
    "from 0.6.0 on, Megatron-Bridge also takes a downloaded Hugging Face folder there"
)
FOLDER = (
    "checkpoints go to nemo_experiments/default/checkpoints of the folder it starts in; a run that finds those of "
    "another phase there resumes them in place of its initial weights: add checkpoint.folder=/PATH"
)
CONVERTED = "a converted checkpoint, or from Megatron-Bridge 0.6.0 on a Hugging Face folder"


def write(framework: Framework, recipe: Recipe, model: ModelSpec, cluster: Cluster) -> ExportedConfig:
    """Export the run command for the matching recipe, or a Python file if there is none."""
    grouped, unmapped = _with_target_groups(recipe, model)
    found = _write(framework, grouped, model, cluster)
    return msgspec.structs.replace(found, unmapped=(*found.unmapped, *unmapped)) if unmapped else found


def _with_target_groups(recipe: Recipe, model: ModelSpec) -> tuple[Recipe, tuple[UnmappedField, ...]]:
    """Return the recipe with whole groups of adapter targets: Megatron's linear layers are fused."""
    targets = recipe.peft.targets
    mamba = ALL_LINEAR not in targets or bool(model.mixers(Mamba2))
    groups = tuple(group for group in groups_of(targets) if mamba or not group.startswith("mamba"))
    if groups == targets:
        return recipe, ()
    grouped = msgspec.structs.replace(recipe, peft=msgspec.structs.replace(recipe.peft, targets=groups))
    reason = f"Megatron fuses these linear layers: {','.join(groups)} is adapted as a whole"
    unmapped = (UnmappedField("peft.targets", ",".join(targets), reason),) if as_groups(targets) is None else ()
    return grouped, unmapped


def _write(framework: Framework, recipe: Recipe, model: ModelSpec, cluster: Cluster) -> ExportedConfig:
    bridge_recipe = with_distributed_optimizer(recipe)
    row = find_counterpart(bridge_recipe, model)
    notes = (
        ["Megatron-Bridge shards the optimizer state over data-parallel ranks (zero1)"]
        if bridge_recipe is not recipe
        else []
    )
    if needs_converted(recipe):
        notes.append(CONVERT.format(model=recipe.checkpoint.pretrained or model_path(recipe, model) or model.hf_id))
    elif recipe.checkpoint.pretrained:
        notes.append(f"{recipe.checkpoint.pretrained} must be {CONVERTED} ({CHECKPOINT})")
    starts = recipe.checkpoint.pretrained or recipe.goal != "pretrain"
    if starts and not recipe.checkpoint.folder and not recipe.benchmark:
        notes.append(FOLDER)
    notes += random_data_notes(recipe, "--dataset mock")
    notes += pattern_notes(recipe, framework.title)
    notes += hub_text_notes(recipe, "dataset.data_path")
    notes += _hub_data_notes(recipe)
    if row is None:
        return _as_python(framework, bridge_recipe, model, cluster, notes)
    changes = recipe_overrides(bridge_recipe, model, cluster, row)
    argv = runner_argv(bridge_recipe, row, changes.settings)
    files = {"run.sh": _script(framework, recipe, cluster, argv, model)}
    if not row.benchmark:
        files["override.py"] = _python(
            framework, recipe, row.name if not row.aliases else row.aliases[0], changes, model
        )
    return ExportedConfig(framework.name, files, program_of(argv, recipe, model), changes.unmapped, tuple(notes))


def _hub_data_notes(recipe: Recipe) -> Iterator[str]:
    """Yield that a dataset of the Hugging Face hub, or a file, is not the folder that Megatron-Bridge reads."""
    folder = None if recipe.benchmark else dataset_keys(recipe).get("dataset.dataset_root")
    if folder is not None and Path(folder).suffix in (".jsonl", ".json", ".parquet", ".csv", ".ndjson"):
        yield (
            f"dataset.dataset_root={folder} is a file: --dataset local-jsonl reads a folder with training.jsonl and "
            "validation.jsonl, rows with input and output, without a chat template: write them there and give "
            "data.dataset=FOLDER"
        )
        return
    if folder is None or not HUB_NAME.fullmatch(folder):
        return
    preset = folder.rpartition("/")[2].lower()
    instead = f", or start with --dataset {preset}" if preset in SFT_DATASETS else ""
    yield (
        f"dataset.dataset_root={folder} must be a folder with training.jsonl and validation.jsonl: write the "
        f"samples of a dataset of the Hugging Face hub there and give data.dataset=FOLDER{instead}"
    )


def program_of(argv: list[str], recipe: Recipe, model: ModelSpec) -> Program:
    """Return the program with the variable that its arguments refer to."""
    source = recipe.checkpoint.pretrained or model.hf_id or model.name
    what = "a converted checkpoint" if variables_in([source]) else f"a checkpoint converted from {source}"
    return Program(tuple(argv), variables=required_variables(argv, {CHECKPOINT_VARIABLE: what}))


def recipe_overrides(
    recipe: Recipe, model: ModelSpec, cluster: Cluster, row: bridge_recipes.BridgeRecipe
) -> Difference:
    """Return the overrides that turn a Megatron-Bridge recipe into this one."""
    found = difference(recipe, model, row)
    settings = {**found.settings, **_tokenizer(recipe, model, row)}
    unmapped = list(found.unmapped)
    if row.packs_in_batch and recipe.data.packing:
        settings = {key: value for key, value in settings.items() if key not in OFFLINE}
        unmapped.append(UnmappedField("data.packing", True, "samples with images are packed inside a batch"))
    if row.benchmark and cluster.world != row.gpus:  # else the runner scales the batch
        settings["train.global_batch_size"] = recipe.train.global_batch_size
    return Difference(settings, tuple(unmapped))


OFFLINE = ("dataset.enable_offline_packing", "dataset.offline_packing_specs.packed_sequence_size")


def _tokenizer(recipe: Recipe, model: ModelSpec, row: bridge_recipes.BridgeRecipe) -> dict[str, Any]:
    """Return the tokenizer where the recipe has another: that of other weights, or a placeholder."""
    if recipe.data.tokenizer:
        named = recipe.data.tokenizer
        return {"tokenizer.tokenizer_type": _tokenizer_type(named), "tokenizer.tokenizer_model": named}
    weights = recipe.checkpoint.pretrained
    if weights and is_hub_id(weights) and weights != model.hf_id:
        return {"tokenizer.tokenizer_type": "HuggingFaceTokenizer", "tokenizer.tokenizer_model": weights}
    if row.null_vocabulary in (None, model.vocab) and not has_other_weights(model):
        return {}
    if recipe.data.dataset == "mock" or not model.hf_id:
        return {"tokenizer.use_tokenizer_vocab_size": False}
    return {"tokenizer.tokenizer_type": "HuggingFaceTokenizer", "tokenizer.tokenizer_model": model.hf_id}


def _tokenizer_type(named: str) -> str:
    return SENTENCEPIECE_TOKENIZER if named.endswith(SENTENCEPIECE) else "HuggingFaceTokenizer"


def runner_argv(recipe: Recipe, row: bridge_recipes.BridgeRecipe, settings: Mapping[str, Any]) -> list[str]:
    """Return the runner and its arguments, as they follow torchrun."""
    name = recipe.name.lower() if recipe.name.lower() in row.aliases else _name(row)
    argv = [SCRIPT, "--recipe", name]
    if recipe.goal == "peft" and recipe.peft.method == "dora":
        argv += ["--mode", "dora"]
    flags = {key: value for key, value in settings.items() if key.startswith("--")}
    if recipe.data.blend and recipe.goal == "pretrain":
        pass  # the token files of the blend, as the settings name them
    elif not row.benchmark and recipe.data.dataset in DATA[recipe.goal]:
        flags["--dataset"] = recipe.data.dataset
    elif recipe.data.dataset == row.recipe().data.dataset:
        flags.pop("--dataset", None)
    for key, value in flags.items():
        argv += [key, str(value)]
    argv += [format_override(key, value) for key, value in settings.items() if not key.startswith("--")]
    argv = [word for word in argv if not word.startswith(f"{CHECKPOINT}=")]
    if needs_converted(recipe):
        argv.append(CHECKPOINT_WORD)
    elif recipe.checkpoint.pretrained:
        argv.append(f"{CHECKPOINT}={recipe.checkpoint.pretrained}")
    return argv


DATA = {"pretrain": ("mock",), "sft": ("squad", "tulu3", "cord-v2"), "peft": ("squad", "tulu3", "cord-v2")}
"""Datasets that are always written out."""


def _name(row: bridge_recipes.BridgeRecipe) -> str:
    """Return an unambiguous name: the runner resolves some library names to benchmarks."""
    resolved = bridge_recipes.find(row.name)
    return row.aliases[0] if row.aliases and resolved is not None and resolved.benchmark != row.benchmark else row.name


def _script(framework: Framework, recipe: Recipe, cluster: Cluster, argv: list[str], model: ModelSpec) -> str:
    """Return the command as a script with required environment variables."""
    head = torchrun(cluster, "$HEAD_NODE")
    quoted = [*(f'"{word}"' if "$" in word else shlex.quote(word) for word in head)]
    variables = program_of(argv, recipe, model).variables
    lines = [" ".join(quoted), *_lines(argv, variables)]
    first = f"# {recipe.name} for Megatron-Bridge ({framework.version}), written by meshwright export."
    where = "# Run it in a checkout of Megatron-Bridge" + (", on every node." if cluster.nodes > 1 else ".")
    needed = [': "${HEAD_NODE:?hostname of the first node}"'] if cluster.nodes > 1 else []
    needed += [f": {shell_word(f'${{{name}}}', variables)}" for name in variables]
    return "\n".join(["#!/bin/bash", first, where, *needed, "", " \\\n    ".join(lines), ""])


def _lines(argv: list[str], variables: Mapping[str, str]) -> list[str]:
    """Return one argument per line, flags together with their value; the script requires the variables before."""
    lines: list[str] = []
    for word in argv:
        quoted = f'"{CHECKPOINT}=${CHECKPOINT_VARIABLE}"' if word == CHECKPOINT_WORD else shell_word(word, {})
        if word != CHECKPOINT_WORD and any(name in variables for name in variables_in([word])):
            quoted = f'"{word}"'
        if lines and lines[-1].startswith("--") and " " not in lines[-1]:
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return lines


# Python.

SAVE_ON_SIGNAL = {"train.exit_signal_handler": True, "train.exit_signal_handler_for_dataloader": True}
COMMON = {"pretrain": "_pretrain_common", "sft": "_sft_common", "peft": "_peft_common"}


def _as_python(
    framework: Framework, recipe: Recipe, model: ModelSpec, cluster: Cluster, notes: list[str]
) -> ExportedConfig:
    """Export a Python file that builds the model from its Hugging Face id or folder, on the common recipe."""
    path = model_path(recipe, model)
    if not model.hf_id and not path:
        raise InputError(
            "Megatron-Bridge has no recipe for this model, and there is no Hugging Face id or folder to build it from",
            field="model",
            value=model.name,
        )
    if model.kind == "diffusion":
        raise InputError(
            "Megatron-Bridge trains diffusion models only with its own recipes", field="model", value=model.name
        )
    if not is_bridged(model):
        reason = f"Megatron-Bridge has no bridge for {model.hf_class or model.model_type}; it has {BRIDGED_SHOWN}"
        raise InputError(reason, field="model", value=model.name)
    if loses_windows(model):
        reason = f"Megatron-Bridge's bridge of {model.hf_class} does not build the sliding windows that its config has"
        raise InputError(reason, field="model", value=model.name, fix=("--to megatron-lm",))
    if path:
        config = "it" if path.endswith(".json") else "its config.json"
        notes = [*notes, f"{path} must be there where the job runs: {config} gives the shape"]
    if recipe.benchmark:
        raise InputError(
            "Megatron-Bridge has no benchmark of this name; export the recipe without benchmark settings",
            field="recipe",
            value=recipe.name,
        )
    changes = difference(recipe, model, python=True)
    unmapped = [*changes.unmapped]
    settings = dict(changes.settings)
    settings |= SAVE_ON_SIGNAL  # the file reads no arguments that could turn it on
    preset = settings.pop("--dataset", None)
    if preset not in (None, "megatron-indexed"):
        reason = "the runner selects datasets; a Python file must build the dataset config"
        unmapped.append(UnmappedField("data.dataset", recipe.data.dataset, reason))
        settings = {key: value for key, value in settings.items() if not key.startswith("dataset.dataset_root")}
    name = "train.py"
    text = _python(framework, recipe, "", Difference(settings, ()), model)
    needed = {CHECKPOINT_VARIABLE: "a converted checkpoint"} if needs_converted(recipe) else {}
    program = Program((name,), variables=needed)
    return ExportedConfig("megatron-bridge", {name: text}, program, tuple(unmapped), tuple(notes))


def _python(framework: Framework, recipe: Recipe, function: str, changes: Difference, model: ModelSpec) -> str:
    """Return a Python file that overrides a recipe function or the common recipe."""
    train = "pretrain" if recipe.goal == "pretrain" else "finetune"
    start = function or COMMON[recipe.goal]
    imports = [
        f"from megatron.bridge.recipes{'' if function else '.common'} import {start}",
        f"from megatron.bridge.training.{train} import {train}",
        f"from megatron.bridge.training.{'vlm' if recipe.data.images else 'gpt'}_step import forward_step",
    ]
    body = [f"cfg = {start}()"]
    if not function:
        imports.insert(0, "from megatron.bridge import AutoBridge")
        body += _model_lines(recipe, model, imports)
    if recipe.goal == "peft" and recipe.peft.method == "dora":
        imports.append("from megatron.bridge.peft.dora import DoRA")
        body.append("cfg.peft = DoRA()")
    settings = {key: value for key, value in changes.settings.items() if not key.startswith("--")}
    body += _assignments(settings, imports)
    if "dataset.seq_length" in settings or not function:
        body.append(f"cfg.model.seq_length = cfg.dataset.seq_length = {recipe.data.seq_length}")
    body = [line for line in body if not line.startswith(f"cfg.{CHECKPOINT} =")]
    if recipe.checkpoint.pretrained and not needs_converted(recipe):
        body.append(f"cfg.{CHECKPOINT} = {_literal(recipe.checkpoint.pretrained)}")
    elif needs_converted(recipe):
        imports.append("import os")
        body.append(f'cfg.{CHECKPOINT} = os.environ["{CHECKPOINT_VARIABLE}"]')
    if recipe.goal != "pretrain" and recipe.train.per_token_loss:
        body.append("cfg.ddp.average_in_collective = False")
    first = f"# {recipe.name} for Megatron-Bridge ({framework.version}), written by meshwright export."
    main = ['if __name__ == "__main__":', f"    {train}(cfg, forward_step)"]
    if any("= os." in line for line in body) and "import os" not in imports:
        imports.append("import os")
    plain = sorted(one for one in imports if one.startswith("import"))
    named = sorted(one for one in imports if one not in plain)
    return "\n".join([first, *plain, *([""] if plain else []), *named, "", *body, "", *main, ""])


def _model_lines(recipe: Recipe, model: ModelSpec, imports: list[str]) -> list[str]:
    """Return the lines that build the model from its hub id, or from the config of its folder, and its tokenizer."""
    path = model_path(recipe, model)
    weights = recipe.checkpoint.pretrained
    built = f"from_hf_pretrained({_literal(weights if weights and is_hub_id(weights) else model.hf_id)})"
    if path:
        imports.append("from transformers import AutoConfig")
        built = f"from_hf_config(AutoConfig.from_pretrained({_literal(path)}))"
    tokenizer = tokenizer_of(recipe, model)
    lines = [f"cfg.model = AutoBridge.{built}.to_megatron_provider(load_weights=False)"]
    if path and not recipe.data.tokenizer and recipe.data.dataset == "mock":
        null = {"tokenizer_type": "NullTokenizer", "vocab_size": model.vocab, "use_tokenizer_vocab_size": False}
        return [*lines, *(f"cfg.tokenizer.{key} = {_literal(value)}" for key, value in null.items())]
    if tokenizer.endswith(SENTENCEPIECE):  # the common recipe has a Hugging Face tokenizer
        lines.append(f"cfg.tokenizer.tokenizer_type = {_literal(_tokenizer_type(tokenizer))}")
    return [*lines, f"cfg.tokenizer.tokenizer_model = {_literal(tokenizer)}"] if tokenizer else lines


def _literal(value: Any) -> str:
    """Format a value as Python code, with double quotes; ${NAME} is a variable of the environment."""
    if isinstance(value, str) and (found := REFERENCE.fullmatch(value)):
        return f'os.environ["{found[1]}"]'
    if isinstance(value, str) and REFERENCE.search(value):
        return f"os.path.expandvars({json.dumps(value, ensure_ascii=False)})"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _assignments(settings: Mapping[str, Any], imports: list[str]) -> list[str]:
    """Return settings as assignments; missing sub-configs are built first."""
    lines: list[str] = []
    inside = [key for key in settings if key.startswith("mixed_precision.")]
    if inside:
        imports.append("from megatron.bridge.training.mixed_precision import get_mixed_precision_config")
        lines.append('cfg.mixed_precision = get_mixed_precision_config("bf16_mixed")')
    for key, value in settings.items():
        if key == "dataset.seq_length":
            continue
        if key.endswith("_dtype") and value in TORCH_DTYPES:
            if "import torch" not in imports:
                imports.append("import torch")
            lines.append(f"cfg.{key} = torch.{value}")
        else:
            lines.append(f"cfg.{key} = {_literal(value)}")
    return lines
