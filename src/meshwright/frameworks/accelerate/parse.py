"""Reading Accelerate: the YAML of `accelerate config`, and commands of `accelerate launch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.accelerate.keys import PREFIXES, READS, TABLE
from meshwright.frameworks.common import as_int, gpu_request_of, value_or_default
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.trainer import Arguments, is_on, open_referenced_file, parse_arguments, program_fields
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, MEGATRON, ZERO, distributed_type, sharding_strategy
from meshwright.recipes.types import Engine, Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

FLAGS = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
GPU_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
ENGINES: dict[str, Engine] = {"DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
MICRO_BATCHES = {
    "MEGATRON_LM": f"{MEGATRON}megatron_lm_num_micro_batches",
    "DEEPSPEED": f"{ZERO}gradient_accumulation_steps",
}
"""What says the micro batches of a step."""
SHARED = f"{MEGATRON}megatron_lm_use_distributed_optimizer"
FROM_DEEPSPEED = (
    "layout.strategy",
    "layout.reshard_after_forward",
    "layout.offload",
    "layout.tp",
    "optimizer.clip_grad",
)
"""What a DeepSpeed config that is named decides."""


def recognises(content: Content) -> int:
    if content.format == "yaml":
        return 3 if {"distributed_type", "compute_environment"} & content.settings.keys() else 0
    return 3 if any(one.launcher == "accelerate" for one in content.launches) else 0


def parse(content: Content) -> ParsedConfig:
    if content.settings:
        return _parsed(content, content.settings, GpuRequest(), {})
    one = next((one for one in content.launches if one.launcher == "accelerate"), None)
    if one is None:
        raise InputError("no command in it is accelerate launch", field="file", value=content.path)
    settings = {**_config_of(content, one), **dict(_options(one))}
    parsed = _parsed(content, settings, gpu_request_of(one), parse_arguments(one.args))
    return msgspec.structs.replace(parsed, env=one.env)


def _config_of(content: Content, one: LaunchCommand) -> Settings:
    said = one.launcher_args.get("config-file") or one.launcher_args.get("config_file")
    if said is None:
        return {}
    return open_referenced_file(content, said).settings


def _options(one: LaunchCommand) -> Iterator[tuple[str, SourcedValue]]:
    """Options of the launcher under the keys that they come before."""
    places = {key.rsplit(".", 1)[-1]: key for key in config_keys(TABLE)}
    for option, said in one.launcher_args.items():
        name = option.replace("-", "_")
        if name in FLAGS and said.value is True:
            yield "distributed_type", msgspec.structs.replace(said, value=FLAGS[name])
        elif name in places:
            number = as_int(said)
            yield places[name], said if number is None else msgspec.structs.replace(said, value=number)


def _parsed(content: Content, said: Settings, asked: GpuRequest, given: Arguments) -> ParsedConfig:
    settings = normal(said)
    kind, program = distributed_type({key: each.value for key, each in settings.items()}), program_fields(given)
    own: dict[str, Any] = {**_formats(kind, settings), **program.field_values}
    if kind == "MEGATRON_LM" and str(getattr(settings.get(SHARED), "value", "")).lower() != "true":
        own["kernels.overlap_param_gather"] = False
    if size := as_int(given.get("per_device_train_batch_size")):
        own["layout.micro_batch_size"] = size
    twice: tuple[Finding, ...] = ()
    said_here = settings.get(f"{FSDP}fsdp_activation_checkpointing")
    if kind == "FSDP" and said_here is not None and str(said_here.value).lower() == "true":
        own["layout.recompute"] = "full"
        twice = tuple(_checkpointed_twice(said_here, given))
    inner = _deepspeed(content, settings) if kind == "DEEPSPEED" else None
    own |= dict(inner.own) if inner else {}
    return ParsedConfig(
        settings=settings,
        mappable={key: each for key, each in settings.items() if _is_read(key, kind, settings)},
        name=Path(content.path).stem,
        model=program.model,
        goal=program.goal,
        gpu_request=_asked(settings, kind, asked),
        files=tuple(dict.fromkeys([content.path, *(each.file for each in said.values())])),
        findings=(*twice, *(inner.findings if inner else ())),
        field_values=own,
        unknown_fields=(*(key for key in program.unknown_fields if key not in own), *_open(kind, settings, own)),
        engine=_engine(kind, settings),
        notes=(*_notes(kind, settings, given), *_not_there(kind, settings, inner)),
    )


def _is_read(key: str, kind: str, settings: Settings) -> bool:
    """Whether this way to share the work asks for a key at all; rules tell of those that stand there for nothing."""
    section = key.partition(".")[0]
    if section in READS.values():
        policy = settings.get(f"{FSDP}fsdp_auto_wrap_policy")
        by_size = policy is not None and str(policy.value).upper() == "SIZE_BASED_WRAP"
        return READS.get(kind, section if kind not in GPU_KINDS else "") == section and (
            by_size or key != f"{FSDP}fsdp_min_num_params"
        )
    return (section, kind) not in (("parallelism_config", "NO"), ("dynamo_config", "DEEPSPEED"))


def normal(settings: Settings) -> dict[str, SourcedValue]:
    """Settings as the launcher sees them: keys with the prefix of their section, truths as PyYAML reads them."""
    found: dict[str, SourcedValue] = {}
    for key, said in settings.items():
        section, dot, name = key.partition(".")
        prefix = PREFIXES.get(section, "")
        full = f"{section}.{prefix}{name}" if dot and prefix and not name.startswith(prefix[:-1]) else key
        word = config_keys(TABLE).get(full)
        if said.value is None and word is not None:
            continue
        if word is not None and word.type == "bool" and said.pyyaml is not UNSET:
            said = msgspec.structs.replace(said, value=said.pyyaml)
        if said.value == "auto" and section == "deepspeed_config":
            said = msgspec.structs.replace(said, unresolved="auto: filled in when training starts")
        found[full] = said
    return found


def _formats(kind: str, settings: Settings) -> dict[str, Any]:
    """Formats that follow from mixed_precision and from what does the sharing."""
    said = settings.get("mixed_precision")
    text = str(said.value).lower() if said else "no"
    if text == "no":
        return {}
    if kind == "DEEPSPEED":
        return {"precision.grads": "bf16", "precision.reduce": "bf16"}
    return {"precision.reduce": "bf16"} if kind == "FSDP" else {}


def _open(kind: str, settings: Settings, own: dict[str, Any]) -> Iterator[str]:
    """Fields that the program sets: without mixed precision also the format that it loads the model in."""
    if kind == "MEGATRON_LM":
        yield "layout.vp"
    if "layout.micro_batch_size" not in own:
        yield "layout.micro_batch_size"
    said = settings.get("mixed_precision")
    if said is None or str(said.value).lower() in ("no", "false"):
        yield "precision.compute"


def _engine(kind: str, settings: Settings) -> Engine:
    """What runs it; torch's tensor and context parallelism is that of AutoModel."""
    cut = any((as_int(settings.get(f"{AXIS}{name}_size")) or 1) > 1 for name in ("tp", "cp"))
    return ENGINES.get(kind, "automodel" if cut else "fsdp1")


def _asked(settings: Settings, kind: str, asked: GpuRequest) -> GpuRequest:
    if kind not in GPU_KINDS:
        return GpuRequest()
    said, nodes = settings.get("num_processes"), as_int(settings.get("num_machines")) or asked.nodes or 1
    world = 1 if kind == "NO" else as_int(said)
    if not world:
        return asked
    each = world // nodes if world % nodes == 0 else None
    return GpuRequest(nodes=nodes, gpus_per_node=each, world_size=world, gpu=asked.gpu, source=said)


def _notes(kind: str, settings: Settings, given: Arguments) -> Iterator[str]:
    if kind not in GPU_KINDS:
        yield f"distributed_type {kind} is of other devices than GPUs: memory and layout are not judged for them"
    if "num_processes" not in settings and kind != "NO":
        yield "num_processes is not said: the command line must give it"
    policy = value_or_default(TABLE, settings, f"{FSDP}fsdp_auto_wrap_policy")
    unnamed = f"{FSDP}fsdp_transformer_layer_cls_to_wrap" not in settings
    if kind == "FSDP" and str(policy).upper() == "TRANSFORMER_BASED_WRAP" and unnamed:
        yield "the layers to wrap are those that the model itself names in _no_split_modules"
    if "per_device_train_batch_size" not in given:
        yield "the batch and the sequence length are the program's own: micro batch 1 is taken for them"


def _checkpointed_twice(said: SourcedValue, given: Arguments) -> Iterator[Finding]:
    """transformers refuses to recompute the same layers twice."""
    if is_on(given, "gradient_checkpointing"):
        yield Finding(
            "accelerate.checkpointed-twice",
            "error",
            f"{FSDP}fsdp_activation_checkpointing",
            f"fsdp_activation_checkpointing and --gradient_checkpointing ({given['gradient_checkpointing'].location}) "
            "would recompute the same layers twice",
            ("without --gradient_checkpointing",),
            file=said.file,
            line=said.line,
        )


class Inner(msgspec.Struct, frozen=True):
    """What a DeepSpeed config says that an Accelerate config names."""

    own: dict[str, Any]
    findings: tuple[Finding, ...]


def _deepspeed(content: Content, settings: Settings) -> Inner | None:
    said = settings.get(f"{ZERO}deepspeed_config_file")
    if said is None or said.value in (None, "none"):
        return None
    try:
        inner = open_referenced_file(content, said)
    except InputError:
        return None
    from meshwright.frameworks.check import check
    from meshwright.frameworks.deepspeed import FRAMEWORK

    if inner.format != "json":
        message = f"{said.value} is no DeepSpeed config: that is JSON"
        key = f"{ZERO}deepspeed_config_file"
        wrong = Finding("accelerate.not-json", "error", key, message, (), file=said.file, line=said.line)
        return Inner({}, (wrong,))
    checked = check(FRAMEWORK, inner)
    fields = {own: getattr(getattr(checked.recipe, own.split(".")[0]), own.split(".")[1]) for own in FROM_DEEPSPEED}
    return Inner(fields, checked.findings)


def _not_there(kind: str, settings: Settings, inner: Inner | None) -> Iterator[str]:
    said = settings.get(f"{ZERO}deepspeed_config_file")
    if kind == "DEEPSPEED" and said is not None and inner is None:
        yield f"{said.value}, which says how DeepSpeed is set up, was not found and is not judged"


def copies(settings: Settings, on: Cluster) -> int:
    """Full copies of the state: FSDP1's hybrid ways share it inside each machine."""
    if value_or_default(TABLE, settings, f"{FSDP}fsdp_version") not in (1, "1"):
        return 1
    try:
        way = sharding_strategy(str(value_or_default(TABLE, settings, f"{FSDP}fsdp_sharding_strategy")))
    except InputError:
        return 1
    return on.nodes if way.startswith("HYBRID") else 1


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """The batch that the accumulation and the GPUs make, and the copies of hybrid sharding."""
    layout, said = recipe.layout, parsed.settings.get("distributed_type")
    kind = str(said.value).upper() if said else ""
    counted = (
        f"{MEGATRON}megatron_lm_num_micro_batches" if kind == "MEGATRON_LM" else f"{ZERO}gradient_accumulation_steps"
    )
    steps = as_int(parsed.settings.get(counted)) or 1
    if kind == "FSDP" and layout.dp_replicate == 1:
        layout = msgspec.structs.replace(layout, dp_replicate=copies(parsed.settings, on))
    ranks = max(1, on.world // (layout.tp * layout.pp * layout.cp))
    batch = layout.micro_batch_size * steps * ranks
    return msgspec.structs.replace(
        recipe, layout=layout, train=msgspec.structs.replace(recipe.train, global_batch_size=batch)
    )
