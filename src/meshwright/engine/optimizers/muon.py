"""Muon (Jordan et al., 2024): updates hidden matrices by their orthogonalized momentum, the rest by AdamW.

Both use the same learning rate. The update of an m × n matrix is lr * 0.2 * sqrt(max(m, n)) times the orthogonal
matrix, which has the root mean square of an AdamW step (Moonlight, arXiv 2502.16982; torch.optim.Muon calls it
match_rms_adamw), so an AdamW learning rate can be reused. Weight decay is decoupled: lr * weight_decay.

Stacked experts are one matrix per expert (and gate). A sharded matrix is gathered on one rank for the Newton-Schulz
iteration, so the update equals that of a single process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from meshwright.engine.optimizers.base import Group, apply_weight_decay, local, store
from meshwright.engine.optimizers.elementwise import AdamW
from meshwright.engine.optimizers.exchange import Exchange, sharded_dims

# Jordan's quintic maximizes the slope at zero; singular values end between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2
GATES = 2


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Return each matrix of a batch [B, m, n] with singular values near 1, by Newton-Schulz iterations."""
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
    """Return the two matrix dimensions of [m, n], [E, m, n], [E, 2, m, n] or [E, m, n, 2]."""
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
        # The iteration was designed for bf16; CPUs are slow in bf16 and are used to compare results.
        self.format = torch.float32 if device_type == "cpu" else torch.bfloat16
        self._exchanges: dict[DeviceMesh, Exchange] = {}

    def init_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        if group["rule"] != "muon":
            return super().init_state(parameter, group)
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=self.moments)}

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        if group["rule"] != "muon":
            return super().update(group, parameters)
        sharded: dict[DeviceMesh, list[Parameter]] = {}
        for parameter in parameters:
            if isinstance(parameter, DTensor) and sharded_dims(parameter) & set(matrix_dims(parameter.shape)):
                sharded.setdefault(parameter.device_mesh, []).append(parameter)
            elif local(parameter).numel():
                self._apply_update(group, parameter, self._orthogonal(parameter, self._direction(parameter)))
        for mesh, members in sharded.items():
            self._update_sharded(group, mesh, sorted(members, key=_flops, reverse=True))
        return None

    def _update_sharded(self, group: Group, mesh: DeviceMesh, parameters: list[Parameter]) -> None:
        if mesh not in self._exchanges:
            self._exchanges[mesh] = Exchange(mesh)
        exchange = self._exchanges[mesh]
        for some in exchange.rounds(len(parameters)):
            members = parameters[some]
            steps = exchange.on_full_matrices(
                [one for one in members if isinstance(one, DTensor)],
                [self._direction(one) for one in members],
                self._orthogonal,
            )
            for parameter, step in zip(members, steps, strict=True):
                self._apply_update(group, parameter, step)

    def _orthogonal(self, parameter: Tensor, stack: Tensor) -> Tensor:
        """Orthogonalize each matrix of a stack with the parameter's dimensions."""
        dims = matrix_dims(parameter.shape)
        last = stack.movedim(dims, (-2, -1))
        result = orthogonalize(last.reshape(-1, *last.shape[-2:]), self.steps)
        return result.reshape(last.shape).movedim((-2, -1), dims)

    def _direction(self, parameter: Parameter) -> Tensor:
        """Update the momentum; return this rank's block of the Nesterov direction, on the compute device."""
        gradient = local(parameter.grad).float()  # type: ignore[arg-type]  # update() gets parameters with a gradient only
        buffer = local(self.state[parameter]["momentum_buffer"])
        momentum = buffer.float()
        momentum.lerp_(gradient, 1 - self.momentum)
        store([buffer], [momentum])
        return gradient.lerp(momentum, self.momentum).to(device=self.device_type, dtype=self.format)

    def _apply_update(self, group: Group, parameter: Parameter, step: Tensor) -> None:
        rows, columns = (parameter.shape[dim] for dim in matrix_dims(parameter.shape))
        size = group["lr"] * RMS_OF_ADAMW * math.sqrt(max(rows, columns))
        target = local(parameter)
        weight = target.float()
        apply_weight_decay([weight], group)
        weight.add_(step.to(device=weight.device, dtype=weight.dtype), alpha=-size)
        store([target], [weight])


def _flops(parameter: Parameter) -> int:
    """Return the multiplications of one iteration, up to a factor: rounds of equal work keep ranks busy."""
    rows, columns = (parameter.shape[dim] for dim in matrix_dims(parameter.shape))
    return parameter.numel() * min(rows, columns)
