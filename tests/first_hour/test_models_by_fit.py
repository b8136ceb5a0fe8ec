"""Models that fit: those that fit on the GPUs come before larger ones that need host memory."""

from __future__ import annotations

from typing import Any

ON = ("--gpus", "1xA10G", "--goal", "lora")


def test_models_that_need_host_memory_follow_those_that_fit(meshwright: Any) -> None:
    listed = [one["plan"] for one in meshwright("models", "ministral3", *ON, "--json").json["models"]]
    fitting = [one for one in listed if one["fits"]]
    assert [one["offload"] for one in fitting][:2] == ["none", "none"]
    sizes = [one["parameters"]["total"] for one in meshwright("models", "ministral3", *ON, "--json").json["models"]]
    assert sizes[0] < max(sizes)


def test_the_figures_are_those_of_recommend(meshwright: Any) -> None:
    [listed] = meshwright("models", "ministral3_8b", *ON, "--json").json["models"]
    planned = meshwright("recommend", "ministral3_8b", *ON, "--json").json
    assert listed["plan"]["step_s"] == planned["estimate"]["step_s"]
    assert listed["plan"]["fits"] == planned["estimate"]["fits"]
