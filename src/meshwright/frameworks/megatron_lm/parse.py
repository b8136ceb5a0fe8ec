"""Reading Megatron-LM: the scripts that start it, and bare lists of its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.frameworks.common import as_int, gpu_request_of
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.megatron_lm.arguments import REST, TABLE, Taken, take
from meshwright.frameworks.megatron_lm.model import Built, build
from meshwright.frameworks.model_match import named
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm_composite_keys import parse_blend
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

PROGRAMS = re.compile(r"pretrain_\w+|train_rl|finetune")
DECODERS = re.compile(r"pretrain_(gpt|mamba|hybrid|retro)\w*|train_rl|finetune")
TOOLS = re.compile(r"(^|/)tools/")
"""Where its programs lie that take the same arguments and train nothing."""
MARKS = frozenset((
    "--num-layers", "--hidden-size", "--num-attention-heads", "--micro-batch-size", "--max-position-embeddings",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--seq-length",
))  # fmt: skip
SPLIT = "969,30,1"
SETTLED = {
    "fine_grained_activation_offloading": "offload.activations-pipeline",
    "moe_paged_stash": "graphs.syncing-dispatch",
    "mock_data": "moe.forced-balance",
}
"""Flags that do what a rule of ours asks for."""
SET_ELSEWHERE = "CUDA_DEVICE_MAX_CONNECTIONS"


def recognises(content: Content) -> int:
    if content.format != "shell" or content.script is None:
        return 0
    for one in content.launches:
        marks = len(MARKS & _texts(one.args))
        if PROGRAMS.fullmatch(_program(one)) and marks:
            return 1 if "--deepspeed" in _texts(one.args) else 5
        if marks >= 3:
            return 1 if "--deepspeed" in _texts(one.args) else 4
    return 2 if len(MARKS & _texts(_bare(content) or _kept(content))) >= 2 else 0


def _program(one: LaunchCommand) -> str:
    return Path(str(one.program.value)).name.removesuffix(".py").rpartition(".")[2]


def _texts(args: Sequence[SourcedValue]) -> set[str]:
    return {str(word.value).partition("=")[0] for word in args}


def _bare(content: Content) -> tuple[SourcedValue, ...]:
    """A file of nothing but arguments: every command in it begins with a dash."""
    commands = content.script.commands if content.script else ()
    lists = [command.words for command in commands if command.words and str(command.words[0].value).startswith("--")]
    return tuple(word for line in lists for word in line)


def _kept(content: Content) -> tuple[SourcedValue, ...]:
    """Arguments that a script keeps in variables, where the command that takes them is not seen."""
    found: list[SourcedValue] = []
    for said in (content.script.variables if content.script else {}).values():
        values = said.value if isinstance(said.value, list) else str(said.value).split()
        if values and str(values[0]).startswith("--") and not said.unresolved:
            found += [msgspec.structs.replace(said, value=text) for text in values]
    return tuple(found)


def parse(content: Content) -> ParsedConfig:
    one = _chosen(content)
    if one is not None:
        return _parsed(content, take(one.args), one)
    bare = _bare(content)
    if bare:
        return _parsed(content, take(bare), None)
    note = "the command that starts the training was not found: the arguments kept in variables were read"
    return _parsed(content, take(_kept(content)), None, (note,))


def _chosen(content: Content) -> LaunchCommand | None:
    """The training that a script starts; where it starts several, the one that says most."""
    found = sorted(content.launches, key=lambda one: -len(MARKS & _texts(one.args)))
    return found[0] if found and MARKS & _texts(found[0].args) else None


def _parsed(content: Content, taken: Taken, one: LaunchCommand | None, notes: tuple[str, ...] = ()) -> ParsedConfig:
    settings = taken.settings
    built = _built(settings, content, one)
    if "yaml_cfg" in settings:
        notes = (*notes, "--yaml-cfg is not read: its values come on top of these")
        settings[REST] = msgspec.structs.replace(settings["yaml_cfg"], unresolved="the file is not read here")
    if one is not None and TOOLS.search(str(one.program.value)):
        settings[REST] = msgspec.structs.replace(one.program, unresolved="this program trains nothing")
    if len(content.launches) > 1 and one is not None:
        notes = (*notes, f"the script starts {len(content.launches)} programs: the one with most settings was read")
    files = dict.fromkeys([content.path, *(said.file for said in settings.values())])
    return ParsedConfig(
        settings=settings,
        name=_name(content, settings),
        model=built.model,
        goal="sft" if "sft" in settings else "pretrain",
        gpu_request=_asked(one) if one is not None else GpuRequest(),
        env=_env(content, one) if one is not None else {},
        findings=taken.findings,
        notes=(*notes, *built.notes),
        files=tuple(files),
        field_values=dict(_own(settings, built.model)),
        suppressed_rules=tuple(rule for key, rule in SETTLED.items() if key in settings),
    )


def _built(settings: Settings, content: Content, one: LaunchCommand | None) -> Built:
    program = _program(one) if one is not None else "pretrain_gpt"
    if one is not None and TOOLS.search(str(one.program.value)):
        return Built(None, (f"{program} trains nothing: only its arguments were checked",))
    if PROGRAMS.fullmatch(program) and not DECODERS.fullmatch(program):
        return Built(None, (f"{program} does not train a decoder: its model is not modelled here",))
    return build(settings, Path(content.path).stem)


def _asked(one: LaunchCommand) -> GpuRequest:
    """The GPUs that a launcher asks for; torchrun without a number of nodes means one."""
    asked = gpu_request_of(one)
    if one.launcher == "torchrun" and one.nodes is None and one.gpus_per_node is not None:
        asked = msgspec.structs.replace(asked, nodes=1)
    return msgspec.structs.replace(asked, source=asked.source or one.program)


def _env(content: Content, one: LaunchCommand) -> Settings:
    """The environment of the training; a launcher may be told more of it, and a file that is sourced may set more."""
    script, env = content.script, dict(one.env)
    if script is None or SET_ELSEWHERE in env:
        return env
    passed = f"{SET_ELSEWHERE}="
    for word in (word for command in script.commands for word in command.words):
        if passed in str(word.value):  # mpirun -x NAME=value, docker run --env NAME=value
            told = str(word.value).partition(passed)[2]
            return {**env, SET_ELSEWHERE: SourcedValue(told, word.line, word.file, word.unresolved)}
    for each in script.unresolved:
        if "source" in f"{each.what} {each.reason}":
            return {**env, SET_ELSEWHERE: SourcedValue("", each.line, each.file, f"{each.what} may set it")}
    return env


def _name(content: Content, settings: Settings) -> str:
    """What the file calls its model: its own name, or else a comment, a variable or a folder that speaks of one."""
    stem = Path(content.path).stem
    if "llama" in stem.lower():
        return stem
    said = next((text for text in _descriptions(content, settings) if "llama" in text.lower()), "")
    return f"{stem} ({said.strip()})" if said else stem


def _descriptions(content: Content, settings: Settings) -> Iterator[str]:
    for key in ("save", "load", "wandb_exp_name", "wandb_project", "tokenizer_model", "tensorboard_dir"):
        if key in settings:
            yield str(settings[key].value)
    yield from re.findall(r"(?m)^[ \t]*#[ \t]*(?!!)(.{0,100})", content.text)
    for name, said in (content.script.variables if content.script else {}).items():
        yield f"{name}={said.value}" if isinstance(said.value, str) and len(said.value) < 200 else name


def _own(settings: Settings, model: ModelSpec | None) -> Iterator[tuple[str, Any]]:
    """Fields that follow from several flags and the model."""
    experts = "num_experts" in settings
    if experts and "expert_tensor_parallel_size" not in settings:
        yield "layout.etp", max(1, number(settings, "tensor_model_parallel_size") or 1)
    if model is not None:
        yield from stages(settings, model.num_layers).items()
    if str(text(settings, "cuda_graph_impl") or "none") != "none":
        yield "kernels.te_rng_tracker", True  # turned on by itself
    if not {"train_data_path", "valid_data_path", "per_split_data_args_path"} & settings.keys():
        yield "data.validation_part", _validation(text(settings, "split") or SPLIT)
    yield from _data(settings)
    if "save" in settings:  # whatever folder that is
        yield "checkpoint.resume", "load" in settings and "finetune" not in settings
    if (text(settings, "tokenizer_type") or "").startswith("Null") or _is_own(settings, model):
        yield "data.tokenizer", ""


def _is_own(settings: Settings, model: ModelSpec | None) -> bool:
    """Whether the tokenizer is the one that the model was published with."""
    owner = named(text(settings, "tokenizer_model") or "")
    return owner is not None and model is not None and owner.vocab == model.vocab


def _data(settings: Settings) -> Iterator[tuple[str, Any]]:
    said = settings.get("data_path") or settings.get("train_data_path")
    if said is None or said.unresolved or "mock_data" in settings or not isinstance(said.value, list):
        return
    dataset, blend = parse_blend(said.value)
    if blend:
        yield "data.blend", blend
    elif dataset:
        yield "data.dataset", dataset


def _validation(split: str) -> float:
    """The share of validation in a split such as 99,1,0."""
    parts = [float(part) for part in re.findall(r"\d+\.?\d*|\.\d+", split)]
    total = sum(parts)
    share = parts[1] / total if len(parts) > 1 and total > 0 else 0.0
    return share if 0 <= share < 1 else 0.0


def text(settings: Settings, key: str) -> str | None:
    """The text of a flag, when it is said and known."""
    said = settings.get(key)
    return None if said is None or said.unresolved else str(said.value)


def number(settings: Settings, key: str) -> int | None:
    """The whole number of a flag, or its default, when that is known."""
    if key in settings:
        return as_int(settings[key])
    word = config_keys(TABLE).get(key)
    return word.default if word is not None and isinstance(word.default, int) else None


def stages(settings: Settings, layers: int) -> dict[str, Any]:
    """The stages of a pipeline where they are said in layers: per virtual stage, or of the first and the last."""
    pp = number(settings, "pipeline_model_parallel_size") or 0
    if pp < 1 or "pipeline_model_parallel_layout" in settings:
        return {}
    found: dict[str, Any] = {}
    chunk = number(settings, "num_layers_per_virtual_pipeline_stage")
    vp = number(settings, "num_virtual_stages_per_pipeline_rank") or 1
    if chunk and "num_virtual_stages_per_pipeline_rank" not in settings:
        vp = per_rank(settings, layers, pp) // chunk
        found["layout.vp"] = max(1, vp)
        found["layout.pp_schedule"] = "interleaved_1f1b" if vp > 1 else "1f1b"
    uneven = _uneven(settings, layers, pp, max(1, vp))
    return {**found, "layout.stage_layers": uneven} if uneven else found


def per_rank(settings: Settings, layers: int, pp: int) -> int:
    """Layers on one rank of the pipeline, embedding and loss counted where they are asked to be."""
    counted = [key for key in ("embedding", "loss") if f"account_for_{key}_in_pipeline_split" in settings]
    return (layers + len(counted)) // pp


def _uneven(settings: Settings, layers: int, pp: int, vp: int) -> tuple[int, ...]:
    """Layers per chunk when the first or the last stage has a number of its own; empty when that does not work out."""
    first = number(settings, "decoder_first_pipeline_num_layers")
    last = number(settings, "decoder_last_pipeline_num_layers")
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if (first is None and last is None) or middle < 0 or rest < 0 or (rest % middle if middle else rest):
        return ()
    ranks = [*([first] if first is not None else []), *[rest // middle] * middle, *([last] if last is not None else [])]
    return tuple(count // vp for count in ranks) * vp if all(count % vp == 0 for count in ranks) else ()


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    """What follows from the number of GPUs: the global batch when it is unsaid, and steps said in samples."""
    settings, layout = parsed.settings, recipe.layout
    batch = recipe.train.global_batch_size
    if "global_batch_size" not in settings:
        batch = layout.micro_batch_size * max(1, on.world // (layout.tp * layout.pp * layout.cp))
    steps, schedule = recipe.train.steps, recipe.schedule
    samples = number(settings, "train_samples")
    if samples and "train_iters" not in settings:
        steps = max(1, samples // batch)
    decay = number(settings, "lr_decay_samples")
    decay_steps = decay // batch if decay else schedule.decay_steps
    return msgspec.structs.replace(
        recipe,
        train=msgspec.structs.replace(recipe.train, global_batch_size=batch, steps=steps),
        schedule=msgspec.structs.replace(
            schedule, decay_steps=decay_steps, warmup_steps=_warmup(recipe, settings, batch, decay_steps or steps)
        ),
    )


def _warmup(recipe: Recipe, settings: Settings, batch: int, steps: int) -> int:
    samples, fraction = number(settings, "lr_warmup_samples"), text(settings, "lr_warmup_fraction")
    if samples:
        return samples // batch
    try:
        return int(float(fraction) * steps) if fraction else recipe.schedule.warmup_steps
    except (ValueError, OverflowError):
        return recipe.schedule.warmup_steps
