"""Tests that need a GPU: NCCL, CUDA events, out of memory, and forking after CUDA was used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.children import child

from meshwright.engine.faults import RunError
from meshwright.engine.loss_guard import LossGuard
from meshwright.engine.metrics import Clock, Constants, Meter, Reporter, memory_parts, optimizer_tensors
from meshwright.engine.process_group import join
from meshwright.engine.processes import _can_fork, fork
from meshwright.engine.profiling import window
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError


def gpus() -> int:
    """Return the number of GPUs, counted in a child: counting here would make this process unfit for forking."""
    import multiprocessing as mp

    context = mp.get_context("fork")
    result: Any = context.Queue()
    counter = context.Process(target=lambda: result.put(torch.cuda.device_count()))
    counter.start()
    count = int(result.get(timeout=60))
    counter.join()
    return count


pytestmark = pytest.mark.skipif(gpus() == 0, reason="needs a GPU")


def backend_and_sum(process: Process) -> tuple[str, str, float]:
    number = torch.tensor(2.0, device=process.device)
    dist.all_reduce(number)
    return dist.get_backend(), str(process.device), number.item()


def test_a_forked_rank_uses_its_gpu() -> None:
    assert fork(1, backend_and_sum, timeout=120) == [("nccl", "cuda:0", 2.0)]


def test_ranks_that_outnumber_the_gpus_share_them() -> None:
    count = gpus()
    found = fork(count + 1, backend_and_sum, timeout=120, collective_timeout_s=60)
    assert found[-1] == ("gloo", "cuda:0", 2.0 * (count + 1))
    with pytest.raises(InputError, match=f"this machine has {count} for {count + 1} ranks"):
        fork(count + 1, backend_and_sum, timeout=120, collective_timeout_s=60, backend="nccl")


def takes_all(process: Process) -> None:
    torch.empty(1 << 50, device=process.device)


def test_out_of_memory_has_a_fix() -> None:
    with pytest.raises(RunError, match="the GPU ran out of memory") as failed:
        fork(1, takes_all, timeout=120)
    assert "layout.recompute=full" in failed.value.fix


def test_a_process_that_used_cuda_is_not_forked(tmp_path: Path) -> None:
    def work() -> tuple[bool, bool]:
        before = _can_fork()
        torch.zeros(1, device="cuda")
        return before, _can_fork()

    assert child(tmp_path, work, timeout=60) == (True, False)


class Kept(list[Any]):
    """A sink that keeps its records."""

    step = list.append

    def close(self) -> None:
        """Nothing to do."""


def test_steps_are_timed_reported_and_profiled_on_the_gpu(tmp_path: Path) -> None:
    def work() -> tuple[Any, ...]:
        kept = Kept()
        with join(Process()) as process, window(True, tmp_path, 1, 1, 2) as recorded:
            device, clock = process.device, Clock(process.device)
            weight = torch.nn.Parameter(torch.randn(4096, 4096, device=device))
            optimizer = torch.optim.AdamW([weight])
            guard = LossGuard("stop", 1, tmp_path, device)
            reporter = Reporter(Meter(Constants(4096, 6.0 * 4096**2, 1, 1e15)), clock, [kept])
            for step in range(1, 7):
                clock.start()
                with clock.part("data"):
                    batch = torch.randn(4096, 4096, device=device)
                with clock.part("forward_backward"):
                    loss = (batch @ weight).square().mean()
                    loss.backward()
                with clock.part("optimizer"):
                    if guard.allows(step, loss, weight.grad.norm()):  # type: ignore[union-attr]
                        optimizer.step()
                reporter.end_step(step, loss=loss, lr=1e-3, grad_norm=weight.grad.norm())  # type: ignore[union-attr]
                recorded.step()
            gradients = [weight.grad]
            memory = memory_parts([weight], gradients, optimizer_tensors(optimizer.state), device)
            reporter.close()
        return list(kept), memory, recorded.table, [path.name for path in tmp_path.glob("trace*")]

    records, memory, table, traces = child(tmp_path, work, timeout=120)
    assert [one.step for one in records] == [1, 2, 3, 4, 5, 6]
    for one in records:
        assert one.loss > 0
        assert sum(one.parts_s.values()) == pytest.approx(one.step_s)
        assert one.parts_s["forward_backward"] > 0
        assert 0 < one.mfu < 1
    mib64 = 64 / 1024
    assert (memory.weights, memory.gradients) == (mib64, mib64)
    assert memory.optimizer == pytest.approx(2 * mib64, rel=1e-3)
    assert memory.peak > 5 * mib64
    assert "CUDA" in table
    assert traces == ["trace_rank0_steps3-4.json.gz"]
