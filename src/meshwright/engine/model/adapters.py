"""LoRA adapters: trained low-rank matrices added to frozen linear layers.

    y = W·x + s·B·A·x         s = alpha / rank (lora, dora) or alpha / √rank (rslora)
    y = m·(W + s·B·A)·x / n   dora: m is trained, n is the norm of each row of W + s·B·A and has no gradient

qlora is lora on weights that are stored in four bits. Dropout applies to the input of A.

A, B and m are parameters of the layer they adapt, so all other names stay those of the model. A starts uniform in
±1/√inputs, B at zero and m at the norms of W: an adapted model starts as the model itself.
"""

from __future__ import annotations

import math
import re
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
from meshwright.engine.model.transformers_stage import TransformersStage
from meshwright.engine.patching import Patch, apply, base_class
from meshwright.engine.vision import is_vision_module
from meshwright.errors import InputError, closest
from meshwright.recipes.adapter_targets import (
    ALL_LINEAR,
    EXPERT_ALIASES,
    GROUPS,
    UNGROUPED,
    group_of,
    groups_of,
    is_target,
)
from meshwright.recipes.engine_models import has_own_layers
from meshwright.recipes.types import Peft

INIT_B = InitSpec("constant", 0.0)


def add_adapters(stage: Stage, peft: Peft, dtype: torch.dtype) -> dict[str, InitSpec]:
    """Freeze a stage and add adapters to the targeted linear layers; return the adapters' init specs.

    In a vision-language model only the language model is adapted.
    """
    stage.requires_grad_(False)
    found: dict[str, InitSpec] = {}
    for name, module in list(stage.named_modules()):
        if is_linear(module) and _is_chosen(stage, name, module, peft.targets):
            _adapt(module, peft, dtype)
            if peft.method == "qlora":
                pack_linear(module, name)
            found |= {f"{name}.{part}": initial for part, initial in _init_specs(module).items()}
            if name.endswith("mixer.out_proj"):
                _disable_fused_mixer(stage.get_submodule(name.rpartition(".")[0]))
    if not isinstance(stage, TransformersStage):  # transformers' own experts have no adapters
        found |= _adapt_experts(stage, peft, dtype)
    if peft.method == "qlora":
        _pack_others(stage)
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


ROUTING = re.compile(r"(^|\.)(gate|router|indexer|scorer)(\.|$)")


def _is_chosen(stage: Stage, path: str, module: nn.Module, targets: tuple[str, ...]) -> bool:
    """Return whether a linear layer is a target.

    In a model that transformers runs, the default groups and all-linear mean every linear layer of its blocks, except
    those that choose experts or tokens: its names need not be those of the groups.
    """
    if not isinstance(stage, TransformersStage):
        return is_target(path, targets) and not is_vision_module(stage.vision_modules, path)
    if not _is_plain_product(module):
        return False
    everything = ALL_LINEAR in targets or set(Peft().targets) <= set(targets)
    in_block = path.startswith(f"{stage.layers_path}.")
    return is_target(path, targets) or (everything and in_block and not ROUTING.search(path))


def _is_plain_product(module: Any) -> bool:
    """Return whether a module on the meta device multiplies rows by its weight: a subclass may do something else."""
    if base_class(module) is nn.Linear or _inputs_first(module):
        return True
    rows = torch.empty(3, module.weight.shape[1], dtype=module.weight.dtype, device="meta")
    try:
        found = module(rows)
    except (RuntimeError, ValueError, IndexError):  # other shapes than those of a linear layer
        return False
    return isinstance(found, torch.Tensor) and found.shape == (3, module.weight.shape[0])


def check_targets(model: Any, peft: Peft, tp: int) -> None:
    """Raise if a named target matches no linear layer of the full model, or one that tp cannot shard."""
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    experts = {block.name: block.experts for block in expert_blocks(model)}
    for target in (name for name in peft.targets if name not in GROUPS and name != ALL_LINEAR):
        stacked = any(is_target(path, (target,)) for name, e in experts.items() for path in _expert_paths(name, e))
        if not stacked and not any(is_target(name, (target,)) for name in linears):
            whole = not has_own_layers(model.config.model_type)
            named = (name for name in linears if whole or group_of(name) or _is_ungrouped(name))
            valid = sorted({name.rpartition(".")[2] for name in named})
            raise InputError(
                f"{model.config.model_type} has no such linear layer; it has {', '.join(valid)}, and the groups "
                f"{', '.join(dict.fromkeys(group_of(name) for name in linears if group_of(name)))}",
                field="peft.targets",
                value=target,
                fix=tuple(f"peft.targets={near}" for near in closest(target, [*valid, ALL_LINEAR])),
            )
    unsharded = [name for name in linears if _is_ungrouped(name) and is_target(name, peft.targets)]
    if tp > 1 and unsharded:
        raise InputError(
            f"{unsharded[0]} is the same on every tensor-parallel rank and has no adapter with tp={tp}",
            field="peft.targets",
            value=",".join(peft.targets),
            fix=("layout.tp=1", "peft.targets=qkv,proj,fc1,fc2"),
        )


def _is_ungrouped(path: str) -> bool:
    return path.rpartition(".")[2] in UNGROUPED


def _expert_paths(name: str, experts: Any) -> list[str]:
    """Return the paths under which the projections of stacked experts may be named."""
    parts = [first_proj(experts), "gate_proj", "up_proj", "down_proj", *EXPERT_ALIASES]
    return [f"{name}.experts{number}.{part}" for number in ("", ".0") for part in parts]


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
    routed = list(expert_blocks(stage)) if {"fc1", "fc2"} & set(groups_of(peft.targets)) else []
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


class PackedLinear(Patch):
    """A frozen linear layer without an adapter whose weight is stored in four bits."""

    tag = "NF4"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return _packed_base(self, x)


PACKED_GROUPS = ("qkv", "proj", "fc1", "fc2")


def _pack_others(stage: Stage) -> None:
    """Store the linear layers without adapters in four bits too: the targets choose what is trained, not what is kept.

    Mixers stay as they are, because their fused kernels read the weights themselves, and so do rows of odd length.
    """
    for name, module in list(stage.named_modules()):
        others = is_linear(module) and not _is_adapted(module) and group_of(name) in PACKED_GROUPS
        if not others or is_vision_module(stage.vision_modules, name):
            continue
        linear: Any = module
        if linear.weight.shape[-1] % 2:
            continue
        linear.lora_inputs_first, linear.base_block = _inputs_first(linear), block_length(linear.weight.shape[-1])
        apply(linear, PackedLinear)
        pack_linear(linear, name)
    for block in expert_blocks(stage):
        for part in (first_proj(block.experts), "down_proj"):
            if getattr(block.experts, part) is not None:
                pack_expert(block.experts, part)


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
            if not _adapts_experts(f"{block.name}.experts", name, peft):
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


def _adapts_experts(path: str, name: str, peft: Peft) -> bool:
    """Return whether the targets include a projection of stacked experts; raise if only the gate or only up is one."""
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    if is_target(f"{path}.{name}", peft.targets):
        return True
    aliases = {module: alias for alias, module in EXPERT_ALIASES.items()}
    named = [
        any(is_target(f"{path}{number}.{one}", peft.targets) for number in ("", ".0") for one in (part, aliases[part]))
        for part in parts
    ]
    if any(named) != all(named):
        raise InputError(
            f"{path} stores gate_proj and up_proj as one tensor, which has one adapter: name both or none",
            field="peft.targets",
            value=",".join(peft.targets),
            fix=("peft.targets=gate_proj,up_proj,down_proj",),
        )
    return all(named)


def _disable_fused_mixer(mixer: Any) -> None:
    """Disable fused state-space kernels: in training they read the output projection's weight, without its adapter."""
    apply(mixer, UnfusedMixer)


class UnfusedMixer(Patch):
    """A mixer that never reports training mode, so that it takes the path through its output projection."""

    tag = "Unfused"
    training = property(lambda self: False, lambda self, value: None)
