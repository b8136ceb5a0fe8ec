"""The printed commands from a recipe to a framework's job, rows for every scheduler, folders of mixed data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

LORA = ("--goal", "lora", "--dataset", "rows.csv", "--seq", "8192", "data.packing=true", "train.epochs=3")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a CSV file of questions and answers."""
    monkeypatch.chdir(tmp_path)
    rows = (f'"What drug does patient {n} get?","The note names drug {n}: take it twice a day."' for n in range(200))
    (tmp_path / "rows.csv").write_text("\n".join(("question,answer", *rows, "")))
    return tmp_path


def printed_command(text: str) -> list[str]:
    """Return the words of the command that an export prints for a layout that runs."""
    found = re.search(r"for a layout that runs: meshwright (.*?), then export", re.sub(r"\s+", " ", text))
    assert found is not None, text
    return shlex.split(found[1])


@pytest.mark.parametrize(
    ("model", "gpus", "to"),
    [
        ("gemma3-12b", "8xL40S", "accelerate"),
        ("qwen3-0.6b", "8xL40S", "accelerate"),
        ("llama3-8b", "8xH100", "accelerate"),
        ("qwen3-0.6b", "2xA100", "automodel"),
        ("qwen3-0.6b", "8xL40S", "deepspeed"),
        ("gpt-oss-20b", "8xH100", "accelerate"),
    ],
)
def test_the_printed_chain_ends_in_a_job(meshwright: Any, here: Path, model: str, gpus: str, to: str) -> None:
    assert not meshwright(
        "recommend", model, "--gpus", gpus, *LORA, "layout.micro_batch_size=1", "--save", "plan.toml"
    ).code
    # A layout that fits nowhere: export has to print the command for one that does.
    refused = meshwright("export", "plan.toml", "--to", to, "layout.micro_batch_size=3")
    file = "plan.toml"
    if "✗" in refused.out:
        assert not meshwright(*printed_command(refused.out)).code
        file = "sized.toml"
    assert "seq_length = 8192" in (here / file).read_text()
    assert "✗" not in meshwright("export", file, "--to", to, "--out", "exported").out
    job = meshwright("launch", file, "--to", to, "--scheduler", "slurm", "--gpus", gpus, "-t", "10:00", "--write", "j")
    assert not job.code, job.err


PLAN = """name = "plan"
model = "gemma3_vl_12b"
goal = "peft"
cluster = "8xL40S"

[data]
dataset = "rows.csv"
seq_length = 16384
packing = true

[train]
global_batch_size = 8
epochs = 3.0

[layout]
recompute = "full"
"""
SHORT = PLAN.replace("16384", "512")


def test_a_warning_does_not_change_the_length_of_a_file(meshwright: Any, here: Path) -> None:
    (here / "plan.toml").write_text(PLAN)
    refused = meshwright("export", "plan.toml", "--to", "accelerate", "--out", "exported")
    answer = meshwright(*printed_command(refused.out))
    assert "data.few-steps" in answer.out
    assert "would change your data.seq_length" in answer.out
    assert "seq_length = 16384" in (here / "sized.toml").read_text()
    assert not meshwright("export", "sized.toml", "--to", "accelerate", "--out", "exported").code
    assert (here / "exported" / "sized.yaml").exists()


@pytest.mark.parametrize("engine", ["", 'engine = "fsdp1"\n'])
def test_full_replication_is_ddp_in_accelerate(meshwright: Any, here: Path, engine: str) -> None:
    layout = 'recompute = "full"\ndp_replicate = 8'
    text = SHORT.replace("[data]", f"{engine}[data]").replace('recompute = "full"', layout)
    (here / "plan.toml").write_text(text)
    answer = meshwright("export", "plan.toml", "--to", "accelerate", "kernels.loss=fused_linear", "--out", "exported")
    written = (here / "exported" / "plan.yaml").read_text()
    assert "distributed_type: MULTI_GPU" in written
    assert "fsdp" not in written
    assert "parallelism_config" not in written
    assert "layout." not in answer.out.partition("Unmapped")[2].partition("Notes")[0]
    assert not meshwright("check", "exported/plan.yaml", "--model", "gemma3_vl_12b").code


SCHEDULERS = {
    "torchrun": (),
    "slurm": ("-t", "10:00"),
    "hosts": ("--hosts", "node1"),
    "kubernetes": ("--image", "nvcr.io/nvidia/nemo-automodel:25.11", "--mount", "data-pvc:/data"),
    "skypilot": (),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_gets_the_rows(meshwright: Any, here: Path, scheduler: str) -> None:
    (here / "plan.toml").write_text(SHORT)
    words = ("launch", "plan.toml", "--to", "automodel", "--scheduler", scheduler, *SCHEDULERS[scheduler])
    refused = meshwright(*words)
    assert refused.code
    assert "fix:   --write FOLDER" in refused.err
    answer = meshwright(*words, "--write", "jobs")
    assert not answer.code, answer.err
    text = "".join(one.read_text() for one in (here / "jobs").iterdir())
    name = "rows.messages.jsonl"
    place = name if scheduler in ("kubernetes", "skypilot") else str(here / "jobs" / name)
    assert f"path_or_dataset_id: {place}\n" in text
    assert '{"role":"user","content":"What drug does patient 0 get?"}' in text
    assert "(data)" not in answer.err  # no folder of this machine is needed


def test_rows_that_no_manifest_holds_go_to_the_volume(meshwright: Any, here: Path) -> None:
    rows = (here / "rows.csv").read_text().splitlines()
    (here / "rows.csv").write_text("\n".join((rows[0], *rows[1:] * 10, "")))
    (here / "plan.toml").write_text(SHORT)
    words = ("launch", "plan.toml", "--to", "automodel", "--scheduler", "kubernetes", "--image", "a/b:1")
    assert "--mount CLAIM:/data" in meshwright(*words, "--write", "jobs").err
    answer = meshwright(*words, "--mount", "data-pvc:/data", "--write", "jobs")
    assert "copy jobs/rows.messages.jsonl to /data of the volume data-pvc" in answer.err
    assert "path_or_dataset_id: /data/rows.messages.jsonl\n" in (here / "jobs" / "plan.yaml").read_text()
    assert len((here / "jobs" / "rows.messages.jsonl").read_text().splitlines()) == 2000


def notes_folder(here: Path, rows: str) -> Path:
    """A folder with 6 notes as .txt files of two lines, a file of rows, and a description."""
    folder = here / "notes"
    folder.mkdir()
    for number in range(6):
        (folder / f"n{number:03}.txt").write_text(f"Note {number}.\nThe patient is well.\n")
    (folder / "batch1.jsonl").write_text(rows)
    (folder / "README.txt").write_text("Notes of a ward.\n")
    return folder


TEXTS = "".join(f'{{"text": "A note of batch 1, number {n}."}}\n' for n in range(8))
CHATS = '{"question": "Which drug?", "answer": "Furosemide."}\n' * 8
SAMPLES = ("samples", "qwen3_600m_sft_config", "--dataset", "notes", "data.tokenizer=bytes", "data.seq_length=512")


def test_texts_of_a_folder_are_all_read(meshwright: Any, here: Path) -> None:
    notes_folder(here, TEXTS)
    answer = meshwright(*SAMPLES, "--count", "1")
    assert "20 of 20" in answer.out + answer.err, answer
    note = "notes: each line of 6 .txt files is a sample; --goal continued-pretraining trains on it as one text; "
    assert f"{note}README.txt not read: the name is that of a description" in re.sub(r"\s+", " ", answer.err)
    planned = meshwright("recommend", "llama3.2-1b", "--goal", "sft", "--dataset", "notes", "--gpus", "1xH100")
    assert "README.txt not read" in re.sub(r"\s+", " ", planned.out)


def test_texts_beside_conversations_are_refused(meshwright: Any, here: Path) -> None:
    folder = notes_folder(here, CHATS)
    reason = "n000.txt, n001.txt, n002.txt and 3 more would be left out: the rows of batch1.jsonl are conversations"
    for words in (SAMPLES, ("recommend", "llama3.2-1b", "--goal", "sft", "--dataset", "notes", "--gpus", "1xH100")):
        refused = meshwright(*words)
        assert refused.code, words
        assert reason in re.sub(r"\s+", " ", refused.out + refused.err)
        assert "data.dataset=notes/batch1.jsonl" in refused.out + refused.err
    (folder / "more.jsonl").write_text(CHATS)
    assert "move the .txt files out of notes" in meshwright(*SAMPLES).err


def test_a_file_that_only_a_pretraining_reads_is_refused(meshwright: Any, here: Path) -> None:
    (notes_folder(here, TEXTS) / "old.txt.zst").write_bytes(b"")
    refused = meshwright(*SAMPLES)
    assert "old.txt.zst cannot be read in a fine-tuning" in refused.err
    assert "fix:   unpack notes/old.txt.zst" in refused.err


def test_what_works_for_continued_pretraining_is_named(meshwright: Any) -> None:
    refused = meshwright("recommend", "gemma3-12b", "--goal", "cpt", "--gpus", "8xL40S")
    assert "on plain text (a text column, or .txt files) sft trains all weights" in refused.err
    assert "fix:   --goal sft data.images=false" in refused.err
    assert meshwright("recommend", "gemma3-12b", "--goal", "sft", "data.images=false", "--gpus", "8xH100").code == 0


@pytest.mark.parametrize(
    "goal", ["continue-pretrain", "continued pretraining", "continual-pretraining", "Continual Pretrain", "DAPT", "cpt"]
)
def test_words_for_continued_pretraining(meshwright: Any, goal: str) -> None:
    answer = meshwright("recommend", "qwen3-0.6b", "--goal", goal, "--gpus", "1xH100")
    assert "means pretrain: train all weights on plain text, starting from the model's" in answer.out
    explained = meshwright("explain", goal)
    assert "starting from the model's existing weights" in explained.out
    assert "learning_rate.continued-pretraining" in explained.out


@pytest.mark.parametrize(("gpus", "link"), [("8xL40S", "peer-to-peer over PCIe"), ("8xH100", "NVLink")])
def test_what_p2p_disable_costs_depends_on_the_links(meshwright: Any, here: Path, gpus: str, link: str) -> None:
    start = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-0.6B --train_type lora --dataset rows.csv --output_dir out"
    (here / "run.sh").write_text(f"#!/bin/bash\nexport NCCL_P2P_DISABLE=1\n{start}\n")
    answer = meshwright("check", "run.sh", "--gpus", gpus)
    assert f"communicate through host memory, not {link} " in re.sub(r"\s+", " ", answer.out)
    assert "not NVLink or PCIe peer-to-peer" in meshwright("explain", "NCCL_P2P_DISABLE").out


def test_size_names_the_images_it_assumes(meshwright: Any) -> None:
    words = ("size", "gemma3-12b", "--goal", "lora", "--gpu", "L40S", "--max-gpus", "2")
    assert (
        "samples with images, as in the recipe gemma3_vl_12b_peft_config; data.images=false" in meshwright(*words).out
    )
    assert "images" not in meshwright(*words, "data.images=false").out


def test_export_with_framework_in_place_of_to(meshwright: Any, here: Path) -> None:
    (here / "plan.toml").write_text(SHORT)
    refused = meshwright("export", "plan.toml", "--framework", "accelerate", "--out", "exported")
    assert "fix:   --to accelerate in place of --framework accelerate" in refused.err
    assert "--to axolotl" not in meshwright("export", "plan.toml", "--framework", "axolotl").err


def test_an_export_and_a_job_of_a_plan_have_the_same_findings(
    meshwright: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "plan.toml").write_text(PLAN)
    words = ("plan.toml", "--to", "automodel", "kernels.loss=fused_linear")
    assert not meshwright("export", *words, "--out", "exported").code
    assert not meshwright("launch", *words, "--scheduler", "torchrun", "--write", "jobs").code
    job = meshwright("check", "jobs/plan.yaml", "--gpus", "8xL40S").out
    assert "too few updates to learn" in job
    found = meshwright("check", "exported/plan.yaml", "--gpus", "8xL40S").out
    assert found.replace("exported/", "jobs/") == job
    monkeypatch.chdir(here / "exported")
    assert meshwright("check", "plan.yaml", "--gpus", "8xL40S").out == job.replace("jobs/", "")
