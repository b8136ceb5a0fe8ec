"""Parse scripts of Megatron-DeepSpeed: Megatron's flags, and the DeepSpeed config that the script names or writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import file_access
from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import torchrun_gpu_request
from meshwright.frameworks.deepspeed.definition import FRAMEWORK as DEEPSPEED
from meshwright.frameworks.deepspeed.parse import AUTO_REASON, normalize
from meshwright.frameworks.deepspeed.rules.sections import AUTO_IN_DEEPSPEED
from meshwright.frameworks.framework import Content, ParsedConfig, RuleContext
from meshwright.frameworks.mapping import map_to_recipe
from meshwright.frameworks.megatron_deepspeed.flags import TITLE, arity, flag_findings, spelling_findings
from meshwright.frameworks.megatron_deepspeed.translate import JSON, mappable, moe_layers, stated_with, translated
from meshwright.frameworks.megatron_lm.arguments import UNREAD_ARGS, key_of, parse_args
from meshwright.frameworks.megatron_lm.layouts import CONNECTIONS
from meshwright.frameworks.megatron_lm.model import BuiltModel, build
from meshwright.frameworks.megatron_lm.parse import (
    PROGRAMS,
    TOOLS,
    TYPICAL_FLAGS,
    derived_fields,
    program_name,
    select_launch,
    without_placeholders,
    words_of,
)
from meshwright.frameworks.megatron_lm.parse import complete as complete_megatron
from meshwright.frameworks.megatron_lm.program_flags import own_flags
from meshwright.frameworks.trainer import open_referenced_file
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.recipes.key_maps.deepspeed import ZERO_STAGES
from meshwright.recipes.types import Engine, Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

OWN_FLAGS = frozenset((
    "--deepspeed", "--deepspeed-config", "--zero-stage", "--no-pipeline-parallel", "--ds-sequence-parallel-size",
    "--deepspeed-activation-checkpointing", "--moe-expert-parallel-size",
))  # fmt: skip
"""Flags that Megatron-LM has not."""
OTHER_ENGINE = (
    "schedule.no-interleaving", "strategy.tied-fsdp2", "strategy.fsdp2-ep", "precision.fp16-fsdp2",
    "sequence_parallel.required-by-moe", "moe.expert-bias", "sequence.attention-kernel",
)  # fmt: skip
"""Rules on Megatron-Core that DeepSpeed's pipeline, ZeRO, MoE layer and sequence parallelism do not have."""
OF_TRAINER = (
    "recompute.supported", "recompute.ops-supported", "precision.format-supported", "optimizer.supported",
    "learning_rate.supported",
)  # fmt: skip
"""Rules on what transformers' Trainer does beside DeepSpeed: Megatron's layers and optimizers are beside it here."""
SPLIT_BY_LAYERS = ("pipeline.more-stages-than-layers", "memory.state", "memory.peak")
"""Rules on stages of whole layers."""
SPLIT_BY_WEIGHTS = ("pipeline.even-split",)
"""Rules on stages of equal length: DeepSpeed's PipelineModule balances layers over its stages."""
REPLACED_RULES = frozenset((
    "deepspeed.batch-arithmetic", "deepspeed.pipeline-zero-stage", "deepspeed.auto-not-filled", "deepspeed.no-type",
    "deepspeed.device-map",
))  # fmt: skip
"""DeepSpeed's rules with an own one here that knows Megatron's layout, and those on the Trainer."""
CLIENT_SECTIONS = ("optimizer.",)  # Megatron passes its own optimizer, so DeepSpeed does not read the section
OTHER_ACCELERATOR = re.compile(r"\b(PT_HPU|HABANA|ASCEND|HCCL)_\w+")  # of Gaudi and Ascend
FIRST_FLAGS = frozenset(("batch_size", "warmup"))
SECOND_FLAGS = frozenset(("micro_batch_size", "global_batch_size", "tensor_model_parallel_size"))
"""Flags of Megatron-LM before version 2, and those that replaced them."""
DECODERS = re.compile(r"pretrain_(gpt|prefix_lm)\w*|finetune_\w+")
ARGUMENTS = "megatron/arguments.py"
LEVELS = 6  # folders above a script that may be the root of its checkout
TOKENS = {
    "train_tokens": "train.steps",
    "lr_warmup_tokens": "schedule.warmup_steps",
    "lr_decay_tokens": "schedule.decay_steps",
}


def detect(content: Content) -> int:
    if content.format != "shell" or content.script is None:
        return 0
    for launch in content.launches:
        words = words_of(launch.args)
        named = PROGRAMS.fullmatch(program_name(launch)) or DECODERS.fullmatch(program_name(launch))
        if not TYPICAL_FLAGS & words or not (named or len(TYPICAL_FLAGS & words) >= 3):
            continue
        if OWN_FLAGS & words or (named and _in_checkout(content.folder)):
            return 6
    return 0


def _in_checkout(folder: Path | None) -> bool:
    """Return whether a script is in a checkout of Megatron-DeepSpeed."""
    if folder is None or file_access.closed():
        return False
    start = folder.resolve()
    places = (start, *list(start.parents)[:LEVELS])
    return any((one / ARGUMENTS).is_file() and _imports_deepspeed(str(one / ARGUMENTS)) for one in places)


@lru_cache(maxsize=8)
def _imports_deepspeed(path: str) -> bool:
    return re.search(r"^import deepspeed", Path(path).read_text(errors="replace"), re.MULTILINE) is not None


def parse(content: Content) -> ParsedConfig:
    launch = select_launch(content)
    if launch is None:
        raise InputError("contains no Megatron-DeepSpeed command", field="file", value=content.path)
    args = parse_args(launch.args, arity)
    given = args.settings
    if TOOLS.search(str(launch.program.value)):
        does_not_train = msgspec.structs.replace(launch.program, unresolved="this program does not train")
        given = {**without_placeholders(given), UNREAD_ARGS: does_not_train}
    if given.keys() >= FIRST_FLAGS and not SECOND_FLAGS & given.keys():
        reason = (
            "is for Megatron-LM 1 (--batch-size, --warmup), whose flags have other meanings than those of version 2"
        )
        fix = ("--micro-batch-size and --lr-warmup-fraction instead of --batch-size and --warmup",)
        raise InputError(reason, field="file", value=content.path, fix=fix)
    own = own_flags(content, launch)
    config, findings, notes = _config(content, given)
    settings = translated(given, config)
    built = _built(settings, given, content, launch)
    stage = zero_stage(settings)
    files = dict.fromkeys([content.path, *(one.file for one in (*given.values(), *config.values()))])
    if len(content.launches) > 1:
        notes.append(f"the script starts {len(content.launches)} programs: the one with the most settings was checked")
    return ParsedConfig(
        settings=settings,
        name=Path(content.path).stem,
        model=built.model,
        goal="sft" if program_name(launch).startswith("finetune_") else "pretrain",
        gpu_request=torchrun_gpu_request(launch),
        env={**_accelerator(content), **launch.env},
        findings=(
            *args.findings,
            *spelling_findings(launch.args),
            *flag_findings(given, own.keys, own.complete or program_name(launch) == "finetune_llama"),
            *findings,
        ),
        notes=(*notes, *built.notes),
        files=tuple(files),
        field_values={**dict(derived_fields(settings, built.model)), **dict(_fields(settings, stage))},
        mappable=mappable(settings),
        stated_with=stated_with(given),
        possible_keys=frozenset(map(key_of, content.script.possible_flags)) if content.script else frozenset(),
        entry=program_name(launch),
        engine=_engine(settings, stage),
        suppressed_rules=(
            *OTHER_ENGINE,
            *(OF_TRAINER if _engine(settings, stage) == "deepspeed" else ()),
            *(("sequence.position-table",) if UNREAD_ARGS in settings else ()),
            *(SPLIT_BY_LAYERS if _splits_other_parts(settings) else ()),
            *(SPLIT_BY_WEIGHTS if _is_pipeline_module(settings, program_name(launch)) else ()),
        ),
    )


def _config(content: Content, given: Settings) -> tuple[dict[str, SourcedValue], list[Finding], list[str]]:
    """Return the settings of the DeepSpeed config that the flags name, what is wrong with them, and notes."""
    named = given.get("deepspeed_config")
    if named is None or "deepspeed" not in given:
        return {}, [], []
    try:
        found = normalize(open_referenced_file(content, named).settings)
    except InputError as error:
        made = content.script is not None and str(named.value) in content.script.written
        if "is not JSON" in error.reason or made:
            message = f"--deepspeed_config {named.value}: {error.reason}"
            finding = Finding(
                "megatron-deepspeed.config", "error", "deepspeed_config", message, (), file=named.file, line=named.line
            )
            return {}, [finding], []
        reason = named.unresolved or "file not found"
        return {}, [], [f"--deepspeed_config {named.value} is not read ({reason}): only the flags are checked"]
    mapped = map_to_recipe(DEEPSPEED, ParsedConfig(settings=found))
    findings = [_of_older_version(msgspec.structs.replace(one, field=f"{JSON}{one.field}")) for one in mapped.findings]
    return found, [*findings, *_deepspeed_findings(found, mapped.recipe)], []


def _deepspeed_findings(settings: Settings, recipe: Recipe) -> Iterator[Finding]:
    """Yield what DeepSpeed's own rules find in the config, without those on parts that Megatron-DeepSpeed replaces."""
    files = tuple(dict.fromkeys(one.file for one in settings.values()))
    ctx = RuleContext(DEEPSPEED, ParsedConfig(settings=settings, files=files), recipe, None, None)
    for rule in DEEPSPEED.rules:
        for one in () if rule.id in REPLACED_RULES else rule.findings(ctx):
            if not one.field.startswith(CLIENT_SECTIONS):
                fix = tuple(text for text in one.fix if '"auto"' not in text)
                yield msgspec.structs.replace(one, field=f"{JSON}{one.field}", fix=fix)
    for key, setting in settings.items():
        if setting.unresolved == AUTO_REASON and not key.startswith((*AUTO_IN_DEEPSPEED, *CLIENT_SECTIONS)):
            message = f"{key} is auto: transformers and accelerate fill it in, {TITLE} does not; write its value"
            yield Finding(
                "megatron-deepspeed.auto", "error", f"{JSON}{key}", message, (), file=setting.file, line=setting.line
            )


def _of_older_version(finding: Finding) -> Finding:
    """Return a finding on the config; a key that DeepSpeed had until some version is no error: its version is open."""
    return msgspec.structs.replace(finding, severity="warning") if finding.rule == "key.removed" else finding


def _built(settings: Settings, given: Settings, content: Content, launch: LaunchCommand) -> BuiltModel:
    program = program_name(launch)
    if PROGRAMS.fullmatch(program) and not DECODERS.fullmatch(program):
        return BuiltModel(None, (f"{program} does not train a decoder: its model is not supported",))
    if moe_layers(given) is None:
        return BuiltModel(None, ("the number of experts differs by layer: the model is not supported",))
    return build(settings, Path(content.path).stem)


def zero_stage(settings: Settings) -> int | None:
    """Return the ZeRO stage: that of the config; of a config that is not read, that of the flag; None if unknown."""
    if "deepspeed" not in settings:
        return 0
    if any(key.startswith(JSON) for key in settings):
        stage = settings.get(f"{JSON}zero_optimization.stage")
        return 0 if stage is None else as_int(stage)
    return as_int(settings.get("zero_stage"))


def _engine(settings: Settings, stage: int | None) -> Engine:
    """Return the engine whose estimate applies: ZeRO-2 and -3 are DeepSpeed's, where nothing else splits the model."""
    split = ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
    alone = all((as_int(settings.get(key)) or 1) == 1 for key in split) and "sequence_parallel" not in settings
    return "deepspeed" if (stage or 0) > 1 and alone else "megatron"


def _fields(settings: Settings, stage: int | None) -> Iterator[tuple[str, Any]]:
    if "deepspeed" in settings and stage in ZERO_STAGES:
        shards = 1 if stage == 0 and _is_bf16(settings) else stage  # its BF16_Optimizer shards states as ZeRO-1 does
        strategy, reshard = ZERO_STAGES[shards or 0]
        yield "layout.strategy", strategy
        yield "layout.reshard_after_forward", reshard
    devices = [settings.get(f"{JSON}zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
    held = ["none" if one is None else str(one.value) for one in devices]
    if held[1] not in ("none", "$") and stage == 3:
        yield "layout.offload", "params"
    elif held[0] != "none" or "cpu_optimizer" in settings:
        yield "layout.offload", "optimizer"


def _is_bf16(settings: Settings) -> bool:
    """Return whether the DeepSpeed config turns bf16 on, whatever the flags say."""
    given = settings.get(f"{JSON}bf16.enabled")
    return given is not None and given.value is True


def _splits_other_parts(settings: Settings) -> bool:
    """Return whether stages are split by modules that are no layers: type:transformer|embedding counts embeddings."""
    method = str(settings["pp_partition_method"].value).lower() if "pp_partition_method" in settings else ""
    return method.startswith("type:") and "embedding" in method


def _accelerator(content: Content) -> Settings:
    """Return CUDA's variables as unknown where a script sets those of another accelerator."""
    other = OTHER_ACCELERATOR.search(content.text)
    return {CONNECTIONS: SourcedValue("", 0, content.path, f"{other[0]} is not for CUDA")} if other else {}


def _is_pipeline_module(settings: Settings, program: str) -> bool:
    """Return whether DeepSpeed builds the model as a PipelineModule."""
    off = settings.get("no_pipeline_parallel")
    return "deepspeed" in settings and bool(DECODERS.fullmatch(program)) and (off is None or not off.value)


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """Set fields derived from the number of GPUs, and the lengths that the flags state in tokens."""
    recipe = complete_megatron(recipe, parsed, on)
    per_step = max(1, recipe.train.global_batch_size * recipe.data.seq_length)
    steps = {key: tokens // per_step for key in TOKENS if (tokens := as_int(parsed.settings.get(key), digits=15))}
    train, schedule = recipe.train, recipe.schedule
    if "train_tokens" in steps:
        others = any(key in parsed.settings for key in ("train_iters", "train_samples"))
        count = max(1, steps["train_tokens"])
        train = msgspec.structs.replace(train, steps=min(count, train.steps) if others else count)
    changes = {
        TOKENS[key].partition(".")[2]: steps[key] for key in ("lr_warmup_tokens", "lr_decay_tokens") if key in steps
    }
    return msgspec.structs.replace(recipe, train=train, schedule=msgspec.structs.replace(schedule, **changes))
