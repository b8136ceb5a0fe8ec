"""Config files that the frameworks' own repositories ship: read without false errors, and their defects found."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import corpora
from benchmarks.corpora.__main__ import corpus_named
from benchmarks.corpora.config_files import CORPORA

from meshwright import check
from meshwright.errors import InputError

SAMPLE = 24  # files of each corpus in the default run
FALSE, UNREAD = 0.01, 0.05  # shares of files

TRAINING = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4, max_steps: 100}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  target_modules: "*_proj"
  dim: 8
distributed: {strategy: fsdp2, tp_size: 1}
dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: train
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
fp8: {enabled: false}
"""
DEFECTS = {
    "automodel.target-unknown": (
        ("lora.PeftConfig", "lora.PeftConfg"),
        ("squad.make_squad_dataset", "squadd.make_squad_dataset"),
        ("nemo_automodel.NeMo", "nemo_automodell.NeMo"),
        ("torch.optim.AdamW", "torch.optim.AdamWW"),
    ),
    "automodel.recipe-unknown": (("ForNextTokenPrediction", "ForNextTokenPredicton"),),
    "automodel.target-keyword": (
        ("dim: 8", "dimm: 8"),
        ("dim: 8", "dim: eight"),
        ("split: train", "splitt: train"),
        ("enabled: false", "enable: false"),
    ),
}


@pytest.mark.parametrize("name", CORPORA)
def test_files_of_the_sample_have_no_false_errors(name: str) -> None:
    entries = corpora.kept_entries(name)
    step = max(1, len(entries) // SAMPLE)
    outcomes = corpora.run_kept(corpus_named(name), entries[::step])
    assert [(one.path, one.unread) for one in outcomes if one.unread] == []
    assert [(one.path, one.false_errors) for one in outcomes if one.false_errors] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPORA)
def test_files_that_the_owners_ship(name: str) -> None:
    outcomes = corpora.run_kept(corpus_named(name), corpora.kept_entries(name))
    false = [(one.path, one.false_errors) for one in outcomes if one.false_errors]
    unread = [(one.path, one.unread) for one in outcomes if one.unread]
    assert len(false) <= FALSE * len(outcomes), false
    assert len(unread) <= UNREAD * len(outcomes), unread


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CORPORA if corpus_named(name).defects])
def test_injected_defects_are_reported(name: str) -> None:
    found = corpora.inject(corpus_named(name), corpora.kept_entries(name), 35)
    missed = [one for kind in found.values() for one in kind["missed"]]
    assert len(missed) <= 0.1 * sum(kind["injected"] for kind in found.values()), missed


def test_a_training_without_defects_has_no_error(tmp_path: Path) -> None:
    assert _errors(tmp_path, TRAINING) == []


@pytest.mark.parametrize(
    ("rule", "change"), [(rule, change) for rule, changes in DEFECTS.items() for change in changes], ids=str
)
def test_names_are_resolved_against_the_source(tmp_path: Path, rule: str, change: tuple[str, str]) -> None:
    assert rule in _errors(tmp_path, TRAINING.replace(*change))


def test_gpus_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "training.yaml"
    path.write_text("# automodel training.yaml --nproc-per-node 8\n" + TRAINING.replace("tp_size: 1", "tp_size: 3"))
    # a command for one node may be one of several, but no number of 8-GPU nodes has groups of 3
    assert check(str(path)).cluster is None
    path.write_text(TRAINING.replace("tp_size: 1", "tp_size: 3") + "ci: {nodes: 1, nproc_per_node: 8}\n")
    assert "automodel.mesh" in {one.rule for one in check(str(path)).findings if one.severity == "error"}


def test_no_error_rests_on_an_assumed_length(tmp_path: Path) -> None:
    text = TRAINING.replace("Llama-3.2-1B", "Llama-3.1-8B").replace("local_batch_size: 4", "local_batch_size: 32")
    path = tmp_path / "training.yaml"
    path.write_text(text[: text.index("peft:")] + text[text.index("distributed:") :])
    found = check(str(path), gpus="1xA100-40").findings
    memory = [one for one in found if one.rule.startswith("memory.")]
    assert memory
    assert all(one.severity == "warning" and "assumed" in one.message for one in memory if one.rule == "memory.peak")


def _errors(folder: Path, text: str) -> list[str]:
    path = folder / "training.yaml"
    path.write_text(text)
    try:
        return [one.rule for one in check(str(path), framework="automodel").findings if one.severity == "error"]
    except InputError as error:
        return [error.reason]
