"""Names of the launchers' options, as their parsers know them: written in full, shortened or mistyped."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from meshwright import similar
from meshwright.frameworks import accelerate_options
from meshwright.frameworks.shell.launch_prefixes import Option, OptionSpec, is_option, is_script, read_option
from meshwright.frameworks.types import SourcedValue

TORCHRUN = accelerate_options.names(
    """
    nnodes nproc_per_node node_rank master_addr master_port local_addr rdzv_id rdzv_backend rdzv_endpoint rdzv_conf
    standalone max_restarts monitor_interval start_method event_log_handler role module no_python run_path log_dir
    redirects tee duplicate_stdout_filters duplicate_stderr_filters local_ranks_filter logs_specs numa_binding
    signals_to_handle shutdown_timeout virtual_local_rank use_env help version
    """
)
DEEPSPEED = accelerate_options.names(
    """
    hostfile include exclude num_nodes min_elastic_nodes max_elastic_nodes num_gpus num_accelerators master_port
    master_addr node_rank launcher launcher_args module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid
    enable_each_rank_log autotuning comment account elastic_training bind_cores_to_rank bind_core_list ssh_port
    venv_script help
    """
)
OPTIONS: Mapping[str, Collection[str]] = {
    "torchrun": TORCHRUN,
    "accelerate": accelerate_options.OF_LAUNCHER,
    "deepspeed": DEEPSPEED,
}
SHORTENED = ("torchrun", "deepspeed")  # whose parsers also take the beginning of an option


def full_name(launcher: str, name: str) -> str:
    """Return the option that a launcher's parser takes a name for: --standalon of torchrun is --standalone."""
    known, typed = OPTIONS.get(launcher, ()), name.replace("-", "_")
    if launcher not in SHORTENED or typed in known:
        return typed
    found = [one for one in known if one.startswith(typed)]
    return found[0] if len(found) == 1 else typed


def meant_option(launcher: str, name: str) -> str:
    """Return the option of a launcher that a name is with a few wrong letters; empty if it has the name or none."""
    known, typed = OPTIONS.get(launcher, ()), full_name(launcher, name)
    is_short = launcher in SHORTENED and any(one.startswith(typed) for one in known)
    if typed in known or is_short or len(typed) == 1:
        return ""
    return next(iter(similar.misspelled(typed, [*{*known} - accelerate_options.OLDER])), "")


def launcher_option(
    words: Sequence[SourcedValue], at: int, launcher: str, option_spec: OptionSpec
) -> tuple[Option, int]:
    """Return an option of a launcher by its full name, and the position after it.

    A mistyped one has the next word as its value, unless that is another option or the program, or it means a switch.
    """
    word = words[at]
    name, equals, value = str(word.value).removeprefix("--").partition("=")
    if launcher not in OPTIONS or not str(word.value).startswith("--"):
        return read_option(words, at, option_spec)
    full = full_name(launcher, name)
    after = words[at + 1] if at + 1 < len(words) else None
    if full not in OPTIONS[launcher] and not equals and after is not None:
        is_switch = meant_option(launcher, full).replace("_", "-") in option_spec.flags
        if is_switch or is_option(after) or is_script(after):
            return Option(full.replace("_", "-"), SourcedValue(True, word.line, word.file)), at + 1
    named = msgspec.structs.replace(word, value=f"--{full}{equals}{value}")
    return read_option([*words[:at], named, *words[at + 1 :]], at, option_spec)
