"""From a question to a plan: matching, sizing, search and explanation."""

from meshwright.planner.explain import reasons
from meshwright.planner.plan import Change, Offer, Plan, Question, Reason
from meshwright.planner.recommend import case_of, on_engine, recommend, smallest_fit
from meshwright.planner.scaling import batch_for_tokens, scaled_batch, scaled_lr

__all__ = [
    "Change",
    "Offer",
    "Plan",
    "Question",
    "Reason",
    "batch_for_tokens",
    "case_of",
    "on_engine",
    "reasons",
    "recommend",
    "scaled_batch",
    "scaled_lr",
    "smallest_fit",
]
