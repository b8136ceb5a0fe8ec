"""Masked and soft-capped attention on CUDA: flex attention with a block mask computed from block ranges.

torch's `create_block_mask` evaluates the mask for every pair of tokens. Whether a block of 128 x 128 is empty, full or
mixed follows from its first and last position and its lowest and highest document: a few operations on a small table.

The tables are built once per micro batch outside compiled layers and passed in. The kernels take the offset of a sample
from the stride of the head dimension, which has size one: inductor gives such a dimension any stride that it likes, and
the kernels then read another sample's table, or beyond it. Inputs of a graph and outputs of a custom operation keep
their strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from meshwright.engine.attention import dry
from meshwright.engine.attention.mask_spec import AttentionSpec, shares_heads
from meshwright.engine.kernels.device_caps import is_dry

BLOCK = 128  # tokens
MAX_TWO_STAGE_WIDTH = 128  # of a head in fp32


class BlockTables(NamedTuple):
    """The mixed and the full blocks of a mask, by query block and by key block; int32.

    Counts are [batch or 1, 1, blocks], indices [batch or 1, 1, blocks, blocks] with the visited blocks first.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    groups: Tensor | None = None,
    tables: BlockTables | None = None,
) -> Tensor:
    """Return attention with any mask, sinks, documents and images, without materializing the score matrix."""
    if is_dry(q):
        out, log_sum = dry.attend_masked(q, k, v)
        return out if sinks is None else _with_sinks(out, log_sum, sinks)
    # Inside a compiled layer flex attention is compiled with the layer.
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    options: dict[str, Any] = {
        "score_mod": _score_mod(spec),
        "block_mask": block_mask(q.shape[2], spec, documents, q.device, groups, tables),
        "scale": spec.scale,
        "enable_gqa": shares_heads(q, k),
    }
    if q.dtype == torch.float32 and q.shape[3] > MAX_TWO_STAGE_WIDTH:
        options["kernel_options"] = {"num_stages": 1}  # two stages of such keys exceed Hopper's shared memory
    if sinks is None:
        attended: Tensor = flex(q, k, v, **options)
        return attended
    out, extra = flex(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return _with_sinks(out, extra.lse, sinks)


def _with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    return out * torch.sigmoid(log_sum - sinks.float()[:, None])[..., None].to(out.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # fullgraph: past the recompile limit it must raise, not fall back to materializing the score matrix.
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(
    seq_length: int,
    spec: AttentionSpec,
    documents: Tensor | None,
    device: torch.device,
    groups: Tensor | None = None,
    tables: BlockTables | None = None,
) -> BlockMask | None:
    """Return which blocks of the score matrix are empty, full or mixed; None if nothing is masked."""
    if not spec.causal and spec.window is None and documents is None:
        return None
    if tables is None:
        tables = block_tables(seq_length, spec, documents, device, groups)
    return BlockMask(
        seq_lengths=(seq_length, seq_length),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_mod(spec, documents, groups),
        **tables._asdict(),
    )


def block_tables(
    seq_length: int, spec: AttentionSpec, documents: Tensor | None, device: torch.device, groups: Tensor | None = None
) -> BlockTables:
    """Return the block tables of a mask; one opaque operation in a compiled graph."""
    return BlockTables(*_block_tables(seq_length, spec.causal, spec.window, documents, groups, device))


@torch.library.custom_op("meshwright::block_tables", mutates_args=())
def _block_tables(
    seq_length: int,
    causal: bool,
    window: int | None,
    documents: Tensor | None,
    groups: Tensor | None,
    device: torch.device,
) -> list[Tensor]:
    count = -(-seq_length // BLOCK)
    first = torch.arange(count, device=device) * BLOCK
    last = (first + BLOCK - 1).clamp_max(seq_length - 1)
    some = torch.ones(1, count, count, dtype=torch.bool, device=device)
    # The last block of an uneven length is never full: its padding is masked.
    full = some & (last - first == BLOCK - 1)[:, None] & (last - first == BLOCK - 1)
    if causal:
        some = some & (first <= last[:, None])
        full = full & (last <= first[:, None])
    inside = torch.arange(count * BLOCK, device=device).clamp_max(seq_length - 1)
    if groups is not None:  # images are numbered in order, so a block has a range of them, or none (low > high)
        tiled = torch.unflatten(groups[:, inside], 1, (count, BLOCK))
        low, high = tiled.masked_fill(tiled < 0, seq_length).amin(-1), tiled.amax(-1)
        some = some | ((low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None]))
    if window is not None:
        some = some & (first[:, None] - last < window)
        full = full & (last[:, None] - first < window)
    if documents is not None:
        low, high = torch.unflatten(documents[:, inside], 1, (count, BLOCK)).aminmax(dim=-1)
        some = some & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        full = full & (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None])
    mixed, full = some & ~full, some & full
    return [
        table for by_row in (mixed, full, mixed.transpose(1, 2), full.transpose(1, 2)) for table in _numbered(by_row)
    ]


@_block_tables.register_fake
def _(
    seq_length: int,
    causal: bool,
    window: int | None,
    documents: Tensor | None,
    groups: Tensor | None,
    device: torch.device,
) -> list[Tensor]:
    count = -(-seq_length // BLOCK)
    given = next((one for one in (documents, groups) if one is not None), None)
    rows = (1 if given is None else given.shape[0], 1, count)
    shapes = [rows, (*rows, count)] * 4
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes]


def _numbered(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every row of blocks how many are set, and the columns with the set ones first."""
    columns = torch.argsort(table.to(torch.int32), dim=-1, descending=True, stable=True)
    return _with_head(table.sum(-1)), _with_head(columns)


def _with_head(table: Tensor) -> Tensor:
    """Return an int32 copy with a head dimension of size one and the strides of a new tensor."""
    out = torch.empty(table.shape[0], 1, *table.shape[1:], dtype=torch.int32, device=table.device)
    return out.copy_(table[:, None])


def _mask_mod(
    spec: AttentionSpec, documents: Tensor | None, groups: Tensor | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    causal, window = spec.causal, spec.window

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        mask = key <= query if causal else key >= 0
        if groups is not None:
            mask = mask | ((groups[batch, query] == groups[batch, key]) & (groups[batch, query] >= 0))
        if window is not None:
            mask = mask & (query - key < window)
        if documents is not None:
            mask = mask & (documents[batch, query] == documents[batch, key])
        return mask

    return mask_mod


def _score_mod(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    cap = spec.softcap
    if cap is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
