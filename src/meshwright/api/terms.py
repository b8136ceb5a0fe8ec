"""Our terms in responses, each explained once: in the legend of a report, in tooltips and by `meshwright explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TERMS = {
    "contract": "settings that determine the trained weights (data, batch, optimizer); a change is a new experiment",
    "layout": "settings that only determine memory and speed (tp, pp, micro batch, recompute), not the trained weights",
    "benchmark": "settings for throughput runs on mock data, never for production",
    "exact": "the shipped recipe of this model for these GPUs, unchanged",
    "resized": "the shipped recipe of this model, adapted to these GPUs or to your settings",
    "closest": "no shipped recipe trains this model for this goal; the recipe of the most similar model is adapted",
    "derived": "the model is yours, not a catalogue one; the recipe of the most similar model is adapted",
    "weights": "parameters of this GPU, in the format they are computed with",
    "gradients": "gradients of this GPU's parameters, where they outlive the backward pass",
    "optimizer": "memory: moments and master weights; step time: the update",
    "activations": "tensors saved for the backward pass",
    "logits": "output over the vocabulary and its gradient, in the loss",
    "buffers": "gathered weight shards, communication and working tensors of the layer being computed",
    "overhead": "CUDA context, communicators and memory that the allocator caches",
    "compute": "matrix products and other kernels",
    "tp": "tensor parallelism; in the step time its communication that compute does not hide",
    "cp": "context parallelism; in the step time its communication that compute does not hide",
    "ep": "expert parallelism; in the step time the token dispatch that compute does not hide",
    "dp": "data parallelism; in the step time gathers and reductions that compute does not hide",
    "pp_bubble": "time in which pipeline stages wait for each other",
    "other": "idle time between kernel launches, slow ranks, and the fixed cost of a step",
    "recompute": "activations computed again in the backward pass to save memory: none, selective (the ones that are "
    "cheap to compute, such as attention), or full (all of every layer)",
    "band": "the interval, in percent, that contains 80 % of comparable published measurements",
    "goodput": "share of the time that trains, after failures, restarts and checkpoints",
    "headroom": "memory left free, because estimates have a band",
}
"""Term → meaning."""
LEGEND = {
    "resized": "this model's recipe, adapted to your GPUs or settings",
    "closest": "recipe of the most similar model",
    "derived": "recipe of the most similar model, for your own model",
    "contract": "changes the trained weights",
    "layout": "changes only memory and speed",
    "buffers": "gathered shards, communication",
    "overhead": "CUDA context, allocator cache",
    "other": "launch gaps, slow ranks",
}
"""The same in a few words, for the line under a report."""
VISIBLE_GIB, VISIBLE_SHARE = 0.05, 0.005


def legend(answer: Mapping[str, Any], step_parts: bool = False) -> str:
    """Return the terms that a plan's report uses, each with its meaning, on one line; empty if there are none."""
    estimate, recipe = answer["estimate"], answer["recipe"]
    kinds = {change["kind"] for change in answer.get("changes", ())}
    used = [recipe["match"]] if recipe.get("match") in LEGEND else []
    used += [kind for kind in ("contract", "layout") if kind in kinds]
    used += [part for part in ("buffers", "overhead") if estimate["memory_gib"][part] >= VISIBLE_GIB]
    if step_parts and estimate["step_parts_s"]["other"] >= VISIBLE_SHARE * estimate["step_s"]:
        used.append("other")
    return "; ".join(f"{term}: {LEGEND[term]}" for term in used)
