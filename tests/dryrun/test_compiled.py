"""What compiled blocks allocate and save in a dry run, compared with GPU measurements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright.dryrun.allocation_log import AllocationLog
from meshwright.dryrun.compiled import simulate_inductor
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine.attention.dry import attend_masked
from meshwright.engine.collectives import gather, sum_scatter
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import GroupInfo, build_mesh
from meshwright.engine.model.config import config_for
from meshwright.engine.trainer import Trainer
from meshwright.recipes.types import Architecture, Data, Kernels, Layout, Optimizer, Precision, Recipe, Schedule, Train

TOKENS, WIDTH, WIDER = 256, 128, 512
NARROW, WIDE = TOKENS * WIDTH * 4, TOKENS * WIDER * 4  # bytes of activations


class Gated(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, device: torch.device, recompute: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDER, bias=False, device=device)
        self.up = nn.Linear(WIDTH, WIDER, bias=False, device=device)
        self.down = nn.Linear(WIDER, WIDTH, bias=False, device=device)
        self.recompute = recompute

    def compute(self, x: Tensor) -> Tensor:
        """Its output."""
        out: Tensor = self.down(functional.silu(self.gate(x)).mul(self.up(x)).add(1.0).mul(2.0))
        return out

    def forward(self, x: Tensor) -> Any:
        """Its output, now or recompute."""
        return checkpoint(self.compute, x, use_reentrant=False) if self.recompute else self.compute(x)


class MemoryUse:
    """Current and peak memory of a log."""

    def __init__(self, log: AllocationLog) -> None:
        self.log = log

    def _curve(self) -> Iterator[int]:
        level = 0
        for segment in self.log.segments:
            for event in segment.events:
                level += self.log.blocks[event].bytes if event >= 0 else -self.log.blocks[~event].bytes
                yield level

    @property
    def now(self) -> int:
        """Allocated bytes."""
        return ([0, *self._curve()])[-1]

    @property
    def most(self) -> int:
        """Peak of allocated bytes."""
        return max(self._curve())

    @property
    def operations(self) -> list[str]:
        """The operations that allocated the blocks, in order."""
        return [block.operation for block in self.log.blocks]


@contextmanager
def simulated() -> Iterator[tuple[torch.device, MemoryUse]]:
    log = AllocationLog()
    with fake_rank(1, 0, log.record) as device, log.patch_torch(), simulate_inductor():
        yield device, MemoryUse(log)


def test_fused_operations_between_products_allocate_nothing() -> None:
    with simulated() as (device, memory):
        block = Gated(device).requires_grad_(False)
        block.compile(fullgraph=True)
        x = torch.empty(TOKENS, WIDTH, device=device)
        block(x)
        before, start = memory.now, len(memory.operations)
        out = block(x)
        assert memory.operations[start:] == ["aten.mm.default"] * 3
        assert memory.now - before == NARROW
        assert out.shape == (TOKENS, WIDTH)


def test_a_pointwise_kernel_reuses_the_buffer_it_reads_last() -> None:
    with simulated() as (device, memory):
        block = Gated(device).requires_grad_(False)
        block.compile(fullgraph=True)
        x = torch.empty(TOKENS, WIDTH, device=device)
        before = memory.now
        block(x)
        assert memory.most - before == 2 * WIDE  # gate and up; their product reuses one of them


@pytest.mark.parametrize(("recompute", "saved"), [(False, 3 * WIDE), (True, 0)])
def test_the_partition_decides_what_is_saved_and_inner_recompute_saves_nothing(recompute: bool, saved: int) -> None:
    with simulated() as (device, memory):
        block = Gated(device, recompute)
        block.compile(fullgraph=True)
        x = torch.empty(TOKENS, WIDTH, device=device, requires_grad=True)
        before = memory.now
        out = block(x)
        assert memory.now - before == NARROW + saved  # gate, up, and what the last product reads
        out.sum().backward()
        del out
        assert [p.grad is not None and p.grad.shape == p.shape for p in block.parameters()] == [True] * 3
        gradients = NARROW + 3 * WIDTH * WIDER * 4
        assert memory.now - before == gradients


class Attending(nn.Module):
    """Attention whose projections are frozen, so that what is saved is what attention's own backward pass reads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device=device).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Its output over the last dimension of [tokens, width]."""
        q, k, v = (one.view(1, TOKENS, 2, -1).transpose(1, 2).mul(2.0) for one in self.into(x).chunk(3, -1))
        return attend_masked(q, k, v)[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_masked_attention_saves_queries_keys_values_and_outputs(compiled: bool) -> None:
    with simulated() as (device, memory):
        block = Attending(device)
        if compiled:
            block.compile(fullgraph=True)
        x = torch.empty(TOKENS, WIDTH, device=device, requires_grad=True)
        before = memory.now
        out = block(x)
        log_sums = 2 * TOKENS * 4
        assert memory.now - before == 4 * NARROW + log_sums
        start = len(memory.operations)
        out.sum().backward()
        assert x.grad is not None
        assert len(memory.operations) > start


class Parallel(nn.Module):
    """A layer that gathers its input over two ranks and scatters its output."""

    def __init__(self, device: torch.device, axis: GroupInfo) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDER, bias=False, device=device)
        self.down = nn.Linear(WIDER, WIDTH, bias=False, device=device)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Its output on this rank."""
        return sum_scatter(self.down(functional.silu(self.up(gather(x, self.axis, 0)))), self.axis, 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives_inside_compiled_layers_are_counted_as_eager_ones(compiled: bool) -> None:
    log = AllocationLog()
    with fake_rank(2, 0, log.record) as device, log.patch_torch(), simulate_inductor():
        group = dist.group.WORLD
        assert group is not None
        block = Parallel(device, GroupInfo(2, 0, group, (0, 1)))
        if compiled:
            block.compile(fullgraph=True)
        x = torch.empty(TOKENS // 2, WIDTH, device=device, requires_grad=True)
        block(x).sum().backward()
        name = group.group_name
    found = [one for segment in log.segments for one in segment.collectives]
    pair = [(name, "all_gather", NARROW), (name, "reduce_scatter", NARROW)]
    assert found == [*pair, *pair]  # the backward pass gathers the output's gradient and scatters the input's


def test_compile_is_restored_on_exit() -> None:
    before = nn.Module.compile
    with simulate_inductor():
        assert nn.Module.compile is not before
    assert nn.Module.compile is before


MEASURED = {  # GiB on one H200, torch 2.11: Llama 3 8B shape with 16 layers, 4 x 4096 tokens, bf16 weights and state
    ("same", "none"): 63.8,
    ("same", "full"): 36.1,
    ("fp8_tensor", "none"): 52.8,
    ("fp8_tensor", "full"): 35.7,
}


@pytest.mark.slow
@pytest.mark.parametrize(("matmul", "recompute"), MEASURED)
def test_peaks_match_measurements(matmul: Any, recompute: Any) -> None:
    recipe = Recipe(
        name="measured",
        model="llama3_8b",
        goal="pretrain",
        cluster="1xH200",
        architecture=Architecture(layers=16),
        data=Data(seq_length=4096, prefetch=0),
        train=Train(global_batch_size=4, steps=1000, check_nan=False),
        optimizer=Optimizer(lr=1e-4),
        schedule=Schedule(name="constant", warmup_steps=0),
        precision=Precision(master="bf16", moments="bf16", grads="bf16", reduce="bf16", matmul=matmul),
        layout=Layout(micro_batch_size=4, recompute=recompute),
        kernels=Kernels(compile=True, loss="fused_linear"),
    )
    config = config_for(recipe)
    with simulated() as (device, memory):
        mesh = build_mesh(recipe.layout, device.type)
        trainer = Trainer(recipe, config, mesh, device, Mock(config.vocab_size, 4096, 1))
        for number in range(2):
            trainer.step(number, figures=False)
        assert memory.most / 2**30 == pytest.approx(MEASURED[matmul, recompute], rel=0.015)
        trainer.close()
