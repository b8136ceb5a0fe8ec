"""Memory compared with published peaks, and with our own on an H200."""

from __future__ import annotations

import pytest

from meshwright import costs
from meshwright.costs.memory import memory, memory_by_stage
from meshwright.models import find

from .helpers import case, llama, mixtral

L13 = llama(40, 5120, 17920, 40, 8)
KEMPNER = {"engine": "kempnerforge", "recompute": "full", "compile": True, "seq_length": 4096, "micro_batch_size": 4}
TP4 = {**KEMPNER, "tp": 4, "sp": True}


@pytest.mark.parametrize(
    ("model", "gpus", "names", "measured"),
    [
        (llama(), "1xH200", {**KEMPNER, "strategy": "ddp", "micro_batch_size": 2, "global_batch_size": 8}, 80.7),
        (llama(), "2xH200", {**KEMPNER, "micro_batch_size": 2, "global_batch_size": 16}, 62.4),
        (llama(), "2xH200", {**KEMPNER, "strategy": "ddp", "tp": 2, "sp": True, "global_batch_size": 8}, 57.8),
        (llama(), "4xH200", {**KEMPNER, "global_batch_size": 32}, 61.1),
        (llama(), "4xH200", {**TP4, "strategy": "ddp", "global_batch_size": 8}, 39.4),
        (llama(), "4xH200", {**KEMPNER, "tp": 2, "sp": True, "global_batch_size": 16}, 45.9),
        (llama(), "4xH200", {**KEMPNER, "micro_batch_size": 8, "global_batch_size": 128}, 81.0),
        (llama(), "8x4xH200", {**KEMPNER, "global_batch_size": 512}, 51.3),
        (llama(), "2x4xH200", {**TP4, "global_batch_size": 16}, 32.7),
        (llama(), "8x4xH200", {**TP4, "global_batch_size": 64}, 27.6),
        (L13, "2x4xH200", {**TP4, "global_batch_size": 32}, 45.1),
        (L13, "8x4xH200", {**TP4, "global_batch_size": 128}, 36.3),
        (find("llama3-70b"), "8x4xH200", {**TP4, "micro_batch_size": 2, "global_batch_size": 64}, 93.2),
    ],
)
def test_kempnerforge_allocates(model, gpus, names, measured):
    assert memory(case(model, gpus, **names)).allocated == pytest.approx(measured, rel=0.06)


TITAN = {"engine": "torchtitan", "recompute": "selective", "seq_length": 8192, "micro_batch_size": 2}
OLD = {**TITAN, "memory_profile": "torchtitan_2024"}
LONG = {**OLD, "compile": True, "recompute": "full", "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("gpus", "names", "measured"),
    [
        ("8xH100", {**OLD, "global_batch_size": 16}, 82.4),
        ("8xH100", {**OLD, "global_batch_size": 16, "compile": True}, 77.0),
        ("128xH100", {**OLD, "global_batch_size": 256}, 67.0),
        ("128xH100", {**OLD, "global_batch_size": 256, "compile": True}, 62.0),
        ("8xH100", {**LONG, "seq_length": 32768, "global_batch_size": 8}, 83.9),
        ("8xH100", {**LONG, "seq_length": 262144, "cp": 8, "global_batch_size": 1}, 84.5),
        ("32xH200", {**TITAN, "global_batch_size": 64, "compile": True, "matmul": "fp8_tensor"}, 48.0),
        ("64xH200", {**TITAN, "global_batch_size": 128, "compile": True, "matmul": "fp8_tensor"}, 47.0),
    ],
)
def test_torchtitan_reserves_for_8b(gpus, names, measured):
    assert memory(case(llama(), gpus, **names)).reserved == pytest.approx(measured, rel=0.06)


def test_torchtitan_reserves_for_70b():
    names = {**OLD, "tp": 8, "sp": True, "recompute": "full", "micro_batch_size": 16, "compile": True}
    found = memory(case(find("llama3-70b"), "256xH100", global_batch_size=512, **names))
    assert found.reserved == pytest.approx(69.7, rel=0.06)  # 71.9, and 67.6 with async tensor parallelism


@pytest.mark.parametrize(
    ("names", "measured"),
    [
        ({"tp": 8, "sp": True, "global_batch_size": 32}, 28.3),
        ({"tp": 2, "sp": True, "global_batch_size": 32}, 60.7),
        ({"cp": 8, "seq_length": 32768, "global_batch_size": 4}, 104.5),
        ({"cp": 8, "seq_length": 131072, "global_batch_size": 4}, 148.0),
        ({"pp": 2, "global_batch_size": 32}, 66.6),
    ],
)
def test_megatron_allocates_for_70b_of_12_layers(names, measured):
    model = llama(12, 8192, 28672, 64, 8)
    one = case(model, "8xB200", engine="megatron", strategy="zero1", **{"seq_length": 4096, **names})
    assert memory(one).allocated == pytest.approx(measured, rel=0.04)


def test_every_stage_is_right_not_only_the_worst():
    """DeepSeek-V3 of four layers in two stages on B200: rank 0 reports 71.2 GiB, the worst rank 114.0."""
    model = find("deepseek-v3")
    layers = (model.layers[0], *model.layers[-3:])
    groups = {layer: tuple(i for i, other in enumerate(layers) if other == layer) for layer in layers}
    short = type(model)(
        **{
            name: getattr(model, name) for name in type(model).__struct_fields__ if name != "groups"
        },
        groups=tuple(type(model.groups[0])(layer, places) for layer, places in groups.items()),
    )  # fmt: skip
    names = {
        "engine": "megatron",
        "strategy": "zero1",
        "pp": 2,
        "ep": 4,
        "global_batch_size": 32,
        "force_balance": True,
    }
    first, last = memory_by_stage(case(short, "8xB200", seq_length=4096, **names))
    assert first.allocated == pytest.approx(71.2, rel=0.03)
    assert last.allocated == pytest.approx(114.0, rel=0.03)


def test_plain_gpt_with_dropout_as_in_megatrons_own_tests():
    """GPT of 32 layers, tp 4, sequence 8,192, micro batch 2: 53.2 GiB on the last rank."""
    from meshwright.models import Attention, Dense, Group, Layer, ModelSpec

    layer = Layer(Attention(32, 8, 128), Dense(16384, gated=False), norm_params=2 * 4096)
    model = ModelSpec(
        "gpt", "gpt", "causal_lm", 4096, (Group(layer, tuple(range(32))),), vocab=131073, final_norm_params=4096
    )
    names = {"engine": "megatron", "strategy": "zero1", "tp": 4, "seq_length": 8192, "micro_batch_size": 2}
    found = memory(case(model, "8xH100", global_batch_size=8, dropout=True, **names), "last")
    assert found.allocated == pytest.approx(53.2, rel=0.03)


OURS = {"strategy": "ddp", "master": "bf16", "moments": "bf16", "seq_length": 4096, "loss": "chunked"}


@pytest.mark.parametrize(
    ("names", "measured"),
    [
        ({"recompute": "full", "compile": True, "micro_batch_size": 4}, 69.9),
        ({"recompute": "full", "micro_batch_size": 4}, 68.5),
        ({"compile": True, "micro_batch_size": 2}, 97.9),
        ({"compile": True, "micro_batch_size": 3}, 116.0),
    ],
)
def test_torch_on_one_h200(names, measured):
    """A plain loop that kept its gradients from step to step, as accumulation does."""
    found = memory(case(llama(), "1xH200", global_batch_size=2 * names["micro_batch_size"], **OURS, **names))
    assert found.allocated == pytest.approx(measured, rel=0.05)


def test_activation_bytes_match_what_autograd_saves():
    """Llama 3 8B layers on H200 with torch 2.11: bytes per token and layer."""
    from meshwright.costs.activations import activation_bytes_by_recompute, layer_activation_bytes

    layer = llama().layers[0]
    for compiled, measured in ((False, 168_072), (True, 139_400)):
        one = case(llama(), "1xH200", compile=compiled)
        assert activation_bytes_by_recompute(one, layer_activation_bytes(one, layer))[0] == pytest.approx(
            measured, rel=0.001
        )


def test_adapters_on_one_consumer_gpu():
    """torchtune, Llama 3.1 8B LoRA of rank 8 on attention, recompute and chunked loss: 16.2 GiB."""
    names = {**OURS, "seq_length": 2048, "recompute": "full", "compile": True, "micro_batch_size": 2, "rank": 8}
    found = memory(
        case(llama(), "1xRTX4090", "peft", "automodel", targets=("qkv", "proj"), global_batch_size=2, **names)
    )
    assert found.allocated == pytest.approx(16.2, rel=0.05)


def test_a_sweep_of_runs_that_passed_and_failed():
    """Aleph Alpha, 13B on A100-80: what ran out of memory and what did not."""
    model = llama(40, 5120, 13824, 40, 40, 128000)
    names = {
        "engine": "megatron", "memory_profile": "aa_scaling", "strategy": "zero1", "grads": "bf16", "loss": "plain",
        "seq_length": 2048, "global_batch_size": 2048, "norm_kernel": "fused",
    }  # fmt: skip
    assert memory(case(model, "32xA100-80", **names)).fits
    assert not memory(case(model, "32xA100-80", micro_batch_size=2, **names)).fits
    assert memory(case(model, "64xA100-80", micro_batch_size=4, recompute="full", **names)).fits
    assert not memory(case(model, "64xA100-80", micro_batch_size=8, recompute="full", **names)).fits


def test_engines_differ_where_they_should():
    names = {"global_batch_size": 64, "seq_length": 8192, "recompute": "none"}
    eager, compiled = (memory(case(llama(), "8xH100", compile=c, **names)) for c in (False, True))
    assert compiled.activations < eager.activations
    hugging_face = memory(case(llama(), "8xH100", engine="automodel", **names))
    assert hugging_face.activations > eager.activations
    padded, even = (memory(case(mixtral(), "8xH200", engine=e, compile=True)) for e in ("kempnerforge", "torchtitan"))
    assert padded.activations > even.activations


def test_frozen_linears_save_no_input():
    few, all_linears = (
        memory(case(llama(), "8xH100", "peft", targets=targets))
        for targets in (("qkv",), ("qkv", "proj", "fc1", "fc2"))
    )
    assert few.activations < all_linears.activations
    assert all_linears.activations == pytest.approx(memory(case(llama(), "8xH100")).activations, rel=0.05)


def test_bands_are_wider_with_fewer_measurements():
    known = costs.estimate(case(llama())).band.memory_pct
    assert costs.estimate(case(llama(), goal="peft")).band.memory_pct > known
    assert costs.estimate(case(llama(), "8xB200", matmul="nvfp4")).band.memory_pct > known


@pytest.mark.parametrize(
    ("micro_batch_size", "measured"),
    [(4, 117.3), (5, 134.4)],  # benchmarks/results/engine_h200_2026-11-15.json
)
def test_our_engine_on_one_h200(micro_batch_size, measured):
    """Gradients of a single micro batch appear while its activations go."""
    names = {**OURS, "strategy": "fsdp2", "loss": "fused_linear", "compile": True, "moments": "bf16", "grads": "bf16"}
    names |= {"micro_batch_size": micro_batch_size, "global_batch_size": micro_batch_size}
    found = memory(case(llama(), "1xH200", reduce="bf16", **names))
    assert found.allocated == pytest.approx(measured, rel=0.02)
