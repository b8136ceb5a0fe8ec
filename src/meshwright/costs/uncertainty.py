"""How far a predicted step may be off: half-widths learnt from residuals, wider where the ruler does not reach.

uncertainty.toml holds, for each kind of training, the 80th percentile of the error over published runs when the fit had not
seen their source, every source counting the same. benchmarks/fit_costs.py writes it.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.case import Case


class Bands(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Half-widths in per cent by kind, what was measured, and how the band widens beyond it."""

    step_pct: dict[str, float]  # dense, moe, hybrid, peft, and functional: runs that nobody tuned
    engines: list[str]  # profiles with measured runs
    gpus: list[str]  # architectures with measured runs
    precisions: list[str]  # matmul formats with measured runs
    largest_world: int  # GPUs of the largest measured run
    longest_seq: int
    widen_engine: float  # factor for an engine without measured runs
    widen_gpu: float
    widen_precision: float
    widen_modality: float  # diffusion and images: no measured run at all
    widen_per_doubling: float  # for every doubling of the GPUs or the sequence beyond the largest measured
    source: str = ""


@cache
def bands() -> Bands:
    """The shipped bands."""
    path = Path(__file__).with_name("uncertainty.toml")
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Bands)
    except (OSError, ValueError) as error:
        raise InputError(f"not a file of bands: {error}", field="bands", value=str(path)) from None


def kind_of(case: Case) -> str:
    """The kind of training whose residuals a case is expected to share."""
    if _profile(case) == "megatron_untuned":
        return "functional"
    if case.goal == "peft":
        return "peft"
    if case.is_hybrid:
        return "hybrid"
    return "moe" if case.is_moe else "dense"


def step_band(case: Case) -> float:
    """Half-width of the 80 per cent band of the step time, in per cent of it."""
    known = bands()
    width: float = known.step_pct[kind_of(case)]
    width *= known.widen_engine if _profile(case) not in known.engines else 1.0
    width *= known.widen_gpu if case.gpu_arch not in known.gpus else 1.0
    width *= known.widen_precision if case.matmul not in known.precisions else 1.0
    width *= known.widen_modality if case.is_diffusion or case.images else 1.0
    beyond = _doublings(case.cluster.world, known.largest_world) + _doublings(case.seq_length, known.longest_seq)
    return float(round(width * known.widen_per_doubling**beyond, 1))


def _profile(case: Case) -> str:
    return getattr(case, "speed_profile", "") or str(case.engine)


def _doublings(value: object, limit: int) -> float:
    """How many times a number doubles the largest measured one; columns count as what they were measured at."""
    return max(math.log2(value / limit), 0.0) if isinstance(value, int) else 0.0
