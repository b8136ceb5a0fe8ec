"""The engine's attention: exact, without mask tensors, on one rank or context-parallel."""

from __future__ import annotations

from meshwright.engine.attention.cp_layout import ContextAxis, context_axis, positions
from meshwright.engine.attention.interface import NAME, attend, register

__all__ = ["NAME", "ContextAxis", "attend", "context_axis", "positions", "register"]
