"""A model that the catalogue does not have, named by its hub id: the same answer everywhere a model is named."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient

import meshwright as library
from meshwright import hub, models
from meshwright.cli.run import run
from meshwright.errors import InputError
from meshwright.web.app import Settings, create_app

ID = "acme/Zebra-130M"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
PARAMETERS = 2 * 32000 * 1024 + 8 * (1024 * (1024 + 512 + 1024) + 3 * 1024 * 2816 + 2 * 1024) + 1024


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of a command and all that it prints."""
    with pytest.raises(SystemExit) as ended:
        run([*words])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def store(home: Path, model_id: str, config: dict[str, Any]) -> None:
    """Write a config.json into a hub cache, as huggingface_hub lays it out."""
    model = home / "hub" / f"models--{model_id.replace('/', '--')}"
    (model / "snapshots" / "0a1b").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0a1b")
    (model / "snapshots" / "0a1b" / "config.json").write_text(json.dumps(config))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty hub cache; the working folder is empty too."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(hub, "_failures", {})
    return tmp_path / "hf"


def test_a_cached_hub_id_is_planned_by_every_verb(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(home, ID, CONFIG)
    for words in (
        ("inspect", ID),
        ("recommend", ID, "--gpus", "8xH100", "--goal", "lora"),
        ("recommend", f"https://huggingface.co/{ID}", "--gpus", "8xH100", "--goal", "sft"),
        ("plan", ID, "--gpus", "8xH100", "--goal", "pretrain"),
        ("size", ID, "--goal", "pretrain", "--gpu", "H100"),
        ("estimate", ID, "--gpus", "8xH100", "--goal", "sft"),
        ("check", ID, "--gpus", "8xH100", "--goal", "sft"),
    ):
        code, text = call(capsys, *words)
        assert code == 0, (words, text)


def test_python_returns_the_exact_model(home: Path) -> None:
    store(home, ID, CONFIG)
    plan = library.recommend(ID, "8xH100", "pretrain")
    assert plan.question.model.params.total == PARAMETERS
    assert (plan.recipe.model, plan.question.model.hf_id) == (ID, ID)
    assert models.config_named(ID) == CONFIG
    assert models.catalogue_name(ID) is None


def test_a_saved_recipe_names_the_hub_id_and_is_read_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(home, ID, CONFIG)
    assert call(capsys, "recommend", ID, "--gpus", "8xH100", "--goal", "sft", "--save", "plan.toml")[0] == 0
    assert f'model = "{ID}"' in Path("plan.toml").read_text()
    assert call(capsys, "check", "plan.toml")[0] == 0


def test_another_framework_s_file_may_name_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(home, ID, CONFIG)
    Path("train.yaml").write_text(
        f"model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        f"  pretrained_model_name_or_path: {ID}\n"
        "step_scheduler:\n  global_batch_size: 32\n  local_batch_size: 4\n  max_steps: 100\n"
        "distributed:\n  strategy: fsdp2\n"
    )
    code, text = call(capsys, "estimate", "train.yaml", "--gpus", "8xH100")
    assert code == 0, text
    assert ID in text


def test_its_own_config_comes_before_the_shipped_shape_of_the_same_name(home: Path) -> None:
    larger = {**models.config_of("qwen3_8b"), "vocab_size": 160_000}
    assert models.find("acme/Qwen3-8B").vocab == models.find("qwen3-8b").vocab
    store(home, "acme/Qwen3-8B", larger)
    assert models.find("acme/Qwen3-8B").vocab == 160_000
    store(home, "acme/Qwen3-8B-Instruct", models.config_of("qwen3_8b") | {"max_position_embeddings": 262_144})
    same = models.find("acme/Qwen3-8B-Instruct")
    assert (same.name, same.hf_id, same.max_seq_length) == ("qwen3_8b", "acme/Qwen3-8B-Instruct", 262_144)


def test_offline_the_message_says_where_it_looked_and_what_to_do(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("inspect", ID), ("recommend", ID, "--gpus", "8xH100", "--goal", "lora", "--offline")):
        code, text = call(capsys, *words)
        assert code == 2
        assert f"it is not in the hub cache {home}/hub and was not downloaded: HF_HUB_OFFLINE is set" in text
        assert "give its config.json" in text
        assert f"hf download {ID} config.json" in text


def test_a_damaged_cached_config_is_one_error(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(home, ID, CONFIG | {"hidden_size": [1024]})
    code, text = call(capsys, "inspect", ID)
    assert code == 2
    assert "must be an integer" in text
    assert "snapshots/0a1b/config.json" in text


def test_weights_that_were_not_downloaded_are_reported(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(home, ID, CONFIG)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    code, text = call(capsys, "train", ID, "--goal", "sft", "--dataset", "rows.jsonl", "train.steps=1")
    assert code == 2
    assert "only config.json of that id, without weights" in text
    assert f"hf download {ID}" in text


# Downloads: with a hub that answers from this process, and with one that does not.


@pytest.fixture
def online(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ids that the hub is asked for; it knows one."""
    asked: list[str] = []
    module, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    for name in ("EntryNotFoundError", "GatedRepoError", "RepositoryNotFoundError"):
        setattr(errors, name, type(name, (Exception,), {}))

    def download(model_id: str, file: str, **options: Any) -> str:
        asked.append(model_id)
        assert file == "config.json"
        if model_id != ID:
            raise errors.GatedRepoError("403" if "gated" in model_id else "404")
        store(home, model_id, CONFIG)
        return str(hub.cached_config(model_id))

    module.hf_hub_download = download  # type: ignore[attr-defined]  # as the library has it
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "_connects", lambda: True)
    return asked


def test_an_unknown_id_is_downloaded_once(online: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "recommend", ID, "--gpus", "8xH100", "--goal", "sft")[0] == 0
    assert call(capsys, "inspect", ID)[0] == 0
    assert online == [ID]


def test_a_gated_model_is_asked_for_once_in_a_minute(online: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = call(capsys, "recommend", "acme/gated-1x", "--gpus", "8xH100", "--goal", "sft")
    assert code == 2
    assert "its license must be accepted at https://huggingface.co/acme/gated-1x" in text
    assert online == ["acme/gated-1x"]


def test_shipped_models_and_files_never_reach_the_hub(online: list[str]) -> None:
    models.find("Qwen/Qwen3-8B")
    models.find("acme/Qwen3-8B-Instruct")
    for missing in ("configs/train.yaml", "data/rows.jsonl", "llama99", "a/b/c"):
        with pytest.raises(InputError):
            models.find(missing)
    assert online == []


def test_offline_is_an_option_of_every_command_that_names_a_model(
    online: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    code, text = call(capsys, "inspect", ID, "--offline")
    assert (code, online) == (2, [])
    assert "HF_HUB_OFFLINE is set" in text


def test_a_hub_that_does_not_answer_costs_seconds(online: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CONNECT_S", 0.2)
    monkeypatch.setattr(hub, "_connects", lambda: time.sleep(30))
    started = time.monotonic()
    with pytest.raises(InputError, match=r"huggingface\.co cannot be reached"):
        models.find(ID)
    with pytest.raises(InputError, match="cannot be reached"):
        models.find(ID)
    assert time.monotonic() - started < 2
    assert online == []


@pytest.mark.parametrize("allowed", [False, True])
def test_the_web_reads_the_hub_only_if_started_with_hub(home: Path, allowed: bool) -> None:
    store(home, ID, CONFIG)
    with TestClient(create_app(Settings(workers=0, hub=allowed)), base_url="http://127.0.0.1") as client:
        reply = client.get("/api/recommend", params={"model": ID, "gpus": "8xH100", "goal": "lora"})
    if allowed:
        assert (reply.status_code, reply.json()["question"]["model"]) == (200, ID)
    else:
        assert reply.status_code == 422
        assert "give its config.json" in reply.json()["error"]["message"]
