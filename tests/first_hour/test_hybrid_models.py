"""The kernels of Mamba-2 and gated-delta layers of hybrid models are chosen by one field."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.families import FAMILIES

from meshwright import extras
from meshwright.engine import shared_gpu, worker
from meshwright.engine.kernels import fla_scan, scan_choice
from meshwright.recipes import load

HYBRID = "nemotronh_4b_pretrain_config"


def test_fla_is_refused_where_it_cannot_run_and_the_fix_runs(meshwright: Any) -> None:
    words = ("train", HYBRID, "--tiny", "train.steps=1")
    refused = meshwright(*words, "kernels.scan=fla")
    assert refused.code == 2, refused.err
    assert "kernels.scan=fla: fla's kernels need a CUDA GPU, and this run is on CPU" in refused.err
    fix = next(line for line in refused.err.splitlines() if line.startswith("fix:")).removeprefix("fix:").strip()
    assert fix == "kernels.scan=torch"
    assert meshwright(*words, *shlex.split(fix)).code == 0


def test_findings_name_what_does_not_combine_and_what_has_no_effect(meshwright: Any) -> None:
    def found(*words: str) -> dict[str, dict[str, Any]]:
        return {one["rule"]: one for one in meshwright("check", *words, "--json").json["findings"]}

    both = found(HYBRID, "kernels.scan=fla", "kernels.deterministic=true")
    assert both["kernels.deterministic-scan"]["severity"] == "error"
    dense = found("llama3_8b_pretrain_config", "kernels.scan=fla")
    assert "has no Mamba-2 or gated-delta layers" in dense["unused.scan"]["message"]
    assert "unused.scan" not in found(HYBRID, "kernels.scan=fla")
    other = found(HYBRID, "kernels.scan=fla", "--engine", "automodel")
    assert "automodel ignores scan=fla" in other["engine.ignores-scan"]["message"]


def test_a_dry_run_says_that_it_models_our_own_kernels(meshwright: Any, tmp_path: Path) -> None:
    config = {**FAMILIES["nemotron_h"], "layers_block_type": ["linear_attention", "mlp"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("dryrun", str(tmp_path), "--goal", "pretrain", "--gpus", "1xH100-SXM", "train.global_batch_size=1")
    words = (*words, "seq_length=64", "kernels.compile=false", "layout.recompute=none", "--json")
    [assumed] = [
        one for one in meshwright(*words, "kernels.scan=fla").json["assumed"] if one["field"] == "kernels.scan"
    ]
    assert assumed["value"] == "torch"
    assert "modelled with our own kernels" in assumed["message"]


def test_a_gpu_run_without_fla_says_once_what_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `auto` takes fla: the line that train and bench print at their start."""
    lines: list[str] = []
    monkeypatch.setattr(worker, "warn", lines.append)
    monkeypatch.setattr(shared_gpu, "describe", lambda process: "")
    monkeypatch.setattr(extras, "_problem", lambda package: extras.MISSING)
    process: Any = SimpleNamespace(device=torch.device("cuda"))

    def started(hybrid: bool) -> list[str]:
        lines.clear()
        spec: Any = SimpleNamespace(recipe=load(HYBRID), case=SimpleNamespace(is_hybrid=hybrid))
        worker._warn_of_slow_device(process, spec)
        return list(lines)

    monkeypatch.setattr(scan_choice, "AUTO_TRITON", False)
    monkeypatch.setattr(fla_scan, "AUTO_FLA", False)
    assert started(True) == []  # installing it would change nothing
    monkeypatch.setattr(fla_scan, "AUTO_FLA", True)
    assert started(False) == []
    [line] = started(True)
    assert line.startswith("Mamba-2 and gated-delta layers run our own kernels, which are slower than fla's: ")
    assert line.endswith(f"fla-core is not installed; run: {extras.install_command('fla-core')}")
