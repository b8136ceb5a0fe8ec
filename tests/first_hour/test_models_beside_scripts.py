"""Models that a file names by a relative path: found beside the file from every folder, as its other files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright import frameworks

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 48_000,
    "max_position_embeddings": 4096,
}
ARGUMENTS = (
    "--deepspeed ds.json {model} --block_size 4096 --do_train --bf16 --per_device_train_batch_size 4 "
    "--gradient_accumulation_steps 4 --max_steps 1000 --learning_rate 3e-4 --output_dir out"
)
ZERO = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
NOT_NAMED = "does not name its model"
FILES = {
    "run.sh": f"torchrun --nproc_per_node 8 run_clm.py {ARGUMENTS.format(model='--config_name config.json')}\n",
    "cd.sh": "cd shape\n"
    f"torchrun --nproc_per_node 8 ../run_clm.py {ARGUMENTS.format(model='--config_name config.json')}\n",
    "tuned.sh": f"torchrun --nproc_per_node 8 run_clm.py {ARGUMENTS.format(model='--model_name_or_path shape')}\n",
    "axolotl.yaml": "base_model: ./shape\nsequence_len: 4096\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "max_steps: 100\nlearning_rate: 2e-5\nbf16: true\ndatasets:\n- path: org/chats\n  type: chat_template\n",
    "factory.yaml": "model_name_or_path: shape\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: llama3\n"
    "dataset: identity\ncutoff_len: 2048\nper_device_train_batch_size: 1\nmax_steps: 100\nbf16: true\n",
    "automodel.yaml": "recipe: TrainFinetuneRecipeForNextTokenPrediction\nstep_scheduler:\n  global_batch_size: 64\n"
    "  local_batch_size: 1\n  max_steps: 100\nmodel:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM."
    "from_pretrained\n  pretrained_model_name_or_path: shape\ndistributed:\n  strategy: fsdp2\n",
}
FOLDER_OF = {"run.sh": "job", "cd.sh": "shape"}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts and the model that they name, and the current folder beside it."""
    for name in ("job/shape", "logs"):
        (tmp_path / name).mkdir(parents=True)
    for name, text in FILES.items():
        (tmp_path / "job" / name).write_text(text)
    (tmp_path / "job/config.json").write_text(json.dumps(MODEL))
    (tmp_path / "job/shape/config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 8}))
    (tmp_path / "job/ds.json").write_text(json.dumps(ZERO))
    monkeypatch.chdir(tmp_path / "logs")
    return tmp_path


def model_of(answer: Any) -> str:
    """Return the model that an answer is about, as a recipe names it."""
    assert "question" in answer.out, answer.err
    model: str = json.loads(answer.out)["question"]["model"]
    return model


@pytest.mark.parametrize("name", FILES)
def test_a_model_beside_its_file_is_found_from_another_folder(meshwright: Any, folders: Path, name: str) -> None:
    answer = meshwright("check", f"../job/{name}", "--gpus", "8xH100", "--json")
    assert json.loads(answer.out)["parameters"], answer.out
    assert NOT_NAMED not in answer.out


@pytest.mark.parametrize("name", ["run.sh", "tuned.sh", "automodel.yaml"])
def test_a_recipe_names_such_a_model_by_a_path_that_works_here(meshwright: Any, folders: Path, name: str) -> None:
    assert Path(model_of(meshwright("estimate", f"../job/{name}", "--gpus", "8xH100", "--json"))).exists()


def test_a_run_starts_from_the_weights_beside_the_script(folders: Path) -> None:
    content = frameworks.open_file("../job/tuned.sh")
    framework = frameworks.framework_of(content)
    assert framework is not None
    recipe = frameworks.import_file(framework, content, gpus="8xH100").recipe
    assert Path(str(recipe.checkpoint.pretrained)).resolve() == folders / "job/shape"


def test_the_command_for_a_file_that_only_check_reads_names_it_too(meshwright: Any, folders: Path) -> None:
    error = meshwright("estimate", "../job/factory.yaml", "--gpus", "8xH100").err
    assert "meshwright recommend ../job/shape --goal sft" in error


def test_the_folder_that_a_script_changes_to_comes_first(meshwright: Any, folders: Path) -> None:
    found = [model_of(meshwright("estimate", f"../job/{name}", "--gpus", "8xH100", "--json")) for name in FOLDER_OF]
    assert [Path(one).parent.name if one.endswith(".json") else Path(one).name for one in found] == [
        *FOLDER_OF.values()
    ]


def test_the_model_of_the_current_folder_is_the_one_that_its_program_opens(meshwright: Any, folders: Path) -> None:
    Path("config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 4}))
    answer = meshwright("estimate", "../job/run.sh", "--gpus", "8xH100", "--json")
    assert Path(model_of(answer)) == folders / "logs/config.json"


def test_a_fix_names_the_config_beside_the_file(meshwright: Any, folders: Path) -> None:
    (folders / "job/none.sh").write_text(f"torchrun --nproc_per_node 8 run_clm.py {ARGUMENTS.format(model='')}\n")
    words = ("estimate", "../job/none.sh", "--gpus", "8xH100")
    assert "--model ../job/config.json" in meshwright(*words).err
    assert meshwright(*words, "--model", "../job/config.json").code == 0
    (folders / "job/config.json").unlink()
    assert "--model FOLDER, where its config.json is" in meshwright(*words).err
