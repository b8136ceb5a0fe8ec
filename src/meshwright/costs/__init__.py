"""The cost model: parameters, memory, FLOPs and step time of one layout, or of a million in one call."""

from meshwright.costs.estimate import Band, Estimate, estimate, to_dict
from meshwright.costs.flops import flops_per_token, forward_flops, layer_flops
from meshwright.costs.memory import PARTS, Fit, Memory, fit_words, memory, memory_by_stage
from meshwright.costs.parameters import parameters
from meshwright.costs.time import StepTime, step_time
from meshwright.costs.timeline import Timeline, timeline

__all__ = [
    "PARTS",
    "Band",
    "Estimate",
    "Fit",
    "Memory",
    "StepTime",
    "Timeline",
    "estimate",
    "fit_words",
    "flops_per_token",
    "forward_flops",
    "layer_flops",
    "memory",
    "memory_by_stage",
    "parameters",
    "step_time",
    "timeline",
    "to_dict",
]
