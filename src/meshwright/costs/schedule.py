"""Micro batches in flight under a pipeline schedule."""

from __future__ import annotations

from meshwright.costs.stages import Stages
from meshwright.costs.vectorize import Column, any_of, smaller, where
from meshwright.recipes.capabilities import V_SHAPED
from meshwright.recipes.case import Case


def in_flight(case: Case, pipeline: Stages) -> Column:
    """Return the micro batches whose activations a stage holds at its peak, in full-stage equivalents.

    1F1B keeps pp - stage. Interleaving keeps 2(pp - stage - 1) + (vp - 1) pp + 1 chunks, each a vp-th of the stage,
    which on the first stage is pp (1 + (pp - 1) / (pp vp)). GPipe and its looped form keep all. The V-shaped
    schedules fold the pipeline, so every rank keeps about pp.
    """
    pp, vp, micro_batches = case.pp, case.vp, case.pass_micro_batches
    plain = pp - pipeline.index
    chunks = 2 * (pp - pipeline.index - 1) + (vp - 1) * pp + 1
    kept = where(vp > 1, chunks / vp, plain)
    kept = where(any_of(case.pp_schedule, *V_SHAPED), pp + 0.5 * (case.pp_schedule == "dualpipe_v"), kept)
    kept = where(any_of(case.pp_schedule, "gpipe", "looped_bfs"), micro_batches, kept)
    return where(pp > 1, smaller(kept, micro_batches), 1)
