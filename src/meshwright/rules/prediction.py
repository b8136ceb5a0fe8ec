"""Multi-token prediction: a loss on the tokens beyond the next one, for models that have modules for it."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule

NO_PREDICTION: Fix = {"mtp_loss": [0.0]}


@rule(
    "prediction.no-modules",
    "error",
    "mtp_loss",
    engines=("meshwright",),
    message="mtp_loss={mtp_loss} trains multi-token prediction, and {family} models have no modules for it",
    symptom="training does not start: the model has no multi-token prediction",
    cause="the modules are part of the published model; there are none to train",
    fixes=(NO_PREDICTION,),
)
def model_predicts_more(c: Case) -> Column:
    return (c.mtp_loss > 0) & (c.mtp_layers == 0)


@rule(
    "prediction.one-module",
    "error",
    "mtp_loss",
    engines=("meshwright",),
    message="{mtp_layers} multi-token-prediction modules are more than the one that can be trained",
    symptom="training does not start: the model has several multi-token-prediction modules",
    cause="modules that follow each other, each for one token further, are not implemented",
    fixes=(NO_PREDICTION,),
)
def one_token_further(c: Case) -> Column:
    return (c.mtp_loss > 0) & (c.mtp_layers > 1)
