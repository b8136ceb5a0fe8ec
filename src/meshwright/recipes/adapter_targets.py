"""Which linear layers get adapters: our groups, Hugging Face module names, `all-linear`, or a regular expression.

As in peft, a name matches the end of a module's path, and a regular expression must match all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from meshwright.errors import InputError, closest
from meshwright.similar import misspelled

FIELD = "peft.targets"
ALL_LINEAR = "all-linear"
USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # names that most models have
# Module names of our groups: a name matches the end of a path. fc1 and fc2 include experts, which are stacked in one
# tensor per projection. In latent attention the projections into heads are adapted, not those into the latent space;
# gated-delta mixers count as attention.
GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": (
        *("q_proj", "k_proj", "v_proj", "qkv_proj"),
        *("q_b_proj", "kv_b_proj"),
        *("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
        *("c_attn", "query_key_value", "Wqkv"),
    ),
    "proj": (
        *("o_proj", "linear_attn.out_proj", "attn.c_proj", "attn.out_proj", "attention.out_proj", "attn.Wo"),
        *("attention.dense", "self_attention.dense", "self_attn.dense"),
    ),
    "fc1": (
        *("gate_proj", "up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in", "mlp.Wi"),
        *("feed_forward.w1", "feed_forward.w3", "input_linear"),
    ),
    "fc2": ("down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2", "fc_out", "mlp.Wo", "feed_forward.w2", "output_linear"),
    "mamba_in": ("mixer.in_proj", "mamba.in_proj"),
    "mamba_out": ("mixer.out_proj", "mamba.out_proj"),
}
# Adapted only if named, or by all-linear: projections into the latent space and of the gates of a delta rule.
UNGROUPED = {
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "in_proj_ba", "in_proj_b", "in_proj_a"), "qkv"),
    **dict.fromkeys(("fc1_latent_proj", "fc2_latent_proj"), "fc1"),
}
# Mixtral's names of an expert's projections, and short names that several layers share.
EXPERT_ALIASES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
SHARED_NAMES = {"c_proj": ("proj", "fc2"), "out_proj": ("proj", "mamba_out"), "in_proj": ("mamba_in",)}
REGEX = re.compile(r"[*+?|()\[\]{}^$\\]")
_DECODERS = ("model", "model.language_model", "language_model.model", "model.model", "base_model.model.model")
_PARENTS = ("self_attn", "attn", "linear_attn", "mlp", "mixer", "mlp.experts", "mlp.experts.0", "mlp.shared_experts")


def target_names() -> tuple[str, ...]:
    """Return every name that a target may have."""
    modules = (name for names in GROUPS.values() for name in names)
    return (*GROUPS, ALL_LINEAR, *modules, *UNGROUPED, *EXPERT_ALIASES, *SHARED_NAMES)


def require_targets(targets: tuple[str, ...]) -> None:
    """Raise if a target is neither a known name nor a valid regular expression."""
    names = target_names()
    for target in targets:
        if REGEX.search(target):
            _compiled(target)
    unknown = [one for one in targets if not (REGEX.search(one) or one in names or _is_path(one))]
    if unknown:
        raise InputError(
            f"unknown linear layer{'s' if len(unknown) > 1 else ''}; known: {ALL_LINEAR}, the groups "
            f"{', '.join(GROUPS)}, Hugging Face names such as {', '.join(USUAL)}, "
            "or a regular expression for module paths",
            field=FIELD,
            value=",".join(unknown),
            fix=_corrections(targets, {one: closest(one, names) for one in unknown}),
        )


def is_known_target(target: str) -> bool:
    """Return whether a target is a known name, a path or a regular expression."""
    return bool(REGEX.search(target)) or _is_path(target) or target in target_names()


def meant_targets(target: str) -> list[str]:
    """Return the names that an unknown target misspells."""
    return misspelled(target, (*target_names(), "all"))


def names_same_layers(targets: tuple[str, ...], others: Sequence[str]) -> bool:
    """Return whether every group of linear layers that targets name is named by others too; True for no group."""
    return {*groups_of(targets)} <= {*groups_of(tuple(others))}


def _corrections(targets: tuple[str, ...], near: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return overrides in which all unknown targets have names like them; a target like none is left out.

    Where none is like a name, all linear layers are what most runs adapt.
    """
    found = []
    for choice in range(max(1, *map(len, near.values()))):
        names = {one: like[min(choice, len(like) - 1)] if like else "" for one, like in near.items()}
        found.append(",".join(dict.fromkeys(name for one in targets if (name := names.get(one, one)))))
    return tuple(f"{FIELD}={text or ALL_LINEAR}" for text in dict.fromkeys(found))


def is_target(path: str, targets: tuple[str, ...]) -> bool:
    """Return whether the module at a path is one of the targets; its path is that in the transformers model."""
    return any(_matches(path, target) for target in targets)


def group_of(path: str) -> str:
    """Return the group of a module by its path in the model; empty if it is in none."""
    pairs = ((group, name) for group, names in GROUPS.items() for name in names)
    return next((group for group, name in pairs if _ends_with(path, name)), "")


@lru_cache(maxsize=256)
def groups_of(targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the groups that targets belong to, in full or in part: rules and costs see whole groups."""
    if set(targets) <= set(GROUPS):
        return targets
    found = {group for target in targets for group in _groups(target)}
    return tuple(group for group in GROUPS if group in found)


# The modules of a group in Llama-like models; naming all of them is naming the group.
STANDARD = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "proj": ("o_proj",),
    "fc1": ("gate_proj", "up_proj"),
    "fc2": ("down_proj",),
    "mamba_in": ("in_proj",),
    "mamba_out": ("mixer.out_proj",),
}


def as_groups(targets: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return targets as whole groups; None if they adapt only some modules of a group."""
    groups = groups_of(targets)
    names = {name for target in targets for name in STANDARD.get(target, (target,))}
    whole = ALL_LINEAR in targets or names == {name for group in groups for name in STANDARD[group]}
    return groups if whole else None


def _groups(target: str) -> tuple[str, ...]:
    if target in GROUPS:
        return (target,)
    if target in SHARED_NAMES:
        return SHARED_NAMES[target]
    names = {**{name: group for group, names in GROUPS.items() for name in names}, **UNGROUPED}
    target = EXPERT_ALIASES.get(target, target)
    places = [f"{start}.layers.0.{parent}" for start in _DECODERS for parent in _PARENTS]
    paths = ((f"{place}.{name}", group) for name, group in names.items() for place in places)
    return tuple({group for path, group in paths if _matches(path, target)})


def _matches(path: str, target: str) -> bool:
    if target in GROUPS:
        return group_of(path) == target
    if target == ALL_LINEAR:
        return bool(group_of(path)) or any(_ends_with(path, name) for name in UNGROUPED)
    if REGEX.search(target):
        return _compiled(target).fullmatch(path) is not None
    return _ends_with(path, target)


def _ends_with(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")


def _is_path(target: str) -> bool:
    """Return whether a target is the path of one module, whose last part is a known name."""
    last = target.rpartition(".")[2]
    return "." in target and any(last == name.rpartition(".")[2] for name in target_names())


@lru_cache(maxsize=64)
def _compiled(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target)
    except re.error as error:
        raise InputError(
            f"is not a valid regular expression: {error}", field=FIELD, value=target, fix=(f"{FIELD}={ALL_LINEAR}",)
        ) from None
