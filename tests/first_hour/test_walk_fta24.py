"""Two newcomers' walks: fine-tuning on a few cards, and a cluster of 24 nodes whose logs they ask about."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import meshwright
from meshwright.cli.run import run as run_command
from meshwright.doctor import reading


def trainer_log(total: int, every: int, seconds: float, *, first: bool = False) -> str:
    """Return a log of the Trainer without a progress bar."""
    epochs, rate = 3.0, round(total / seconds, 3)
    steps = [*([1] if first else []), *range(every, total + 1, every)]
    lines = [
        f"{{'loss': {2 - step / total:.4f}, 'grad_norm': 0.5, 'epoch': {round(epochs * step / total, 2)}}}"
        for step in steps
    ]
    end = f"{{'train_runtime': {seconds}, 'train_steps_per_second': {rate}, 'train_loss': 1.1, 'epoch': {epochs}}}"
    return "\n".join([*lines, end])


@pytest.mark.parametrize("seconds", [3605.2, 3598.1])
@pytest.mark.parametrize("first", [False, True])
def test_the_trainers_rounded_rate_gives_whole_steps_per_record(seconds: float, first: bool) -> None:
    run = reading.read_text(trainer_log(1000, 10, seconds, first=first), "hf2.log")
    found = [step.step for step in run.steps]
    assert found == [*([1] if first else []), *range(10, 1001, 10)]
    assert run.header.total_steps == 1000
    assert any("10 steps per record" in note for note in run.notes)


def test_steps_that_are_approximate_are_called_so() -> None:
    run = reading.read_text(trainer_log(70, 7, 30011.0), "slow.log")
    assert any("approximate" in note for note in run.notes)


def test_an_unfinished_run_takes_its_steps_from_the_examples_and_the_batch() -> None:
    head = (
        "***** Running training *****\n  Num examples = 8,000\n  Num Epochs = 3\n"
        "  Total train batch size (w. parallel, distributed & accumulation) = 24\n  Total optimization steps = 1,002\n"
    )
    lines = [f"{{'loss': 1.5, 'grad_norm': 0.5, 'epoch': {round(step / 334, 2)}}}" for step in range(10, 401, 10)]
    run = reading.read_text(head + "\n".join(lines), "unfinished.log")
    assert [step.step for step in run.steps] == list(range(10, 401, 10))
    assert run.header.total_steps == 1002


ROW = '{"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]}'


def commanded(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_command(list(words))
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out + found.err


@pytest.mark.parametrize("name", ["bom.jsonl", "bom.jsonl.gz", "bom.json", "lines.json", "bom.csv", "bom.txt"])
def test_data_with_a_byte_order_mark_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {
        "bom.json": f"[{ROW}, {ROW}]",
        "bom.csv": 'prompt,response\n"What is 2 + 2?",4\n',
        "bom.txt": "What is 2 + 2?\n4\n",
    }
    raw = texts.get(name, f"{ROW}\n{ROW}\n").encode("utf-8-sig")
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    words = ("samples", "qwen3_600m_sft_config", "--dataset", name, "data.tokenizer=bytes", "--count", "1")
    code, text = commanded(capsys, *words)
    assert code == 0, text
    assert "not JSON" not in text
    assert "\ufeff" not in text
    assert "is 2 + 2?" in text


def test_configs_with_a_byte_order_mark_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}', "utf-8-sig")
    Path("axolotl.yml").write_text("base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\nadapter: lora\n", "utf-8-sig")
    Path("tt.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 2048\n', "utf-8-sig")
    for name in ("ds_config.json", "axolotl.yml", "tt.toml"):
        _, text = commanded(capsys, "check", name, "--gpus", "8xH100")
        assert "not valid" not in text, text
        assert "JSON" not in text, text
        assert "\ufeff" not in text, text


TALK = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("tools.jsonl").write_text((TALK % ("word " * 400, "answer " * 400)) * 400)
    return "tools.jsonl"


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"])
def test_the_recommended_batch_follows_a_small_dataset(model: str, talks: str) -> None:
    words = (f"data.dataset={talks}", "train.epochs=3")
    plan = meshwright.recommend(model, "1x4090", "lora", overrides=words)
    steps = plan.budget.steps
    assert plan.recipe.train.global_batch_size == 8
    assert 50 <= steps <= 500
    changed = [one.why for one in plan.changes if one.field == "train.global_batch_size"]
    assert all("leave only" in why for why in changed)
    assert not any("global_batch_size" in text for one in plan.suggestions for text in one.overrides)


def test_a_typed_batch_stays_and_a_smaller_one_is_suggested(talks: str) -> None:
    words = (f"data.dataset={talks}", "train.epochs=3", "train.global_batch_size=128")
    plan = meshwright.recommend("Qwen/Qwen2.5-7B-Instruct", "1x4090", "lora", overrides=words)
    assert plan.recipe.train.global_batch_size == 128
    assert ("train.global_batch_size=8",) in [one.overrides for one in plan.suggestions]
