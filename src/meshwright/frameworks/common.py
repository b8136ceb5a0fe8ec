"""Helpers shared by several frameworks: GPU requests, values with defaults, range checks, TOML formatting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
from msgspec import UNSET

from meshwright import file_access
from meshwright.clusters import Cluster
from meshwright.display import two_digits
from meshwright.frameworks.framework import FrameworkRule, GpuRequest, Problem, RuleContext
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

INFINITE = float("inf")
_DEVICE = re.compile(r"-?\d+|(?:GPU|MIG)-\S+")  # in CUDA_VISIBLE_DEVICES
FOLDERS = {
    "megatron_lm": ("save", "load", "finetune"),
    "megatron_bridge": ("checkpoint.save", "checkpoint.load", "checkpoint.finetune"),
    "torchtitan": ("checkpoint.folder", "", ""),
    "automodel": ("checkpoint.checkpoint_dir", "", ""),
    "kempnerforge": ("checkpoint.dir", "", ""),
}
"""Keys of the folder that a run saves to, of the one that it loads, and of the use of only its weights."""
STATE_LEFT_OUT = {
    "megatron_lm": {"no_load_optim": True, "no_load_rng": True},
    "megatron_bridge": {"checkpoint.load_optim": False, "checkpoint.load_rng": False},
}
"""Keys and values with which a start does not load all of the training state."""
INITIAL_WEIGHTS = {"megatron-lm": "pretrained_checkpoint", "megatron-bridge": "checkpoint.pretrained_checkpoint"}
"""Key of the weights that only the first start loads, by framework: later ones find a checkpoint of the run itself."""
ASSUMED_VOCABULARY = "the vocabulary size depends on the tokenizer: assumed"  # start of a note
DEFAULT_VOCABULARY = "--tokenizer-type is not set"  # start of a note on the vocabulary of the framework's default
KEEP_ALL = 1_000_000  # checkpoint.keep of a framework that deletes none
ALL_ARGUMENTS = ("$@", "$*")  # of a script, if they are unknown
OTHER_TASK = re.compile(
    r"(?i)(^|[._-])(convert|preprocess|tokenize|eval|evaluate|evaluation|infer|inference|generate|generation|serve|server|"
    r"merge|export|download|predict|benchmark|score|demo|chat|lm_eval|estimate|estimation)([_.-]|$)"
)
"""Names of programs that do something else than train."""


def state_left_out(key_map: str, settings: Settings) -> dict[str, SourcedValue]:
    """Return the settings with which a start does not load all of the training state."""
    wanted = STATE_LEFT_OUT.get(key_map, {})
    return {key: settings[key] for key, value in wanted.items() if key in settings and settings[key].value is value}


def gpu_request_of(launch: LaunchCommand) -> GpuRequest:
    """Return the GPUs that a launch command requests."""
    return GpuRequest(
        nodes=as_int(launch.nodes),
        gpus_per_node=as_int(launch.gpus_per_node),
        gpu=launch.gpu,
        source=launch.gpus_per_node or launch.nodes,
    )


def torchrun_gpu_request(launch: LaunchCommand) -> GpuRequest:
    """Return the GPUs that a launch command requests; torchrun without --nnodes uses one node."""
    request = gpu_request_of(launch)
    if launch.launcher == "torchrun" and launch.nodes is None and launch.gpus_per_node is not None:
        return msgspec.structs.replace(request, nodes=1)
    return request


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def torchrun(cluster: Cluster, head: str = "HEAD_NODE") -> list[str]:
    """Return torchrun and its options for a cluster, up to the program."""
    argv = ["torchrun", f"--nproc-per-node={cluster.gpus_per_node}"]
    if cluster.nodes > 1:
        argv += [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29500"]
    return argv


def random_data_notes(recipe: Recipe, key: str) -> Iterator[str]:
    """Yield that a training without a dataset has random tokens, which the framework's key sets."""
    if recipe.data.dataset == "mock" and not recipe.data.blend and not recipe.benchmark:
        yield (
            f"{key}: the run trains on random tokens for {recipe.train.steps:,} iterations; "
            "add data.dataset=PREFIX and train.steps=N to train on data"
        )


def short_training_notes(recipe: Recipe, model: ModelSpec) -> Iterator[str]:
    """Yield that a pretraining on data ends after fewer tokens than the model has parameters."""
    train, data = recipe.train, recipe.data
    tokens = train.steps * train.global_batch_size * data.seq_length
    on_data = data.dataset != "mock" or bool(data.blend)
    if recipe.goal != "pretrain" or model.kind == "diffusion" or recipe.benchmark or train.epochs:
        return
    if on_data and tokens < model.params.total:
        yield (
            f"the training ends after {train.steps:,} steps, {two_digits(tokens / 1e9)}B tokens for "
            f"{two_digits(model.params.total / 1e9)}B parameters: train.steps=N sets its length"
        )


def pattern_notes(recipe: Recipe, title: str) -> Iterator[str]:
    """Yield that a pattern of file names is no prefix of token files: AutoModel expands it, Megatron does not."""
    named = [*recipe.data.blend] or [recipe.data.dataset]
    for path in named if recipe.goal == "pretrain" else ():
        if has_magic(path):
            yield (
                f"{path} is a pattern, and {title} expands none: name the prefix of each file without .bin, "
                "data.dataset=PREFIX, or data.blend=PREFIX:WEIGHT,PREFIX:WEIGHT for several"
            )


def hub_text_notes(recipe: Recipe, key: str) -> Iterator[str]:
    """Yield that texts of the Hugging Face hub, or a file of texts, are not the token files that Megatron reads."""
    named = [*recipe.data.blend] or [recipe.data.dataset]
    trains = recipe.goal == "pretrain" and (recipe.data.blend or recipe.data.dataset != "mock")
    for name in named if trains else ():
        is_text = Path(name).suffix in (".txt", ".json", ".jsonl", ".parquet", ".csv")
        is_hub = not name.startswith(("/", ".", "~", "$")) and name.count("/") <= 1 and not name.endswith("_document")
        here = not file_access.closed() and any(Path(f"{name}{end}").exists() for end in ("", ".bin"))
        if is_text or (is_hub and not here and not has_magic(name)):
            kind = "a file of texts" if is_text else "the name of a dataset"
            yield (
                f"{key} {name} is {kind}: Megatron reads token files (.bin, .idx); tokenize it with "
                "tools/preprocess_data.py and name their prefix with data.dataset=PREFIX"
            )


def value_or_default(table: str, settings: Settings, key: str) -> Any:
    """Return the value of a key, or its default if it is unset, unresolved or of another type."""
    config_key = config_keys(table).get(key)
    default = None if config_key is None or config_key.default is UNSET else config_key.default
    setting = settings.get(key)
    if setting is None or setting.unresolved:
        return default
    if isinstance(default, bool):
        return setting.value if isinstance(setting.value, bool) else default
    if isinstance(default, int | float):
        return (
            setting.value if isinstance(setting.value, int | float) and not isinstance(setting.value, bool) else default
        )
    return setting.value


def format_toml(key: str, value: Any) -> str:
    """Format a setting as a line of TOML."""
    if value is None:
        return f"without {key}"
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}"
    if isinstance(value, tuple | list):
        return f"{key} = [{', '.join(_toml_text(one) for one in value)}]"
    return f"{key} = {_toml_text(value)}"


def _toml_text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


Ranges = Mapping[str, tuple[float, float, bool]]
"""By key: minimum, maximum, and whether the minimum is exclusive."""


def range_rule(
    framework: str, ranges: Ranges, format_setting: Callable[[str, Any], str], symptom: str
) -> FrameworkRule:
    """Return the rule that numbers are in the range the framework accepts."""

    def check(ctx: RuleContext) -> Iterator[Problem]:
        for key, (minimum, maximum, exclusive) in ranges.items():
            found = ctx.get(key)
            if not ctx.is_set(key) or isinstance(found, bool) or not isinstance(found, int | float):
                continue
            if not minimum <= found <= maximum or (exclusive and found == minimum):
                expected = f"above {minimum:g}" if exclusive else f"at least {minimum:g}"
                expected += f" and at most {maximum:g}" if maximum != INFINITE else ""
                config_key = config_keys(ctx.framework.key_map)[key]
                fix = () if config_key.default in (UNSET, None) else (format_setting(key, config_key.default),)
                yield Problem(f"{key}={found} must be {expected}", fix, key=key)

    return FrameworkRule(
        f"{framework}.out-of-range",
        "error",
        tuple(ranges),
        check,
        symptom=symptom,
        cause="each config section validates its own values when it is parsed",
    )


def new_batch(before: int, after: int) -> str:
    """Return the end of a message whose fix is another batch; empty if it stays."""
    return "" if before == after else f"; the nearest batch is {after}, a new experiment"


def visible_devices(setting: SourcedValue | None) -> list[str]:
    """Return the devices of CUDA_VISIBLE_DEVICES; none if it is unknown, or a text to replace (YOUR_DEVICES)."""
    if setting is None or setting.unresolved:
        return []
    devices = [one.strip() for one in str(setting.value).split(",") if one.strip()]
    return devices if all(_DEVICE.fullmatch(one) for one in devices) else []
