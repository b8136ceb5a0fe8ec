"""Reading NeMo AutoModel's YAML, and the commands that start one with settings on top."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.automodel.accessors import noticed
from meshwright.frameworks.automodel.derived_fields import assumptions, follows, model_name
from meshwright.frameworks.automodel.extra_keys import SPOKEN
from meshwright.frameworks.automodel.ignored_keys import BEFORE
from meshwright.frameworks.automodel.values import kept, literal, normalised, size_of, text_in
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import Content, Framework, GpuRequest, ParsedConfig, RuleContext
from meshwright.frameworks.load import open_file
from meshwright.frameworks.model_match import find_model, from_sizes
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.types import Goal, Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

SETTLED = ("schedule.micro-batch-rounds",)
"""Rules of ours that count the micro batches of a step; there a pipeline runs those of one local batch at a time."""
MARKS = ("step_scheduler", "dist_env", "loss_fn", "packed_sequence", "distributed", "lr_scheduler", "recipe")

LANGUAGE = ("NextTokenPrediction", "train_ft", "benchmark", "Benchmark")
ENCODERS = ("BiEncoder", "Biencoder", "CrossEncoder", "SequenceClassification")
"""Parts of the names of models that only recipes of another kind train, for files that name no recipe."""


def detect(content: Content) -> int:
    """How surely a file is AutoModel's."""
    if content.format == "yaml":
        return _surely(content)
    return 3 if any(_config_of(one) is not None for one in content.launches) else 0


def _surely(content: Content) -> int:
    targets = [str(said.value) for key, said in content.settings.items() if key.rpartition(".")[2] == "_target_"]
    if any(text.startswith("nemo_automodel") for text in targets):
        return 4
    marks = content.top_level_keys() & set(MARKS)
    return 3 if len(marks) >= 3 or ("step_scheduler" in marks and "distributed" in marks) else 0


def _config_of(one: LaunchCommand) -> SourcedValue | None:
    """The YAML that a command trains by; None when it is no command of AutoModel's."""
    if one.launcher == "automodel":
        return next((said for said in one.args if str(said.value).endswith((".yaml", ".yml"))), None)
    name = str(one.program.value)
    ours = "nemo_automodel" in name or re.search(r"(finetune|pretrain|train_ft|benchmark)\.py$", name)
    if not ours:
        return None
    for at, said in enumerate(one.args):
        text = str(said.value)
        if text in ("--config", "-c") and at + 1 < len(one.args):
            return one.args[at + 1]
        if text.startswith("--config="):
            return msgspec.structs.replace(said, value=text.partition("=")[2])
        if "nemo_automodel.cli" in name and text.endswith((".yaml", ".yml")):
            return said
    return None


def parse(content: Content) -> ParsedConfig:
    """What a file or script says."""
    if content.format == "yaml":
        return _parsed(content.settings, content, _asked_in(content.settings))
    one = next((one for one in content.launches if _config_of(one) is not None), None)
    if one is None:
        raise InputError("starts no training of AutoModel", field="file", value=content.path)
    named_file = _config_of(one) or one.program
    path = (content.folder or Path()) / str(named_file.value)
    if named_file.unresolved or content.folder is None or not path.is_file():
        raise InputError("the config that the script starts is not there", field="file", value=str(named_file.value))
    found = open_file(path)
    said = {**found.settings, **dict(_arguments(one, named_file))}
    found_in = _parsed(said, content, _asked(one), one.env, Path(named_file.value).stem)
    wrong = tuple(_command(one, found_in)) if one.launcher == "automodel" else ()
    return msgspec.structs.replace(found_in, findings=(*wrong, *found_in.findings))


def _command(one: LaunchCommand, parsed: ParsedConfig) -> Iterator[Finding]:
    """What is wrong with the automodel command itself."""
    from meshwright.frameworks.automodel.command_rules import NO_RECIPE, OLD_COMMAND

    ctx = RuleContext(_framework(), parsed, Recipe(name="", model="", goal=parsed.goal, cluster=""), None, None)
    yield from noticed(NO_RECIPE, ctx)
    first = one.args[0]
    if (
        not first.unresolved
        and not str(first.value).startswith("-")
        and not str(first.value).endswith((".yaml", ".yml"))
    ):
        for finding in noticed(OLD_COMMAND, ctx):
            yield msgspec.structs.replace(finding, file=first.file, line=first.line)


def _arguments(one: LaunchCommand, config: SourcedValue) -> Iterator[tuple[str, SourcedValue]]:
    """`--a.b value`, `--a.b=value`, or `--a.b` alone for true; the config's own words are left out."""
    args = [said for said in one.args if said is not config and not str(said.value).startswith("--config=")]
    at = 0
    while at < len(args):
        said, text = args[at], str(args[at].value)
        at += 1
        if text in ("--config", "-c") or not text.startswith("--"):
            continue
        key, equals, value = text[2:].partition("=")
        if equals:
            yield key, msgspec.structs.replace(said, value=value)
        elif at < len(args) and not str(args[at].value).startswith("--"):
            follows = args[at]
            yield key, SourcedValue(follows.value, said.line, said.file, follows.unresolved)
            at += 1
        else:
            yield key, msgspec.structs.replace(said, value=True)


def _asked(one: LaunchCommand) -> GpuRequest:
    nodes, per_node = (_number(said) for said in (one.nodes, one.gpus_per_node))
    if one.launcher == "automodel" and nodes is None:
        nodes = 1  # the command starts ranks on its own machine only
    return GpuRequest(nodes=nodes, gpus_per_node=per_node, gpu=one.gpu, source=one.gpus_per_node)


def _asked_in(settings: Settings) -> GpuRequest:
    """The GPUs that a block for SkyPilot asks for, such as H100:8."""
    said = settings.get("skypilot.accelerators")
    nodes = _number(settings.get("skypilot.num_nodes")) or 1
    if said is None:
        return GpuRequest()
    gpu, _, count = str(said.value).partition(":")
    return GpuRequest(nodes=nodes, gpus_per_node=int(count) if count.isdigit() else 1, gpu=_gpu(gpu), source=said)


def _gpu(text: str) -> str:
    """A GPU that we know by SkyPilot's name for it; empty for others."""
    from meshwright.clusters import cluster

    name = text.upper().removesuffix("-SXM").removesuffix("-80GB") + ("-80" if text.upper() == "A100-80GB" else "")
    try:
        cluster(f"1x{name}")
    except InputError:
        return ""
    return name


def _number(said: SourcedValue | None) -> int | None:
    if said is None or said.unresolved:
        return None
    value = literal(said.value)
    return value if is_int(value) and value > 0 else None


def _parsed(
    settings: Settings, content: Content, asked: GpuRequest, env: Settings | None = None, stem: str = ""
) -> ParsedConfig:
    said = normalised(settings)
    recipe = text_in(said, "recipe") or text_in(said, "recipe._target_")
    notes: list[str] = []
    kind = recipe or next((part for part in ENCODERS if part in text_in(said, "model._target_")), "")
    other = bool(kind) and not any(part in kind for part in (*LANGUAGE, "VLM"))
    if other:
        notes.append(f"{kind.rpartition('.')[2]} trains in another way: only what all recipes share was checked")
        said = {key: one for key, one in said.items() if key.split(".")[0] in SPOKEN}
    elif not any(key.startswith("recipe") for key in said):
        notes.append("the file names no recipe, as the automodel command wants: it was read as one for language models")
    files = tuple(dict.fromkeys([content.path, *(one.file for one in settings.values())]))
    model = None if other else _model(said, notes)
    goal = _goal(said, recipe)
    raw = ParsedConfig(settings=said, name=stem or Path(content.path).stem, model=model, goal=goal, files=files)
    ctx = RuleContext(_framework(), raw, Recipe(name="", model="", goal=goal, cluster=""), None, None)
    findings = tuple(finding for rule in BEFORE for finding in noticed(rule, ctx))
    left = kept(said)
    notes += assumptions(left)
    return msgspec.structs.replace(
        raw,
        settings=left,
        gpu_request=asked,
        env=env or {},
        findings=findings,
        notes=tuple(notes),
        field_values=follows(left, model, goal, recipe),
        suppressed_rules=SETTLED if size_of(left, "pp") > 1 else (),
    )


def _framework() -> Framework:
    from meshwright.frameworks.automodel import FRAMEWORK

    return FRAMEWORK


def _model(settings: Settings, notes: list[str]) -> ModelSpec | None:
    name = model_name(settings)
    if name:
        found = find_model(name)
        if found is None:
            notes.append(f"{name} is not in the catalogue: its sizes are not known")
        return found
    sizes = {
        key.removeprefix("model.config."): said.value
        for key, said in settings.items()
        if key.startswith("model.config.") and key.count(".") == 2 and not said.unresolved
    }
    kind = str(sizes.pop("_target_", "")).rpartition(".")[2].removesuffix("Config")
    if not kind or len(sizes) < 4:
        return None
    try:
        return from_sizes(_model_type(kind), **sizes)
    except (InputError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError, KeyError):
        return None


def _model_type(name: str) -> str:
    """The model type of a config class: Qwen3Moe is qwen3_moe."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def _goal(settings: Settings, recipe: str) -> Goal:
    if any(key == "peft" or key.startswith("peft.") for key in settings):
        return "peft"
    dataset, built = text_in(settings, "dataset._target_").lower(), text_in(settings, "model._target_")
    loads = settings.get("model.load_base_model")
    fresh = built.endswith("from_config") and not (loads is not None and loads.value is True)
    tokens = any(
        part in dataset for part in ("megatron_dataset", "nanogpt", "mock_iterable", "pretrain", "bin_dataset")
    )
    return "pretrain" if fresh or tokens or "retrain" in recipe or "Benchmark" in recipe else "sft"
