"""Several ranks share a GPU: gloo is chosen, memory is divided, and what is sent goes through host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.families import FAMILIES
from tests.engine.parity import SEQ, compile_without_a_compiler, recipe
from tests.engine.ranks import run

from meshwright import models
from meshwright.clusters import cluster
from meshwright.engine import mesh, shared_gpu, validate
from meshwright.engine.collectives import copy_in, sum_out
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import GroupInfo, build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.rank_env import Process
from meshwright.engine.shared_gpu import choose_backend, ranks_per_gpu
from meshwright.engine.trainer import Trainer
from meshwright.errors import InputError
from meshwright.planner.baseline import baseline_for
from meshwright.planner.plan import Question
from meshwright.recipes import types

FOUR = Process(world=4, local_world=4, how="nproc")


@pytest.mark.parametrize(
    ("process", "device", "gpus", "expected"),
    [
        (FOUR, "cuda", 1, "gloo"),
        (FOUR, "cuda", 3, "gloo"),
        (FOUR, "cuda", 4, "nccl"),
        (Process(world=4, local_world=4, how="torchrun"), "cuda", 2, "gloo"),
        (Process(world=4, local_world=4, how="slurm"), "cuda", 1, "nccl"),  # each task sees its own GPU
        (Process(), "cuda", 1, "nccl"),
        (FOUR, "cpu", 0, "gloo"),
        (Process(backend="gloo"), "cuda", 1, "gloo"),
    ],
)
def test_backend_by_ranks_and_gpus(process: Process, device: str, gpus: int, expected: str) -> None:
    assert choose_backend(process, device, gpus) == expected


@pytest.mark.parametrize(("device", "gpus", "text"), [("cuda", 1, "has 1 for 4 ranks"), ("cpu", 0, "train on CPU")])
def test_nccl_that_cannot_work_is_refused(device: str, gpus: int, text: str) -> None:
    with pytest.raises(InputError, match=text) as refused:
        choose_backend(Process(world=4, local_world=4, how="nproc", backend="nccl"), device, gpus)
    assert "--backend gloo" in refused.value.fix


def test_ranks_take_their_part_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(text: str) -> Any:
        return cluster("1xH200" if text == "auto" else text)

    monkeypatch.setattr(validate, "cluster", one)
    full = one("1xH200").gpu.memory_gib
    made = recipe(types.Layout())
    assert validate.run_cluster(made, None, 1).gpu.memory_gib == full
    assert validate.run_cluster(made, None, 4).gpu.memory_gib == pytest.approx(full / 4 - 1)
    assert ranks_per_gpu(FOUR, 1) == 4


def compiled_sum(rank: int, world: int, through_host: bool) -> tuple[list[float], str]:
    """Return a sum over the ranks and its gradient in compiled code, and the code of its graphs."""
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        graphs.append(str(module.code))
        return module.forward

    axis = GroupInfo(world, rank, dist.group.WORLD, tuple(range(world)), through_host)
    x = torch.full((2,), float(rank + 1), requires_grad=True)
    out = torch.compile(lambda x: 3 * sum_out(copy_in(2 * x, axis), axis), backend=backend)(x)
    out.sum().backward()
    return [*out.tolist(), *x.grad.tolist()], "\n".join(graphs)


def test_collectives_through_host_memory_stay_outside_compiled_code() -> None:
    for through_host in (False, True):
        for values, code in run(2, compiled_sum, through_host):
            assert values == [18.0, 18.0, 12.0, 12.0]
            assert ("_SumOut" in code or "all_reduce" in code or "autograd_function" in code) != through_host
            assert "mul" in code or "*" in code  # the rest is compiled


def compiled_through_host(rank: int, world: int, layout: types.Layout) -> list[float]:
    mesh.sends_through_host = lambda device_type, group: group is not None
    compile_without_a_compiler()
    return loss_and_norm(layout, compiled=True)


@pytest.mark.slow
def test_compiled_tensor_parallel_steps_through_host_memory_equal_one_rank() -> None:
    layout = types.Layout(tp=2, sp=True, micro_batch_size=1)
    for values in run(2, compiled_through_host, layout):
        assert values == pytest.approx(run(1, alone)[0], rel=1e-5)


def test_compiled_scans_over_context_parallel_ranks_that_share_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(validate, "cluster", lambda text: cluster("1xH200" if text == "auto" else text))
    for model, cp, refused in (("nemotronh_4b", 2, True), ("nemotronh_4b", 1, False), ("llama32_1b", 2, False)):
        question = Question(models.find(model), model, cluster("2xH200"), "pretrain")
        case = baseline_for(question, [f"layout.cp={cp}", "kernels.compile=true"]).case
        if not refused:
            validate.refuse_compiled_scans(case, None, 2)
            continue
        with pytest.raises(InputError, match="crash where ranks share a GPU") as error:
            validate.refuse_compiled_scans(case, None, 2)
        assert error.value.fix == ("kernels.compile=false",)


def streams_of_fsdp(rank: int, world: int) -> list[str]:
    config = transformers_config(FAMILIES["llama"])
    made = recipe(types.Layout(), precision=types.Precision(compute="bf16", master="fp32"))
    trainer = Trainer(
        made, config, build_mesh(made.layout, "cpu"), torch.device("cpu"), Mock(config.vocab_size, SEQ, 0)
    )
    trainer.step(0)
    return sorted({type(one._get_fsdp_state()._comm_ctx).__name__ for one in trainer.stages[0].layers.values()})


def test_one_rank_needs_no_stream_of_fsdp() -> None:
    assert run(1, streams_of_fsdp)[0] == ["OneStream"]
    assert run(2, streams_of_fsdp)[0] == ["FSDPCommContext"]


LAYOUTS = {
    "1f1b": types.Layout(pp=2, micro_batch_size=1),
    "zbv": types.Layout(pp=2, vp=2, pp_schedule="zbv", micro_batch_size=1),
    "ring": types.Layout(cp=2, cp_comm="ring", micro_batch_size=1),
}


def loss_and_norm(layout: types.Layout, compiled: bool = False) -> list[float]:
    config = transformers_config(FAMILIES["llama"])
    train, kernels = types.Train(global_batch_size=4, steps=9), types.Kernels(compile=compiled)
    made = recipe(layout, train=train, kernels=kernels)
    trainer = Trainer(made, config, build_mesh(layout, "cpu"), torch.device("cpu"), Mock(config.vocab_size, SEQ, 0))
    return [value for step in (0, 1) for one in [trainer.step(step)] for value in (one.loss, one.grad_norm)]


def sent_through_host(rank: int, world: int, layout: types.Layout) -> tuple[list[float], int]:
    """Return losses and norms with every send and receive in host memory, and the number of copies."""
    copies: list[torch.Tensor] = []

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(made := original(tensor))
        return made

    original, shared_gpu.on_host = shared_gpu.on_host, on_host
    shared_gpu.sends_through_host = lambda device_type, group: group is not None
    return loss_and_norm(layout), len(copies)


def alone(rank: int, world: int) -> list[float]:
    return loss_and_norm(types.Layout(micro_batch_size=1))


@pytest.mark.parametrize("name", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zbv", "ring"))])
def test_steps_with_sends_through_host_memory_equal_one_rank(name: str) -> None:
    expected = run(1, alone)[0]
    for values, copies in run(2, sent_through_host, LAYOUTS[name]):
        assert values == pytest.approx(expected, rel=1e-5)
        assert copies >= 4  # two steps, several micro batches


def test_only_cuda_tensors_of_gloo_groups_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: group)
    cuda, cpu = "cuda", "cpu"
    assert shared_gpu.sends_through_host(cuda, "gloo")
    assert not shared_gpu.sends_through_host(cuda, "nccl")
    assert not shared_gpu.sends_through_host(cpu, "gloo")
    assert not shared_gpu.sends_through_host(cuda, None)
