"""Settings as options of `accelerate launch`, for commands that give them there and not in a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.frameworks.accelerate.job_environment import settings_of
from meshwright.frameworks.accelerate.keys import format_setting
from meshwright.frameworks.accelerate.write import ENV_VARS
from meshwright.frameworks.accelerate_options import TYPES, VALUES
from meshwright.frameworks.framework import Content
from meshwright.frameworks.merged_fix import LAUNCH

SWITCHES = {value: name for name, value in TYPES.items()}


def formatter_for(content: Content) -> Callable[[str, Any], str]:
    """Return how a setting of a file is written: as a line of a config, or as an option of the command.

    A command without a config has all settings as options; one with a config those that it gives itself. A job that
    starts its program otherwise has them as variables.
    """
    launch = next((one for one in content.launches if one.launcher == "accelerate"), None)
    if launch is None:
        return _formatter_of_variables(content)
    if str(launch.program.value).startswith("trl."):
        return format_setting
    given = {name.replace("-", "_") for name in launch.launcher_args}

    def written(key: str, value: Any) -> str:
        name = SWITCHES.get(str(value), "") if key == "distributed_type" else key.rpartition(".")[2]
        if name not in VALUES | TYPES.keys() | given or ("config_file" in given and name not in given):
            return format_setting(key, value)
        if value is None:
            return f"without --{name}"
        if key == "distributed_type":
            return f"{LAUNCH}--{name}"
        return f"{LAUNCH}--{name} {str(value).lower() if isinstance(value, bool) else value}"

    return written


def _formatter_of_variables(content: Content) -> Callable[[str, Any], str]:
    """Return how a setting is written where a job exports the variables that accelerate launch would set."""
    exported = {name for one in content.launches if settings_of(one.env) for name in one.env}

    def written(key: str, value: Any) -> str:
        name = ENV_VARS.get(key, "")
        if name not in exported or value is None:
            return format_setting(key, value)
        return f"export {name}={str(value).lower() if isinstance(value, bool) else value}"

    return written
