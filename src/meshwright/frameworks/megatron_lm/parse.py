"""Parse Megatron-LM launch scripts and argument lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import KEEP_ALL, torchrun_gpu_request
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.megatron_lm.arguments import (
    DEFAULT_TOKENIZER,
    KEY_MAP,
    UNREAD_ARGS,
    ParsedArgs,
    flag_of,
    key_of,
    parse_args,
)
from meshwright.frameworks.megatron_lm.model import BuiltModel, build
from meshwright.frameworks.megatron_lm.program_flags import own_flags, split_settings
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.schedule_units import with_lengths
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm_composite_keys import parse_blend, validation_part
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

PROGRAMS = re.compile(r"pretrain_\w+|train_rl|finetune")
DECODERS = re.compile(r"pretrain_(gpt|mamba|hybrid|retro)\w*|train_rl|finetune")
OTHER_MODELS = ("model_provider", "language_model_type", "flextron")
"""Flags of programs whose model is more than the decoder that the flags describe."""
TOOLS = re.compile(r"(^|/)tools/|(^|/)eval_harness/|(^|/)eval\w*\.py$")
"""Programs that take the same arguments but do not train."""
TYPICAL_FLAGS = frozenset((
    "--num-layers", "--hidden-size", "--num-attention-heads", "--micro-batch-size", "--max-position-embeddings",
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--seq-length",
))  # fmt: skip
FOREIGN = 2  # flags of Megatron-LM per other flag, below which a program is not built on it
SPLIT = "969,30,1"
SUPPRESSED_RULES = {
    "fine_grained_activation_offloading": "offload.activations-pipeline",
    "moe_paged_stash": "graphs.syncing-dispatch",
    "mock_data": "moe.forced-balance",
    "microbatch_group_size_per_virtual_pipeline_stage": "schedule.micro-batch-groups",  # a rule of this framework
    "sft": "sequence.loss-per-token",  # a requirement of Megatron-Bridge
    "dynamic_context_parallel": "data.packing-micro-batch",  # its loader takes samples one by one
}
"""Flags that satisfy one of our rules, or to which it does not apply."""
NEEDED_FLAGS = {
    "use_distributed_optimizer": "offload.optimizer-strategy",
    "max_position_embeddings": "sequence.position-table",
    "seq_length": "sequence.position-table",
    "pipeline_model_parallel_size": "megatron-lm.virtual-stages-need-stages",
}
"""Flags without which one of our rules fails: the program, or an argument that could not be read, may set them."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
SHELL_SETUP = re.compile(r"(conda|mamba|modules|lmod)\S*\.sh\b|\bactivate\b|/init/bash\b")
"""Sourced files of conda, of virtual environments and of environment modules, which set no variable of CUDA."""
RUNTIME_ENV = re.compile(r"--runtime-env(-json)?=")  # of ray job submit


def detect(content: Content) -> int:
    if content.format != "shell" or content.script is None:
        return 0
    for launch in content.launches:
        flags = len(TYPICAL_FLAGS & words_of(launch.args))
        with_dashes = TYPICAL_FLAGS & {str(arg.value).partition("=")[0] for arg in launch.args}
        if PROGRAMS.fullmatch(program_name(launch)) and with_dashes:
            return 5
        if flags >= 3 and _is_megatron_command(words_of(launch.args)):
            return 4
    return 2 if len(TYPICAL_FLAGS & words_of(_argument_list(content) or _from_variables(content))) >= 2 else 0


def _is_megatron_command(words: set[str]) -> bool:
    """Return whether most flags of a program of another name are Megatron-LM's: others share some of its names."""
    given = [key_of(one) for one in words if one.startswith("--")]
    known = sum(key in config_keys(KEY_MAP) for key in given)
    return known >= FOREIGN * (len(given) - known)


def program_name(launch: LaunchCommand) -> str:
    """Return the name of a launch's program, without folder and suffix."""
    return Path(str(launch.program.value)).name.removesuffix(".py").rpartition(".")[2]


def words_of(args: Sequence[SourcedValue]) -> set[str]:
    """Return the words of a command, flags with dashes and without the value that follows an equals sign."""
    words = (str(arg.value).partition("=")[0] for arg in args)
    return {word.replace("_", "-") if word.startswith("--") else word for word in words}


def _argument_list(content: Content) -> tuple[SourcedValue, ...]:
    """Return the arguments of a bare argument list: every command starts with --."""
    commands = content.script.commands if content.script else ()
    lists = [command.words for command in commands if command.words and str(command.words[0].value).startswith("--")]
    return tuple(arg for line in lists for arg in line)


def _from_variables(content: Content) -> tuple[SourcedValue, ...]:
    """Return arguments stored in variables, for scripts whose launch command was not found."""
    found: list[SourcedValue] = []
    for setting in (content.script.variables if content.script else {}).values():
        values = setting.value if isinstance(setting.value, list) else str(setting.value).split()
        if values and str(values[0]).endswith(".py"):  # CMD="pretrain_gpt.py --num-layers …"
            values = values[1:]
        if values and str(values[0]).startswith("--") and (isinstance(setting.value, list) or not setting.unresolved):
            found += _located(content, setting, [str(one) for one in values])
    return tuple(found)


def _located(content: Content, variable: SourcedValue, words: Sequence[str]) -> Iterator[SourcedValue]:
    """Yield the words of a variable, each with the line of its flag: a long one has a flag per line."""
    lines = content.text.splitlines() if variable.file == content.path else []
    at = variable.line
    for word in words:
        flag = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])") if word.startswith("--") else None
        if flag is not None:
            at = next((n for n in range(at, len(lines) + 1) if flag.search(lines[n - 1])), at)
        is_open = variable.unresolved if set("$`") & set(word) else ""
        yield msgspec.structs.replace(variable, value=word, line=at, unresolved=is_open)


def parse(content: Content) -> ParsedConfig:
    launch = select_launch(content)
    if launch is not None:
        return _parsed(content, parse_args(launch.args), launch)
    args = _argument_list(content)
    if args:
        return _parsed(content, parse_args(args), None)
    note = "launch command not found: arguments were taken from the script's variables"
    args = _from_variables(content)
    if not TYPICAL_FLAGS & words_of(args):
        raise InputError("contains no Megatron-LM command", field="file", value=content.path)
    return _parsed(content, parse_args(args), None, (note,), is_found=False)


def select_launch(content: Content) -> LaunchCommand | None:
    """Return the launch command with the most typical flags."""
    found = sorted(content.launches, key=lambda launch: -len(TYPICAL_FLAGS & words_of(launch.args)))
    return found[0] if found and TYPICAL_FLAGS & words_of(found[0].args) else None


def without_placeholders(settings: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return the settings of an evaluation: it takes sizes that are -1 from the checkpoint."""
    return {key: one for key, one in settings.items() if str(one.value) != "-1"}


def _parsed(
    content: Content, args: ParsedArgs, launch: LaunchCommand | None, notes: tuple[str, ...] = (), is_found: bool = True
) -> ParsedConfig:
    settings = args.settings
    if launch is not None and TOOLS.search(str(launch.program.value)):
        settings = without_placeholders(settings)
    built = _built(settings, content, launch)
    if "yaml_cfg" in settings:
        notes = (*notes, "the --yaml-cfg file is not read; its values override these")
        settings[UNREAD_ARGS] = msgspec.structs.replace(
            settings["yaml_cfg"], unresolved="the --yaml-cfg file is not read"
        )
    if launch is not None and TOOLS.search(str(launch.program.value)):
        settings[UNREAD_ARGS] = msgspec.structs.replace(launch.program, unresolved="this program does not train")
    if len(content.launches) > 1 and launch is not None:
        notes = (
            *notes,
            f"the script starts {len(content.launches)} programs: the one with the most settings was checked",
        )
    own = own_flags(content, launch, is_found)
    mappable, unknown = split_settings(settings, own)
    added = next((key for key in settings if key in own.keys), unknown[0].field if unknown else "")
    if not is_found and settings:  # part of a command, or one that is put together at run time
        first = next(iter(settings.values()))
        settings.setdefault(UNREAD_ARGS, msgspec.structs.replace(first, unresolved="the launch command was not found"))
    elif added and not own.complete:  # such a program may set flags of Megatron-LM itself, or do without them
        reason = f"the program adds {flag_of(added)} to Megatron-LM's flags"
        settings.setdefault(UNREAD_ARGS, msgspec.structs.replace(settings[added], unresolved=reason))
    files = dict.fromkeys([content.path, *(setting.file for setting in settings.values())])
    return ParsedConfig(
        settings=settings,
        name=_name(content, settings),
        model=built.model,
        goal="sft" if "sft" in settings else "pretrain",
        gpu_request=_gpu_request(launch) if launch is not None else GpuRequest(),
        env=_env(content, launch),
        findings=(*args.findings, *unknown),
        notes=(*notes, *built.notes),
        files=tuple(files),
        field_values=dict(derived_fields(settings, built.model)),
        mappable=mappable,
        possible_keys=frozenset(map(key_of, content.script.possible_flags)) if content.script else frozenset(),
        entry=program_name(launch) if launch is not None else "",
        suppressed_rules=(
            *(rule for key, rule in SUPPRESSED_RULES.items() if key in settings),
            *(rule for key, rule in NEEDED_FLAGS.items() if UNREAD_ARGS in settings and key not in settings),
            *(("graphs.experts-need-capacity",) if has_static_experts(settings) else ()),
        ),
    )


def has_static_experts(settings: Settings) -> bool:
    """Return whether experts of dropless routing have buffers of fixed size, so that whole layers can be captured."""
    switches = ("moe_expert_rank_capacity_factor", "moe_paged_stash", "use_transformer_engine_op_fuser")
    names = {"cuda_graph_impl": "transformer_engine", "moe_token_dispatcher_type": "flex"}
    names |= {"moe_flex_dispatcher_backend": "hybridep"}
    return all(key in settings for key in switches) and all(text(settings, key) == name for key, name in names.items())


def _built(settings: Settings, content: Content, launch: LaunchCommand | None) -> BuiltModel:
    program = program_name(launch) if launch is not None else "pretrain_gpt"
    if launch is not None and TOOLS.search(str(launch.program.value)):
        return BuiltModel(None, (f"{program} does not train: only its arguments were checked",))
    multimodal = next((key for key in OTHER_MODELS if key in settings), "")
    if multimodal:
        return BuiltModel(None, (f"{flag_of(multimodal)} builds a model of several parts: it is not supported",))
    if PROGRAMS.fullmatch(program) and not DECODERS.fullmatch(program):
        return BuiltModel(None, (f"{program} does not train a decoder: its model is not supported",))
    return build(settings, Path(content.path).stem)


def _gpu_request(launch: LaunchCommand) -> GpuRequest:
    request = torchrun_gpu_request(launch)
    return msgspec.structs.replace(request, source=request.source or launch.program)


def _env(content: Content, launch: LaunchCommand | None) -> Settings:
    """Return the environment of the training, including variables set by launcher options or unread sourced files.

    Without a launch command it is that of the script's last command.
    """
    script = content.script
    last = {} if script is None or not script.commands else script.commands[-1].env
    env = dict(last if launch is None else launch.env)
    if script is None or CONNECTIONS in env:
        return env
    passed = f"{CONNECTIONS}="
    words = [arg for command in script.commands for arg in command.words]
    for arg in words:
        if arg.unresolved and RUNTIME_ENV.match(str(arg.value)):
            return {**env, CONNECTIONS: SourcedValue("", arg.line, arg.file, "the runtime environment may set it")}
        if passed in str(arg.value):  # mpirun -x NAME=value, docker run --env NAME=value
            value = str(arg.value).partition(passed)[2]
            return {**env, CONNECTIONS: SourcedValue(value, arg.line, arg.file, arg.unresolved)}
    for each in script.unresolved:
        if "source" in f"{each.what} {each.reason}" and not SHELL_SETUP.search(each.what):
            return {**env, CONNECTIONS: SourcedValue("", each.line, each.file, f"{each.what} may set it")}
    return env


def _name(content: Content, settings: Settings) -> str:
    """Return the name of the model, from the file name, a comment, a variable or a path."""
    stem = Path(content.path).stem
    if "llama" in stem.lower():
        return stem
    description = next((text for text in _descriptions(content, settings) if "llama" in text.lower()), "")
    return f"{stem} ({description.strip()})" if description else stem


def _descriptions(content: Content, settings: Settings) -> Iterator[str]:
    for key in ("save", "load", "wandb_exp_name", "wandb_project", "tokenizer_model", "tensorboard_dir"):
        if key in settings:
            yield str(settings[key].value)
    yield from re.findall(r"(?m)^[ \t]*#[ \t]*(?!!)(.{0,100})", content.text)
    for name, setting in (content.script.variables if content.script else {}).items():
        yield f"{name}={setting.value}" if isinstance(setting.value, str) and len(setting.value) < 200 else name


def derived_fields(settings: Settings, model: ModelSpec | None) -> Iterator[tuple[str, Any]]:
    """Yield recipe fields derived from several flags and the model."""
    experts = "num_experts" in settings
    if experts and "expert_tensor_parallel_size" not in settings:
        yield "layout.etp", max(1, int_value(settings, "tensor_model_parallel_size") or 1)
    elif not experts and UNREAD_ARGS not in settings:
        yield "layout.etp", 1  # accepted without experts, and without effect
    if model is not None:
        yield from pipeline_fields(settings, model.num_layers).items()
    if str(text(settings, "cuda_graph_impl") or "none") != "none":
        yield "kernels.te_rng_tracker", True  # Megatron-LM turns it on for CUDA graphs
        if "perform_rl_step" in settings and "rl_training_cuda_graphs" not in settings:
            yield "kernels.cuda_graphs", "none"  # they are captured for rollouts, and off while it trains
    if not {"train_data_path", "valid_data_path", "per_split_data_args_path"} & settings.keys():
        yield "data.validation_part", validation_part(text(settings, "split") or SPLIT)
    yield from _data(settings)
    if "save" in settings:  # whatever directory that is
        yield "checkpoint.resume", "load" in settings and "finetune" not in settings
        yield "checkpoint.keep", 1 if "save_retain_interval" in settings else KEEP_ALL
    if (text(settings, "tokenizer_type") or "").startswith("Null") or _is_model_tokenizer(settings, model):
        yield "data.tokenizer", ""
    elif folder := _byte_pair_folder(settings):
        yield "data.tokenizer", folder


def _byte_pair_folder(settings: Settings) -> str:
    """Return the folder of GPT2BPETokenizer's two files: a tokenizer for every trainer; empty if they are apart."""
    if text(settings, "tokenizer_type") != DEFAULT_TOKENIZER:
        return ""
    files = [text(settings, key) for key in ("vocab_file", "merge_file")]
    folders = {str(Path(one).parent) for one in files if one}
    return folders.pop() if all(files) and len(folders) == 1 else ""


def _is_model_tokenizer(settings: Settings, model: ModelSpec | None) -> bool:
    """Return whether the tokenizer is the one published with the model, which an export names again."""
    owner = find_model(text(settings, "tokenizer_model") or "")
    return owner is not None and model is not None and bool(owner.hf_id) and owner.hf_id == model.hf_id


def _data(settings: Settings) -> Iterator[tuple[str, Any]]:
    setting = settings.get("data_path") or settings.get("train_data_path")
    if setting is None or setting.unresolved or "mock_data" in settings or not isinstance(setting.value, list):
        return
    dataset, blend = parse_blend(setting.value)
    if blend:
        yield "data.blend", blend
    elif dataset:
        yield "data.dataset", dataset


def text(settings: Settings, key: str) -> str | None:
    """Return the value of a flag as text, if it is set and resolved."""
    setting = settings.get(key)
    return None if setting is None or setting.unresolved else str(setting.value)


def int_value(settings: Settings, key: str) -> int | None:
    """Return the integer value of a flag, or its default, if known."""
    if key in settings:
        return as_int(settings[key])
    config_key = config_keys(KEY_MAP).get(key)
    return config_key.default if config_key is not None and isinstance(config_key.default, int) else None


def pipeline_fields(settings: Settings, layers: int) -> dict[str, Any]:
    """Return the pipeline fields if stages are given in layers: per virtual stage, or for the first and last."""
    pp = int_value(settings, "pipeline_model_parallel_size") or 0
    if pp < 1 or "pipeline_model_parallel_layout" in settings:
        return {}
    found: dict[str, Any] = {}
    chunk = int_value(settings, "num_layers_per_virtual_pipeline_stage")
    vp = int_value(settings, "num_virtual_stages_per_pipeline_rank") or 1
    if chunk and "num_virtual_stages_per_pipeline_rank" not in settings:
        vp = layers_per_rank(settings, layers, pp) // chunk
        found["layout.vp"] = max(1, vp)
        found["layout.pp_schedule"] = "interleaved_1f1b" if vp > 1 else "1f1b"
    uneven = _uneven(settings, layers, pp, max(1, vp))
    return {**found, "layout.stage_layers": uneven} if uneven else found


def layers_per_rank(settings: Settings, layers: int, pp: int) -> int:
    """Return the layers per pipeline rank; embedding and loss count as layers if requested."""
    counted = [key for key in ("embedding", "loss") if f"account_for_{key}_in_pipeline_split" in settings]
    return (layers + len(counted)) // pp


def _uneven(settings: Settings, layers: int, pp: int, vp: int) -> tuple[int, ...]:
    """Return the layers per chunk if the first or last stage has its own number; empty if it does not divide."""
    first = int_value(settings, "decoder_first_pipeline_num_layers")
    last = int_value(settings, "decoder_last_pipeline_num_layers")
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if (first is None and last is None) or middle < 0 or rest < 0 or (rest % middle if middle else rest):
        return ()
    between = [rest // middle] * middle if middle else []
    ranks = [*([first] if first is not None else []), *between, *([last] if last is not None else [])]
    return tuple(count // vp for count in ranks) * vp if all(count % vp == 0 for count in ranks) else ()


def scheduled_batches(settings: Settings) -> tuple[int, ...]:
    """Return the batch sizes of --step-batch-size-schedule in order, such as 0:384 200B:768; or none."""
    found = text(settings, "step_batch_size_schedule") or ""
    entries = [one.partition(":") for one in found.replace(",", " ").split()]
    return tuple(int(size) for _, _, size in entries) if all(size.isdigit() for _, _, size in entries) else ()


def complete(recipe: Recipe, parsed: ParsedConfig, cluster: Cluster) -> Recipe:
    """Set fields derived from the number of GPUs: the default global batch, and steps given in samples."""
    settings, layout = parsed.settings, recipe.layout
    batch = recipe.train.global_batch_size
    steps = scheduled_batches(settings)
    if steps:
        batch = steps[-1]
    elif "global_batch_size" not in settings:
        batch = layout.micro_batch_size * max(1, cluster.world // (layout.tp * layout.pp * layout.cp))
    recipe = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))
    return with_lengths(KEY_MAP, recipe, settings)
