"""Adapters: low-rank pairs beside frozen linear layers. They alone learn; the model's own weights stay as they are.

    y = W·x + s·B·A·x         s = alpha / rank (lora, dora) or alpha / √rank (rslora)
    y = m·(W + s·B·A)·x / n   dora: m is learnt, n is the norm of each row of W + s·B·A and has no gradient

qlora is lora on weights that are stored in four bits. Dropout drops channels of what A multiplies.

A, B and m are parameters of the layer that they adapt, so all other names stay the model's own. A starts uniformly in
±1/√inputs, B at nought and m at the norms of W: an adapted model starts as the model itself.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.engine.collectives import sum_out
from meshwright.engine.experts.expert_params import add_expert_adapter, expert_blocks, first_proj, pack_expert
from meshwright.engine.kernels.dropout_keys import apply_dropout
from meshwright.engine.kernels.lora_linear import adapted_linear, packed_linear
from meshwright.engine.kernels.nf4 import block_length
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.model.nf4_linear import pack_linear
from meshwright.engine.model.stage import Stage
from meshwright.engine.patching import Patch, apply, base_class
from meshwright.engine.vision import is_vision_module
from meshwright.errors import InputError
from meshwright.recipes.types import Peft

# What the recipe's targets are called in the models: a name matches the end of a path. Experts are stacked in one
# tensor per projection and come under fc1 and fc2 too. Of latent attention the projections that make the heads are
# adapted, not those into the latent space; gated delta rules stand where attention stands in other layers.
TARGETS: dict[str, tuple[str, ...]] = {
    "qkv": (
        *("q_proj", "k_proj", "v_proj"),
        *("q_b_proj", "kv_b_proj"),
        *("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
        "c_attn",
    ),
    "proj": ("o_proj", "linear_attn.out_proj", "attn.c_proj"),
    "fc1": ("gate_proj", "up_proj", "c_fc"),
    "fc2": ("down_proj", "mlp.c_proj"),
    "mamba_in": ("mixer.in_proj",),
    "mamba_out": ("mixer.out_proj",),
}
INIT_B = InitSpec("constant", 0.0)


def add_adapters(stage: Stage, peft: Peft, dtype: torch.dtype) -> dict[str, InitSpec]:
    """Freezes a stage and gives the linear layers that the recipe names adapters; says how those start.

    Of a model that sees, only the language model is adapted.
    """
    stage.requires_grad_(False)
    found: dict[str, InitSpec] = {}
    for name, module in list(stage.named_modules()):
        if peft_target(name) in peft.targets and is_linear(module) and not is_vision_module(stage.vision_modules, name):
            _adapt(module, peft, dtype)
            if peft.method == "qlora":
                pack_linear(module, name)
            found |= {f"{name}.{part}": initial for part, initial in _starts(module).items()}
            if name.endswith("mixer.out_proj"):
                _keep_out_of_fused_kernels(stage.get_submodule(name.rpartition(".")[0]))
    found |= _adapt_experts(stage, peft, dtype)
    if not found:
        raise InputError(
            f"layers {', '.join(map(str, stage.layers))} have none of the linear layers that get adapters",
            field="peft.targets",
            value=",".join(peft.targets),
            fix=("name other targets, or give every pipeline stage layers that have them",),
        )
    if peft.dropout:
        _check_dropout(stage, peft)
        _drop_out(stage, peft.dropout)
    return found


def tune_adapters(layer: nn.Module) -> int:
    """Sends the products of adapted linear layers through the kernels tuned for long load; says how many."""
    adapted: list[Any] = [module for module in layer.modules() if hasattr(module, "lora_tuned")]
    for linear in adapted:
        linear.lora_tuned = True
    return len(adapted)


def patch_base(linear: Any, patch: type[Patch]) -> None:
    """Patch the frozen linear layer below its adapter."""
    apply(linear, patch, under=Adapter)
    linear.lora_fused = False  # the fused operation multiplies by the weight itself


def peft_target(path: str) -> str:
    """What recipes call a module, by its path in the model; empty where it is never adapted."""
    ends = (f".{path}".endswith(f".{name}") for names in TARGETS.values() for name in names)
    targets = (target for target, names in TARGETS.items() for _ in names)
    return next((target for target, matches in zip(targets, ends, strict=True) if matches), "")


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by one matrix: torch's linear layer, or GPT-2's, which stores it transposed."""
    return isinstance(module, nn.Linear) or _inputs_first(module)


def _inputs_first(module: nn.Module) -> bool:
    return base_class(module).__name__ == "Conv1D" and hasattr(module, "nf")


def scale_of(peft: Peft) -> float:
    """The factor of the adapters' output."""
    return peft.alpha / (math.sqrt(peft.rank) if peft.method == "rslora" else peft.rank)


class DropoutContext:
    """What the adapters of a layer are told with every micro batch: the keys of its tokens."""

    keys: torch.Tensor | None = None


def _drop_out(stage: Stage, probability: float) -> None:
    """Gives the adapters of a stage dropout; the keys of the tokens come with the layers' arguments."""
    layer: Any
    for layer in stage.layers.values():
        layer.dropout_context = DropoutContext()
        adapted: list[tuple[str, Any]] = [(n, m) for n, m in layer.named_modules() if hasattr(m, "lora_A")]
        for name, linear in adapted:
            # Keys differ between layers already, so that all layers share one graph.
            linear.lora_key, linear.dropout_context = zlib.crc32(name.encode()), layer.dropout_context
            linear.lora_dropout = probability
        apply(layer, AdapterDropout)


class AdapterDropout(Patch):
    """A decoder layer that passes its adapters the dropout keys of the tokens; also when it is recomputed."""

    tag = "AdapterDropout"

    def forward(self: Any, *args: Any, noise: torch.Tensor | None = None, **kwargs: Any) -> Any:
        self.dropout_context.keys = noise
        return super().forward(*args, **kwargs)


def _check_dropout(stage: Stage, peft: Peft) -> None:
    """Refuses dropout where a linear layer does not know which token is which, and where dora would go past it."""
    routed = list(expert_blocks(stage)) if {"fc1", "fc2"} & set(peft.targets) else []
    mixers = [
        name for name, m in stage.named_modules() if hasattr(m, "conv1d") and any(_is_adapted(c) for c in m.children())
    ]
    why = ""
    if peft.method == "dora":
        why, fix = "dora takes the norms of whole weights, past the dropout", "peft.method=lora"
    elif routed:
        why, fix = f"tokens reach the experts of {routed[0].name} out of order", "peft.targets=qkv,proj"
    elif mixers:
        why, fix = f"{mixers[0]} takes documents and sequences apart before its linear layers", "peft.dropout=0"
    if why:
        raise InputError(
            f"{why}: there would be other masks in every layout",
            field="peft.dropout",
            value=peft.dropout,
            fix=tuple(dict.fromkeys((fix, "peft.dropout=0"))),
        )


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def _adapt(module: Any, peft: Peft, dtype: torch.dtype) -> None:
    """Adds the parameters of an adapter to a linear layer and makes its forward use them."""
    inputs_first = _inputs_first(module)
    inputs, outputs = module.weight.shape if inputs_first else reversed(module.weight.shape)
    normed = peft.method == "dora"
    device = module.weight.device
    module.lora_A = nn.Parameter(torch.empty(peft.rank, inputs, dtype=dtype, device=device))
    module.lora_B = nn.Parameter(torch.empty(outputs, peft.rank, dtype=dtype, device=device))
    if normed:
        module.lora_magnitude = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device))
    module.lora_scale, module.lora_inputs_first = scale_of(peft), inputs_first
    module.lora_tuned, module.lora_dropout = False, 0.0
    module.base_block = block_length(module.weight.shape[-1])
    module.lora_axes = ()  # ranks that hold other inputs of the same rows
    module.lora_fused = type(module) is nn.Linear
    apply(module, ADAPTERS[peft.method])


def _starts(module: Any) -> dict[str, InitSpec]:
    starts = {"lora_A": _uniform(module.lora_A.shape[-1]), "lora_B": INIT_B}
    if hasattr(module, "lora_magnitude"):
        starts["lora_magnitude"] = InitSpec("constant", 1.0)  # until `start_magnitudes` knows the weights
    return starts


def _uniform(inputs: int) -> InitSpec:
    return InitSpec("uniform", -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


class Adapter(Patch):
    """Base class of the patches that add a low-rank adapter to a frozen linear layer."""


class LoRA(Adapter):
    """y = W·x + s·B·A·x, as one operation where the frozen layer is a plain nn.Linear."""

    tag = "LoRA"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.lora_fused and not _drops(self):
            return _fused(self, x, self.weight, None)
        return _add_adapter(self, x, super().forward(x))


class QLoRA(Adapter):
    """The same on a weight that is stored in four bits."""

    tag = "QLoRA"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not _drops(self):
            return _fused(self, x, self.base_codes, self.base_scales)
        return _add_adapter(self, x, _packed_base(self, x))


class DoRA(Adapter):
    """y = m·(W + s·B·A)·x / n."""

    tag = "DoRA"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return _renormed(self, _add_adapter(self, x, super().forward(x)))


ADAPTERS: dict[str, type[Adapter]] = {"lora": LoRA, "rslora": LoRA, "qlora": QLoRA, "dora": DoRA}


def _drops(linear: Any) -> bool:
    return bool(linear.lora_dropout and linear.training)


def _fused(linear: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    first, second = linear.lora_A.to(x.dtype), linear.lora_B.to(x.dtype)  # may be stored in a wider format
    settings = (linear.lora_scale, linear.lora_inputs_first, linear.lora_tuned)
    out = adapted_linear(x, weight, scales, first, second, *settings)
    return out if linear.bias is None else out + linear.bias


def _add_adapter(linear: Any, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    first, second = linear.lora_A.to(x.dtype), linear.lora_B.to(x.dtype)
    kept = _dropped(linear, x) if _drops(linear) else x
    return base + functional.linear(functional.linear(kept, first) * linear.lora_scale, second)


def _dropped(linear: Any, x: torch.Tensor) -> torch.Tensor:
    first = linear.lora_axes[0].rank * x.shape[-1] if linear.lora_axes else 0
    return apply_dropout(x, linear.dropout_context.keys, linear.lora_key, first, linear.lora_dropout)


def _packed_base(linear: Any, x: torch.Tensor) -> torch.Tensor:
    made = packed_linear(x, linear.base_codes, linear.base_scales, linear.lora_inputs_first)
    return made if linear.bias is None else made + linear.bias


def _renormed(linear: Any, out: torch.Tensor) -> torch.Tensor:
    """Rows of the adapted weight taken to the length that dora learns; the bias stays out of it."""
    ratio = (linear.lora_magnitude / _row_norms(linear).to(linear.lora_magnitude.dtype)).to(out.dtype)
    renormed: torch.Tensor = out * ratio if linear.bias is None else (out - linear.bias) * ratio + linear.bias
    return renormed


def _row_norms(linear: Any) -> torch.Tensor:
    with torch.no_grad():
        weight = linear.weight.t() if linear.lora_inputs_first else linear.weight
        adapted = weight + linear.lora_scale * (linear.lora_B @ linear.lora_A)
        squares: torch.Tensor = adapted.float().square().sum(1)
        for axis in linear.lora_axes:
            squares = sum_out(squares, axis)
        return squares.sqrt()


@torch.no_grad()
def init_magnitudes(stage: Stage) -> None:
    """Sets what dora learns to the norms of the weights as they are; call it whenever base weights were filled."""
    for module in stage.modules():
        linear: Any = module
        parts = dict(linear.named_parameters(recurse=False))
        for name in (n for n in parts if n.startswith("lora_magnitude")):
            weight = full_tensor(parts[name.replace("lora_magnitude", "weight")])
            norms = weight.float().norm(dim=0 if linear.lora_inputs_first else 1)
            fill_initial(parts[name], name, InitSpec("values", values=norms), seed=0)


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    there = parameter.to(parameter.device_mesh.device_type)  # offloaded weights wait where no collective reaches them
    return there.full_tensor()  # type: ignore[no-any-return,attr-defined]  # still a DTensor


def _adapt_experts(stage: Stage, peft: Peft, dtype: torch.dtype) -> dict[str, InitSpec]:
    found: dict[str, InitSpec] = {}
    for block in expert_blocks(stage):
        for target, name in (("fc1", first_proj(block.experts)), ("fc2", "down_proj")):
            if target not in peft.targets:
                continue
            if peft.method == "dora":
                raise InputError(
                    f"dora adapts single matrices, not the stacked experts that {target} names too",
                    field="peft.method",
                    value="dora",
                    fix=("peft.method=lora", "peft.targets=qkv,proj"),
                )
            inputs = add_expert_adapter(block.experts, name, peft.rank, scale_of(peft), dtype)
            if peft.method == "qlora":
                pack_expert(block.experts, name)
            path = f"{block.name}.experts.{name}"
            found |= {f"{path}_lora_A": _uniform(inputs), f"{path}_lora_B": INIT_B}
    return found


def _keep_out_of_fused_kernels(mixer: Any) -> None:
    """State-space kernels multiply by the output projection's weight themselves, past its adapter, when training."""
    apply(mixer, UnfusedMixer)


class UnfusedMixer(Patch):
    """A mixer that never reports training mode, so that it takes the path through its output projection."""

    tag = "Unfused"
    training = property(lambda self: False, lambda self, value: None)
