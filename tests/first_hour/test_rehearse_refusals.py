"""Rehearsals that cannot run: what the command needs, what would fit, and nothing runs first."""

from __future__ import annotations

import shlex
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from meshwright import clusters
from meshwright.engine.model_families import family_of
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.rehearsal import run
from meshwright.rehearsal.rank import RankResult
from meshwright.rehearsal.run_plan import Device

SMALLER = {"layout.recompute=full", "layout.micro_batch_size=1"}
no_gpu = pytest.mark.skipif(which("nvidia-smi") is not None, reason="this machine has a GPU")


@no_gpu
@pytest.mark.parametrize(
    "words",
    [
        ("llama3_8b_pretrain_config", "--gpus", "8xH100", "layout.tp=2"),
        ("llama3-8b", "--gpus", "8xH100", "--goal", "sft"),
        ("qwen3-30b-a3b", "--gpus", "2x8xH200", "--goal", "pretrain", "layout.ep=8"),
    ],
)
def test_without_a_gpu_the_offered_dry_run_is_that_of_the_same_step(meshwright: Any, words: tuple[str, ...]) -> None:
    done = meshwright("rehearse", *words)
    assert done.code == 2
    assert "times kernels on an NVIDIA GPU: no GPU found on this machine" in done.err
    assert "pass the cluster" not in done.err  # it was passed
    assert f"meshwright dryrun {shlex.join(words)}" in done.err
    assert not list(Path().iterdir())


def test_options_that_exclude_each_other_are_refused_before_a_rank_runs(meshwright: Any) -> None:
    words = ("llama3_8b_pretrain_config", "--gpus", "2xH100", "--device", "cpu")
    done = meshwright("rehearse", *words, "--tiny", "--alternatives")
    assert done.code == 2
    assert "alternatives: rehearses layouts of the full model" in done.err
    assert "rehearsing" not in done.err
    done = meshwright("rehearse", *words, "layout.tp=2")
    assert "meshwright dryrun llama3_8b_pretrain_config --gpus 2xH100 layout.tp=2" in done.err


@pytest.mark.parametrize(
    ("changes", "offered", "not_offered"),
    [
        (("layout.micro_batch_size=4", "layout.recompute=none"), SMALLER, set()),
        (("layout.micro_batch_size=1", "layout.recompute=full"), set(), SMALLER),
        (("layout.tp=8",), set(), {"layout.tp=16"}),
    ],
)
def test_a_rank_that_does_not_fit_by_parts_says_what_would(
    monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], offered: set[str], not_offered: set[str]
) -> None:
    tried: list[int] = []

    def out_of_memory(_: Any, tasks: Any, *more: Any, **options: Any) -> list[RankResult]:
        tried.append(max(map(len, tasks[0].kept)))
        return [RankResult({}, out_of_memory="CUDA out of memory. Tried to allocate 2.00 GiB")]

    monkeypatch.setattr("meshwright.dryrun.ranks.run_parallel", out_of_memory)
    recipe = override.apply(index.load("llama3_8b_pretrain_config"), ("layout.pp=1", "layout.vp=1", *changes))
    small = Device("cuda", clusters.gpu("A10"), 22.0)
    with pytest.raises(InputError, match=r"does not fit this GPU of 22 GiB.*need about \d+ GiB") as caught:
        run.rehearse(recipe, clusters.cluster("8xH100"), small, config=family_of(recipe).config_for(recipe))
    assert tried == sorted(tried, reverse=True)  # fewer layers each time
    assert tried[-1] <= 2
    fixes = set(caught.value.fix)
    assert offered <= fixes
    assert not not_offered & fixes
    assert "a GPU with more memory" in fixes
    assert any(fix.startswith("meshwright dryrun llama3_8b_pretrain_config --gpus 8xH100") for fix in fixes)
