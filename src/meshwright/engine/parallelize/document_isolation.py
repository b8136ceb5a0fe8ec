"""Packed documents in mixers that carry a state from token to token: each document begins with an empty one.

Attention keeps documents apart by its mask. State-space and gated-delta mixers have none: their convolution and their
state would run on into the next document. So every document becomes a row of its own, filled up behind its end, where
a causal mixer does not look. Rows of like length run together; at most half of what is computed is filling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.engine.data.mock import typical_documents
from meshwright.engine.kernels.device_caps import is_dry
from meshwright.engine.mesh import GroupInfo
from meshwright.engine.parallelize.tp_plan import tp_module_of
from meshwright.engine.patching import Patch, apply


class DocumentRows(NamedTuple):
    """Documents of like length: the token in each place of their rows, which places hold one, and which token each."""

    taken: torch.Tensor  # [documents, longest], counted through all samples; any token behind a document's end
    inside: torch.Tensor  # [tokens], places of the rows laid end to end
    tokens: torch.Tensor  # [tokens]


def isolate_documents(layer: nn.Module) -> None:
    """Makes the mixers of a layer run on one document at a time where samples come with documents."""
    for module in list(layer.modules()):
        region = tp_module_of(module)
        if region is not None and region.mixes_tokens:
            apply(module, DocumentIsolation)


def isolates_documents(layer: nn.Module) -> bool:
    """Whether a mixer of the layer runs on one document at a time, with shapes that only the data knows."""
    return any(isinstance(module, DocumentIsolation) for module in layer.modules())


class DocumentIsolation(Patch):
    """A mixer that starts every document of a packed sample with an empty state."""

    tag = "DocIsolation"

    def forward(
        self: Any, hidden_states: torch.Tensor, *args: Any, documents: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if documents is None:
            whole: torch.Tensor = super().forward(hidden_states, *args, **kwargs)
            return whole
        sequence = getattr(self, "region_sequence", None)
        if sequence is not None and sequence.cp.size > 1:
            documents = _gather_documents(documents, sequence.cp, sequence.order)
        apart: torch.Tensor = _run_by_document(self, hidden_states, documents, args, kwargs)
        return apart


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _run_by_document(mixer: Any, hidden: torch.Tensor, documents: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    flat = hidden.flatten(0, 1)
    parts, places = [], []
    for rows in _plan(documents):
        out = super(DocumentIsolation, mixer).forward(flat[rows.taken], *args, **kwargs)
        parts.append(out.flatten(0, 1)[rows.inside])
        places.append(rows.tokens)
    back = torch.cat(places).argsort()
    return torch.cat(parts)[back].view(*hidden.shape[:2], -1)


_plans: Any = WeakIdKeyDictionary()  # by the tensor of documents, which all layers of a micro batch share


def _plan(documents: torch.Tensor) -> list[DocumentRows]:
    found: list[DocumentRows] | None = _plans.get(documents)
    if found is None:
        every = document_rows(_on_host(documents))
        found = _plans[documents] = [_there(rows, documents.device) for rows in every]
    return found


def _on_host(documents: torch.Tensor) -> torch.Tensor:
    # A dry run's have no data; they are the typical ones.
    return torch.from_numpy(typical_documents(*documents.shape)) if is_dry(documents) else documents.cpu()


def _there(rows: torch.Tensor, device: torch.device) -> DocumentRows:
    inside = (rows >= 0).flatten().nonzero().flatten()
    return DocumentRows(*(part.to(device) for part in (rows.clamp(min=0), inside, rows.flatten()[inside])))


def document_rows(documents: torch.Tensor) -> list[torch.Tensor]:
    """The places of the documents' tokens [n, width] (counted through all samples), a row each, -1 behind their ends.

    Documents whose lengths lie between the same powers of two are in one tensor.
    """
    count, width = documents.shape
    begins = torch.ones(count, width, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = begins.flatten().nonzero().flatten()
    lengths = torch.diff(first, append=torch.tensor([count * width]))
    found = []
    for bits in sorted({int(length - 1).bit_length() for length in lengths.tolist()}):
        here = (lengths > (1 << bits) // 2) & (lengths <= 1 << bits) if bits else lengths == 1
        across = torch.arange(int(lengths[here].max()))
        rows = first[here, None] + across
        found.append(rows.masked_fill(across >= lengths[here, None], -1))
    return found


def _gather_documents(documents: torch.Tensor, cp: GroupInfo, order: torch.Tensor) -> torch.Tensor:
    """The documents of the whole sequence in its natural order, from each rank's part."""
    import torch.distributed as dist

    parts = [torch.empty_like(documents) for _ in range(cp.size)]
    dist.all_gather(parts, documents.contiguous(), group=cp.group)
    return torch.cat(parts, 1).index_select(1, order.argsort().to(documents.device))
