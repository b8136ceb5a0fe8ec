"""Flags of Megatron-LM's parsers and the values they accept (megatron_lm_flags.tsv); values of other releases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

TABLE = "megatron_lm_flags.tsv"
OTHER_RELEASES: Mapping[str, tuple[str, ...]] = {
    "ckpt_convert_format": ("zarr",),
    "ckpt_format": ("zarr",),
    "cross_entropy_fusion_impl": ("linear",),
    "inference_dynamic_batching_prefix_caching_coordinator_policy": ("round_robin",),
    "inference_grouped_gemm_backend": ("auto", "te"),
}
"""Values that releases since 0.9 or the dev branch accept, but the table's commit does not. Case matters."""


class Flag(msgspec.Struct, frozen=True):
    """A flag that Megatron-LM's parser accepts, or the parser of one of its programs."""

    name: str  # with underscores, without dashes
    type: Any  # flag, int, float, str or list
    choices: tuple[str, ...]
    programs: tuple[str, ...]  # that add it; empty: all
    argument: str  # that it sets, as the argument dump of a log names it: fp8 for fp8_format
    turns_off: bool = False  # whether it sets the argument to False


@cache
def _table() -> tuple[Flag, ...]:
    found = []
    for row in Path(__file__).with_name(TABLE).read_text(encoding="utf-8").splitlines()[2:]:
        name, takes, choices, programs, argument = row.split("\t")
        sets, _, off = (argument or name).partition("=")
        allowed = (*choices.split(), *OTHER_RELEASES.get(name, ())) if choices else ()
        found.append(Flag(name, takes, allowed, tuple(programs.split()), sets, turns_off=bool(off)))
    return tuple(found)


@cache
def parser_flags() -> Mapping[str, Flag]:
    """Return the flags that every program accepts, by name."""
    return {one.name: one for one in _table() if not one.programs}


@cache
def flags_by_argument() -> Mapping[str, Flag]:
    """Return the flags that every program accepts, by the argument they set; of several, the one named like it."""
    flags = parser_flags().values()
    return {one.argument: one for one in sorted(flags, key=lambda one: one.name == one.argument)}


@cache
def all_program_flags() -> frozenset[str]:
    """Return the flags that programs of Megatron-LM add."""
    return frozenset(one.name for one in _table() if one.programs)


@cache
def program_flags(program: str) -> Mapping[str, Flag] | None:
    """Return the flags that a program of Megatron-LM adds, by its file name; None for other programs."""
    name = PurePosixPath(program).name
    if name not in PROGRAMS:
        return None
    return {one.name: one for one in _table() if any(PurePosixPath(path).name == name for path in one.programs)}


PROGRAMS = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_bert.py", "pretrain_t5.py",
            "pretrain_ict.py", "pretrain_vlm.py", "train_rl.py", "train.py", "finetune.py", "pretrain_hybrid_flex.py",
            "pretrain_vision_classify.py", "pretrain_vision_dino.py", "pretrain_vision_inpaint.py")  # fmt: skip
"""Training programs of Megatron-LM by file name: their parsers accept the flags of the table and no others."""
