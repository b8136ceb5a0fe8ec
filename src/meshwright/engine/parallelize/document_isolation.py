"""Packed documents in state-space and gated-delta mixers: every document starts with an empty state.

Attention isolates documents by its mask. Mixers have no mask: their convolution and their state would leak into the
next document. So every document becomes a row of its own, padded at its end, where a causal mixer does not look. Rows
of similar length run together; at most half of the computed tokens are padding. The kernels of fla and ours in Triton
take document ids instead, and nothing is padded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.engine.data.mock import typical_documents
from meshwright.engine.kernels.device_caps import is_dry
from meshwright.engine.kernels.scan_patch import PackedScan
from meshwright.engine.mesh import GroupInfo
from meshwright.engine.parallelize.tp_plan import tp_module_of
from meshwright.engine.patching import Patch, apply


class DocumentRows(NamedTuple):
    """Documents of similar length as padded rows."""

    gather: torch.Tensor  # [documents, longest]: index of each token over all samples; any index where padded
    inside: torch.Tensor  # [tokens]: positions in the flattened rows that are not padding
    tokens: torch.Tensor  # [tokens]: index over all samples of each of these


def isolate_documents(layer: nn.Module) -> None:
    """Make the mixers of a layer run document by document where samples have document ids."""
    for module in list(layer.modules()):
        plan = tp_module_of(module)
        if plan is not None and plan.mixes_tokens:
            apply(module, DocumentBoundaries if isinstance(module, PackedScan) else DocumentIsolation)


def isolates_documents(layer: nn.Module) -> bool:
    """Return whether a mixer of the layer runs document by document, with shapes that depend on the data."""
    return any(isinstance(module, DocumentIsolation) for module in layer.modules())


class DocumentBoundaries(Patch):
    """A mixer whose kernels start every document with an empty state, given the document ids of the full sequence."""

    tag = "DocBoundaries"

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        *args: Any,
        documents: torch.Tensor | None = None,
        block_tables: Any = None,  # of attention in the same layer
        **kwargs: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = super().forward(
            hidden_states, *args, documents=_of_full_sequence(self, documents), **kwargs
        )
        return out


class DocumentIsolation(Patch):
    """A mixer that starts every document of a packed sample with an empty state."""

    tag = "DocIsolation"

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        *args: Any,
        documents: torch.Tensor | None = None,
        block_tables: Any = None,  # of attention in the same layer
        **kwargs: Any,
    ) -> torch.Tensor:
        documents = _of_full_sequence(self, documents)
        if documents is None:
            out: torch.Tensor = super().forward(hidden_states, *args, **kwargs)
            return out
        isolated: torch.Tensor = _run_by_document(self, hidden_states, documents, args, kwargs)
        return isolated


def _of_full_sequence(mixer: Any, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Return the document ids of the tokens that a mixer sees: cp ranks gather the sequence."""
    sequence = getattr(mixer, "tp_sequence", None)
    if documents is None or sequence is None or sequence.cp.size == 1:
        return documents
    return _gather_documents(documents, sequence.cp, sequence.order)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _run_by_document(mixer: Any, hidden: torch.Tensor, documents: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    flat = hidden.flatten(0, 1)
    outputs, tokens = [], []
    for rows in _plan(documents):
        out = super(DocumentIsolation, mixer).forward(flat[rows.gather], *args, **kwargs)
        outputs.append(out.flatten(0, 1)[rows.inside])
        tokens.append(rows.tokens)
    order = torch.cat(tokens).argsort()
    return torch.cat(outputs)[order].view(*hidden.shape[:2], -1)


_plans: Any = WeakIdKeyDictionary()  # by the tensor of document ids, which all layers of a micro batch share


def _plan(documents: torch.Tensor) -> list[DocumentRows]:
    plan: list[DocumentRows] | None = _plans.get(documents)
    if plan is None:
        # The one copy to the host per micro batch: row shapes depend on the document lengths.
        plan = _plans[documents] = [_on_device(rows, documents.device) for rows in document_rows(_on_host(documents))]
    return plan


def _on_host(documents: torch.Tensor) -> torch.Tensor:
    # A dry run has no data: typical documents take their place.
    return torch.from_numpy(typical_documents(*documents.shape)) if is_dry(documents) else documents.cpu()


def _on_device(rows: torch.Tensor, device: torch.device) -> DocumentRows:
    inside = (rows >= 0).flatten().nonzero().flatten()
    return DocumentRows(*(part.to(device) for part in (rows.clamp(min=0), inside, rows.flatten()[inside])))


def document_rows(documents: torch.Tensor) -> list[torch.Tensor]:
    """Return token indices [documents, longest] over all samples, one document per row, -1 where padded.

    Documents whose lengths lie between the same powers of two share a tensor, which bounds padding by one half.
    """
    count, width = documents.shape
    starts = torch.ones(count, width, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = starts.flatten().nonzero().flatten()
    lengths = torch.diff(first, append=torch.tensor([count * width]))
    tensors = []
    for bits in sorted({int(length - 1).bit_length() for length in lengths.tolist()}):
        bucket = (lengths > (1 << bits) // 2) & (lengths <= 1 << bits) if bits else lengths == 1
        offsets = torch.arange(int(lengths[bucket].max()))
        rows = first[bucket, None] + offsets
        tensors.append(rows.masked_fill(offsets >= lengths[bucket, None], -1))
    return tensors


def _gather_documents(documents: torch.Tensor, cp: GroupInfo, order: torch.Tensor) -> torch.Tensor:
    """Return the document ids of the full sequence in its natural order, gathered over cp."""
    import torch.distributed as dist

    parts = [torch.empty_like(documents) for _ in range(cp.size)]
    dist.all_gather(parts, documents.contiguous(), group=cp.group)
    return torch.cat(parts, 1).index_select(1, order.argsort().to(documents.device))
