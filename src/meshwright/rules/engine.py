"""Values that an engine does not execute, one rule per row of the table of capabilities (recipes/capabilities.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.recipes.capabilities import CAPABILITIES, MODEL_LIMITS, Capability, ModelLimit
from meshwright.recipes.case import Case, Column
from meshwright.recipes.engine_models import WHOLE_MODEL_LIMITS, is_whole, lacking, unsplit_reason
from meshwright.rules.memory import offloads
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_CP, NO_EP, NO_GRAPHS, NO_PP, NO_TP, PLAIN_1F1B, without

FIXES: dict[str, tuple[Fix, ...]] = {
    "engine.no-tp": (NO_TP,),
    "engine.no-pp": (NO_PP,),
    "engine.no-cp": (NO_CP,),
    "engine.no-ep": (NO_EP,),
    "engine.no-etp": ({"etp": [1]},),
    "engine.no-vp": (PLAIN_1F1B,),
    "strategy.supported": ({"strategy": ["fsdp2", "zero1"]},),
    "schedule.supported": ({"pp_schedule": ["interleaved_1f1b", "1f1b"]}, PLAIN_1F1B),
    "offload.supported": ({"offload": offloads("params", "optimizer", "none")},),
    "recompute.ops-supported": ({"recompute_modules": without("recompute_modules", lambda c: ("ops",))},),
    "sequence.attention-kernel": ({"attention": ["auto"]}, {"cp": [1]}),
    "graphs.supported": ({"cuda_graphs": ["full_iteration"], "cuda_graph_scope": [()]}, NO_GRAPHS),
    "kernels.loss-supported": ({"loss": ["chunked"]},),
    "precision.gather-ineffective": ({"fp8_gather": [False]}, {"matmul": ["fp8_tensor"]}),
    "engine.ignores-grads": ({"grads": lambda c: [str(c.reduce)]}, {"reduce": lambda c: [str(c.grads)]}),
}
"""Fixes that change other fields too, or prefer some values; the others set the field to what the engine runs."""


def _supported(row: Capability) -> Callable[[Case], list[Any]]:
    return lambda c: list(row.runs[c.engine])


def _is_axis(row: Capability) -> bool:
    return row.rule.startswith("engine.no-")


def _refuses(row: Capability) -> None:
    """Register the error for engines that refuse other values."""
    supports = "" if _is_axis(row) else "; it supports {supported}"
    rule(
        row.rule,
        "error",
        row.field,
        engines=row.refusing,
        message=f"{{engine}} does not support {row.name} ({row.field}={{{row.field}}})"
        if _is_axis(row)
        else f"{{engine}} does not support {row.field}={{{row.field}}}{f' {row.where}' if row.where else ''}{supports}",
        symptom=row.symptom,
        cause=row.cause,
        fixes=FIXES.get(row.rule, ({row.field: _supported(row)},)),
        values={"supported": lambda c: ", ".join(map(str, row.runs[c.engine]))},
    )(row.unsupported)


def _ignores(row: Capability) -> None:
    """Register the warning for engines that accept other values and run something else."""
    id = row.warning
    resets: dict[str, Any] = {name: [value] for name, value in row.resets.items()}
    rule(
        id,
        "advice" if row.harmless else "warning",
        row.field,
        engines=row.ignoring,
        message=f"{{engine}} ignores {row.field}={{{row.field}}}"
        f"{f' {row.where}' if row.where else ''} and runs {row.field}={{runs}}: {{why}}",
        symptom="the setting has no effect, and the estimate does not count it",
        cause=f"{row.name}: {'; '.join(dict.fromkeys(row.why.values()))}",
        fixes=FIXES.get(id, ({row.field: lambda c: [row.what_runs(c)], **resets},)),
        values={"runs": row.what_runs, "why": lambda c: row.why[c.engine]},
    )(row.unsupported)


for _row in CAPABILITIES:
    if _row.rule and _row.refusing:
        _refuses(_row)
    if _row.ignoring:
        _ignores(_row)


@rule(
    "engine.model-not-trained",
    "warning",
    "model",
    engines=("meshwright",),
    message="our engine does not train {model_type} models: it lacks {lacks}; use --engine and export, or --to",
    symptom="train, bench and dryrun end with an error before the model is built",
    cause="the engine trains causal language models of transformers; it never runs a model's own code",
    values={"model_type": lambda c: c.model.model_type, "lacks": lambda c: lacking(c.model)},
)
def untrained_model(c: Case) -> Column:
    return bool(lacking(c.model))


WHOLE_FIXES: dict[str, Fix] = {"tp": {**NO_TP, "sp": [False]}, "cp": NO_CP, "ep": NO_EP}


def _limits_whole(field: str, plain: tuple[Any, ...], what: str) -> None:
    """Register the error for a setting that needs layers of our own."""
    name = field.partition(".")[2]

    def unsupported(c: Case) -> Column:
        if not is_whole(c.model) or (field.startswith("peft.") and c.goal != "peft"):
            return False
        value = getattr(c, name)
        return ~np.isin(value, plain) if isinstance(value, np.ndarray) else value not in plain

    rule(
        f"engine.whole-{name.replace('_', '-')}",
        "error",
        name,
        engines=("meshwright",),
        message=f"our engine has no {what} for {{model_type}} models ({name}={{{name}}})",
        symptom="train ends with an error before the model is built",
        cause="the engine runs transformers' own forward pass of this model type, whose modules it does not know",
        fixes=(WHOLE_FIXES.get(name, {name: list(plain)}),),
        values={"model_type": lambda c: c.model.model_type},
    )(unsupported)


for _field, (_plain, _what) in WHOLE_MODEL_LIMITS.items():
    _limits_whole(_field, _plain, _what)


@rule(
    "engine.whole-pp",
    "error",
    "pp",
    engines=("meshwright",),
    message="our engine has no pipeline stages for this {model_type} model (pp={pp}): {why}",
    symptom="train ends with an error before the model is built",
    cause="the engine runs transformers' own forward pass of this model type, and stages are whole blocks of it",
    fixes=(NO_PP,),
    values={"model_type": lambda c: c.model.model_type, "why": lambda c: unsplit_reason(c.model)},
)
def whole_model_unsplit(c: Case) -> Column:
    return (c.pp > 1) if is_whole(c.model) and unsplit_reason(c.model) else False


@rule(
    "engine.whole-balancing",
    "error",
    "aux_loss",
    engines=("meshwright",),
    message="our engine cannot balance the experts of this {model_type} model on several stages "
    "(aux_loss={aux_loss}, pp={pp})",
    symptom="train ends with an error before the model is built",
    cause="transformers computes the balancing loss of this model type from the routers of all layers at once",
    fixes=({"aux_loss": [0.0]}, NO_PP),
    values={"model_type": lambda c: c.model.model_type},
)
def whole_model_balanced_on_stages(c: Case) -> Column:
    return c.is_moe & (c.pp > 1) & (c.balancing != "none") & (c.aux_loss > 0) if is_whole(c.model) else False


def _limits_model(row: ModelLimit) -> None:
    """Register the error for a degree that an engine does not support for some models."""

    def unsupported(c: Case) -> Column:
        return (getattr(c, row.field) > 1) if c.model.model_type in row.model_types else False

    rule(
        model_rule(row),
        "error",
        row.field,
        engines=(row.engine,),
        message=f"{{engine}} does not support {row.field}={{{row.field}}} for {{kind}} models",
        symptom="NotImplementedError or RuntimeError: the model does not support it",
        cause=row.cause,
        fixes=(MODEL_FIXES[row.field],),
        values={"kind": lambda c: c.model.model_type},
    )(unsupported)


def model_rule(row: ModelLimit) -> str:
    """Return the id of the rule for a limit of some models."""
    return f"{SUBJECTS[row.field]}.{row.engine}-models"


SUBJECTS = {"pp": "pipeline", "cp": "sequence"}
MODEL_FIXES = {"pp": NO_PP, "cp": NO_CP}
for _limit in MODEL_LIMITS:
    _limits_model(_limit)
