"""The estimate's documented keys, and step time compared with measured runs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from meshwright import costs

from .helpers import case, diffusion, hybrid, llama, mixtral


def test_the_dictionary_has_the_documented_keys_and_is_json():
    made = costs.to_dict(costs.estimate(case(llama(), "8xH100")))
    assert set(made) == {
        "fits", "memory_gib", "step_s", "step_parts_s", "tokens_per_s_per_gpu",
        "tflops_per_gpu", "mfu", "mfu_convention", "band",
        "fit_probability",
    }  # fmt: skip
    assert set(made["memory_gib"]) == {
        "weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead", "total", "capacity",
    }  # fmt: skip
    assert set(made["step_parts_s"]) == {"compute", "tp", "cp", "ep", "pp_bubble", "dp", "optimizer", "other"}
    ends = {"step_low_s", "step_high_s", "memory_low_gib", "memory_high_gib"}
    assert set(made["band"]) == {"step_pct", "memory_pct", *ends}
    assert json.loads(json.dumps(made)) == made


def test_throughput_follows_from_the_step():
    one = case(llama(), "8xH100", global_batch_size=128, seq_length=4096)
    made = costs.estimate(one)
    assert made.tokens_per_s_per_gpu == pytest.approx(128 * 4096 / 8 / made.step_s)
    assert made.tflops_per_gpu == pytest.approx(made.tokens_per_s_per_gpu * costs.flops_per_token(one) / 1e12)
    assert made.mfu == pytest.approx(made.tflops_per_gpu / one.cluster.gpu.peak_tflops["bf16"])


def test_eight_bit_matmuls_are_faster_and_name_their_peak():
    bf16, fp8 = (costs.estimate(case(llama(), "8xH100", matmul=m)) for m in ("same", "fp8_tensor"))
    assert fp8.step_s < bf16.step_s
    assert "dense bf16" in bf16.mfu_convention
    assert "dense fp8" in fp8.mfu_convention


def test_bands_are_wider_with_few_measurements():
    known = costs.estimate(case(llama())).band
    for model in (mixtral(), hybrid(), diffusion()):
        band = costs.estimate(case(model)).band
        assert band.step_pct >= known.step_pct
        assert band.memory_pct >= known.memory_pct
    assert costs.estimate(case(llama(), "8xMI300X")).band.step_pct > known.step_pct
    assert costs.estimate(case(llama(), "8xB200", matmul="nvfp4")).band.memory_pct > known.memory_pct


def test_a_model_that_is_too_large_does_not_fit():
    assert not costs.estimate(case(llama(), "1xH100", global_batch_size=8)).fits
    assert costs.estimate(case(llama(), "8xH200", global_batch_size=8)).fits


def test_a_pipeline_waits_less_with_more_micro_batches_and_with_chunks():
    names = {"pp": 4, "engine": "megatron", "strategy": "zero1"}
    few = costs.step_time(case(llama(), "16xH100", global_batch_size=32, **names))
    many = costs.step_time(case(llama(), "16xH100", global_batch_size=256, **names))
    assert few.pp_bubble / few.step_s > many.pp_bubble / many.step_s
    chunked = costs.step_time(case(llama(), "16xH100", global_batch_size=32, vp=2, **names))
    assert chunked.pp_bubble < few.pp_bubble
    even = costs.step_time(case(llama(vocab=1024), "16xH100", global_batch_size=32, **names))
    assert even.pp_bubble / even.compute == pytest.approx(3 / 8, rel=0.1)  # a large head makes the last stage wait less


def test_tensor_parallelism_across_nodes_is_slow():
    inside = costs.step_time(case(llama(), "2x8xH100", tp=8, sp=True, engine="megatron"))
    across = costs.step_time(case(llama(), "4x4xH100", tp=8, sp=True, engine="megatron"))
    assert across.tp > 1.5 * inside.tp


# Published steps in seconds, tokens per second and GPU beside them.
MEGATRON = {"engine": "megatron", "strategy": "zero1", "sp": True}


@pytest.mark.parametrize(
    ("model", "gpus", "names", "step_s", "tolerance"),
    [
        (
            llama(),
            "4xH200",
            {
                "engine": "kempnerforge",
                "recompute": "full",
                "compile": True,
                "micro_batch_size": 4,
                "global_batch_size": 32,
            },
            3.36,
            0.25,
        ),
        (
            llama(),
            "8x4xH200",
            {
                "engine": "kempnerforge",
                "recompute": "full",
                "compile": True,
                "micro_batch_size": 4,
                "global_batch_size": 512,
            },
            7.05,
            0.25,
        ),
        (
            llama(80, 8192, 28672, 64, 8),
            "64xH100",
            {
                **MEGATRON,
                "tp": 4,
                "pp": 8,
                "vp": 5,
                "seq_length": 8192,
                "global_batch_size": 128,
                "matmul": "fp8_tensor",
            },
            10.23,
            0.25,
        ),
        (
            llama(126, 16384, 53248, 128, 8),
            "256xGB200",
            {
                **MEGATRON,
                "tp": 4,
                "pp": 16,
                "vp": 4,
                "seq_length": 8192,
                "global_batch_size": 1536,
                "matmul": "fp8_tensor",
            },
            60.09,
            0.25,
        ),
    ],
)
def test_steps_match_published_ones(model, gpus, names, step_s, tolerance):
    assert costs.estimate(case(model, gpus, **{"seq_length": 4096, **names})).step_s == pytest.approx(
        step_s, rel=tolerance
    )


LAYOUTS = {"strategy": ["fsdp2", "megatron_fsdp", "ddp"], "cp": [1, 2, 1], "offload": ["none", "none", "optimizer"]}
IGNORED = {
    "attention": "eager", "overlap_param_gather": False, "overlap_grad_reduce": False, "defer_grad_sync": True,
    "fp8_gather": True, "grads": "bf16",
}  # fmt: skip
"""Values that engines replace in some of these layouts, and not in the others."""


@pytest.mark.parametrize("engine", ["meshwright", "automodel"])
@pytest.mark.parametrize("field", IGNORED)
def test_layouts_at_once_are_estimated_as_each_alone_where_an_engine_ignores_a_value(field: str, engine: str) -> None:
    asked = case(llama(), "16xH100", engine=engine).replace(**{field: IGNORED[field]})
    together = costs.estimate(asked.replace(**{name: np.array(each) for name, each in LAYOUTS.items()}))
    for row in range(3):
        alone = costs.estimate(asked.replace(**{name: each[row] for name, each in LAYOUTS.items()}))
        assert together.step_s[row] == pytest.approx(float(alone.step_s), rel=1e-9)
        assert together.memory.total[row] == pytest.approx(float(alone.memory.total), rel=1e-9)
