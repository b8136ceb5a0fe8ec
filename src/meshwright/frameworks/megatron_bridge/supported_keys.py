"""Convert valid settings that have a different form, or no counterpart, in a recipe."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.frameworks.megatron_bridge import precision
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.frameworks.types import SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_bridge import MLA_MODULES, RECOMPUTE_MODULES
from meshwright.recipes.key_maps.shared_composite_keys import recompute_keys
from meshwright.recipes.key_maps.value_maps import LORA_TARGETS
from meshwright.recipes.types import Recipe

OUR_MODULES = RECOMPUTE_MODULES[: RECOMPUTE_MODULES.index("mhc")]
LINEARS = {**LORA_TARGETS, **MLA_MODULES}
RECOMPUTE = ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers")


def mappable_settings(
    settings: dict[str, SourcedValue], base: Recipe, model: ModelSpec | None
) -> dict[str, SourcedValue]:
    """Return the settings without values that have no counterpart, so that none is reported as invalid."""
    found = {key: setting for key, setting in settings.items() if not _is_unset(key, setting)}

    def put(key: str, new: Any) -> None:
        found[key] = msgspec.structs.replace(found[key], value=new)

    modules = get_value(found, "model.recompute_modules")
    if isinstance(modules, list):
        put("model.recompute_modules", [one for one in modules if one not in RECOMPUTE_MODULES or one in OUR_MODULES])
    targets = get_value(found, "peft.target_modules")
    if isinstance(targets, list) and all(one in LINEARS for one in targets):
        back = {ours: theirs for theirs, ours in LORA_TARGETS.items()}
        put("peft.target_modules", list(dict.fromkeys(back[LINEARS[one]] for one in targets)))
    elif isinstance(targets, list) and any("*" in str(one) or "." in str(one) for one in targets):
        del found["peft.target_modules"]
    named = get_value(found, "mixed_precision", "")
    if named is None or precision.preset(named) is not None:
        del found["mixed_precision"]  # handled by precision.effective(), with the settings it overwrites
    comm_type = get_value(found, "model.cp_comm_type")
    if isinstance(comm_type, list) and len(set(map(str, comm_type))) == 1:
        put("model.cp_comm_type", comm_type[0])
    elif isinstance(comm_type, list):
        del found["model.cp_comm_type"]
    if isinstance(get_value(found, "model.moe_router_load_balancing_type"), list):
        del found["model.moe_router_load_balancing_type"]
    if isinstance(scope := get_value(found, "model.cuda_graph_scope"), str):
        put("model.cuda_graph_scope", [one for one in scope.split(",") if one != "full"])
    if model is not None and model.hf_id and get_value(found, "tokenizer.tokenizer_model") == model.hf_id:
        put("tokenizer.tokenizer_model", None)
    return _without_unused_backend(_complete_recompute(found, base), base)


def _is_unset(key: str, setting: SourcedValue) -> bool:
    """Return whether a null unsets a value that recipes always have; another setting then decides."""
    config_key = config_keys("megatron_bridge").get(key)
    return (
        setting.value is None and config_key is not None and bool(config_key.field) and "null" not in config_key.values
    )


def _complete_recompute(found: dict[str, SourcedValue], base: Recipe) -> dict[str, SourcedValue]:
    """Recompute has three keys; unset ones take the values of the base recipe."""
    given = [key for key in RECOMPUTE if key in found]
    if not given or any(found[key].unresolved for key in given):
        return found
    before: dict[str, Any] = {f"model.{key}": text for key, text in recompute_keys(base).items()}
    granularity = get_value(found, RECOMPUTE[0], before.get(RECOMPUTE[0]))
    if granularity != "full":  # method and number then have no effect, or a rule reports them
        return {key: one for key, one in found.items() if key not in RECOMPUTE[1:]}
    added = {key: before[key] for key in RECOMPUTE if key not in found and key in before}
    return {**found, **{key: msgspec.structs.replace(found[given[0]], value=text) for key, text in added.items()}}


def _without_unused_backend(found: dict[str, SourcedValue], base: Recipe) -> dict[str, SourcedValue]:
    """Drop the backend unless the flex dispatcher reads it."""
    type_key, backend_key = "model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"
    flex = base.moe.dispatcher in ("deepep", "hybridep")
    dispatcher = get_value(found, type_key, "flex" if flex else "alltoall")
    if dispatcher != "flex" and backend_key in found:
        return {key: setting for key, setting in found.items() if key != backend_key}
    if dispatcher == "flex" and backend_key not in found and type_key in found and flex:
        return {**found, backend_key: msgspec.structs.replace(found[type_key], value=base.moe.dispatcher)}
    return found
