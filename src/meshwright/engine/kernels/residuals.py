"""Decoder layers whose output projections add the residual inside their GEMM, instead of in a separate pass.

Only layers of the form `x + attention(norm(x))`, then `x + mlp(norm(x))`, are patched. They are recognized by the
source of their forward, not by family name: 68 decoder layers of transformers 5.17 match. The optimization is optional:
a layer that does not match keeps its own forward.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from torch import Tensor, nn

from meshwright.engine.kernels.linears import TunedLinear, linear_add
from meshwright.engine.patching import Patch, apply

LAYER = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, position_ids=position_ids,
    past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
"""
LAST_OF_ATTENTION = "attn_output = self.o_proj(attn_output)\nreturn attn_output, attn_weights"
LAST_OF_MLP = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\nreturn down_proj"


def fuse_residuals(model: nn.Module) -> int:
    """Let o_proj and down_proj of every matching layer add the residual; return how many projections do.

    For layers without tp, after `tune_linears`: with tp the reduction over ranks comes before the residual.
    """
    fused = 0
    layer: Any
    for layer in list(model.modules()):
        cls: Any = type(layer)
        if _ends_with(cls, LAYER):
            attention = _defer(layer.self_attn, "o_proj", LAST_OF_ATTENTION)
            mlp = _defer(layer.mlp, "down_proj", LAST_OF_MLP)
            if attention or mlp:
                apply(layer, FusedResidual)
            fused += attention + mlp
    return fused


def _defer(module: Any, name: str, ending: str) -> bool:
    """Defer a module's last projection to its layer if it is the last operation of the module."""
    cls: Any = type(module)
    last: Any = getattr(module, name, None)
    tuned = isinstance(last, TunedLinear) and not isinstance(last, DeferredProjection)
    if not tuned or last.bias is not None or not _ends_with(cls, ending):
        return False
    apply(last, DeferredProjection)
    return True


class DeferredProjection(Patch):
    """A projection that returns its input: the layer multiplies, together with its residual."""

    tag = "Deferred"

    def forward(self, input: Tensor) -> Tensor:
        return input


class FusedResidual(Patch):
    """A decoder layer whose deferred projections add the residual stream inside their product."""

    tag = "FusedResidual"

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(("attention_mask", "position_ids", "past_key_values", "use_cache"), args, strict=False))
        inner, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named, **kwargs)
        hidden_states = _add(hidden_states, inner, getattr(self.self_attn, "o_proj", None))
        inner = self.mlp(self.post_attention_layernorm(hidden_states))
        return _add(hidden_states, inner, getattr(self.mlp, "down_proj", None))


def _add(residual: Tensor, inner: Tensor, last: Any) -> Tensor:
    deferred = isinstance(last, DeferredProjection)
    return linear_add(residual, inner, last.weight) if deferred else residual + inner


@cache
def _ends_with(cls: Any, ending: str) -> bool:
    """Return whether the source of a class's forward ends with these statements."""
    statements = [ast.unparse(node) for node in ast.parse(ending).body]
    return _statements(cls)[-len(statements) :] == statements


@cache
def _statements(cls: Any) -> list[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    body = getattr(tree.body[0], "body", [])
    return [ast.unparse(one) for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
