"""Options of torchrun, accelerate launch and deepspeed that they lack: a mistyped one ends the command at once."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.merged_fix import LAUNCH
from meshwright.frameworks.shell.launcher_names import meant_option
from meshwright.frameworks.shell.values import LaunchCommand
from meshwright.rules.rule import Finding

PREFIXES = {"torchrun": "torchrun ", "accelerate": LAUNCH, "deepspeed": "deepspeed "}


def misspelled_options(launch: LaunchCommand) -> Iterator[Finding]:
    """Yield the options of a launcher that are those of its parser with a few wrong letters."""
    for option, setting in launch.launcher_args.items():
        meant = meant_option(launch.launcher, option)
        if not meant:
            continue
        title = PREFIXES[launch.launcher].strip()
        value = "" if setting.value is True else f" {setting.value}"
        value = value.replace(" ", "=", 1) if launch.launcher == "torchrun" else value
        message = f"{title} has no --{option.replace('-', '_')}; did you mean --{meant}?"
        fix = f"{title} --{meant}{value}"
        yield Finding("key.unknown", "error", option, message, (fix,), file=setting.file, line=setting.line)
