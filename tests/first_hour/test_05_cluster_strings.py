"""Issue 2, number 5: cluster strings are understood or refused, and what they leave open is said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshwright.clusters import assumptions, cluster, gpus
from meshwright.errors import InputError


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("1x4090", "1xRTX4090"),
        ("4090x1", "1xRTX4090"),
        ("2x3090", "2xRTX3090"),
        ("2x8x4090", "2x8xRTX4090"),
        ("8 H100", "8xH100"),
        ("8 4090", "8xRTX4090"),
        ("h100:8", "8xH100"),
        ("gpu:h100:8", "8xH100"),
        ("8*H100", "8xH100"),
        ("8 x h100", "8xH100"),
        ("8H100", "8xH100"),
        ("8-h100", "8xH100"),
        ("8 h100 gpus", "8xH100"),
        ("H100x8", "8xH100"),
        ("2 nodes of 8 H100", "2x8xH100"),
        ("2 nodes with 4 L40S each", "2x4xL40S"),
        ("8 H100 per node, 4 nodes", "4x8xH100"),
        ("16 h100 on 2 nodes", "2x8xH100"),
        ("2x(8xH100)", "2x8xH100"),
        ("a100-80gb:8", "8xA100-80"),
        ("16 x A100 40GB", "2x8xA100-40"),
        ("8xH100-SXM5", "8xH100"),
        ("2x H100 PCIe", "2xH100-PCIe"),
        ("2xH100 NVL", "2xH100-NVL"),
        ("RTX 4090 x2", "2xRTX4090"),
        ("dual 3090", "2xRTX3090"),
        ("1x4070 Ti", "1xRTX4070-Ti"),
        ("1x 4070 ti super", "1xRTX4070-Ti-Super"),
        ("1x RTX 6000 Ada", "1xRTX6000-Ada"),
        ("1x rtx pro 6000", "1xRTX-PRO-6000"),
        ("1xRTX 3090 24GB", "1xRTX3090"),
        ("nvidia-tesla-t4:4", "4xT4"),
        ("p5.48xlarge", "8xH100"),
        ("2 x p4d.24xlarge", "2x8xA100-40"),
        ("a3-highgpu-8g", "8xH100"),
        ("4xStandard_ND96isr_H100_v5", "4x8xH100"),
        ("g5.xlarge", "1xA10G"),
        ("3090", "1xRTX3090"),
        ("4090", "1xRTX4090"),
        ("rtx 5080", "1xRTX5080"),
    ],
)
def test_what_people_type_is_understood(typed: str, meant: str) -> None:
    assert str(cluster(typed)) == meant


@pytest.mark.parametrize(
    ("typed", "reason", "fix"),
    [
        ("3070", "describe a card that the catalogue lacks in a .toml file", None),
        ("8x3070", "looks like the name of a card", None),
        ("1080", "looks like the name of a card", None),
        ("2x6000", "looks like the name of a card", "2xA6000"),
        ("2x500", "500 GPUs are not one node", None),
        ("h100 8", "write the count before the GPU", "8xH100"),
        ("4xA100-40 x 24", "both counts come before the GPU", "24x4xA100-40"),
        ("24xA100-40x4", "both counts come before the GPU", "24x4xA100-40"),
        ("17 h100 on 2 nodes", "cannot be in 2 equal nodes", None),
        ("g5.13xlarge", "not a cluster", "g5.12xlarge"),
        ("8xP40", "no tensor cores", "1xT4"),
    ],
)
def test_the_rest_is_refused_with_a_fix(typed: str, reason: str, fix: str | None) -> None:
    with pytest.raises(InputError) as caught:
        cluster(typed)
    assert reason in caught.value.reason
    assert fix is None or fix == caught.value.fix[0]


def test_a_card_number_is_never_a_count() -> None:
    for series in range(1, 6):
        for card in range(5, 10):
            for text in (f"{series}0{card}0", f"1x{series}0{card}0", f"{series}0{card}0x1"):
                try:
                    found = cluster(text)
                except InputError:
                    continue
                assert found.world == 1, text


@pytest.mark.parametrize("name", ["RTX 3090", "4070", "4080", "5080", "L4", "T4", "A10G", "RTX 6000 Ada", "GH200"])
def test_gpus_that_people_have(meshwright: Any, name: str) -> None:
    answer = meshwright("estimate", "qwen3-0.6b", "--goal", "peft", "--gpus", f"1x{name}", "--seq", "1k", "--json").json
    assert 0 < answer["estimate"]["mfu"] < 0.8
    assert answer["estimate"]["band"]["step_pct"] >= 40  # nothing was measured on them


def test_shapes_and_variants_that_were_assumed_are_said(meshwright: Any) -> None:
    text = meshwright("recommend", "llama3-8b", "--gpus", "12xL40S", "--goal", "sft").out
    assert "Assumed  12 GPUs do not fill nodes of 8" in text
    assert "taken as 3 nodes of 4" in text
    assert "full nodes: 8xL40S or 16xL40S" in text
    answer = meshwright("check", "llama3_8b_sft_config", "--gpus", "60xH100", "--json").json
    assert {one["field"]: one["value"] for one in answer["assumed"]} == {
        "variant": "H100",
        "nodes": "15x4",
        "network": "400 Gb/s per GPU",
    }
    answer = meshwright("estimate", "llama3-8b", "--gpus", "1xA100", "--goal", "peft", "--json").json
    assert ["80 GB" in one["message"] for one in answer["question"]["assumed"]] == [True]
    answer = meshwright("plan", "llama3-8b", "--gpus", "8", "--goal", "sft", "--top", "1", "--json").json
    assert [one["field"] for one in answer["plans"][0]["question"]["assumed"]] == ["gpu"]
    script = meshwright("launch", "llama3_8b_sft_config", "--scheduler", "slurm", "--gpus", "2xA100", "--json").json
    assert [one["field"] for one in script["assumed"]] == ["variant"]


def test_what_was_typed_in_full_leaves_nothing_open() -> None:
    for text in ("8xH100", "1xRTX4090", "8xA100-80", "1xH100-NVL"):
        assert assumptions(text) == ()
    for text in ("4x8xH100", "2x8xA100-80"):  # several nodes need a network, which the text cannot say
        assert [one.field for one in assumptions(text)] == ["network"]


def test_gpus_without_bf16_train_in_fp16(meshwright: Any) -> None:
    answer = meshwright("recommend", "qwen3-0.6b", "--gpus", "4xT4", "--goal", "sft", "--seq", "1k", "--json").json
    assert answer["contract"]["precision"] == "fp16"
    assert any(c["field"] == "precision.compute" and "does not support bf16" in c["why"] for c in answer["changes"])
    assert not [f for f in answer["findings"] if f["rule"].startswith("precision.")]
    answer = meshwright("check", "qwen3_600m_sft_config", "--gpus", "4xV100", "--json")
    assert answer.code == 1
    found = {f["rule"]: f["fix"] for f in answer.json["findings"]}
    assert found["precision.bf16-gpu"] == ["precision.compute=fp16"]


def test_every_gpu_of_the_catalogue_is_found_by_what_it_is_called() -> None:
    for known in gpus():
        for typed in (f"2x{known.name}", f"2 {known.name.lower()}", f"{known.name}:2"):
            assert cluster(typed).gpu.name == known.name


@pytest.mark.parametrize(
    ("typed", "said", "fix"),
    [
        ("mac", "Apple's are not among them", "8xH100"),
        ("M3 Max", "Apple's are not among them", "8xH100"),
        ("1xTPUv5e", "TPUs are not among them", "8xH100"),
        ("8xGaudi3", "other accelerators are not among them", "8xH100"),
        ("16xtrn2", "other accelerators are not among them", "8xH100"),
        ("rtx 4090 laptop", "a laptop's card", "memory_gib = 16"),
        ("Tesla P40", "no tensor cores", "1xT4"),
        ("2xP100", "no tensor cores", "1xT4"),
        ("GTX 1080 Ti", "no tensor cores", "1xT4"),
        ("1xTitanRTX", "not in the catalogue", "memory_gib"),
        ("DGX Spark", "shares the memory", "cluster_file"),
        ("1xGB10", "shares the memory", "cluster_file"),
        ("colab", "one of several GPUs", "1xT4"),
        ("kaggle", "one of several GPUs", "2xT4"),
        ("2x16GB", "name it", "2xRTX"),
        ("24 GB VRAM", "name it", "1xRTX"),
    ],
)
def test_a_machine_without_a_planned_gpu_is_named_as_such(typed: str, said: str, fix: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        cluster(typed)
    assert fix in caught.value.fix[0]


@pytest.mark.parametrize(
    ("typed", "meant"), [("kaggle T4 x2", "2xT4"), ("colab L4", "1xL4"), ("runpod 4x A40", "4xA40")]
)
def test_the_name_of_a_provider_is_no_part_of_the_gpu(typed: str, meant: str) -> None:
    assert cluster(typed) == cluster(meant)
