"""Multi-token prediction: an extra loss on tokens beyond the next, for models with MTP modules."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule

NO_PREDICTION: Fix = {"mtp_loss": [0.0]}


@rule(
    "prediction.no-modules",
    "error",
    "mtp_loss",
    engines=("meshwright",),
    message="mtp_loss={mtp_loss} trains multi-token prediction, but {family} models have no modules for it",
    symptom="training does not start: the model has no multi-token prediction",
    cause="the modules are part of the published model; this one has none",
    fixes=(NO_PREDICTION,),
)
def mtp_modules_missing(c: Case) -> Column:
    return (c.mtp_loss > 0) & (c.mtp_layers == 0)


@rule(
    "prediction.one-module",
    "error",
    "mtp_loss",
    engines=("meshwright",),
    message="the model has {mtp_layers} multi-token-prediction modules, but only one can be trained",
    symptom="training does not start: the model has several multi-token-prediction modules",
    cause="chained modules, each predicting one token further, are not implemented",
    fixes=(NO_PREDICTION,),
)
def several_mtp_modules(c: Case) -> Column:
    return (c.mtp_loss > 0) & (c.mtp_layers > 1)
