"""Commands of TRL's own scripts: their --config FILE, their arguments, and the configs that TRL ships."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.frameworks import accelerate_options
from meshwright.frameworks.framework import Content
from meshwright.frameworks.hf_arguments import as_parsed
from meshwright.frameworks.key_table import read_table
from meshwright.frameworks.trainer import TRL_KEYS, Arguments, open_referenced_file, parse_arguments
from meshwright.frameworks.trl_data import CONFIG, MIXTURE, is_of_command
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps.accelerate import FSDP, ZERO
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand


TRL, TRL_SCRIPTS = "trl.", "trl/scripts/"  # modules of TRL, and their files
TRL_FILES = ("datasets[0].data_files", "datasets[0].data_dir", "datasets[0].path")  # the first of these names the data
_SHARDED = {
    "distributed_type": "FSDP",
    f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    f"{FSDP}fsdp_offload_params": False,
}
TRL_CONFIGS: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {**_SHARDED, f"{FSDP}fsdp_version": 1, f"{FSDP}fsdp_sharding_strategy": "FULL_SHARD"},
    "fsdp2": {**_SHARDED, f"{FSDP}fsdp_version": 2, f"{FSDP}fsdp_reshard_after_forward": True},
    **{f"zero{n}": {"distributed_type": "DEEPSPEED", f"{ZERO}zero_stage": n} for n in (1, 2, 3)},
}
"""Configs of Accelerate that TRL ships, by the names that --accelerate_config accepts."""


def given_arguments(launch: LaunchCommand) -> dict[str, SourcedValue]:
    """Return the arguments of a command; the parser of TRL's scripts completes shortened names."""
    given, script = parse_arguments(launch.args), str(launch.program.value)
    if not is_by_trl(script):
        return given
    from meshwright.frameworks.front_ends import older_keys

    return as_parsed(given, read_table(TRL_KEYS), shortened=True, older=(CONFIG, *older_keys.TRL))


def trl_findings(arguments: Arguments) -> Iterator[Finding]:
    """Yield arguments that TRL does not have, and values that it does not accept."""
    from meshwright.frameworks.front_ends.describe import FRONT_ENDS
    from meshwright.frameworks.front_ends.keys import key_findings

    trl = FRONT_ENDS["trl"]
    return key_findings(trl, trl.table, arguments, is_open=False, is_command=True, table=trl.name)


def with_trl_file(
    content: Content, launch: LaunchCommand, arguments: Arguments
) -> tuple[LaunchCommand, dict[str, SourcedValue], Settings]:
    """Return a command of TRL with the arguments of its --config FILE, which those of the command replace.

    The third value has TRL's arguments as the file writes them, without the options of Accelerate's launcher.
    """
    path = arguments.get(CONFIG)
    if path is None:
        return launch, dict(arguments), {}
    from meshwright.frameworks.shell import with_options

    named = open_referenced_file(content, path).settings
    options = {key.replace("_", "-"): one for key, one in named.items() if key in accelerate_options.IN_FILE}
    if "accelerate-config" in options:
        options["config-file"] = options.pop("accelerate-config")
    launch = with_options(launch, {**options, **launch.launcher_args}, launch.job)
    own = {key: one for key, one in named.items() if not is_of_command(key)}
    given = {key: one for key, one in own.items() if one.value is not None}
    files = [given[key] for key in TRL_FILES if key in given]
    given = {key: one for key, one in given.items() if not key.startswith(f"{MIXTURE}[")}
    given |= {MIXTURE: files[0]} if files else {}
    texts = {key: ",".join(map(str, one.value)) for key, one in given.items() if isinstance(one.value, list)}
    read = {key: msgspec.structs.replace(one, value=texts.get(key, one.value)) for key, one in given.items()}
    return launch, {**read, **{key: one for key, one in arguments.items() if key != CONFIG}}, own


def is_by_trl(script: str) -> bool:
    """Return whether a script is one of TRL's own, not a program that uses TRL."""
    return script.startswith(TRL) or TRL_SCRIPTS in script
