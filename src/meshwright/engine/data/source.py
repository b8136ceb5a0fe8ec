"""What a source of samples gives, and how a step's samples are dealt out to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.engine.collectives import total
from meshwright.engine.mesh import Mesh


@dataclass(frozen=True)
class Samples:
    """Tokens [n, seq + 1] and which of the seq predictions count [n, seq]."""

    tokens: NDArray[np.int64]
    counted: NDArray[np.bool_]
    documents: NDArray[np.int64] | None = None  # [n, seq]: which document a token belongs to, where samples are packed


class Source(Protocol):
    """Samples by number: the same number gives the same sample, whoever asks and whenever."""

    def samples(self, numbers: Sequence[int]) -> Samples: ...


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step: all its micro batches, one after the other, and its part of the sequence."""

    tokens: torch.Tensor  # [micro batches × size, seq / cp]
    # Labels, weights, positions (and documents; with multi-token prediction next_tokens, labels_2, weights_2) of the
    # same shape.
    told: dict[str, torch.Tensor]
    numbers: list[int]  # the samples
    counted: int  # predictions of the whole step, over all ranks

    def micro_batches(self, size: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """The micro batches in order."""
        parts = range(0, len(self.tokens), size)
        return [(self.tokens[i : i + size], {k: v[i : i + size] for k, v in self.told.items()}) for i in parts]


def sample_numbers(step: int, global_batch: int, micro_batch: int, dp: int, rank: int) -> list[int]:
    """The samples of one data-parallel rank in a step: micro batches are dealt out in turn."""
    micro_batches = global_batch // (micro_batch * dp)
    first = step * global_batch
    return [first + (i * dp + rank) * micro_batch + j for i in range(micro_batches) for j in range(micro_batch)]


class Loader:
    """Gives each rank its part of every step."""

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
    ) -> None:
        self.mtp = mtp  # whether the tokens two ahead are predicted too
        self.source, self.mesh, self.device = source, mesh, device
        self.global_batch, self.micro_batch, self.per_token = global_batch, micro_batch, per_token
        self.positions = positions  # of the tokens this rank holds, in the order it holds them

    def batch(self, step: int) -> Batch:
        """This rank's part of a step."""
        dp = self.mesh.dp
        numbers = sample_numbers(step, self.global_batch, self.micro_batch, dp.size, dp.rank)
        samples = self.source.samples(numbers)
        counted = torch.from_numpy(samples.counted)
        everywhere = int(total(counted.sum().to(self.device), dp))
        held = {
            "labels": torch.from_numpy(samples.tokens[:, 1:]).masked_fill(~counted, -100),
            "weights": self._weights(counted, everywhere),
        }
        if self.mtp:
            held |= self._two_ahead(samples)
        if samples.documents is not None:
            held["documents"] = torch.from_numpy(samples.documents)
        told = {name: self._part(value) for name, value in held.items()}
        told["positions"] = self.positions.to(self.device).expand(len(numbers), -1)
        return Batch(self._part(torch.from_numpy(samples.tokens[:, :-1])), told, numbers, everywhere)

    def _two_ahead(self, samples: Samples) -> dict[str, torch.Tensor]:
        """The tokens after the next ones and what their predictions count; the last place of a sample has none."""
        next_tokens = torch.from_numpy(samples.tokens[:, 1:])
        counted = torch.zeros(next_tokens.shape, dtype=torch.bool)
        counted[:, :-1] = torch.from_numpy(samples.counted[:, 1:])
        if samples.documents is not None:  # a token and the next must be of one document, as the next two are
            counted[:, :-1] &= torch.from_numpy(samples.documents[:, :-1] == samples.documents[:, 1:])
        everywhere = int(total(counted.sum().to(self.device), self.mesh.dp))
        return {
            "next_tokens": next_tokens,
            "labels_2": next_tokens.roll(-1, 1).masked_fill(~counted, -100),
            "weights_2": self._weights(counted, everywhere),
        }

    def _weights(self, counted: torch.Tensor, everywhere: int) -> torch.Tensor:
        """What each prediction adds to the loss: tokens count alike, or samples do and share it among their tokens."""
        mask = counted.float()
        if self.per_token:
            return mask / max(everywhere, 1)
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / self.global_batch

    def _part(self, value: torch.Tensor) -> Any:
        return value[:, self.positions].to(self.device, non_blocking=True)
