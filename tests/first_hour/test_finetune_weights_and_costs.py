"""Fine-tuning on one RTX 4090: whose weights, what it costs, what fits how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.clusters import cluster
from meshwright.display import amount, duration
from meshwright.models import find
from meshwright.planner.storage import storage_of
from meshwright.recipes import load
from meshwright.recipes.case import Case
from meshwright.recipes.files import from_file

IDS = (
    "meta-llama/Llama-3.2-3B-Instruct",
    "unsloth/Llama-3.2-3B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen3-1.7B-Base",
)


@pytest.mark.parametrize("hub_id", IDS)
def test_a_typed_hub_id_is_that_of_the_weights(meshwright: Any, hub_id: str, tmp_path: Path) -> None:
    saved = tmp_path / "mine.toml"
    answer = meshwright("recommend", hub_id, "--gpus", "1xRTX4090", "--goal", "lora", "--save", str(saved))
    assert f"hf download {hub_id})" in " ".join(answer.out.split())
    assert f"--model {hub_id} " in " ".join(answer.out.split())
    assert find(from_file(str(saved)).model).hf_id == hub_id  # what train looks for


def test_a_hub_id_stays_that_of_the_weights_beside_a_folder_of_its_organization(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    answer = meshwright("recommend", IDS[0], "--gpus", "1xRTX4090", "--goal", "lora", "--json").json
    assert answer["question"]["model"] == IDS[0]


@pytest.mark.parametrize(("framework", "key"), [("automodel", "model"), ("megatron-bridge", "tokenizer_model")])
def test_exports_name_the_typed_hub_id(meshwright: Any, framework: str, key: str, tmp_path: Path) -> None:
    typed = "unsloth/Meta-Llama-3-8B-Instruct"
    words = ("llama3_8b_sft_config", "--model", typed, "--to", framework, "--gpus", "8xH100", "--out", str(tmp_path))
    answer = meshwright("export", *words, "--json")
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert typed in text
    assert "meta-llama/" not in text
    assert key in text
    assert not {one["field"] for one in answer.json["unmapped"]} & {"checkpoint.pretrained", "data.tokenizer"}


@pytest.mark.parametrize(
    ("name", "weights"),
    [("llama3.2-3b-chat", "meta-llama/Llama-3.2-3B"), ("gemma-3-1b-thinking", "google/gemma-3-1b-pt")],
)
def test_a_name_without_organization_says_whose_weights_it_means(meshwright: Any, name: str, weights: str) -> None:
    answer = meshwright("recommend", name, "--gpus", "1xRTX4090", "--goal", "lora")
    assert f"its weights are {weights};" in answer.err
    plain = meshwright("recommend", "llama3.2-3b", "--gpus", "1xRTX4090", "--goal", "lora")
    assert "is the catalogue model" not in plain.err


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (3, "3.00 days"),
        (1, "24.0 hours"),
        (0.05, "72.0 minutes"),
        (1e-4, "8.64 seconds"),
        (1e-8, "less than 0.01 seconds"),
    ],
)
def test_a_duration_has_the_unit_that_fits(days: float, text: str) -> None:
    assert duration(days) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.00"), (0.004, "less than 0.01"), (0.63, "0.63"), (1234.5, "1,234")])
def test_money_shows_cents_only_where_they_tell(value: float, text: str) -> None:
    assert amount(value) == text


def test_two_gpu_types_are_compared_by_time_and_cost(meshwright: Any) -> None:
    words = ("--goal", "lora", "--gpus", "1xRTX4090,1xH100", "--tokens", "2M", "--max-gpus", "1")
    out = meshwright("size", "llama3.2-3b", *words, "--price", "RTX4090=0.3,H100=2.5").out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("RTX4090 ", "H100 "))}
    assert rows["RTX4090"][-3:-1] == ["minutes", "0.3"]
    assert rows["H100"][-3:-1] == ["seconds", "2.5"]
    assert 0 < float(rows["RTX4090"][-1]) < float(rows["H100"][-1])
    assert "smallest  RTX4090: 1 GPU" in out
    assert "H100: 1 GPU" in out


def test_models_name_the_offload_that_makes_them_fit(meshwright: Any) -> None:
    words = ("models", "llama3.2", "--gpus", "1xRTX4090", "--goal", "full")
    plans = {one["name"]: one["plan"] for one in meshwright(*words, "--json").json["models"]}
    assert plans["llama32_3b"]["offload"] == "optimizer"
    assert 40 < plans["llama32_3b"]["host_gib"] < 60
    assert (plans["llama32_1b"]["offload"], plans["llama32_1b"]["host_gib"]) == ("none", 0)
    assert "optimizer, host" in meshwright(*words).out
    assert "1 model fits, 0 do not" in meshwright(*words[:1], "llama3.2-3b", *words[2:]).out


def test_adapters_are_stored_in_fp32_and_per_projection() -> None:
    recipe = load("qwen3_600m_peft_config")
    model = find(recipe.model)
    case = Case(recipe, model, cluster("1xH100"))
    layer, rank, hidden = model.layers[0], recipe.peft.rank, model.hidden
    outputs = sum(out for _, _, out in PROJECTIONS)
    inputs = sum(into for _, into, _ in PROJECTIONS)
    params = model.num_layers * rank * (inputs + outputs)
    assert (hidden, layer.ffn.width) == (1024, 3072)
    assert storage_of(case).model_gib == pytest.approx(4 * params / 2**30)
    assert storage_of(case).checkpoint_gib == pytest.approx(12 * params / 2**30)
    fused = storage_of(Case(recipe, model, cluster("1xH100"), "megatron"))
    assert fused.model_gib == pytest.approx(4 * (params - model.num_layers * rank * 3 * hidden) / 2**30)


PROJECTIONS = (
    ("q_proj", 1024, 2048), ("k_proj", 1024, 1024), ("v_proj", 1024, 1024), ("o_proj", 2048, 1024),
    ("gate_proj", 1024, 3072), ("up_proj", 1024, 3072), ("down_proj", 3072, 1024),
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "HALF", "fp16"])
def test_convert_takes_the_names_of_torch(meshwright: Any, dtype: str, tmp_path: Path) -> None:
    refused = meshwright("convert", str(tmp_path / "none"), str(tmp_path / "out"), "--dtype", dtype)
    assert "no such file or folder" in refused.err
    assert "dtype=" not in refused.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("merge", "run1"), "convert RUN OUT --merge"),
        (("train", "llama32_1b", "--goal", "lora", "--load_in_4bit"), "--goal qlora"),
    ],
)
def test_words_of_other_trainers_name_ours(meshwright: Any, words: tuple[str, ...], hint: str) -> None:
    assert hint in meshwright(*words).err


def test_size_ends_where_more_gpus_are_not_faster(meshwright: Any) -> None:
    out = meshwright(
        "size", "qwen3-0.6b", "--goal", "lora", "--gpus", "RTX4090", "--tokens", "2M", "--max-gpus", "512"
    ).out
    counts = [
        int(line.split()[0].replace(",", "")) for line in out.splitlines() if line[:1].isdigit() and "MFU" not in line
    ]
    found = re.search(r"more than ([0-9,]+) GPUs are not faster", out)
    assert found
    assert max(counts[:-1]) == int(found[1].replace(",", ""))  # the last line says how many counts were tried
