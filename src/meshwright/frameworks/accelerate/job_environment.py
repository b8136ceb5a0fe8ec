"""The settings of Accelerate that a job's environment variables make, as accelerate launch would set them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from meshwright.frameworks.accelerate.write import ENV_VARS, FSDP_NAMES, USE_FLAGS
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP


def settings_of(env: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
    """Return the settings by key; empty unless the variables select FSDP or DeepSpeed."""
    given = {name: one for name, one in env.items() if not one.unresolved}
    flags = {kind: given[name] for kind, name in USE_FLAGS.items() if name in given}
    kind = next((kind for kind, one in flags.items() if str(one.value).lower() in ("true", "1")), "")
    if not kind:
        return {}
    keys = {name: key for key, name in ENV_VARS.items()}
    for key in config_keys("accelerate"):
        section, _, last = key.partition(".")
        if f"{section}." in (FSDP, AXIS.partition(".")[0] + "."):
            keys[FSDP_NAMES.get(last, last.upper())] = key
    found = {keys[name]: _typed(one) for name, one in given.items() if name in keys}
    return {"distributed_type": msgspec.structs.replace(flags[kind], value=kind), **found}


def _typed(setting: SourcedValue) -> SourcedValue:
    text = str(setting.value)
    value = text.lower() == "true" if text.lower() in ("true", "false") else int(text) if text.isdigit() else text
    return msgspec.structs.replace(setting, value=value)
