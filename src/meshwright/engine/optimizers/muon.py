"""Muon (Jordan et al., 2024): hidden matrices move along their orthogonalised momentum, the rest by AdamW.

Learning rate: one for both. A matrix of m rows and n columns is moved by lr * 0.2 * sqrt(max(m, n)) times the
orthogonal matrix, which has the root mean square of an AdamW step (Moonlight, arXiv 2502.16982; torch.optim.Muon calls
it match_rms_adamw), so an AdamW learning rate can be used as it is. Weight decay is decoupled: lr * weight_decay.

Stacked experts are as many matrices as they have experts (and gates). A matrix that is cut over ranks is made whole on
one of them for the Newton-Schulz iteration, so the update is that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from meshwright.engine.optimizers.base import Group, local, shrink, store
from meshwright.engine.optimizers.elementwise import AdamW
from meshwright.engine.optimizers.exchange import Exchange, cut_dims

# Jordan's quintic: largest slope at zero; singular values end between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2
GATES = 2


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Each matrix of a batch [B, m, n] with its singular values moved near 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=SMALLEST_NORM).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def matrix_dims(shape: Sequence[int]) -> tuple[int, int]:
    """Which two dimensions are the matrix: of [m, n], [E, m, n], [E, 2, m, n] and [E, m, n, 2]."""
    if len(shape) == 4:
        return (2, 3) if shape[1] == GATES else (1, 2)
    return len(shape) - 2, len(shape) - 1


class Muon(AdamW):
    """Muon for groups of rule "muon", AdamW for the others."""

    def __init__(
        self,
        groups: list[Group],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        moments: torch.dtype,
        momentum: float,
        steps: int,
        device_type: str,
    ) -> None:
        super().__init__(groups, lr, betas, eps, moments)
        self.momentum, self.steps, self.device_type = momentum, steps, device_type
        # bf16 is what the iteration was made for; a CPU is slow at it and is where results are compared.
        self.format = torch.float32 if device_type == "cpu" else torch.bfloat16
        self._exchanges: dict[DeviceMesh, Exchange] = {}

    def fresh_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        if group["rule"] != "muon":
            return super().fresh_state(parameter, group)
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=self.moments)}

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        if group["rule"] != "muon":
            return super().update(group, parameters)
        cut: dict[DeviceMesh, list[Parameter]] = {}
        for parameter in parameters:
            if isinstance(parameter, DTensor) and cut_dims(parameter) & set(matrix_dims(parameter.shape)):
                cut.setdefault(parameter.device_mesh, []).append(parameter)
            elif local(parameter).numel():
                self._move(group, parameter, self._orthogonal(parameter, self._direction(parameter)))
        for mesh, members in cut.items():
            self._update_cut(group, mesh, sorted(members, key=_work, reverse=True))
        return None

    def _update_cut(self, group: Group, mesh: DeviceMesh, parameters: list[Parameter]) -> None:
        if mesh not in self._exchanges:
            self._exchanges[mesh] = Exchange(mesh)
        exchange = self._exchanges[mesh]
        for some in exchange.rounds(len(parameters)):
            members = parameters[some]
            steps = exchange.on_whole(
                [one for one in members if isinstance(one, DTensor)],
                [self._direction(one) for one in members],
                self._orthogonal,
            )
            for parameter, step in zip(members, steps, strict=True):
                self._move(group, parameter, step)

    def _orthogonal(self, parameter: Tensor, stack: Tensor) -> Tensor:
        """A stack of whole matrices, laid out like the parameter, each orthogonalised."""
        dims = matrix_dims(parameter.shape)
        last = stack.movedim(dims, (-2, -1))
        result = orthogonalized(last.reshape(-1, *last.shape[-2:]), self.steps)
        return result.reshape(last.shape).movedim((-2, -1), dims)

    def _direction(self, parameter: Parameter) -> Tensor:
        """Takes the gradient into the momentum; this rank's part of the Nesterov direction, on the working device."""
        gradient = local(parameter.grad).float()  # type: ignore[arg-type]  # only parameters with a gradient come here
        buffer = local(self.state[parameter]["momentum_buffer"])
        momentum = buffer.float()
        momentum.lerp_(gradient, 1 - self.momentum)
        store([buffer], [momentum])
        return gradient.lerp(momentum, self.momentum).to(device=self.device_type, dtype=self.format)

    def _move(self, group: Group, parameter: Parameter, step: Tensor) -> None:
        rows, columns = (parameter.shape[dim] for dim in matrix_dims(parameter.shape))
        size = group["lr"] * RMS_OF_ADAMW * math.sqrt(max(rows, columns))
        target = local(parameter)
        weight = target.float()
        shrink([weight], group)
        weight.add_(step.to(device=weight.device, dtype=weight.dtype), alpha=-size)
        store([target], [weight])


def _work(parameter: Parameter) -> int:
    """Multiplications of one iteration, up to a factor: rounds of equal work keep ranks from waiting."""
    rows, columns = (parameter.shape[dim] for dim in matrix_dims(parameter.shape))
    return parameter.numel() * min(rows, columns)
