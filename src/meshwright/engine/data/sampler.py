"""What a source of samples gives, and how a step's samples are dealt out to ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from meshwright.engine.attention import ContextAxis
from meshwright.engine.attention import positions as held_positions
from meshwright.engine.data.prefetch import Prefetcher
from meshwright.engine.faults import RunError
from meshwright.engine.mesh import Mesh
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

NOT_COUNTED = -100  # the label of a prediction that does not count
PAD = 0  # the token that fills a sample up; it is never predicted, and nothing before it sees it


class Sample(NamedTuple):
    """One sample of a corpus: tokens [width + 1], which of its width predictions count, and what goes along uncut."""

    tokens: NDArray[np.int64]
    counted: NDArray[np.bool_]  # [width]: whether predicting tokens[i + 1] from tokens[: i + 1] counts
    documents: NDArray[np.int64] | None = None  # [width]: see Samples
    whole: Mapping[str, NDArray[Any]] = {}


class Corpus(Protocol):
    """A finite set of samples by index, in the order they lie on disk; `order.Shuffled` makes a Source of it.

    `sample` is a function of the index alone and may be called from several threads at once.
    """

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Samples:
    """Tokens [n, width + 1] and which of the width predictions count [n, width].

    The width is at most data.seq_length and the same for all samples of a step, on all ranks (the Loader pads where a
    layout needs it). Where samples are packed, `documents` [n, width] gives each token a number that its document
    shares with no other of the sample; a document's tokens lie side by side. Predictions across a border do not count:
    where documents[i] != documents[i + 1], counted[i] is False; the Loader refuses samples that break this. Whether
    the last prediction crosses a border only the source can know.

    `whole` holds values of n samples (leading dimension n) that go along with their samples uncut, such as images.
    """

    tokens: NDArray[np.int64]
    counted: NDArray[np.bool_]
    documents: NDArray[np.int64] | None = None
    whole: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Predictions in one sample."""
        return int(self.counted.shape[1])


class Source(Protocol):
    """Samples by number, without an end: the same number gives the same sample, whoever asks and whenever.

    `samples` may be called from several threads at once. A source that must be read in order, by one thread, says so
    with an attribute `in_order = True`.
    """

    def samples(self, numbers: Sequence[int]) -> Samples: ...


def stack(samples: Sequence[Sample]) -> Samples:
    """Samples of one width, side by side."""
    documents = [sample.documents for sample in samples]
    return Samples(
        np.stack([sample.tokens for sample in samples]),
        np.stack([sample.counted for sample in samples]),
        None if documents[0] is None else np.stack([d for d in documents if d is not None]),
        {name: np.stack([sample.whole[name] for sample in samples]) for name in samples[0].whole},
    )


def nothing_held_out(recipe: Recipe) -> InputError:
    """The error for a run that evaluates on nothing; found before its first step, not at the first evaluation."""
    return InputError(
        f"the run evaluates every {recipe.train.eval_every} steps and holds nothing out",
        field="data.validation",
        value="",
        fix=("data.validation_part=0.02", "data.validation=FILE, FOLDER or split", "train.eval_every=0"),
    )


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step: all its micro batches, one after the other, and its part of the sequence."""

    tokens: torch.Tensor  # [micro batches × size, width / cp]
    # Labels, weights, positions (and documents; with multi-token prediction next_tokens, labels_2, weights_2) of the
    # same shape; and the values that go along whole, [micro batches × size, …].
    told: dict[str, torch.Tensor]
    numbers: list[int]  # the samples
    counted: int  # predictions of the whole step, over all ranks
    computed: int  # tokens of the whole step, over all ranks: also those whose predictions do not count

    def micro_batches(self, size: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """The micro batches in order."""
        parts = range(0, len(self.tokens), size)
        return [(self.tokens[i : i + size], {k: v[i : i + size] for k, v in self.told.items()}) for i in parts]


def sample_numbers(step: int, global_batch: int, micro_batch: int, dp: int, rank: int) -> list[int]:
    """The samples of one data-parallel rank in a step: micro batches are dealt out in turn."""
    micro_batches = global_batch // (micro_batch * dp)
    first = step * global_batch
    return [first + (i * dp + rank) * micro_batch + j for i in range(micro_batches) for j in range(micro_batch)]


def places_in_documents(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of every token [n, width] in its document, counted from 0."""
    places = np.arange(documents.shape[1])
    begins = np.zeros(documents.shape, dtype=np.int64)
    begins[:, 1:] = np.where(documents[:, 1:] != documents[:, :-1], places[1:], 0)
    found: NDArray[np.int64] = places - np.maximum.accumulate(begins, axis=1)
    return found


def padded(samples: Samples, width: int) -> Samples:
    """Samples filled up at their end to a width, with tokens that are not counted and belong to no document of it."""
    more = width - samples.width
    if more == 0:
        return samples
    documents = samples.documents
    if documents is not None:
        fill = documents.max(1, keepdims=True) + 1
        documents = np.concatenate([documents, np.repeat(fill, more, 1)], 1)
    return Samples(
        np.pad(samples.tokens, ((0, 0), (0, more)), constant_values=PAD),
        np.pad(samples.counted, ((0, 0), (0, more))),
        documents,
        samples.whole,
    )


def refuse_predictions_across_documents(samples: Samples, numbers: Sequence[int]) -> None:
    """Refuses samples of a source that counts the prediction of one document's first token from another's last."""
    documents = samples.documents
    if documents is None:
        return
    wrong = samples.counted[:, :-1] & (documents[:, 1:] != documents[:, :-1])
    if wrong.any():
        row, place = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"sample {numbers[row]} counts the prediction at {place}, which is of another document")


@dataclass(frozen=True)
class _Read:
    """The samples of a rank in a step, at the width they run at, and which predictions count."""

    samples: Samples
    numbers: list[int]
    counted: list[NDArray[np.bool_]]  # of the next token; with multi-token prediction also of the one after it


class Loader:
    """Gives each rank its part of every step; prepares the steps that follow meanwhile."""

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
        context: ContextAxis | None = None,
        prefetch: int = 0,
        readers: int = 1,
    ) -> None:
        """`positions` are those of the tokens this rank holds of a whole sample, in the order it holds them.

        `context` is the cp axis, which lets samples stay narrower than that; without it cp ranks see padded ones.
        `prefetch` steps are prepared ahead, read by this many threads. Every data-parallel rank must make its loaders
        and ask for steps in the same order.
        """
        self.mtp = mtp  # whether the tokens two ahead are predicted too
        self.mesh, self.device = mesh, device
        self.global_batch, self.micro_batch, self.per_token = global_batch, micro_batch, per_token
        self.positions, self.context = positions, context
        self.seq_length = len(positions) * mesh.cp.size
        self._held: dict[int, NDArray[np.int64]] = {self.seq_length: positions.numpy()}
        self._own = self._source = source
        self._ahead: Prefetcher[_Read, tuple[Batch, Any]] = Prefetcher(self._read, self._finish, prefetch, readers)
        self._counts = _counting_group(mesh)
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" and prefetch else None  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @property
    def source(self) -> Source:
        """Where samples come from; another one may take its place for a while, as evaluation does."""
        return self._source

    @source.setter
    def source(self, source: Source) -> None:
        self._source = source
        self._ahead.keep_only(self._own, source)

    def batch(self, step: int) -> Batch:
        """This rank's part of a step."""
        batch, copied = self._ahead.get(self._source, step)
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in (batch.tokens, *batch.told.values()):
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """Ends what runs in the background."""
        self._ahead.close()

    def _read(self, source: Source, step: int) -> _Read:
        dp = self.mesh.dp
        numbers = sample_numbers(step, self.global_batch, self.micro_batch, dp.size, dp.rank)
        samples = source.samples(numbers)
        refuse_predictions_across_documents(samples, numbers)
        samples = padded(samples, self._width(samples.width))
        counted = [samples.counted, self._two_ahead(samples)] if self.mtp else [samples.counted]
        return _Read(samples, numbers, counted)

    def _finish(self, step: int, read: _Read | BaseException) -> tuple[Batch, Any]:
        """The batch on the device, and the event that says when its copy is there."""
        everywhere = self._everywhere(step, read)
        assert isinstance(read, _Read)
        if self._copies is None:
            return self._batch(read, everywhere), None
        with torch.cuda.stream(self._copies):
            batch = self._batch(read, everywhere)
            return batch, self._copies.record_event()

    def _everywhere(self, step: int, read: _Read | BaseException) -> list[int]:
        """How many predictions count over all ranks; all ranks fail where one could not read its samples."""
        own = [] if isinstance(read, BaseException) else [int(mask.sum()) for mask in read.counted]
        told = torch.zeros(3, dtype=torch.int64)  # of the next token, of the one after it, ranks that failed
        told[: len(own)] = torch.tensor(own, dtype=torch.int64)
        told[2] = isinstance(read, BaseException)
        if self._counts is not None:
            dist.all_reduce(told, group=self._counts)
        if isinstance(read, BaseException):
            raise read
        *counted, failures = told.tolist()
        if failures:
            raise RunError(f"another rank could not read its samples of step {step + 1}; its message says why")
        return counted

    def _width(self, given: int) -> int:
        """The width at which this layout runs samples: pipelines need one, cp and tp equal parts."""
        if given > self.seq_length:
            raise ValueError(f"samples of {given} tokens, of at most {self.seq_length}")
        cp, tp = self.mesh.cp.size, self.mesh.tp.size
        if self.mesh.pp.size > 1 or (cp > 1 and self.context is None):
            return self.seq_length
        unit = tp * cp * (self.context.parts if self.context is not None else 1)
        return min(-(-given // unit) * unit, self.seq_length)

    def _batch(self, read: _Read, everywhere: list[int]) -> Batch:
        samples, counted = read.samples, read.counted
        held = self._positions(samples.width)
        next_tokens = samples.tokens[:, 1:]
        told: dict[str, NDArray[Any]] = {
            "labels": np.where(counted[0], next_tokens, NOT_COUNTED),
            "weights": self._weights(counted[0], everywhere[0]),
        }
        if self.mtp:
            told["next_tokens"] = next_tokens
            told["labels_2"] = np.where(counted[1], np.roll(next_tokens, -1, 1), NOT_COUNTED)
            told["weights_2"] = self._weights(counted[1], everywhere[1])
        if samples.documents is not None:
            told["documents"] = samples.documents
            told["positions"] = places_in_documents(samples.documents)
        told["tokens"] = samples.tokens[:, :-1]
        if self.mesh.cp.size > 1:
            told = {name: value[:, held] for name, value in told.items()}
        parts = {name: self._to_device(value) for name, value in told.items()}
        if samples.documents is None:
            parts["positions"] = self._to_device(held).expand(len(read.numbers), -1)
        parts |= {name: self._to_device(value) for name, value in samples.whole.items()}
        return Batch(parts.pop("tokens"), parts, read.numbers, everywhere[0], self.global_batch * samples.width)

    def _positions(self, width: int) -> NDArray[np.int64]:
        if width not in self._held:
            self._held[width] = held_positions(width, self.context).numpy()
        return self._held[width]

    def _two_ahead(self, samples: Samples) -> NDArray[np.bool_]:
        """Which predictions of the tokens after the next count; the last place of a sample has none."""
        counted = np.zeros_like(samples.counted)
        counted[:, :-1] = samples.counted[:, 1:]
        if samples.documents is not None:  # a token and the next must be of one document, as the next two are
            counted[:, :-1] &= samples.documents[:, :-1] == samples.documents[:, 1:]
        return counted

    def _weights(self, counted: NDArray[np.bool_], everywhere: int) -> NDArray[np.float32]:
        """What each prediction adds to the loss: tokens count alike, or samples do and share it among their tokens."""
        mask = counted.astype(np.float32)
        if self.per_token:
            return mask / np.float32(max(everywhere, 1))
        share: NDArray[np.float32] = mask / np.maximum(mask.sum(1, keepdims=True), 1) / np.float32(self.global_batch)
        return share

    def _to_device(self, value: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        if self.device.type == "cuda":  # only from pinned memory does a copy run beside the host
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def _counting_group(mesh: Mesh) -> Any:
    """A group of the data-parallel ranks for counts alone: on the host, where they neither stop the device nor meet
    the step's own collectives.
    """
    if mesh.dp.size == 1:
        return None
    return dist.new_group(list(mesh.dp.ranks), backend="gloo", use_local_synchronization=True)
