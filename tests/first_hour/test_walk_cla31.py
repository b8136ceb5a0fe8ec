"""What an engineer with 32 nodes of H200 typed about continued pretraining of Llama 3.3 70B."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mistakes import call

CLUSTER = 'gpu = "H200"\nnodes = 32\ngpus_per_node = 8\nnetwork_gb_s_per_node = "3200 Gb/s"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


CPT = ("llama-3.3-70b", "--gpus", "cluster.toml", "--goal", "cpt", "--seq", "8k", "--engine", "megatron")


def test_the_end_of_the_decay_follows_a_typed_rate() -> None:
    said = call("recommend", *CPT, "optimizer.lr=3e-5", "--json").json
    assert said["contract"]["min_lr"] == pytest.approx(3e-6)
    assert "follows lr" in next(one["why"] for one in said["changes"] if one["field"] == "schedule.min_lr")
    found = call("export", "llama3_70b_pretrain_config", "--to", "megatron-lm", "optimizer.lr=2e-4")
    assert "--min-lr 2e-05" in found.out
    typed = call("recommend", *CPT, "optimizer.lr=3e-5", "schedule.min_lr=3e-5", "--json").json
    assert "learning_rate.no-decay" in [one["rule"] for one in typed["findings"]]


TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nlr = 3e-4\n[lr_scheduler]\nmin_lr_factor = {}\n'
    "[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 10000\n"
)
AXOLOTL = (
    "base_model: NousResearch/Meta-Llama-3-8B\nlearning_rate: 1e-5\nlr_scheduler: cosine\ncosine_min_lr_ratio: {}\n"
    "sequence_len: 2048\nmicro_batch_size: 1\noptimizer: adamw_torch\ndatasets:\n  - path: tatsu-lab/alpaca\n"
    "    type: alpaca\n"
)
OWN = (
    'name = "own"\nmodel = "llama3_8b"\ngoal = "pretrain"\ncluster = "8xH100"\n[optimizer]\nlr = 1e-4\n'
    "[schedule]\nmin_lr = {}e-4\n"
)


@pytest.mark.parametrize(("name", "text"), [("a.toml", TITAN), ("a.yaml", AXOLOTL), ("own.toml", OWN)])
@pytest.mark.parametrize(
    ("share", "rule"),
    [("1.0", "learning_rate.no-decay"), ("1.5", "learning_rate.minimum-above-peak"), ("0.1", "")],
)
def test_a_decay_that_does_not_decay_is_found_in_every_file(
    folder: Path, name: str, text: str, share: str, rule: str
) -> None:
    (folder / name).write_text(text.format(share))
    rules = [one["rule"] for one in call("check", name, "--gpus", "8xH100", "--json").json["findings"]]
    assert [one for one in rules if one in ("learning_rate.no-decay", "learning_rate.minimum-above-peak")] == (
        [rule] if rule else []
    )
