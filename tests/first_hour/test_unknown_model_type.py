"""A model of a type that the engine has no layers for, from its config.json to a trained folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_decoders import CASES

SHORT = ("train.steps=2", "data.seq_length=32")


def config_file(folder: Path, kind: str, **changes: Any) -> str:
    values = {"model_type": kind, **CASES[kind]["config"], **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_config_file_to_trained_folder_and_back(meshwright: Any, tmp_path: Path) -> None:
    """Train from config.json, resume, convert, then train adapters on the folder that the run wrote."""
    config = config_file(tmp_path, "falcon")
    first = meshwright("train", config, "--tiny", "--json", "--out", "run", *SHORT)
    assert first.code == 0, first.err
    assert len(first.json["losses"]) == 2
    longer = ("train.steps=3", "data.seq_length=32", "--accept-changes")
    resumed = meshwright("train", config, "--tiny", "--json", "--out", "run", *longer)
    assert resumed.code == 0, resumed.err
    assert len(resumed.json["losses"]) == 1
    assert meshwright("convert", "run", "hf").code == 0
    saved = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert saved["architectures"] == ["FalconForCausalLM"]
    tuned = meshwright(
        *("train", "run/model", "--goal", "peft", "--dataset", "mock", "--json", "--out", "adapters"),
        *("train.global_batch_size=2", "layout.micro_batch_size=2", "precision.compute=fp32", *SHORT),
    )
    assert tuned.code == 0, tuned.err
    assert (tmp_path / "adapters" / "model" / "adapter_model.safetensors").is_file()


def test_the_run_line_of_a_recommendation_trains(meshwright: Any, tmp_path: Path) -> None:
    """State-space layers: the plan has data parallelism only, and packing is turned off with a note."""
    config = config_file(tmp_path, "mamba2")
    plan = meshwright("recommend", config, "--gpus", "1xH100", "--goal", "sft", "--json")
    assert plan.code == 0, plan.err
    words = shlex.split(plan.json["commands"]["meshwright"])
    assert words[:2] == ["meshwright", "train"]
    words[words.index("--dataset") + 1] = "mock"
    kept = [word for word in words[1:] if not word.startswith(("data.seq_length=", "train.", "kernels.compile="))]
    done = meshwright(*kept, "--tiny", "--json", "--out", "run", *SHORT)
    assert done.code == 0, done.err
    assert "data.packing true → false: transformers' mamba2 does not keep the documents" in done.err


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("layout.tp=2", "our engine has no tensor parallelism for cohere2 models (tp=2)"),
        ("layout.cp=2", "our engine has no context parallelism for cohere2 models (cp=2)"),
    ],
)
def test_what_such_a_model_cannot_do_is_said_before_it_starts(
    meshwright: Any, tmp_path: Path, override: str, reason: str
) -> None:
    config = config_file(tmp_path, "cohere2")
    refused = meshwright("train", config, "--tiny", "--nproc", "2", override)
    assert refused.code == 1
    assert reason in refused.out + refused.err


def test_a_dry_run_says_that_it_executes_our_layers(meshwright: Any, tmp_path: Path) -> None:
    refused = meshwright("dryrun", config_file(tmp_path, "cohere2"), "--gpus", "8xH100", "--goal", "pretrain")
    assert refused.code == 2
    assert "cohere2 models run transformers' forward pass" in refused.err
