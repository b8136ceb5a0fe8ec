"""What a newcomer did with other frameworks' files: epochs, tool calls, ways out, what an engine cannot do."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

H100 = ("--gpus", "1xH100")
CHATS = 2000


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of short chats in the current folder."""
    monkeypatch.chdir(tmp_path)
    row = {
        "messages": [{"role": "user", "content": "What is it? " * 40}, {"role": "assistant", "content": "It. " * 99}]
    }
    (tmp_path / "val.jsonl").write_text(f"{json.dumps(row)}\n" * CHATS)
    return "val.jsonl"


def test_epochs_survive_a_round_trip_and_are_counted(meshwright: Any, chats: str) -> None:
    asked = (*H100, f"data.dataset={chats}", "train.epochs=3")
    for framework, key, name in (
        ("automodel", "num_epochs: 3", "qwen3_4b_peft_config.yaml"),
        ("megatron-bridge", "cfg.train.train_iters = None\ncfg.train.num_epochs = 3", "override.py"),
        ("trl", "num_train_epochs=3.0", ""),
    ):
        written = meshwright("export", "qwen3_4b_peft_config", "--to", framework, *asked, "--out", framework)
        assert written.code == 0, framework
        texts = [path.read_text() for path in Path(framework).iterdir()]
        assert any(key in text for text in texts), framework
        assert not any("max_steps" in text for text in texts), framework
        if not name:
            continue
        path = f"{framework}/{name}"
        for verb in ("estimate", "recommend"):
            budget = meshwright(verb, path, *H100, "--price", "2", "--json").json["budget"]
            assert (budget["steps"] < 300, budget["tokens_from"][:8]) == (True, "3 epochs"), (framework, verb)
        imported = meshwright("import", path, *H100)
        assert "epochs = 3.0" in imported.out
        assert "num_epochs" not in imported.err
        assert meshwright("check", path, *H100).code == 0
        for other in ("automodel", "megatron-bridge"):
            assert "300000" not in meshwright("export", path, "--to", other, *H100).out
    steps = meshwright("export", "qwen3_4b_sft_config", "--to", "megatron-lm", *asked[2:], "--gpus", "8xH100")
    assert steps.code == 2
    assert "fix:   train.steps=" in steps.err
    assert "train.steps=N" not in steps.err


def test_a_file_without_a_length_has_no_budget_and_is_not_exported_with_one(meshwright: Any, chats: str) -> None:
    meshwright("export", "qwen3_4b_peft_config", "--to", "trl", *H100, "--out", "trl")
    asked = ("trl/qwen3_4b_peft_config.yaml", "--model", "qwen3_4b", "--goal", "peft", *H100)
    for verb in ("estimate", "recommend"):
        found = meshwright(verb, *asked, "--price", "2", "--json").json
        assert (found["budget"], found["contract"]["steps"]) == (None, None)
        assert "no figures: nothing says how long it trains" in meshwright(verb, *asked, "--price", "2").out
        known = meshwright(verb, *asked, "--price", "2", "train.steps=500", "--json").json
        assert known["budget"]["steps"] == 500
    refused = meshwright("export", *asked, "--to", "automodel")
    assert refused.code == 2
    assert "does not say how long it trains" in refused.err
    assert "max_steps: 1000" in meshwright("export", *asked, "--to", "automodel", "train.steps=1000").out


def test_the_way_out_of_an_export_that_does_not_fit_keeps_what_was_asked(meshwright: Any, chats: str) -> None:
    asked = ("peft.method=qlora", f"data.dataset={chats}", "train.epochs=3", "peft.rank=16", "peft.alpha=64")
    job = ("llama3_8b_peft_config", "--model", "llama31_8b", "--to", "trl", "--gpus", "1xRTX4090")
    out = meshwright("export", *job, *asked, "layout.recompute=none", "--out", "ex").out
    words = shlex.split(out.partition("for a layout that runs: meshwright ")[2].partition(", then")[0])
    assert set(asked) < set(words)
    assert "layout.recompute=none" not in words
    assert meshwright(*words).code == 0
    sized = Path("sized.toml").read_text()
    for line in ('method = "qlora"', "rank = 16", 'dataset = "val.jsonl"', "epochs = 3.0"):
        assert line in sized
    assert meshwright("export", "sized.toml", "--to", "trl", "--out", "sized").code == 0


OWN = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 8, local_batch_size: 1, num_epochs: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-4B
  torch_dtype: bfloat16
distributed: {strategy: fsdp2}
dataset:
  _target_: nemo_automodel.components.datasets.llm.chat_dataset.ChatDataset
  path_or_dataset_id: tools.jsonl
  split: train
  seq_length: 2048
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 8, alpha: 16}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
"""


def _call(name: str, **more: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {"city": "Bern"}}, **more}


def test_tool_messages_without_ids_get_those_of_the_calls(meshwright: Any, chats: str) -> None:
    rows = [
        {"messages": [
            {"role": "user", "content": "Weather and time?"},
            {"role": "assistant", "content": "", "tool_calls": [_call("weather"), _call("time", id="t7")]},
            {"role": "tool", "content": "rain"}, {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "Rain at noon.", "tool_calls": None},
            {"role": "user", "content": "Again."},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]},
            {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "Sun."},
        ]},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<tool_call>f()</tool_call>"},
            {"role": "tool", "content": "1"}, {"role": "assistant", "content": "One."}]},
    ]  # fmt: skip
    Path("tools.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 50))
    Path("own.yaml").write_text(OWN)
    found = {one["rule"]: one for one in meshwright("check", "own.yaml", *H100, "--json").json["findings"]}
    (fix,) = found["automodel.dataset-rows"]["fix"]
    assert meshwright(*shlex.split(fix.replace("FOLDER", "fixed"))[1:]).code == 0
    lines = [json.loads(line) for line in Path("fixed/tools.messages.jsonl").read_text().splitlines()]
    assert [one.get("tool_call_id") for one in lines[0]["messages"] if one["role"] == "tool"] == [
        "call_0", "t7", "call_0",
    ]  # fmt: skip
    assert [call["id"] for one in lines[0]["messages"] for call in one.get("tool_calls", ())] == [
        "call_0", "t7", "call_0",
    ]  # fmt: skip
    assert lines[1]["messages"][2]["tool_call_id"] == "call_0"
    assert "automodel.dataset-rows" not in meshwright("check", "fixed/own.yaml", *H100).out
