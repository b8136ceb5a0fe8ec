"""The layers of a config.json: their number, lists with one entry per layer, and a choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from meshwright.errors import InputError
from meshwright.recipes.other_names import ARCHITECTURE_NAMES


def number_name(values: Mapping[str, Any], field: str) -> str:
    """Return the config's name of an architecture field of a recipe."""
    found = next((name for name in ARCHITECTURE_NAMES[field] if name in values), None)
    if found is None:
        raise InputError(f"this model has no {field} to change", field=f"architecture.{field}")
    return found


def layer_count(values: Mapping[str, Any]) -> int:
    """Return the number of layers of a config, given as a number or as a list."""
    if "layers_block_type" in values:
        return len(values["layers_block_type"])
    return int(values[number_name(values, "layers")])


def with_layers(values: Mapping[str, Any], chosen: list[int]) -> dict[str, Any]:
    """Return the config with these layers in this order; lists with one entry per layer are reindexed."""
    count, changed = layer_count(values), dict(values)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == count and not _lists_numbers(value, count):
            changed[name] = [value[i] for i in chosen]
        elif _lists_numbers(value, count):
            changed[name] = [place for place, i in enumerate(chosen) if i in value]
        elif _is_by_number(value):
            changed[name] = {place: value[key] for place, i in enumerate(chosen) for key in value if int(key) == i}
    if "first_k_dense_replace" in values:
        changed["first_k_dense_replace"] = sum(i < values["first_k_dense_replace"] for i in chosen)
    if _shared_layers(values):
        changed[SHARED] = sum(i >= count - _shared_layers(values) for i in chosen)
    if isinstance(values.get("attention_types"), list) and "attention_layers" in changed:  # GPT-Neo: runs of kinds
        changed["attention_types"] = [[[kind], 1] for kind in changed["attention_layers"]]
    for name in ARCHITECTURE_NAMES["layers"]:
        if name in values:
            changed[name] = len(chosen)
    return changed


def layer_signatures(values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return a signature of each layer; layers with equal signatures have the same structure."""
    count = layer_count(values)
    numbers = [v for v in values.values() if _lists_numbers(v, count)]
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == count and v not in numbers]
    by_number = [{int(k): str(one) for k, one in v.items()} for v in values.values() if _is_by_number(v)]
    dense, shared = values.get("first_k_dense_replace", 0), _shared_layers(values)
    return [
        (
            *(str(v[i]) for v in lists),
            *(i in v for v in numbers),
            *(v.get(i) for v in by_number),
            i < dense,
            i >= count - shared,
        )
        for i in range(count)
    ]


SHARED = "num_kv_shared_layers"  # the last ones, which use keys and values of earlier layers


def _shared_layers(values: Mapping[str, Any]) -> int:
    found = values.get(SHARED)
    return found if isinstance(found, int) else 0


def _lists_numbers(value: Any, count: int) -> bool:
    """Return whether a value is a list of layer numbers: increasing, and not one entry per layer."""
    if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
        return False
    rising = all(a < b for a, b in pairwise(value))
    return rising and value[0] >= 0 and value[-1] < count and (len(value) < count or value == list(range(count)))


def _is_by_number(value: Any) -> bool:
    """Return whether a value maps layer numbers to values of these layers."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(str(key).isdigit() and isinstance(one, Mapping) for key, one in value.items())


def representative_layers(values: Mapping[str, Any], count: int, of_each: int = 1) -> list[int]:
    """Return layers that include every signature, in the model's order."""
    signatures = layer_signatures(values)
    places = {one: [i for i, other in enumerate(signatures) if other == one] for one in dict.fromkeys(signatures)}
    chosen = sorted(i for found in places.values() for i in found[:of_each])
    others = [i for i in range(len(signatures)) if i not in chosen]
    chosen += others[: max(0, count - len(chosen))]
    while len(chosen) < count:  # fewer layers than pipeline stages: repeat the last one
        chosen.append(chosen[-1])
    return sorted(chosen)
