"""Users' own files, exported: what is written parses, reads back as the same training, and says what it lost."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.file_to_file import CASES, FILES, prepare, swept
from tests.cli.conftest import meshwright

from meshwright.choices import FRAMEWORKS

__all__ = ["meshwright"]

QUICK = ("am_lora", "trl_py", "own_sft", "titan_8b", "acc_trl_sharegpt")
WRONG = ("crash", "syntax", "unreadable", "missing path", "silent", "not in file", "verdict")


def test_every_folder_of_files_is_a_case() -> None:
    assert {one.case for one in CASES} == {path.name for path in FILES.iterdir()}
    assert all((FILES / one.case / one.file).is_file() for one in CASES)


@pytest.mark.parametrize("case", QUICK)
def test_an_exported_file_is_the_same_training(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = swept([case], FRAMEWORKS, ["export"])
    assert [one for one in found.problems if one.kind in WRONG] == []


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a case's folder the current one."""

    def enter(name: str) -> Path:
        prepare(next(one for one in CASES if one.case == name), tmp_path)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return enter


def test_an_export_to_deepspeed_has_a_program_with_the_model_and_the_data(meshwright: Any, case: Any) -> None:
    folder = case("acc_trl_sharegpt")
    found = meshwright("export", "sft.sh", "--to", "deepspeed", "--gpus", "8xH100", "--out", "ds")
    assert found.code == 0, found
    program = (folder / "ds" / "train.py").read_text()
    assert 'from_pretrained("Qwen/Qwen2.5-7B-Instruct"' in program
    assert 'data_files="sharegpt.messages.jsonl"' in program, "ShareGPT rows are converted"
    assert '"messages"' in (folder / "ds" / "sharegpt.messages.jsonl").read_text()
    assert "eval_strategy" not in (folder / "ds" / "sft_args.py").read_text(), "the Trainer refuses it without data"
    assert "train.eval_every=50: no validation data is set" in found.out
    assert "# not in this file: train.eval_every=50" in program
    assert "Start    cd ds && torchrun --nproc-per-node=8 train.py\n" in found.out
    back = meshwright("import", "ds/ds_config.json", "--gpus", "8xH100")
    assert 'pretrained = "Qwen/Qwen2.5-7B-Instruct"' in back.out
    assert 'dataset = "sharegpt.messages.jsonl"' in back.out


@pytest.mark.parametrize("to", ["accelerate", "deepspeed"])
def test_the_job_of_a_written_program_is_read_back(meshwright: Any, case: Any, to: str) -> None:
    case("own_sft")
    found = meshwright("launch", "my.toml", "--to", to, "--scheduler", "slurm", "--time", "24:00:00", "--write", "job")
    assert found.code == 0, found
    back = meshwright("import", "job/my.sbatch", "--gpus", "8xH100")
    assert back.code == 0, back
    for line in ("lr = 1e-05", "epochs = 2.0", "validation_part = 0.1", "global_batch_size = 32", "keep = 2"):
        assert line in back.out
    assert meshwright("check", "job/my.sbatch", "--gpus", "8xH100").code == 0


def test_a_script_is_read_with_the_program_that_it_starts(meshwright: Any, case: Any) -> None:
    folder = case("trl_py")
    (folder / "run.sh").write_text("torchrun --nproc_per_node 8 train.py\n")
    found = meshwright("import", "run.sh", "--gpus", "8xH100")
    assert found.code == 0, found
    assert 'model = "qwen3_8b"' in found.out
    assert "validation_part = 0.05" in found.out
    assert 'dataset = "data/messages.jsonl"' in found.out


def test_files_for_training_and_validation_are_both_read(meshwright: Any, case: Any) -> None:
    case("hf_py")
    found = meshwright("import", "train.py", "--gpus", "4xH100")
    assert 'dataset = "data/corpus.txt"' in found.out
    assert 'validation = "data/val.txt"' in found.out


def test_replicas_move_to_megatron(meshwright: Any, case: Any) -> None:
    """Replicas gather no parameters: the overlap of that gather was an error of every plan."""
    case("trl_cli")
    found = meshwright("recommend", "sft.sh", "--gpus", "8xH100", "--engine", "megatron", "--save", "sized.toml")
    assert found.code == 0, found
    assert "overlap.gather-needs-sharding" not in found.out


def test_job_scripts_say_what_they_do_not_have(meshwright: Any, case: Any) -> None:
    folder = case("mlm_dense")
    job = ("--scheduler", "slurm", "--time", "24:00:00", "--gpus", "4x8xH100", "--write", "job")
    found = meshwright("launch", "pretrain_3b.sh", "--to", "megatron-bridge", *job)
    assert found.code == 0, found
    [script] = (folder / "job").glob("*.sbatch")
    assert "# not in this file: pretrain_3b.sh" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_local_file_for_a_script_of_trl_is_named_in_a_config(meshwright: Any, case: Any) -> None:
    """TRL passes --dataset_name to load_dataset, which refuses a file."""
    folder = case("acc_trl_sharegpt")
    found = meshwright("export", "sft.sh", "--to", "accelerate", "--gpus", "8xH100", "--out", "acc")
    assert found.code == 0, found
    assert "--dataset_name" not in found.out
    assert "--config sft_data.yaml" in found.out
    data = yaml.safe_load((folder / "acc" / "sft_data.yaml").read_text())["datasets"]
    assert data == [{"path": "json", "data_files": str(folder / "acc" / "sharegpt.messages.jsonl"), "split": "train"}]
    assert subprocess.run(["bash", "-n", "acc/sft.sh"], check=False).returncode == 0
    back = meshwright("import", "acc/sft.sh", "--gpus", "8xH100")
    assert "sharegpt.messages.jsonl" in back.out
    assert meshwright("check", "acc/sft.sh", "--gpus", "8xH100").out.count("error") == 0


def test_a_fused_output_layer_is_not_written_for_releases_of_megatron(meshwright: Any) -> None:
    words = (
        "export",
        "llama3_8b_pretrain_config",
        "--to",
        "megatron-lm",
        "--gpus",
        "8xH100",
        "kernels.loss=fused_linear",
    )
    found = meshwright(*words)
    assert "cross-entropy-fusion-impl linear \\" not in found.out
    assert "Unmapped kernels.loss=fused_linear" in found.out


@pytest.mark.parametrize(("name", "file", "model"), [
    ("trl_dpo", "dpo.sh", "Qwen/Qwen2-0.5B-Instruct --goal sft --gpus 8xH100"),
    ("trl_grpo", "grpo.sh", "Qwen/Qwen2.5-1.5B-Instruct --goal sft --gpus 8xH100"),
])  # fmt: skip
def test_runs_with_preferences_or_rewards_say_what_can_be_planned(
    meshwright: Any, case: Any, name: str, file: str, model: str
) -> None:
    case(name)
    found = meshwright("import", file, "--gpus", "8xH100")
    assert found.code == 2
    assert "losses of preferences or rewards are neither read nor planned" in found.err
    assert f"fix:   meshwright recommend {model}" in found.err
    assert meshwright("recommend", *model.split()).code == 0


def test_validations_without_data_are_reported_and_the_run_line_works(meshwright: Any, case: Any) -> None:
    case("acc_trl_sharegpt")
    checked = meshwright("check", "sft.sh", "--gpus", "8xH100").out
    assert (
        "--eval_strategy no trains without validation (accelerate.trl-no-test-split)  fix: meshwright export" in checked
    )
    assert "--out FOLDER data.validation_part=0.02" in checked
    assert "(accelerate.trl-dataset-file)  fix: meshwright export sft.sh --gpus 8xH100 --to accelerate" in checked
    command = meshwright("recommend", "sft.sh", "--gpus", "8xH100", "--json").json["commands"]["meshwright"]
    assert "data.validation_part=0.02" in command


def test_the_tokenizer_is_that_of_the_weights_and_never_a_look_alikes(meshwright: Any, case: Any) -> None:
    folder = case("acc_trl_sharegpt")
    for to in ("megatron-lm", "megatron-bridge"):
        out = meshwright("export", "sft.sh", "--to", to, "--gpus", "8xH100", "--out", to, "train.steps=10")
        assert out.code == 0, out
        text = "".join(path.read_text() for path in (folder / to).glob("*.*"))
        assert "Qwen/Qwen2.5-7B-Instruct" in text.partition("tokenizer")[2]
    assert "messages" in (folder / "megatron-lm" / "sharegpt.messages.jsonl").read_text(), "--sft reads messages"


def test_bpe_files_do_not_become_another_models_tokenizer(meshwright: Any, case: Any) -> None:
    folder = case("mlm_gpt2_bpe")
    saved = meshwright("recommend", "run.sh", "--gpus", "8xH100", "--engine", "megatron", "--save", "s.toml")
    assert saved.code == 0, saved
    found = meshwright("export", "s.toml", "--to", "megatron-lm", "--out", "m")
    assert "TinyLlama" not in found.out
    assert "--tokenizer-type GPT2BPETokenizer" in (folder / "m" / "s.sh").read_text()


def test_text_of_the_hub_is_not_a_prefix_of_token_files(meshwright: Any, case: Any) -> None:
    folder = case("titan_8b")
    words = ("export", "train.toml", "--to", "megatron-lm", "--gpus", "4x8xH100", "--out", "m", "layout.recompute=none")
    found = meshwright(*words)
    assert "--data-path c4 is the name of a dataset" in found.out
    assert f"--tokenizer-model {folder / 'tok'}\n" in (folder / "m" / "train.sh").read_text()
