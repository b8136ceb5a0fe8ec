"""What a training costs: parameters, memory, FLOPs and time of one layout or of a million at once."""

from meshwright.costs.memory import Memory, memory
from meshwright.costs.parameters import parameters

__all__ = ["Memory", "memory", "parameters"]
