"""Memory compared with textbook byte counts and measured runs."""

from __future__ import annotations

import time

import numpy as np
import pytest

from meshwright import costs
from meshwright.clusters import Cluster
from meshwright.costs.parameters import layer_params, rank_params
from meshwright.costs.stages import chunk_layers, stages
from meshwright.costs.vectorize import GIB
from meshwright.models import find

from .helpers import case, huge_gpu, hybrid, llama, mixtral

ONE = Cluster(huge_gpu(), 1, 1)


def state_bytes(one) -> float:
    found = costs.memory(one)
    return (found.weights + found.gradients + found.optimizer) * GIB / one.model.params.total


@pytest.mark.parametrize(
    ("engine", "names", "each"),
    [
        ("meshwright", {"strategy": "fsdp2"}, 16),
        ("meshwright", {"strategy": "ddp"}, 16),
        ("torchtitan", {"strategy": "fsdp2"}, 16),
        ("megatron", {"strategy": "ddp"}, 18),
        ("megatron", {"strategy": "zero1"}, 18),
        ("megatron", {"strategy": "megatron_fsdp"}, 18),
        ("megatron", {"strategy": "zero1", "grads": "bf16"}, 16),
        ("megatron", {"strategy": "zero1", "reduce": "bf16"}, 16),  # one buffer accumulates and is reduced
        ("megatron", {"strategy": "zero1", "grads": "bf16", "moments": "bf16"}, 12),
        ("kempnerforge", {"strategy": "fsdp2"}, 8),
        ("deepspeed", {"strategy": "fsdp2", "grads": "bf16"}, 16),
        ("deepspeed", {"strategy": "fsdp2", "offload": "optimizer", "grads": "bf16"}, 2),
        ("meshwright", {"strategy": "fsdp2", "optimizer_name": "lion"}, 12),
        ("meshwright", {"strategy": "fsdp2", "offload": "optimizer"}, 0),  # FSDP2 keeps the updated weights with it
        ("meshwright", {"strategy": "fsdp2", "offload": "params"}, 0),
    ],
)
def test_bytes_per_parameter_on_one_gpu(engine, names, each):
    one = case(llama(), ONE, engine=engine, global_batch_size=1, **names)
    assert state_bytes(one) == pytest.approx(each, rel=1e-6)


def test_the_distributed_optimizer_is_six_bytes_and_twelve_over_the_ranks():
    one = case(llama(), "8xH100", engine="megatron", strategy="zero1", global_batch_size=8)
    assert state_bytes(one) == pytest.approx(6 + 12 / 8, rel=1e-6)


def test_experts_are_sharded_by_expert_parallelism_and_their_own_ranks():
    model = mixtral()
    one = case(model, "8xH100", engine="megatron", strategy="zero1", ep=4, global_batch_size=8)
    routed, dense = model.params.routed, model.params.total - model.params.routed
    expected = dense * (6 + 12 / 8) + routed / 4 * (6 + 12 / 2)
    assert state_bytes(one) * model.params.total == pytest.approx(expected, rel=1e-6)


def test_deferred_reduction_keeps_unsharded_gradients():
    model = llama()
    unsharded = costs.memory(case(model, "8xH100", global_batch_size=64)).gradients
    shared = costs.memory(case(model, "8xH100", global_batch_size=64, defer_grad_sync=False)).gradients
    assert unsharded == pytest.approx(8 * shared)


def test_adapters_leave_bf16_weights_and_little_else():
    model = llama()
    tuned = costs.memory(case(model, ONE, "peft", global_batch_size=1, rank=16))
    assert tuned.weights * GIB == pytest.approx(2 * model.params.total, rel=0.02)
    assert tuned.gradients + tuned.optimizer < 0.05 * tuned.weights
    squeezed = costs.memory(case(model, ONE, "peft", global_batch_size=1, rank=16, method="qlora"))
    assert squeezed.weights < 0.45 * tuned.weights


def test_all_parameters_are_on_some_stage():
    for model in (llama(), mixtral(), hybrid()):
        assert costs.parameters(case(model, "8xH100", images=True)) == pytest.approx(model.params.total)
        parts = [layer_params(group.layer, model.hidden) for group in model.groups]
        for part, group in zip(parts, model.groups, strict=True):
            assert part.sharded + part.replicated + part.routed == group.layer.params(model.hidden)


def test_stages_have_their_real_layers():
    model = mixtral(layers=8)  # the dense layer is the first
    one = case(model, "8xH100", pp=4)
    held = stages(one)
    dense, moe = (number for _, number in held.layers)
    assert dense.tolist() == [1, 0, 0, 0]
    assert moe.tolist() == [1, 2, 2, 2]
    total = rank_params(one, held).total
    assert total[-1] - total[1] == pytest.approx(model.vocab * model.hidden + model.final_norm_params)


def test_uneven_stages_are_taken_as_given_and_ends_count_as_layers():
    assert chunk_layers(126, (), 8, 1, 1).tolist() == [15, 16, 16, 16, 16, 16, 16, 15]
    assert chunk_layers(10, (4, 6), 2, 0, 0).tolist() == [4, 6]
    held = stages(case(llama(layers=10), "8xH100", pp=2, stage_layers=(4, 6)))
    assert held.count.tolist() == [4, 4, 4, 6]


def test_interleaving_keeps_more_micro_batches():
    names = {"pp": 4, "global_batch_size": 256, "engine": "megatron", "strategy": "zero1"}
    plain = costs.memory(case(llama(), "16xH100", **names))
    chunked = costs.memory(case(llama(), "16xH100", vp=2, pp_schedule="interleaved_1f1b", **names))
    assert chunked.activations / plain.activations == pytest.approx(1 + 3 / 8, rel=0.05)
    assert costs.memory(case(llama(), "16xH100", pp_schedule="gpipe", **names)).activations > 5 * plain.activations


def test_megatron_theoretical_state_of_70b():
    one = case(find("llama3-70b"), "64xH100", engine="megatron", strategy="zero1", tp=4, pp=4, sp=True)
    found = costs.memory(one)
    assert found.weights + found.gradients + found.optimizer == pytest.approx(38.1, rel=0.03)


def test_memory_of_a_hundred_thousand_candidates_takes_less_than_a_second():
    rng, count = np.random.default_rng(0), 100_000
    columns = {
        "tp": rng.choice([1, 2, 4, 8], count),
        "pp": rng.choice([1, 2, 4, 8], count),
        "vp": rng.choice([1, 2, 4], count),
        "micro_batch_size": rng.choice([1, 2, 4], count),
        "recompute": rng.choice(["none", "selective", "full"], count),
    }
    one = case(find("qwen3-30b-a3b"), "256xH100", **columns)
    start = time.process_time()
    found = costs.memory(one)
    assert time.process_time() - start < 1.0
    assert found.total.shape == (count,)
