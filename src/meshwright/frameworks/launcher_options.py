"""Options of torchrun and accelerate launch that neither has: a mistyped one ends the command before it starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from meshwright import similar
from meshwright.frameworks import accelerate_options
from meshwright.frameworks.merged_fix import LAUNCH
from meshwright.frameworks.shell.values import LaunchCommand
from meshwright.rules.rule import Finding

TORCHRUN = accelerate_options.names(
    """
    nnodes nproc_per_node node_rank master_addr master_port local_addr rdzv_id rdzv_backend rdzv_endpoint rdzv_conf
    standalone max_restarts monitor_interval start_method event_log_handler role module no_python run_path log_dir
    redirects tee duplicate_stdout_filters duplicate_stderr_filters local_ranks_filter logs_specs numa_binding
    signals_to_handle shutdown_timeout virtual_local_rank use_env help version
    """
)
OPTIONS: Mapping[str, Collection[str]] = {"torchrun": TORCHRUN, "accelerate": accelerate_options.OF_LAUNCHER}
PREFIXES = {"torchrun": "torchrun ", "accelerate": LAUNCH}
SHORTENED = ("torchrun",)  # whose parser also takes the beginning of an option


def misspelled_options(launch: LaunchCommand) -> Iterator[Finding]:
    """Yield the options of a launcher that are those of its parser with a few wrong letters."""
    known = OPTIONS.get(launch.launcher, ())
    for option, setting in launch.launcher_args.items() if known else ():
        name = option.replace("-", "_")
        is_short = launch.launcher in SHORTENED and any(one.startswith(name) for one in known)
        near = (
            []
            if name in known or is_short or len(name) == 1
            else similar.misspelled(name, [*{*known} - accelerate_options.OLDER])
        )
        if not near:
            continue
        title = PREFIXES[launch.launcher].strip()
        value = "" if setting.value is True else f" {setting.value}"
        value = value.replace(" ", "=", 1) if launch.launcher == "torchrun" else value
        message = f"{title} has no --{name}; did you mean --{near[0]}?"
        fix = f"{title} --{near[0]}{value}"
        yield Finding("key.unknown", "error", option, message, (fix,), file=setting.file, line=setting.line)
