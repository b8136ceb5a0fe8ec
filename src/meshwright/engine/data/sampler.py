"""The loader that gives each rank its part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.engine.attention import ContextAxis
from meshwright.engine.attention import positions as rank_positions
from meshwright.engine.data.prefetch import Prefetcher
from meshwright.engine.data.sample_types import PAD, Samples, Source
from meshwright.engine.faults import RunError
from meshwright.engine.mesh import Mesh

IGNORE_INDEX = -100  # label of tokens outside the loss


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step: all its micro batches concatenated, and its part of the sequence."""

    tokens: torch.Tensor  # [micro batches × size, width / cp]
    # Labels, weights, positions (and documents; token_mask for balancing losses; with multi-token prediction
    # next_tokens, labels_2, weights_2) of the same shape; and the per-sample extras, [micro batches × size, …].
    model_kwargs: dict[str, torch.Tensor]
    numbers: list[int]  # sample numbers
    target_tokens: int  # tokens in the loss in this step, over all ranks
    computed_tokens: int  # all tokens of this step over all ranks, including those outside the loss
    target_samples: int = 0  # samples with a token in the loss, over all ranks

    def micro_batches(self, size: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Return the micro batches in order."""
        parts = range(0, len(self.tokens), size)
        return [(self.tokens[i : i + size], {k: v[i : i + size] for k, v in self.model_kwargs.items()}) for i in parts]


def sample_numbers(step: int, global_batch: int, micro_batch: int, dp: int, rank: int) -> list[int]:
    """Return the sample numbers of one data-parallel rank in a step; micro batches are assigned round-robin."""
    micro_batches = global_batch // (micro_batch * dp)
    first = step * global_batch
    return [first + (i * dp + rank) * micro_batch + j for i in range(micro_batches) for j in range(micro_batch)]


def positions_in_documents(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of every token [n, width] within its document."""
    columns = np.arange(documents.shape[1])
    starts = np.zeros(documents.shape, dtype=np.int64)
    starts[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], columns[1:], 0)
    positions: NDArray[np.int64] = columns - np.maximum.accumulate(starts, axis=1)
    return positions


def pad_samples(samples: Samples, width: int) -> Samples:
    """Pad samples at the end to `width`; padding is outside the loss and forms its own document."""
    padding = width - samples.width
    if padding == 0:
        return samples
    documents = samples.documents
    if documents is not None:
        fill = documents.max(1, keepdims=True) + 1
        documents = np.concatenate([documents, np.repeat(fill, padding, 1)], 1)
    return Samples(
        np.pad(samples.tokens, ((0, 0), (0, padding)), constant_values=PAD),
        np.pad(samples.loss_mask, ((0, 0), (0, padding))),
        documents,
        samples.extras,
    )


def tokens_up_to_last_target(loss_mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tokens [n, width] are not padding: those up to the last target of a sample, itself included."""
    mask: NDArray[np.bool_] = np.logical_or.accumulate(loss_mask[:, ::-1], axis=1)[:, ::-1].copy()
    mask[:, 1:] |= mask[:, :-1].copy()
    return mask


def check_document_boundaries(samples: Samples, numbers: Sequence[int]) -> None:
    """Raise if a sample has a target across a document boundary in its loss mask."""
    documents = samples.documents
    if documents is None:
        return
    wrong = samples.loss_mask[:, :-1] & (documents[:, 1:] != documents[:, :-1])
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"sample {numbers[row]}: the target at {column} crosses a document boundary")


@dataclass(frozen=True)
class _RankSamples:
    """The padded samples of a rank in a step and their loss masks."""

    samples: Samples
    numbers: list[int]
    loss_masks: list[NDArray[np.bool_]]  # of the next token and, with multi-token prediction, of the one after it
    per_token: bool


class _Targets(NamedTuple):
    """The targets of a loss mask in a step, over all ranks."""

    tokens: int
    samples: int  # with a target


class Loader:
    """Gives each rank its part of every step and prefetches the following steps."""

    def __init__(
        self,
        source: Source,
        mesh: Mesh,
        *,
        global_batch: int,
        micro_batch: int,
        positions: torch.Tensor,
        per_token: bool,
        device: torch.device,
        mtp: bool = False,
        token_mask: bool = False,
        context: ContextAxis | None = None,
        prefetch: int = 0,
        readers: int = 1,
    ) -> None:
        """`positions` are this rank's token positions in a full-length sample, in the rank's token order.

        `context` is the cp axis; with it samples may stay narrower than seq_length, without it cp pads them.
        `prefetch` steps are prepared ahead by `readers` threads. All data-parallel ranks must create their loaders
        and request steps in the same order, because counting targets is a collective.
        """
        self.mtp = mtp  # multi-token prediction: also predict the token after the next
        self.token_mask = token_mask  # also return which tokens are not padding
        self.mesh, self.device = mesh, device
        self.global_batch, self.micro_batch, self.per_token = global_batch, micro_batch, per_token
        self.positions, self.context = positions, context
        self.seq_length = len(positions) * mesh.cp.size
        self._positions_by_width: dict[int, NDArray[np.int64]] = {self.seq_length: positions.numpy()}
        self._train_source = self._source = source
        self._prefetcher: Prefetcher[_RankSamples, tuple[Batch, Any]] = Prefetcher(
            self._read, self._finish, prefetch, readers
        )
        self._counts_group = _count_group(mesh)
        self._copy_stream: Any = torch.cuda.Stream(device) if device.type == "cuda" and prefetch else None  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @property
    def source(self) -> Source:
        """The current source; evaluation swaps in another one temporarily."""
        return self._source

    @source.setter
    def source(self, source: Source) -> None:
        self._source = source
        self._prefetcher.keep_only(self._train_source, source)

    def batch(self, step: int) -> Batch:
        """Return this rank's part of a step."""
        batch, copied = self._prefetcher.get(self._source, step)
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in (batch.tokens, *batch.model_kwargs.values()):
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stop the background threads."""
        self._prefetcher.close()

    def _read(self, source: Source, step: int) -> _RankSamples:
        dp = self.mesh.dp
        numbers = sample_numbers(step, self.global_batch, self.micro_batch, dp.size, dp.rank)
        samples = source.samples(numbers)
        check_document_boundaries(samples, numbers)
        samples = pad_samples(samples, self._width(samples.width))
        loss_masks = [samples.loss_mask, self._two_ahead(samples)] if self.mtp else [samples.loss_mask]
        per_token = bool(getattr(source, "per_token", self.per_token))  # finite sources always average over tokens
        return _RankSamples(samples, numbers, loss_masks, per_token)

    def _finish(self, step: int, read: _RankSamples | BaseException) -> tuple[Batch, Any]:
        """Return the batch on the device and the CUDA event of its copy."""
        targets = self._global_counts(step, read)
        assert isinstance(read, _RankSamples)
        if self._copy_stream is None:
            return self._batch(read, targets), None
        with torch.cuda.stream(self._copy_stream):
            batch = self._batch(read, targets)
            return batch, self._copy_stream.record_event()

    def _global_counts(self, step: int, read: _RankSamples | BaseException) -> list[_Targets]:
        """Return the targets of every loss mask over all ranks; fail on all ranks if one could not read its samples."""
        masks = [] if isinstance(read, BaseException) else read.loss_masks
        # Tokens and samples one ahead, tokens and samples two ahead, failed ranks.
        counts = torch.zeros(5, dtype=torch.int64)
        for i, mask in enumerate(masks):
            counts[2 * i], counts[2 * i + 1] = int(mask.sum()), int(mask.any(1).sum())
        counts[4] = isinstance(read, BaseException)
        if self._counts_group is not None:
            dist.all_reduce(counts, group=self._counts_group)
        if isinstance(read, BaseException):
            raise read
        ahead, samples, ahead_2, samples_2, failures = counts.tolist()
        if failures:
            raise RunError(f"another rank could not read its samples of step {step + 1}; see that rank's error")
        return [_Targets(ahead, samples), _Targets(ahead_2, samples_2)]

    def _width(self, width: int) -> int:
        """Return the padded width: pipelines need a fixed width, cp and tp one that divides evenly."""
        if width > self.seq_length:
            raise ValueError(f"samples have {width} tokens, the maximum is {self.seq_length}")
        cp, tp = self.mesh.cp.size, self.mesh.tp.size
        if self.mesh.pp.size > 1 or (cp > 1 and self.context is None):
            return self.seq_length
        unit = tp * cp * (self.context.parts if self.context is not None else 1)
        return min(-(-width // unit) * unit, self.seq_length)

    def _batch(self, read: _RankSamples, targets: list[_Targets]) -> Batch:
        samples, masks = read.samples, read.loss_masks
        positions = self._positions(samples.width)
        next_tokens = samples.tokens[:, 1:]
        fields: dict[str, NDArray[Any]] = {
            "labels": np.where(masks[0], next_tokens, IGNORE_INDEX),
            "weights": self._weights(masks[0], targets[0], read.per_token),
        }
        if self.mtp:
            fields["next_tokens"] = next_tokens
            fields["labels_2"] = np.where(masks[1], np.roll(next_tokens, -1, 1), IGNORE_INDEX)
            fields["weights_2"] = self._weights(masks[1], targets[1], read.per_token)
        if samples.documents is not None:
            fields["documents"] = samples.documents
            fields["positions"] = positions_in_documents(samples.documents)
        if self.token_mask:
            fields["token_mask"] = tokens_up_to_last_target(samples.loss_mask)
        fields["tokens"] = samples.tokens[:, :-1]
        if self.mesh.cp.size > 1:
            fields = {name: value[:, positions] for name, value in fields.items()}
        tensors = {name: self._to_device(value) for name, value in fields.items()}
        if samples.documents is None:
            tensors["positions"] = self._to_device(positions).expand(len(read.numbers), -1)
        tensors |= {name: self._to_device(value) for name, value in samples.extras.items()}
        computed = self.global_batch * samples.width
        return Batch(tensors.pop("tokens"), tensors, read.numbers, targets[0].tokens, computed, targets[0].samples)

    def _positions(self, width: int) -> NDArray[np.int64]:
        if width not in self._positions_by_width:
            self._positions_by_width[width] = rank_positions(width, self.context).numpy()
        return self._positions_by_width[width]

    def _two_ahead(self, samples: Samples) -> NDArray[np.bool_]:
        """Return the loss mask of the targets two ahead; the last token of a sample has no such target."""
        loss_mask = np.zeros_like(samples.loss_mask)
        loss_mask[:, :-1] = samples.loss_mask[:, 1:]
        if samples.documents is not None:  # all three tokens must be in one document
            loss_mask[:, :-1] &= samples.documents[:, :-1] == samples.documents[:, 1:]
        return loss_mask

    def _weights(self, loss_mask: NDArray[np.bool_], targets: _Targets, per_token: bool) -> NDArray[np.float32]:
        """Return each target's loss weight: equal per token, or equal per sample and split over its targets.

        Samples without targets are not counted: they pad the last step of train.epochs.
        """
        mask = loss_mask.astype(np.float32)
        if per_token:
            return mask / np.float32(max(targets.tokens, 1))
        samples = np.float32(max(targets.samples, 1))
        share: NDArray[np.float32] = mask / np.maximum(mask.sum(1, keepdims=True), 1) / samples
        return share

    def _to_device(self, value: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        if self.device.type == "cuda":  # only copies from pinned memory are asynchronous
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _count_group(mesh: Mesh) -> Any:
    """Return a gloo group of the data-parallel ranks for target counts: CPU collectives neither synchronize the device
    nor interleave with the step's NCCL collectives.
    """
    if mesh.dp.size == 1:
        return None
    return dist.new_group(list(mesh.dp.ranks), backend="gloo", use_local_synchronization=True)
