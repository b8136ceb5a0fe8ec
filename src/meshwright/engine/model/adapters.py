"""LoRA adapters: trained low-rank matrices added to frozen linear layers.

    y = W·x + s·B·A·x         s = alpha / rank (lora, dora) or alpha / √rank (rslora)
    y = m·(W + s·B·A)·x / n   dora: m is trained, n is the norm of each row of W + s·B·A and has no gradient

qlora is lora on weights that are stored in four bits. Dropout applies to the input of A.

A, B and m are parameters of the layer they adapt, so all other names stay those of the model. A starts uniform in
±1/√inputs, B at zero and m at the norms of W: an adapted model starts as the model itself.
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

# Module names of the recipe's targets: a name matches the end of a path. fc1 and fc2 include experts, which are stacked
# in one tensor per projection. In latent attention the projections into heads are adapted, not those into the latent
# space; gated-delta mixers count as attention.
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
    """Freeze a stage and add adapters to the targeted linear layers; return the adapters' init specs.

    In a vision-language model only the language model is adapted.
    """
    stage.requires_grad_(False)
    found: dict[str, InitSpec] = {}
    for name, module in list(stage.named_modules()):
        if peft_target(name) in peft.targets and is_linear(module) and not is_vision_module(stage.vision_modules, name):
            _adapt(module, peft, dtype)
            if peft.method == "qlora":
                pack_linear(module, name)
            found |= {f"{name}.{part}": initial for part, initial in _init_specs(module).items()}
            if name.endswith("mixer.out_proj"):
                _disable_fused_mixer(stage.get_submodule(name.rpartition(".")[0]))
    found |= _adapt_experts(stage, peft, dtype)
    if not found:
        raise InputError(
            f"layers {', '.join(map(str, stage.layers))} have none of the targeted linear layers",
            field="peft.targets",
            value=",".join(peft.targets),
            fix=("choose other targets, or give every pipeline stage layers that have them",),
        )
    if peft.dropout:
        _check_dropout(stage, peft)
        _add_dropout(stage, peft.dropout)
    return found


def tune_adapters(layer: nn.Module) -> int:
    """Use the GEMM kernels tuned for sustained load in adapted linear layers; return how many."""
    adapted: list[Any] = [module for module in layer.modules() if hasattr(module, "lora_tuned")]
    for linear in adapted:
        linear.lora_tuned = True
    return len(adapted)


def patch_base(linear: Any, patch: type[Patch]) -> None:
    """Patch the frozen linear layer below its adapter."""
    apply(linear, patch, under=Adapter)
    linear.lora_fused = False  # the fused operation multiplies by the weight itself


def peft_target(path: str) -> str:
    """Return the target name of a module by its path in the model; empty if it is never adapted."""
    pairs = ((target, name) for target, names in TARGETS.items() for name in names)
    return next((target for target, name in pairs if f".{path}".endswith(f".{name}")), "")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear, or GPT-2's Conv1D, which stores its weight transposed."""
    return isinstance(module, nn.Linear) or _inputs_first(module)


def _inputs_first(module: nn.Module) -> bool:
    return base_class(module).__name__ == "Conv1D" and hasattr(module, "nf")


def scale_of(peft: Peft) -> float:
    """Return the factor of the adapters' output."""
    return peft.alpha / (math.sqrt(peft.rank) if peft.method == "rslora" else peft.rank)


class DropoutContext:
    """The dropout keys of the current micro batch's tokens, shared by the adapters of a layer."""

    keys: torch.Tensor | None = None


def _add_dropout(stage: Stage, probability: float) -> None:
    """Add dropout to the adapters of a stage; the layers get the tokens' keys as an argument."""
    layer: Any
    for layer in stage.layers.values():
        layer.dropout_context = DropoutContext()
        adapted: list[tuple[str, Any]] = [(n, m) for n, m in layer.named_modules() if hasattr(m, "lora_A")]
        for name, linear in adapted:
            # The name inside the layer only: token keys differ per layer already, and all layers must share one graph.
            linear.lora_key, linear.dropout_context = zlib.crc32(name.encode()), layer.dropout_context
            linear.lora_dropout = probability
        apply(layer, AdapterDropout)


class AdapterDropout(Patch):
    """A decoder layer that passes its adapters the dropout keys of the tokens; also when it is recomputed."""

    tag = "AdapterDropout"

    def forward(self: Any, *args: Any, dropout_keys: torch.Tensor | None = None, **kwargs: Any) -> Any:
        self.dropout_context.keys = dropout_keys
        return super().forward(*args, **kwargs)


def _check_dropout(stage: Stage, peft: Peft) -> None:
    """Raise if dropout cannot be the same in every layout: a linear layer must know its tokens."""
    routed = list(expert_blocks(stage)) if {"fc1", "fc2"} & set(peft.targets) else []
    mixers = [
        name for name, m in stage.named_modules() if hasattr(m, "conv1d") and any(_is_adapted(c) for c in m.children())
    ]
    reason = ""
    if peft.method == "dora":
        reason, fix = "dora normalizes by the full weights, which bypasses the dropout", "peft.method=lora"
    elif routed:
        reason, fix = f"tokens reach the experts of {routed[0].name} in another order", "peft.targets=qkv,proj"
    elif mixers:
        reason, fix = f"{mixers[0]} reorders tokens by document before its linear layers", "peft.dropout=0"
    if reason:
        raise InputError(
            f"{reason}: dropout masks would depend on the layout",
            field="peft.dropout",
            value=peft.dropout,
            fix=tuple(dict.fromkeys((fix, "peft.dropout=0"))),
        )


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def _adapt(module: Any, peft: Peft, dtype: torch.dtype) -> None:
    """Add the parameters of an adapter to a linear layer and patch its forward."""
    inputs_first = _inputs_first(module)
    inputs, outputs = module.weight.shape if inputs_first else reversed(module.weight.shape)
    has_magnitude = peft.method == "dora"
    device = module.weight.device
    module.lora_A = nn.Parameter(torch.empty(peft.rank, inputs, dtype=dtype, device=device))
    module.lora_B = nn.Parameter(torch.empty(outputs, peft.rank, dtype=dtype, device=device))
    if has_magnitude:
        module.lora_magnitude = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device))
    module.lora_scale, module.lora_inputs_first = scale_of(peft), inputs_first
    module.lora_tuned, module.lora_dropout = False, 0.0
    module.base_block = block_length(module.weight.shape[-1])
    module.lora_axes = ()  # groups that share the rows' inputs
    module.lora_fused = type(module) is nn.Linear
    apply(module, ADAPTERS[peft.method])


def _init_specs(module: Any) -> dict[str, InitSpec]:
    specs = {"lora_A": _uniform(module.lora_A.shape[-1]), "lora_B": INIT_B}
    if hasattr(module, "lora_magnitude"):
        specs["lora_magnitude"] = InitSpec("constant", 1.0)  # until `start_magnitudes` knows the weights
    return specs


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
        return _apply_magnitude(self, _add_adapter(self, x, super().forward(x)))


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
    out = packed_linear(x, linear.base_codes, linear.base_scales, linear.lora_inputs_first)
    return out if linear.bias is None else out + linear.bias


def _apply_magnitude(linear: Any, out: torch.Tensor) -> torch.Tensor:
    """Scale the rows of the adapted weight to dora's trained magnitudes; the bias is not scaled."""
    ratio = (linear.lora_magnitude / _row_norms(linear).to(linear.lora_magnitude.dtype)).to(out.dtype)
    scaled: torch.Tensor = out * ratio if linear.bias is None else (out - linear.bias) * ratio + linear.bias
    return scaled


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
    """Set dora's magnitudes to the norms of the weights; call it whenever base weights were filled."""
    for module in stage.modules():
        linear: Any = module
        parts = dict(linear.named_parameters(recurse=False))
        for name in (n for n in parts if n.startswith("lora_magnitude")):
            weight = full_tensor(parts[name.replace("lora_magnitude", "weight")])
            norms = weight.float().norm(dim=0 if linear.lora_inputs_first else 1)
            fill_initial(parts[name], name, InitSpec("values", values=norms), seed=0)


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a parameter that may be sharded."""
    if not isinstance(parameter, DTensor):
        return parameter
    on_device = parameter.to(parameter.device_mesh.device_type)  # collectives cannot reach offloaded weights
    return on_device.full_tensor()  # type: ignore[no-any-return,attr-defined]  # still a DTensor


def _adapt_experts(stage: Stage, peft: Peft, dtype: torch.dtype) -> dict[str, InitSpec]:
    found: dict[str, InitSpec] = {}
    for block in expert_blocks(stage):
        for target, name in (("fc1", first_proj(block.experts)), ("fc2", "down_proj")):
            if target not in peft.targets:
                continue
            if peft.method == "dora":
                raise InputError(
                    f"dora does not support stacked experts, which {target} includes",
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


def _disable_fused_mixer(mixer: Any) -> None:
    """Disable fused state-space kernels: in training they read the output projection's weight, without its adapter."""
    apply(mixer, UnfusedMixer)


class UnfusedMixer(Patch):
    """A mixer that never reports training mode, so that it takes the path through its output projection."""

    tag = "Unfused"
    training = property(lambda self: False, lambda self, value: None)
