"""Sample types: corpora by index and endless sources by sample number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

PAD = 0  # padding token: never a target, and causal attention hides it from earlier tokens


class Sample(NamedTuple):
    """One sample of a corpus: tokens [width + 1], loss mask [width] and extra arrays."""

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]  # [width]: whether predicting tokens[i + 1] from tokens[: i + 1] is in the loss
    documents: NDArray[np.int64] | None = None  # [width]: see Samples
    extras: Mapping[str, NDArray[Any]] = {}


class Corpus(Protocol):
    """A finite, indexable set of samples in disk order; `shuffle.Shuffled` turns it into a Source.

    `sample` is a function of the index alone and must be thread-safe.
    """

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Samples:
    """Tokens [n, width + 1] and their loss mask [n, width].

    The width is at most data.seq_length and the same for all samples of a step, on all ranks (the Loader pads where a
    layout needs it). Packed samples have `documents` [n, width], a document id per token that is unique within the
    sample; a document's tokens are contiguous. Targets never cross a document boundary: where documents[i] !=
    documents[i + 1], loss_mask[i] is False, and the Loader rejects samples that break this. Only the source knows
    whether the last target crosses a boundary.

    `extras` has per-sample arrays (leading dimension n) that are not split along the sequence, such as images.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    documents: NDArray[np.int64] | None = None
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Return the number of targets per sample."""
        return int(self.loss_mask.shape[1])

    def take(self, rows: Sequence[int], keep: Sequence[bool]) -> Samples:
        """Return the samples of these rows; those not kept have no targets."""
        return Samples(
            self.tokens[rows],
            self.loss_mask[rows] & np.array(keep)[:, None],
            None if self.documents is None else self.documents[rows],
            {name: value[rows] for name, value in self.extras.items()},
        )

    def cut(self, width: int) -> Samples:
        """Return the samples without what follows the first `width` targets."""
        documents = None if self.documents is None else self.documents[:, :width]
        return Samples(self.tokens[:, : width + 1], self.loss_mask[:, :width], documents, self.extras)


class Source(Protocol):
    """An endless sequence of samples: the same number returns the same sample on every rank and after every resume.

    `samples` must be thread-safe. A source that must be read in order by one thread sets `in_order = True`. A source
    of finite data has `epoch_size(limit)`, its number of different samples; one that must read its data to know it may
    stop above `limit`.
    """

    def samples(self, numbers: Sequence[int]) -> Samples: ...


def stack(samples: Sequence[Sample]) -> Samples:
    """Stack samples of equal width."""
    documents = [sample.documents for sample in samples]
    return Samples(
        np.stack([sample.tokens for sample in samples]),
        np.stack([sample.loss_mask for sample in samples]),
        None if documents[0] is None else np.stack([d for d in documents if d is not None]),
        {name: np.stack([sample.extras[name] for sample in samples]) for name in samples[0].extras},
    )


def no_validation_data(recipe: Recipe) -> InputError:
    """Return the error for a run without validation data; raised before the first step, not at the first evaluation."""
    return InputError(
        f"train.eval_every={recipe.train.eval_every}, but no validation data is set",
        field="data.validation",
        value="",
        fix=("data.validation_part=0.02", "data.validation=FILE, FOLDER or split", "train.eval_every=0"),
    )
