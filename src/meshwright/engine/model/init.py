"""Weight initialization that depends only on the seed and the parameter's name: the same for every layout.

transformers' init of each parameter is recorded on the meta device (a normal of some width, ones, a copied vector) and
replayed on the shard that a rank has. The random generator is counter-based: a value is a function of the seed, the
name and the index in the full tensor, so a rank computes only its own shard.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.engine.kernels.device_caps import has_data
from meshwright.engine.model.module_names import find_module_names
from meshwright.errors import MeshwrightError

aten = torch.ops.aten


@dataclass(frozen=True)
class InitSpec:
    """The init of a parameter or buffer: normal(a, b), uniform(a, b), constant(a) or given values."""

    kind: str
    a: float = 0.0
    b: float = 0.0
    values: torch.Tensor | None = None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records in-place init operations on meta tensors; a later one replaces an earlier one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.specs: dict[int, InitSpec] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            spec = _init_spec(func, args, kwargs or {})
            if spec is not None:
                self.specs[id(args[0])] = spec
        return out


def _init_spec(func: Any, args: Any, kwargs: Any) -> InitSpec | None:
    name = func.overloadpacket
    if name is aten.normal_:
        return InitSpec("normal", *_two_arguments(args, kwargs, "mean", 0.0, "std", 1.0))
    if name is aten.uniform_:
        return InitSpec("uniform", *_two_arguments(args, kwargs, "from", 0.0, "to", 1.0))
    if name is aten.zero_:
        return InitSpec("constant", 0.0)
    if name is aten.fill_:
        return InitSpec("constant", float(args[1]))
    if name is aten.copy_ and not args[1].is_meta:
        return InitSpec("values", values=args[1].detach().clone())
    return None


def _two_arguments(args: Any, kwargs: Any, first: str, a: float, second: str, b: float) -> tuple[float, float]:
    values = list(args[1:3])
    return (
        float(values[0] if values else kwargs.get(first, a)),
        float(values[1] if len(values) > 1 else kwargs.get(second, b)),
    )


def record_initial(model: Any, seed: int) -> dict[str, InitSpec]:
    """Return transformers' init of every parameter and buffer of a meta model, by name."""
    recorder = _Recorder()
    names = {id(module): name for name, module in model.named_modules()}
    owners = _owners(model)
    for module in reversed(list(model.modules())):  # children first, as transformers does: parents may override
        _seed_cpu(_key(seed, names[id(module)]))  # for vectors that transformers computes on the CPU
        with recorder, torch.no_grad():
            owners[id(module)]._init_weights(module)
    found = _random_vectors(model, owners, names, recorder, seed)
    missing = []
    for name, tensor in _tensors(model):
        if id(tensor) in recorder.specs:
            found.setdefault(name, recorder.specs[id(tensor)])
        elif name not in found:
            missing.append(name)
    found |= _constructed(model, missing, seed)
    return found | _scaled_outputs(model) | _patch_embeddings(model)


def _owners(model: Any) -> dict[int, Any]:
    """Return the model whose `_init_weights` applies to each module: the innermost one in a composite model."""
    owners: dict[int, Any] = {}
    for module in model.modules():  # outer ones first
        if hasattr(module, "_init_weights"):
            owners |= {id(inner): module for inner in module.modules()}
    if getattr(model, "mtp", None) is not None:  # built from the language model's layers
        owners |= dict.fromkeys(map(id, model.mtp.modules()), model.get_submodule(find_module_names(model).body))
    return owners


def _random_vectors(
    model: Any, owners: dict[int, Any], names: dict[int, str], recorder: _Recorder, seed: int
) -> dict[str, InitSpec]:
    """Return vectors that transformers draws on the model's device: drawn again with real tensors."""
    found = {}
    for module in model.modules():
        own = module._parameters
        missing = [n for n, p in own.items() if p is not None and p.ndim == 1 and id(p) not in recorder.specs]
        if not missing:
            continue
        before = {n: p for n, p in own.items() if p is not None and p.ndim == 1}
        own.update({n: nn.Parameter(torch.zeros(p.shape)) for n, p in before.items()})
        _seed_cpu(_key(seed, names[id(module)]))
        owners[id(module)]._init_weights(module)
        for n in missing:
            found[f"{names[id(module)]}.{n}"] = InitSpec("values", values=own[n].detach().clone())
        own.update(before)
    return found


def _constructed(model: Any, names: list[str], seed: int) -> dict[str, InitSpec]:
    """Return the init of tensors that only their module's constructor fills, or that are computed on their own device.

    The model is built again with small tensors on the CPU; of larger ones the operations are recorded.
    """
    if not names:
        return {}
    recorder = _Recorder()
    _seed_cpu(_key(seed, "constructed"))
    with recorder, _SmallOnCpu(), torch.no_grad():
        built = dict(_tensors(type(model)(model.config)))
    found = {}
    for name in names:
        tensor = built[name]
        if tensor.is_meta and id(tensor) not in recorder.specs:
            raise MeshwrightError(f"transformers has no init for {name}", field="model")
        found[name] = recorder.specs[id(tensor)] if tensor.is_meta else InitSpec("values", values=tensor.detach())
    return found


class _SmallOnCpu(TorchFunctionMode):
    """Allocates small new tensors on the CPU and larger ones on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        empty = func(*args, **{**kwargs, "device": "meta"})
        return func(*args, **kwargs) if empty.numel() <= BLOCK else empty


def _scaled_outputs(model: Any) -> dict[str, InitSpec]:
    """Return Nemotron-H's init of output projections: uniform, scaled down with depth."""
    if model.config.model_type != "nemotron_h":
        return {}
    depth = math.sqrt(model.config.num_hidden_layers)
    return {
        name: InitSpec("uniform", -1 / math.sqrt(p.shape[1]) / depth, 1 / math.sqrt(p.shape[1]) / depth)
        for name, p in model.named_parameters()
        if name.endswith("out_proj.weight")
    }


def _patch_embeddings(model: Any) -> dict[str, InitSpec]:
    """Return SigLIP's init of patch weights: torch has no truncated normal on meta; the cutoff is far out."""
    return {
        f"{name}.patch_embedding.weight": InitSpec(
            "normal", 0.0, 1 / math.sqrt(module.patch_embedding.weight[0].numel())
        )
        for name, module in model.named_modules()
        if type(module).__name__ == "SiglipVisionEmbeddings"
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _seed_cpu(seed: int) -> None:
    """Seed the CPU's generator alone: `torch.manual_seed` formats a stack for every kind of device it does not find."""
    torch._C.default_generator.manual_seed(seed)


def _key(seed: int, name: str) -> int:
    return (seed * 0x9E3779B1 + zlib.crc32(name.encode())) & 0x7FFFFFFF


@torch.no_grad()
def fill_initial(tensor: torch.Tensor, name: str, initial: InitSpec, seed: int) -> None:
    """Fill this rank's shard of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not has_data(local):
        return
    if initial.kind == "constant":
        local.fill_(initial.a)
        return
    if local.numel() == 0:
        return
    indices = _flat_index_parts(tensor, local.device)
    if initial.kind == "values":
        assert initial.values is not None
        local.copy_(initial.values.reshape(-1).to(local.device)[_sum(indices)].reshape(local.shape))
        return
    key = _key(seed, name)
    for first, rows in _blocks(local):
        part = [indices[0][first : first + rows.shape[0]], *indices[1:]] if indices else []
        rows.copy_(_draw(initial, key, _sum(part)))


BLOCK = 1 << 22  # values drawn or constructed at once: bounds their memory


def _blocks(local: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    rows = local if local.dim() else local.reshape(1)
    step = max(1, BLOCK // max(1, rows[0].numel()))
    for first in range(0, rows.shape[0], step):
        yield first, rows[first : first + step]


def _flat_index_parts(tensor: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Return what each dimension adds to the flat index in the full tensor of this rank's values; to be summed."""
    shape = tensor.shape
    found: list[torch.Tensor] = []
    stride = 1
    for dim in reversed(range(len(shape))):
        rows = local_indices(tensor, dim).to(device)
        found.insert(0, (rows * stride).reshape([-1 if d == dim else 1 for d in range(len(shape))]))
        stride *= shape[dim]
    return found


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for part in parts:
        total = part + total.to(part.device)
    return total


def local_indices(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the indices along a dimension of the full tensor that are on this rank."""
    rows = torch.arange(tensor.shape[dim])
    if not isinstance(tensor, DTensor):
        return rows
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    shards = [(i, p) for i, p in enumerate(tensor.placements) if getattr(p, "dim", None) == dim]
    # A strided shard (FSDP over a tensor-parallel shard) splits the result of the plain shards.
    for i, _ in sorted(shards, key=lambda c: type(c[1]) is not Shard):
        size = tensor.device_mesh.size(i)
        step = -(-len(rows) // size)
        rows = rows[coordinate[i] * step : (coordinate[i] + 1) * step]
    return rows


def _draw(initial: InitSpec, key: int, indices: torch.Tensor) -> torch.Tensor:
    first = _uniform(indices, key)
    if initial.kind == "uniform":
        return initial.a + (initial.b - initial.a) * first
    second = _uniform(indices, key ^ 0x5BD1E995)
    normal = torch.sqrt(-2 * torch.log(1 - first)) * torch.cos(2 * math.pi * second)  # Box-Muller; 1 - u is never 0
    return initial.a + initial.b * normal


def _uniform(indices: torch.Tensor, key: int) -> torch.Tensor:
    """Return values in [0, 1) from an integer hash of index and key."""
    drawn = hash32(
        hash32(indices & MASK) + (indices >> 32) * 0x9E3779B1 + key
    )  # hashed before the key is added, so that names are independent
    return (drawn >> 8).to(torch.float32) * 2.0**-24


MASK = 0xFFFFFFFF


def hash32(x: torch.Tensor) -> torch.Tensor:
    """Return a 32-bit integer hash: rounds of xor-shift and multiply in the low half of 64-bit integers."""
    x = x & MASK
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> 16)) * multiplier) & MASK
    return x ^ (x >> 16)
