"""What each engine keeps in GPU memory beyond the textbook, as data (memory_profiles.toml, memory_meshwright.toml)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.case import Case
from meshwright.toml_tables import TomlTables


class MemoryProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory behavior of one engine; memory_profiles.toml describes every field."""

    logits: float
    logits_compiled: float = 0.0
    logits_one_rank: float = 0.0
    logits_parallel: float = 0.0
    logits_gathered: float = 2.0
    gathers_logits: bool = False
    keeps_outputs: bool = False
    keeps_logits: float = 0.0
    separate_copy: bool = False
    pure_low: bool = False
    plain_one_rank: bool = False
    casts_again: bool = False
    extra_gradients: float = 0.0
    gradient_buckets: bool = False
    layer_gradients: float = 0.0
    defers: bool = False
    norm_extra: float = 0.0
    fused_activation: bool = False
    repeats_kv: bool = False
    gathers_inputs: bool = False
    keeps_experts_gathered: bool = False
    whole_graph: bool = False
    stacked_experts: float = 0.0
    imbalance: float = 1.15
    exchanged: float = 1.0
    live_parameters: float = 0.0
    reduce_bucket: float = 0.0
    inplace_activation: bool = False
    fragmentation: float = 0.06
    state_fragmentation: float = 0.025
    expert_holes: float = 0.0
    fresh_gradients: bool = False
    loss_chunk: float = 0.0
    gathers_again: bool = False
    wide_second_moment: bool = False
    lean_gather: bool = False
    offloads_masters: bool = False
    offloads_gradients: bool = False
    reduces_in_place: bool = False
    wide_norms: tuple[str, ...] = ()
    splits_recompute: bool = False
    workspaces_gib: float = 0.0
    wide_router: bool = False
    drops_frozen_rows: bool = False
    weights_local_rows: bool = False
    clamped_gate: float = 0.0
    shards_by_expert: bool = False
    shards_adapters: bool = False
    replicates_vision: bool = False
    plain_convolutions: bool = False
    scan_block_bytes: float = 0.0
    scan_gib: float = 0.0
    delta_block_bytes: float = 0.0
    document_rows: float = 0.0
    joins_segments: bool = False


def memory_profiles() -> dict[str, MemoryProfile]:
    """Return every profile by name."""
    return {name: _profile(name) for name in _tables("memory_profiles.toml")}


@cache
def _profile(name: str) -> MemoryProfile:
    table = {**_tables("memory_profiles.toml")[name], **_tables("memory_meshwright.toml").get(name, {})}
    try:
        return msgspec.convert(table, MemoryProfile)
    except msgspec.ValidationError as error:
        raise InputError(f"not a memory profile: {error}", field="file", value="memory_profiles.toml") from None


@cache
def _tables(file: str) -> TomlTables:
    return TomlTables(Path(__file__).with_name(file))


def memory_profile(case: Case) -> MemoryProfile:
    """Return the profile of the framework that a case names, else of its engine; cached per case."""
    return case.cached(_find_profile)


def _find_profile(case: Case) -> MemoryProfile:
    return _profile(getattr(case, "memory_profile", "") or case.engine)
