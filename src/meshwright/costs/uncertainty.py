"""Error band of a predicted step: half-widths fitted to residuals, wider outside the measured range.

uncertainty.toml has, for each error class, the 80th percentile of the error over published runs when the fit had not
seen their source, every source counting the same. benchmarks/fit_costs.py writes it.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from meshwright.costs.calibration import calibration
from meshwright.costs.gemm import untrained_router
from meshwright.errors import InputError
from meshwright.recipes.case import Case

LEAST_OWN_PCT = 6.0  # half-width below which few own runs say nothing
CONSUMER_BLACKWELL = 12.0  # compute capability of GeForce and RTX PRO: other tensor cores than B200 and GB200


class ErrorBands(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Half-widths in per cent by error class, the measured range, and how the band widens beyond it."""

    step_pct: dict[str, float]  # dense, moe, hybrid, peft, and functional: untuned runs
    engines: list[str]  # profiles with measured runs
    gpus: list[str]  # architectures with measured runs
    cards: list[str]  # GPU types with measured runs
    precisions: list[str]  # matmul formats with measured runs
    largest_world: int  # GPUs of the largest measured run
    longest_seq: int
    layout_gain_pct: float  # predicted gain of one layout over another that is real in four of five measured pairs
    widen_engine: float  # factor for an engine without measured runs
    widen_gpu: float
    widen_card: float  # for a GPU type without measured runs of a measured architecture
    widen_precision: float
    widen_routing: float  # experts without forced balance: the load of the fullest rank was measured in few runs
    widen_modality: float  # diffusion and images: without measured runs
    widen_per_doubling: float  # per doubling of GPUs or sequence beyond the largest measured
    source: str = ""


@cache
def error_bands() -> ErrorBands:
    """Return the shipped error bands."""
    path = Path(__file__).with_name("uncertainty.toml")
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), ErrorBands)
    except (OSError, ValueError) as error:
        raise InputError(f"not a file of error bands: {error}", field="bands", value=str(path)) from None


def error_class(case: Case) -> str:
    """Return the error class of a case: runs whose residuals it is expected to share."""
    if _profile(case) == "megatron_untuned":
        return "functional"
    if case.goal == "peft":
        return "peft"
    if case.is_hybrid:
        return "hybrid"
    return "moe" if case.is_moe else "dense"


def step_band(case: Case) -> float:
    """Return the half-width of the 80 per cent error band of the step time, in per cent."""
    known = error_bands()
    width: float = known.step_pct[error_class(case)]
    width *= known.widen_engine if _profile(case) not in known.engines else 1.0
    width *= _widen_gpu(case, known)
    width *= known.widen_precision if case.matmul not in known.precisions or _is_int8(case) else 1.0
    width *= known.widen_routing if _routes_freely(case) else 1.0
    width *= known.widen_modality if case.is_diffusion or case.images else 1.0
    beyond = _doublings(case.cluster.world, known.largest_world) + _doublings(case.seq_length, known.longest_seq)
    width = min(width * known.widen_per_doubling**beyond, _own_band(case, known))
    width = max(width, _unexplained(case))
    return float(round(width, 1))


def _routes_freely(case: Case) -> bool:
    """Return whether the router decides the load of experts; functional runs have a band of their own."""
    known = case.force_balance or untrained_router(case) or error_class(case) == "functional"
    return bool(case.is_moe) and not known


def _is_int8(case: Case) -> bool:
    """Return whether frozen weights are in LLM.int8, of which no run was measured."""
    return bool(case.goal == "peft" and case.method == "lora8bit")


def _own_band(case: Case, known: ErrorBands) -> float:
    """Return the half-width that a user's own runs allow, if they are of this GPU, engine and model family.

    The median error of each run predicted from the others, doubled: a band holds four of five runs, not half of them.
    """
    machine = calibration(case).machine
    if machine is None or machine.error_left_out_pct is None or machine.gpu != case.gpu:
        return math.inf
    if case.engine not in machine.engines or case.model.family not in machine.families:
        return math.inf
    width = max(2 * machine.error_left_out_pct, LEAST_OWN_PCT)
    return float(width * known.widen_per_doubling ** _doublings(case.cluster.world, machine.largest_world))


def _unexplained(case: Case) -> float:
    """Return the half-width that contains the only run of a user's calibration, which the fit explains in part."""
    machine = calibration(case).machine
    if machine is None or machine.unexplained is None or machine.gpu != case.gpu:
        return 0.0
    same = case.engine in machine.engines and case.model.family in machine.families
    return float(machine.band_pct) if same else 0.0


def _widen_gpu(case: Case, known: ErrorBands) -> float:
    """Return the factor for the GPU; a custom or consumer GPU shares no measured runs with its architecture."""
    consumer = case.gpu_arch == "blackwell" and case.capability >= CONSUMER_BLACKWELL
    if case.gpu_arch not in known.gpus or consumer:
        return known.widen_gpu
    return 1.0 if case.gpu in known.cards else known.widen_card


def _profile(case: Case) -> str:
    return getattr(case, "speed_profile", "") or str(case.engine)


def _doublings(value: object, limit: int) -> float:
    """Return how many times a value doubles the largest measured one; columns count as within range."""
    return max(math.log2(value / limit), 0.0) if isinstance(value, int) else 0.0
