"""The training program of an export for Accelerate or DeepSpeed: TRL's SFTTrainer, or the Trainer on plain text.

The configs of both have neither a model nor data: without a program of its own, an export could not be started.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright import file_access
from meshwright.frameworks.model_match import model_path
from meshwright.frameworks.run_tokenizer import tokenizer_of
from meshwright.frameworks.trainer_args import CALLBACKS, PROGRAM, QUANTIZED, SAMPLE_LENGTH, WRITTEN, stops_early
from meshwright.frameworks.types import UnmappedField
from meshwright.models import ModelSpec, MoE
from meshwright.recipes.types import Architecture, Recipe, field_value

READERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
"""Builders of the datasets library, by the end of a file's name."""
UNKNOWN_DATA = ("", "mock", "DATA")
NOT_CHATS = ("rajpurkar/squad", "squad")  # datasets of the hub whose columns TRL does not know
NO_DATA = (
    "train.eval_every",
    "train.early_stop_patience",
    "train.early_stop_delta",
)  # fields without effect in a program without validation data
VALIDATION_PART = 0.02  # share of the data that is held out if a file validates and names none
BALANCING = "moe.aux_loss"
FIELDS = ("data.dataset", "data.split", "data.tokenizer", "data.validation", "data.validation_part")
"""Recipe fields that the program sets besides the model."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
"""Formats of weights as from_pretrained names them; others are float32."""
ATTENTION = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}


def program_text(recipe: Recipe, model: ModelSpec, module: str) -> str:
    """Return the program that trains a recipe with the arguments of `module`; empty if none can be written.

    A program needs data that the datasets library reads, and for pretraining a model in published sizes.
    """
    data = recipe.data
    if data.dataset in UNKNOWN_DATA or data.blend or data.images or model.kind != "causal_lm" or not _loads(recipe):
        return ""
    if recipe.goal != "pretrain" and data.dataset in NOT_CHATS:
        return ""
    if data.columns or _is_resized(recipe) or not _source(recipe, model):
        return ""
    return _pretraining(recipe, model, module) if recipe.goal == "pretrain" else _fine_tuning(recipe, model, module)


def carried_by_program(recipe: Recipe) -> tuple[str, ...]:
    """Return the recipe fields that a written program sets."""
    attention = ("kernels.attention",) if _attention(recipe) else ()
    return (*FIELDS, "checkpoint.pretrained", *attention)


def program_data_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return a note on data that the written program takes as they are."""
    if recipe.goal == "pretrain" or _builder(recipe.data.dataset):
        return ()
    return (f"{PROGRAM} passes {recipe.data.dataset} to TRL, which reads messages, prompt and completion, or text",)


def without_model(recipe: Recipe, model: ModelSpec) -> tuple[UnmappedField, ...]:
    """Return the model of an export without a program: its files do not name it."""
    return (UnmappedField("model", recipe.model or model.name, "your training program decides"),)


def without_balancing(recipe: Recipe, model: ModelSpec) -> tuple[UnmappedField, ...]:
    """Return the balancing loss of experts: a model of transformers adds its own, if its config says so."""
    sparse = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoE)]
    if not sparse or not recipe.moe.aux_loss or not recipe.moe.balancing.endswith("aux_loss"):
        return ()
    weight = recipe.moe.aux_loss * len(sparse) / sparse[0].topk  # transformers takes the mean over layers
    reason = (
        "the Trainer adds no balancing loss: output_router_logits=true in the model's config adds transformers' own, "
        f"of this strength with router_aux_loss_coef={weight:.3g}"
    )
    return (UnmappedField(BALANCING, recipe.moe.aux_loss, reason),)


def with_data(recipe: Recipe) -> Recipe:
    """Return the recipe without validations that have no data: the Trainer refuses to start with them."""
    if _is_evaluated(recipe):
        return recipe
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, eval_every=0))


def lost_by_program(recipe: Recipe) -> tuple[UnmappedField, ...]:
    """Return the fields that the written program leaves out: validations without data."""
    if _is_evaluated(recipe):
        return ()
    part = f"data.validation_part={VALIDATION_PART}"
    reason = f"no validation data is set, and the Trainer does not start without: add {part}"
    values = {field: field_value(recipe, field) for field in NO_DATA}
    return tuple(UnmappedField(field, value, reason) for field, value in values.items() if value)


def _is_evaluated(recipe: Recipe) -> bool:
    data = recipe.data
    return not recipe.train.eval_every or bool(data.validation or data.validation_part)


def _is_resized(recipe: Recipe) -> bool:
    return any(getattr(recipe.architecture, name) is not None for name in Architecture.__struct_fields__)


def _source(recipe: Recipe, model: ModelSpec) -> str:
    return recipe.checkpoint.pretrained or model_path(recipe, model) or model.hf_id or ""


def _loads(recipe: Recipe) -> bool:
    """Return whether load_dataset reads the data: a hub id, a folder, or a file with a known ending."""
    return all(_builder(name) or _is_named(name) for name in (recipe.data.dataset, recipe.data.validation) if name)


def _builder(name: str) -> str:
    return READERS.get(Path(name).suffix.lower(), "")


def _is_named(name: str) -> bool:
    """Return whether a name without a known ending is a dataset of the hub or a folder, not a prefix of token files."""
    if name.startswith(("/", ".", "~")):
        return not file_access.closed() and Path(name).expanduser().is_dir()
    tokens = not file_access.closed() and Path(f"{name}.bin").exists()
    return not tokens and not Path(name).suffix and name.count("/") <= 1 and not name.endswith("_document")


def _datasets(recipe: Recipe) -> tuple[list[str], str, str]:
    """Return the lines that load the data, and the expressions of the training and the validation samples."""
    data = recipe.data
    files = {"train": data.dataset, "validation": data.validation}
    named = {key: name for key, name in files.items() if name}
    builders = {_builder(name) for name in named.values()}
    if data.validation and len(builders) == 1 and "" not in builders:
        listed = ", ".join(f'"{key}": "{name}"' for key, name in named.items())
        line = f'data = load_dataset("{builders.pop()}", data_files={{{listed}}})'
        return [line], 'data["train"]', 'data["validation"]'
    lines = [f"data = {_loading(data.dataset, data.split or 'train')}"]
    if data.validation:
        return [*lines, f"held_out = {_loading(data.validation, 'train')}"], "data", "held_out"
    if data.validation_part:
        lines += [f"data = data.train_test_split(test_size={data.validation_part}, seed=args.seed)"]
        return lines, 'data["train"]', 'data["test"]'
    return lines, "data", ""


def _loading(name: str, split: str) -> str:
    builder = _builder(name)
    first = f'"{builder}", data_files="{name}"' if builder else f'"{name}"'
    return f'load_dataset({first}, split="{split}")'


def _head(recipe: Recipe, imports: list[str]) -> list[str]:
    title = f'"""Trains {recipe.name or "a recipe"}, {WRITTEN}; its settings are in the files beside it."""'
    paths = ["from pathlib import Path", ""] if _resumes(recipe) else []
    return [title, "", *paths, *imports, ""]


def _fine_tuning(recipe: Recipe, model: ModelSpec, module: str) -> str:
    """Return a program with TRL's SFTTrainer."""
    adapters = recipe.goal == "peft"
    quantized = adapters and recipe.peft.method in QUANTIZED
    names = ["args", *(["peft_config"] if adapters else []), *(["quantization_config"] if quantized else [])]
    loads, train, held_out = _datasets(recipe)
    stops = bool(held_out) and stops_early(recipe)
    names += [CALLBACKS] if stops else []
    source = _source(recipe, model)
    tokenizer = recipe.data.tokenizer if recipe.data.tokenizer not in ("", source) else ""
    classes = ["AutoModelForCausalLM", *(["AutoTokenizer"] if tokenizer else [])]
    frozen = "fp32" if recipe.precision.frozen == "fp32" else "bf16" if quantized else recipe.precision.compute
    kind = DTYPES.get(frozen if adapters else recipe.precision.master, "float32")
    options = [f'dtype="{kind}"', *(["quantization_config=quantization_config"] if quantized else [])]
    options += _attention(recipe)
    lines = _head(
        recipe,
        [
            "from datasets import load_dataset",
            f"from transformers import {', '.join(classes)}",
            "from trl import SFTTrainer",
            "",
            f"from {module} import {', '.join(names)}",
        ],
    )
    lines += [*loads, f'model = AutoModelForCausalLM.from_pretrained("{source}", {", ".join(options)})']
    lines += ["trainer = SFTTrainer(", "    model=model,", "    args=args,", f"    train_dataset={train},"]
    lines += [f"    eval_dataset={held_out},"] if held_out else []
    lines += [f'    processing_class=AutoTokenizer.from_pretrained("{tokenizer}"),'] if tokenizer else []
    lines += ["    peft_config=peft_config,"] if adapters else []
    lines += [f"    {CALLBACKS}={CALLBACKS},"] if stops else []
    return "\n".join((*lines, ")", *_training(recipe), ""))


def _attention(recipe: Recipe) -> list[str]:
    name = "flash" if recipe.data.packing and recipe.kernels.attention == "auto" else recipe.kernels.attention
    return [f'attn_implementation="{ATTENTION[name]}"'] if name in ATTENTION else []


def _pretraining(recipe: Recipe, model: ModelSpec, module: str) -> str:
    """Return a program with the Trainer, on texts that are joined and cut into samples."""
    loads, train, held_out = _datasets(recipe)
    stops = bool(held_out) and stops_early(recipe)
    source = _source(recipe, model)
    starts = bool(recipe.checkpoint.pretrained)
    tokenizer = recipe.data.tokenizer or recipe.checkpoint.pretrained or tokenizer_of(recipe, model)
    kind = DTYPES.get(recipe.precision.master, "float32")
    classes = [*([] if starts else ["AutoConfig"]), "AutoModelForCausalLM", "AutoTokenizer", "Trainer"]
    options = "".join(f", {one}" for one in [f'dtype="{kind}"', *_attention(recipe)])
    if starts:
        made = f'model = AutoModelForCausalLM.from_pretrained("{source}"{options})'
    else:
        made = f'model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("{source}"){options})'
    lines = _head(
        recipe,
        [
            "from datasets import load_dataset",
            f"from transformers import {', '.join(classes)}, default_data_collator",
            "",
            f"from {module} import args, {SAMPLE_LENGTH}{f', {CALLBACKS}' * stops}",
        ],
    )
    lines += [
        f'tokenizer = AutoTokenizer.from_pretrained("{tokenizer}")',
        "",
        "",
        "def to_samples(rows):",
        '    """Join the texts of some rows, with the end-of-text token between them, and cut them into samples."""',
        '    texts = (tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in rows["text"])',
        "    tokens = [token for text in texts for token in text]",
        f"    starts = range(0, len(tokens) // {SAMPLE_LENGTH} * {SAMPLE_LENGTH}, {SAMPLE_LENGTH})",
        f"    samples = [tokens[start : start + {SAMPLE_LENGTH}] for start in starts]",
        '    return {"input_ids": samples, "labels": samples}',
        "",
        "",
        *loads,
        made,
        "trainer = Trainer(",
        "    model=model,",
        "    args=args,",
        f"    train_dataset={_mapped(train)},",
        *([f"    eval_dataset={_mapped(held_out)},"] if held_out else []),
        "    data_collator=default_data_collator,",
        *([f"    {CALLBACKS}={CALLBACKS},"] if stops else []),
        ")",
    ]
    return "\n".join((*lines, *_training(recipe), ""))


def _mapped(data: str) -> str:
    return f"{data}.map(to_samples, batched=True, remove_columns={data}.column_names)"


def _resumes(recipe: Recipe) -> bool:
    return bool(recipe.checkpoint.save_every) and recipe.checkpoint.resume


def _training(recipe: Recipe) -> list[str]:
    """Return the lines that train and save; a restarted run resumes from the latest checkpoint."""
    if not _resumes(recipe):
        return ["trainer.train()", "trainer.save_model()"]
    resumes = 'any(Path(args.output_dir).glob("checkpoint-*"))'
    return [f"trainer.train(resume_from_checkpoint={resumes})", "trainer.save_model()"]
