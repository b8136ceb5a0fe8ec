"""A user's tensor-parallel plan: which linear layers of a module of their own are sharded by rows or by columns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright.engine.parallelize.tp_plan import COLUMNS, KV_ROWS, ROWS, ShardSpec, TPModule, linear_shards
from meshwright.errors import InputError, closest

FIELD = "tp_plan"
STYLES: dict[str, ShardSpec] = {"colwise": ROWS, "colwise_kv": KV_ROWS, "rowwise": COLUMNS}
"""transformers' words: colwise shards the outputs of a linear layer (the rows of its weight), rowwise its inputs."""
DIVIDE = "divide"  # of an integer attribute, such as a number of heads


def apply_custom_plan(model: nn.Module, plan: Mapping[str, str] | None) -> None:
    """Mark the modules that a plan names; `tp_module_of` finds them, with tensor parallelism or without.

    Keys are paths with * for a layer number, from any module on: layers.*.mlp.w1 or mlp.w1.
    """
    if not plan:
        return
    parents: dict[str, dict[str, str]] = defaultdict(dict)  # path of a module -> its children and attributes
    for key, style in plan.items():
        if style not in (*STYLES, DIVIDE):
            near = closest(style, (*STYLES, DIVIDE))
            known = f"one of {', '.join(STYLES)}, {DIVIDE}"
            raise InputError(
                f"{key}: must be {known}", field=FIELD, value=style, fix=[f"{key!r}: {one!r}" for one in near]
            )
        for path in _matches(model, key, style):
            parent, _, name = path.rpartition(".")
            parents[parent][name] = style
    for path, styles in parents.items():
        model.get_submodule(path).custom_tp_plan = _module_plan(path, styles)  # type: ignore[assignment]


def _matches(model: nn.Module, key: str, style: str) -> list[str]:
    """Return the paths of the layers or attributes that a key names."""
    pattern = re.compile(r"(?:.*\.)?" + re.escape(key).replace(r"\*", "[^.]+"))
    if style == DIVIDE:
        owner, _, name = key.rpartition(".")
        owners = re.compile(r"(?:.*\.)?" + re.escape(owner).replace(r"\*", "[^.]+"))
        found = [
            f"{path}.{name}" for path, one in model.named_modules() if owners.fullmatch(path) and _is_count(one, name)
        ]
    else:
        found = [path for path, one in model.named_modules() if pattern.fullmatch(path)]
        for path in found:
            if not isinstance(model.get_submodule(path), nn.Linear):
                kind = type(model.get_submodule(path)).__name__
                raise InputError(f"{path} is a {kind}; only linear layers can be sharded", field=FIELD, value=key)
    if not found:
        names = dict.fromkeys(
            re.sub(r"\.\d+\.", ".*.", path) for path, one in model.named_modules() if isinstance(one, nn.Linear)
        )
        near = closest(key, names) or [name for name in names if name.endswith(key.rpartition(".")[2])][:3]
        raise InputError("no module of the model matches", field=FIELD, value=key, fix=near or [*names][:3])
    return found


def _is_count(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), int) and not isinstance(getattr(module, name), bool)


def _module_plan(path: str, styles: Mapping[str, str]) -> TPModule:
    """Return the plan of one module; raise if its output would not be a partial sum."""
    linears = {name: style for name, style in styles.items() if style != DIVIDE}
    kinds = {style.partition("_")[0] for style in linears.values()}
    if kinds != {"colwise", "rowwise"}:
        missing = ({"colwise", "rowwise"} - kinds).pop() if linears else "a linear layer"
        raise InputError(
            f"{path} needs layers of both kinds: colwise at its inputs and rowwise at its output, which is summed",
            field=FIELD,
            value=", ".join(f"{name}: {style}" for name, style in styles.items()),
            fix=(f"add {missing} for the other layers of {path}",),
        )
    shards: dict[str, ShardSpec | str] = {}
    for name, style in linears.items():
        shards |= linear_shards(name, STYLES[style])
    divided = tuple(name for name, style in styles.items() if style == DIVIDE)
    return TPModule(f"custom {path}", tuple(linears), shards, divided=divided)
