"""Fields that have no effect because another field, the goal or the model does not use them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import keys_by_flat_name, recipe_fields
from meshwright.rules.rule import Broken, Fix, Severity, rule
from meshwright.rules.search_values import one_of

VALIDATIONS = 20  # of a run that stops early: enough to see where the loss stops to fall
MOST_STEPS = 50  # between two of them, where the steps follow from the data
MEANT: dict[str, tuple[Fix, ...]] = {
    "eval_steps": ({"eval_every": lambda c: [int(c.eval_steps)]},),
    "early_stop_patience": ({"eval_every": lambda c: [max(1, min(MOST_STEPS, int(c.steps) // VALIDATIONS))]},),
}
"""Fixes that a field's value suggests: eval_steps of other trainers are the steps between two validations, and early
stopping needs validations."""


class Unused(NamedTuple):
    """Fields, where nothing reads them, and why."""

    fields: tuple[str, ...]
    where: Broken
    why: str  # template over names of the case
    severity: Severity = "warning"


def _pretraining(c: Case) -> Column:
    return c.goal == "pretrain"


def _is_dense(c: Case) -> Column:
    return not c.is_moe


MOE_FIELDS = (
    "balancing",
    "router_z_loss",
    "capacity_factor",
    "router_dtype",
    "dispatcher",
    "grouped_gemm",
    "ep_overlap",
    "force_balance",
)
UNUSED = (
    Unused(("pp_schedule", "embedding_as_layer", "head_as_layer"), lambda c: c.pp == 1, "there is no pipeline at pp=1"),
    Unused(("cp_comm",), lambda c: c.cp == 1, "nothing is exchanged at cp=1", "advice"),
    Unused(
        ("cp_inner",),
        lambda c: (c.cp == 1) | (c.cp_comm != "a2a+ring"),
        "only cp_comm=a2a+ring with cp > 1 has an inner group",
    ),
    Unused(
        ("recompute_layers",),
        lambda c: c.recompute != "full",
        "it counts fully recomputed layers, and recompute={recompute}",
    ),
    Unused(
        ("muon_momentum", "muon_ns_steps"), lambda c: c.optimizer_name != "muon", "{optimizer_name} has no such setting"
    ),
    Unused(("eps",), lambda c: one_of(c.optimizer_name, ("sgd", "lion")), "{optimizer_name} divides by nothing"),
    Unused(("beta2",), lambda c: c.optimizer_name == "sgd", "sgd has no second moment"),
    Unused(("decay_steps",), lambda c: c.schedule_name == "constant", "a constant schedule does not decay"),
    Unused(
        ("wsd_decay_steps", "wsd_decay_style"),
        lambda c: c.schedule_name != "wsd",
        "a {schedule_name} schedule has no stable phase",
    ),
    Unused(("first_last_bf16",), lambda c: c.matmul == "same", "no layer computes in fp8 (matmul=same)"),
    Unused(("frozen",), lambda c: c.goal != "peft", "only adapters leave the weights of the model frozen"),
    Unused(("temperature",), lambda c: not c.blend and not c.anneal_blend, "there is no blend to sample from"),
    Unused(
        ("eval_steps", "early_stop_patience"), lambda c: c.eval_every == 0, "train.eval_every=0 turns validation off"
    ),
    Unused(
        ("early_stop_delta",),
        lambda c: (c.eval_every == 0) | (c.early_stop_patience == 0),
        "early stopping needs train.eval_every and train.early_stop_patience",
    ),
    Unused(
        ("streaming", "group_by_length", "train_on", "chat_template", "merge_system", "truncation"),
        _pretraining,
        "pretraining reads one stream of tokens, without conversations",
    ),
    Unused(("scan",), lambda c: not c.is_hybrid, "the model has no Mamba-2 or gated-delta layers"),
    Unused(MOE_FIELDS, _is_dense, "the model has no experts", "advice"),
    Unused(("aux_loss",), lambda c: _is_dense(c) | (c.balancing == "none"), "no loss balances experts here", "advice"),
)


def _differs(c: Case, field: str) -> Column:
    """Return where a field has another value than its default."""
    value, default = getattr(c, field), recipe_fields()[keys_by_flat_name()[field]].default
    return value != default


def _register(row: Unused, field: str) -> None:
    def unused(c: Case) -> Column:
        return np.asarray(_differs(c, field)) & row.where(c)

    rule(
        f"unused.{field}".replace("_", "-"),
        row.severity,
        field,
        engines=("meshwright",),  # other frameworks write defaults of fields that they do not use
        message=f"{field}={{{field}}} has no effect: {row.why}",
        symptom="the run is the same as without the setting",
        cause="another setting, the goal or the model decides whether it is read",
        fixes=(*MEANT.get(field, ()), {field: [recipe_fields()[keys_by_flat_name()[field]].default]}),
    )(unused)


for _row in UNUSED:
    for _field in _row.fields:
        _register(_row, _field)
