"""Estimates a case: memory, step time, throughput and their error bands."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from meshwright.costs.flops import flops_per_token
from meshwright.costs.memory import PARTS as MEMORY_PARTS
from meshwright.costs.memory import Fit, Memory, fit_words, memory, memory_band
from meshwright.costs.speeds import linear_precision, peak_flops
from meshwright.costs.time import PARTS as STEP_PARTS
from meshwright.costs.time import step_time
from meshwright.costs.uncertainty import step_band
from meshwright.costs.vectorize import Column, plain
from meshwright.recipes.capabilities import executed
from meshwright.recipes.case import Case

NAN = float("nan")
MOST_MFU = 0.9  # of the peak: what matrix products alone reach at most (H20)


class Band(msgspec.Struct, frozen=True):
    """Half-width of the error band in per cent: four of five comparable published runs are within it.

    It is a factor: 35 per cent means from the estimate / 1.35 to the estimate × 1.35.
    """

    step_pct: float
    memory_pct: float


class Estimate(msgspec.Struct, frozen=True):
    """The costs of one layout, or of a column of layouts."""

    memory: Memory
    parts: dict[str, Column]  # seconds; they add up to step_s
    step_s: Column
    tokens_per_s_per_gpu: Column
    tflops_per_gpu: Column
    mfu: Column  # a share, 0.45 = 45 %
    mfu_convention: str
    band: Band
    can_be_built: bool = True  # False: a rule refuses the layout, so its arithmetic means nothing

    @property
    def fits(self) -> Column:
        """Whether the layout can be built and its memory fits the GPU with the reserve."""
        return self.memory.fits if self.can_be_built else False

    @property
    def fit(self) -> Fit:
        """The verdict on one layout in words, by the chance that it fits; it never contradicts `fits`."""
        return fit_words(self.memory) if self.can_be_built else "does not fit"

    def refused(self) -> Estimate:
        """Return the estimate of a layout that cannot be built: it does not fit, and its speeds are not a number."""
        parts = dict.fromkeys(self.parts, NAN)
        speeds = dict.fromkeys(("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"), NAN)
        return msgspec.structs.replace(self, parts=parts, **speeds, can_be_built=False)


def estimate(case: Case) -> Estimate:
    """Return memory, step time and throughput of a case, as its engine runs it."""
    case = executed(case)
    time = step_time(case)
    tokens_per_s = case.global_batch_size * case.seq_length / time.step_s / case.world
    achieved = tokens_per_s * flops_per_token(case)
    peak = linear_precision(case)
    return Estimate(
        memory=memory(case),
        parts=time.parts,
        step_s=time.step_s,
        tokens_per_s_per_gpu=plain(tokens_per_s),
        tflops_per_gpu=plain(achieved / 1e12),
        mfu=plain(achieved / peak_flops(case, peak)),
        mfu_convention=_convention(case, peak),
        band=Band(step_band(case), memory_band(case)),
    )


def _convention(case: Case, peak: str) -> str:
    return (
        "causal attention counted as half, LM head included, input embedding and recompute excluded"
        + (", frozen weights at 4 FLOPs per parameter" if case.goal == "peft" else "")
        + f"; peak = dense {peak} {peak_flops(case, peak) / 1e12:g} TFLOP/s"
    )


def _fastest(estimate: Estimate) -> float:
    """Return the factor of the band's fast end, at which a step takes no more of the peak than GPUs reach."""
    reachable = MOST_MFU / float(estimate.mfu) if 0 < estimate.mfu < MOST_MFU else math.inf
    return min(1 + estimate.band.step_pct / 100, reachable)


def to_dict(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate of one layout as plain values."""
    gib = {name: float(getattr(estimate.memory, name)) for name in (*MEMORY_PARTS, "total", "capacity")}
    host = float(estimate.memory.host)
    return {
        "fits": bool(estimate.fits),
        "memory_gib": gib,
        **({"host_gib": host} if host else {}),
        "step_s": float(estimate.step_s),
        "step_parts_s": {name: float(estimate.parts[name]) for name in STEP_PARTS},
        "tokens_per_s_per_gpu": float(estimate.tokens_per_s_per_gpu),
        "tflops_per_gpu": float(estimate.tflops_per_gpu),
        "mfu": float(estimate.mfu),
        "mfu_convention": estimate.mfu_convention,
        "band": {
            "step_pct": estimate.band.step_pct,
            "memory_pct": estimate.band.memory_pct,
            "step_low_s": float(estimate.step_s) / _fastest(estimate),
            "step_high_s": float(estimate.step_s) * (1 + estimate.band.step_pct / 100),
            "memory_low_gib": gib["total"] / (1 + estimate.band.memory_pct / 100),
            "memory_high_gib": gib["total"] * (1 + estimate.band.memory_pct / 100),
        },
        "fit_probability": round(float(estimate.memory.fit_probability), 3),
    }
