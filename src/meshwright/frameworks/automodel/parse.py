"""Parse NeMo AutoModel's YAML configs and the commands that run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.automodel.derived_fields import (
    assumed_fields,
    assumptions,
    default_warmup,
    derived_values,
    loads_weights,
    model_name,
)
from meshwright.frameworks.automodel.extra_keys import COMMON_BLOCKS, OWN_PACKED_KERNELS
from meshwright.frameworks.automodel.ignored_keys import IGNORED_KEY_RULES
from meshwright.frameworks.automodel.model_sizes import changed_sizes, commented_model
from meshwright.frameworks.automodel.targets import TARGET_RULES, has_own_model, recipe_names
from meshwright.frameworks.automodel.values import (
    axis_size,
    effective_settings,
    literal,
    normalize,
    setting_value,
    text_setting,
)
from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import Content, Framework, GpuRequest, ParsedConfig, RuleContext
from meshwright.frameworks.key_table import near_name
from meshwright.frameworks.load import open_file
from meshwright.frameworks.model_match import find_local_model, find_model, from_sizes, model_option
from meshwright.frameworks.types import ProgramArguments, Settings, SourcedValue
from meshwright.models import ModelSpec, is_path, reshape
from meshwright.recipes.types import Goal, Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

SUPPRESSED_RULES = ("schedule.micro-batch-rounds",)
"""Our rules on micro batches per step; AutoModel's pipeline runs those of one local batch at a time."""
MARKER_KEYS = ("step_scheduler", "dist_env", "loss_fn", "packed_sequence", "distributed", "lr_scheduler", "recipe")

CI_OVERRIDES = ("ci.ep_size", "ci.tp_size", "ci.pp_size", "ci.cp_size", "ci.local_batch_size")
COMMENT_LINES = 60
COMMENTED_GPUS = re.compile(r"(?:torchrun|automodel|\bam\b).*--nproc[-_]per[-_]node[= ](\d{1,3})\b")
COMMENTED_NODES = re.compile(r"--nnodes[= ](\d{1,4})\b")

LLM_RECIPES = ("NextTokenPrediction", "train_ft", "benchmark", "Benchmark")
IMAGE_MODEL = "ForImageTextToText"  # in the model class of VLM recipes
ENCODER_MODELS = ("BiEncoder", "Biencoder", "CrossEncoder", "SequenceClassification")
"""Name parts of models that other recipes train, for files without a recipe key."""


def detect(content: Content) -> int:
    """Return how likely a file is AutoModel's; 0 if it is not."""
    if content.format == "yaml":
        return _yaml_confidence(content)
    return 3 if any(_config_of(launch) is not None for launch in content.launches) else 0


def _yaml_confidence(content: Content) -> int:
    targets = [str(setting.value) for key, setting in content.settings.items() if key.rpartition(".")[2] == "_target_"]
    if any(text.startswith("nemo_automodel") for text in targets):
        return 4
    named = str(getattr(content.settings.get("recipe"), "value", ""))
    if named in recipe_names() or (named and near_name(named, recipe_names())) or named.startswith("nemo_automodel."):
        return 4
    if {"recipe_args", "dist_env"} <= content.top_level_keys():
        return 3
    markers = content.top_level_keys() & set(MARKER_KEYS)
    return 3 if len(markers) >= 3 or ("step_scheduler" in markers and "distributed" in markers) else 0


def _config_of(launch: LaunchCommand) -> SourcedValue | None:
    """Return the config path of an AutoModel command, or None for other commands."""
    if launch.launcher == "automodel":
        return next((argument for argument in launch.args if str(argument.value).endswith((".yaml", ".yml"))), None)
    name = str(launch.program.value)
    is_automodel = "nemo_automodel" in name or re.search(r"(finetune|pretrain|train_ft|benchmark)\.py$", name)
    if not is_automodel:
        return None
    for index, argument in enumerate(launch.args):
        text = str(argument.value)
        if text in ("--config", "-c") and index + 1 < len(launch.args):
            return launch.args[index + 1]
        if text.startswith("--config="):
            return msgspec.structs.replace(argument, value=text.partition("=")[2])
        if "nemo_automodel.cli" in name and text.endswith((".yaml", ".yml")):
            return argument
    return None


def parse(content: Content, framework: Framework) -> ParsedConfig:
    """Parse a file or script."""
    if content.format == "yaml":
        return _parsed(framework, content.settings, content, _file_request(content))
    launch = next((launch for launch in content.launches if _config_of(launch) is not None), None)
    if launch is None:
        raise InputError("contains no AutoModel command", field="file", value=content.path)
    config = _config_of(launch) or launch.program
    path = (content.folder or Path()) / str(config.value)
    if config.unresolved or content.folder is None or not path.is_file():
        raise InputError("config file referenced by the script not found", field="file", value=str(config.value))
    config_content = open_file(path)
    settings = {**config_content.settings, **dict(_arguments(launch, config))}
    parsed = _parsed(framework, settings, content, _gpu_request(launch), launch.env, Path(config.value).stem)
    command_findings = tuple(_command_findings(framework, launch, parsed)) if launch.launcher == "automodel" else ()
    return msgspec.structs.replace(parsed, findings=(*command_findings, *parsed.findings))


def _command_findings(framework: Framework, launch: LaunchCommand, parsed: ParsedConfig) -> Iterator[Finding]:
    """Yield findings on the automodel command itself."""
    from meshwright.frameworks.automodel.command_rules import NO_RECIPE, OLD_COMMAND

    ctx = RuleContext(framework, parsed, Recipe(name="", model="", goal=parsed.goal, cluster=""), None, None)
    yield from NO_RECIPE.findings(ctx)
    first = launch.args[0]
    if (
        not first.unresolved
        and not str(first.value).startswith("-")
        and not str(first.value).endswith((".yaml", ".yml"))
    ):
        for finding in OLD_COMMAND.findings(ctx):
            yield msgspec.structs.replace(finding, file=first.file, line=first.line)


def _arguments(launch: LaunchCommand, config: SourcedValue) -> Iterator[tuple[str, SourcedValue]]:
    """Yield `--a.b value`, `--a.b=value`, or `--a.b` alone for true, without the config argument."""
    args = [
        argument
        for argument in launch.args
        if argument is not config and not str(argument.value).startswith("--config=")
    ]
    index = 0
    while index < len(args):
        argument, text = args[index], str(args[index].value)
        index += 1
        if text in ("--config", "-c") or not text.startswith("--"):
            continue
        key, equals, value = text[2:].partition("=")
        if equals:
            yield key, msgspec.structs.replace(argument, value=value)
        elif index < len(args) and not str(args[index].value).startswith("--"):
            following = args[index]
            yield key, SourcedValue(following.value, argument.line, argument.file, following.unresolved)
            index += 1
        else:
            yield key, msgspec.structs.replace(argument, value=True)


def _gpu_request(launch: LaunchCommand) -> GpuRequest:
    nodes, per_node = (_positive_int(value) for value in (launch.nodes, launch.gpus_per_node))
    if launch.launcher == "automodel" and nodes is None:
        nodes = 1  # the command starts ranks only on the local machine
    return GpuRequest(nodes=nodes, gpus_per_node=per_node, gpu=launch.gpu, source=launch.gpus_per_node)


def _file_request(content: Content) -> GpuRequest:
    """Return the GPUs that a file names: in a skypilot or ci block, or in a command of its comments."""
    settings = content.settings
    if "skypilot.accelerators" in settings:
        return _skypilot_request(settings)
    if any(key in settings for key in CI_OVERRIDES):  # the tests run another layout than the file's
        return GpuRequest()
    source, comment = settings.get("ci.nproc_per_node"), _commented_request(content)
    nodes = _positive_int(settings.get("ci.nodes"))
    if source is None:
        return comment if nodes in (None, comment.nodes) and _may_run_on(settings, comment) else GpuRequest()
    gpu = _gpu(text_setting(settings, "ci.cluster_tag"))
    return GpuRequest(nodes=nodes or 1, gpus_per_node=_positive_int(source), gpu=gpu, source=source)


def _may_run_on(settings: Settings, request: GpuRequest) -> bool:
    """Return whether a layout can be that of a request: a command for one node may be one of several."""
    tp, pp, cp, ep = (axis_size(settings, name) for name in ("tp", "pp", "cp", "ep"))
    return request.count is None or (request.count % (tp * pp * cp) == 0 and request.count >= pp * ep)


def _commented_request(content: Content) -> GpuRequest:
    """Return the GPUs of a launch command in a comment, such as `# torchrun --nproc-per-node=8 …`."""
    for number, line in enumerate(content.text.splitlines()[:COMMENT_LINES], 1):
        found = COMMENTED_GPUS.search(line) if line.lstrip().startswith("#") else None
        if found:
            nodes = COMMENTED_NODES.search(line)
            source = SourcedValue(int(found[1]), number, content.path)
            count = int(nodes[1]) if nodes else 1
            return GpuRequest(nodes=count, gpus_per_node=int(found[1]), source=source, is_example=not nodes)
    return GpuRequest()


def _skypilot_request(settings: Settings) -> GpuRequest:
    """Return the GPUs of a SkyPilot block, such as H100:8."""
    accelerators = settings.get("skypilot.accelerators")
    nodes = _positive_int(settings.get("skypilot.num_nodes")) or 1
    if accelerators is None:
        return GpuRequest()
    gpu, _, count = str(accelerators.value).partition(":")
    return GpuRequest(
        nodes=nodes, gpus_per_node=int(count) if count.isdigit() else 1, gpu=_gpu(gpu), source=accelerators
    )


def _gpu(text: str) -> str:
    """Return our name for a SkyPilot GPU, or an empty string."""
    from meshwright.clusters import cluster

    name = text.upper().removesuffix("-SXM").removesuffix("-80GB") + ("-80" if text.upper() == "A100-80GB" else "")
    try:
        cluster(f"1x{name}")
    except InputError:
        return ""
    return name


def _positive_int(setting: SourcedValue | None) -> int | None:
    if setting is None or setting.unresolved:
        return None
    value = literal(setting.value)
    return value if is_int(value) and value > 0 else None


def _parsed(
    framework: Framework,
    settings: Settings,
    content: Content,
    gpu_request: GpuRequest,
    env: Settings | None = None,
    stem: str = "",
) -> ParsedConfig:
    normalized = normalize(settings)
    recipe = text_setting(normalized, "recipe") or text_setting(normalized, "recipe._target_")
    notes: list[str] = []
    recipe_or_model = recipe or next(
        (part for part in ENCODER_MODELS if part in text_setting(normalized, "model._target_")), ""
    )
    written = ParsedConfig(settings=normalized, files=(content.path,))
    as_written = RuleContext(framework, written, Recipe(name="", model="", goal="sft", cluster=""), None, None)
    name_findings = [finding for rule in TARGET_RULES for finding in rule.findings(as_written)]
    is_other_recipe = bool(recipe_or_model) and not any(part in recipe_or_model for part in (*LLM_RECIPES, "VLM"))
    if is_other_recipe:
        notes.append(
            f"{recipe_or_model.rpartition('.')[2]} is not an LLM or VLM recipe: "
            "only settings shared by all recipes are checked"
        )
        left_out = ("lr_scheduler",) if "Multimodal" in recipe_or_model else ()  # with keys of its own
        blocks = [one for one in COMMON_BLOCKS if one not in left_out]
        normalized = {key: setting for key, setting in normalized.items() if key.split(".")[0] in blocks}
    elif not any(key.startswith("recipe") for key in normalized):
        recipe = "VLM" if IMAGE_MODEL in text_setting(normalized, "model._target_") else ""
        kind = f"{'a VLM' if recipe else 'an LLM'} recipe"
        notes.append(f"the file has no recipe key, which the automodel command requires: it is read as {kind}")
    files = tuple(dict.fromkeys([content.path, *(setting.file for setting in settings.values())]))
    model = None if is_other_recipe else _model(normalized, notes, content)
    sizes, problem = changed_sizes(normalized, model) if model_name(normalized) else ({}, "")
    if problem:
        notes.append(problem)
        model = None
    goal = _goal(normalized, recipe)
    parsed = ParsedConfig(
        settings=normalized, name=stem or Path(content.path).stem, model=model, goal=goal, files=files
    )
    ctx = RuleContext(framework, parsed, Recipe(name="", model="", goal=goal, cluster=""), None, None)
    findings = (*name_findings, *(finding for rule in IGNORED_KEY_RULES for finding in rule.findings(ctx)))
    effective = effective_settings(normalized)
    notes += assumptions(effective)
    return msgspec.structs.replace(
        parsed,
        settings=effective,
        gpu_request=gpu_request,
        env=env or {},
        findings=findings,
        notes=tuple(notes),
        field_values={
            **derived_values(effective, reshape(model, **sizes) if model else None, goal, recipe),
            **{f"architecture.{name}": size for name, size in sizes.items()},
        },
        assumed=assumed_fields(effective),
        suppressed_rules=tuple(_suppressed(effective, model)),
        program=ProgramArguments(warmup_share=default_warmup(effective)),
    )


def _suppressed(settings: Settings, model: ModelSpec | None) -> Iterator[str]:
    """Yield the rules of ours that do not apply: those on AutoModel's own models, for models of transformers."""
    if axis_size(settings, "pp") > 1:
        yield from SUPPRESSED_RULES
    if setting_value(settings, "separate_meshes") is True:  # the teacher has GPUs of its own
        yield from ("topology.shard-product", "topology.world", "batch.divides")
    forced = settings.get("model.force_hf")
    by_transformers = forced is not None and forced.value is True
    if model is not None and model.hf_class.startswith(OWN_PACKED_KERNELS):
        yield "sequence.packing-over-context"
    if model is not None and (by_transformers or (model.hf_class and not has_own_model(model.hf_class))):
        yield "peft.experts-tensor-parallel"


def _model(settings: Settings, notes: list[str], content: Content) -> ModelSpec | None:
    name = model_name(settings)
    if name:
        own, problem = find_local_model(name, content)
        found = own or find_model(name)
        if found is None and not problem and is_path(name) and (found := commented_model(content.text)) is not None:
            notes.append(f"{name} is not here: it has weights of {found.name}, as a comment of the file says")
        if found is None:
            reason = problem or ("no such folder with a config.json here" if is_path(name) else "not in the catalogue")
            notes.append(f"{name}: {reason}, so its sizes are unknown ({model_option(content)})")
        return found
    sizes = {
        key.removeprefix("model.config."): setting.value
        for key, setting in settings.items()
        if key.startswith("model.config.") and key.count(".") == 2 and not setting.unresolved
    }
    class_name = str(sizes.pop("_target_", "")).rpartition(".")[2].removesuffix("Config")
    if not class_name or len(sizes) < 4:
        return None
    try:
        return from_sizes(_model_type(class_name), **sizes)
    except (InputError, TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError, KeyError):
        return None


def _model_type(name: str) -> str:
    """Return the model type of a config class: Qwen3Moe → qwen3_moe."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def _goal(settings: Settings, recipe: str) -> Goal:
    if any(key == "peft" or key.startswith("peft.") for key in settings):
        return "peft"
    dataset, built = text_setting(settings, "dataset._target_").lower(), text_setting(settings, "model._target_")
    fresh = built.endswith("from_config") and not loads_weights(settings)
    tokens = any(
        part in dataset for part in ("megatron_dataset", "nanogpt", "mock_iterable", "pretrain", "bin_dataset")
    )
    return "pretrain" if fresh or tokens or "retrain" in recipe or "Benchmark" in recipe else "sft"
