"""Converting, resuming after a change, and data seen before a GPU is rented."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwright as library
from meshwright.engine.data.instructions import _once
from meshwright.engine.post_training import convert as converting

SFT, PEFT = "qwen3_600m_sft_config", "llama3_8b_peft_config"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_chats(path: Path, rows: int = 12) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"what is {i}"}, {"role": "assistant", "content": f"it is {i}"}]}
        for i in range(rows)
    ]
    path.write_text("\n".join(map(json.dumps, chats)))


def test_converted_adapters_keep_their_provenance_and_a_change_of_tensors_is_refused(
    here: Path, meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chats(here / "chats.jsonl")
    words = ("train", PEFT, "--tiny", "--dataset", "chats.jsonl", "train.steps=4", "checkpoint.save_every=2")
    assert meshwright(*words, "data.validation_part=0.2", "train.eval_every=2", "--out", "run").code == 0
    trained = (here / "run" / "model" / "README.md").read_text()
    for name, options, loader in (
        ("step2", ("--checkpoint", "2"), "peft"),
        ("merged", ("--checkpoint", "2", "--merge"), "transformers"),
        ("last", (), "peft"),
    ):
        assert meshwright("convert", "run", name, *options).code == 0
        card = (here / name / "README.md").read_text()
        assert f"library_name: {loader}\n" in card
        for line in trained.splitlines():
            if line.startswith(("base_model:", "Trained from")):
                assert line in card
        step = 4 if name == "last" else 2
        assert f"| steps | {step} |" in card
        assert f" at step {step}, over " in card
    monkeypatch.setattr(converting, "free_gib", lambda: 0.0)
    warned = meshwright("convert", "run", "short", "--checkpoint", "2").err
    assert "warning: the base weights of the adapters take 0.0 GiB of this machine's memory" in warned
    assert meshwright("convert", "run/model", "folder", "--merge").code == 0  # of the adapters' folder: the same card
    card, last = ((here / name / "README.md").read_text() for name in ("folder", "merged"))
    head = card.partition("Trained from")[0]
    assert head == last.partition("Trained from")[0]
    assert "library_name: transformers\n" in head
    assert "| steps | 4 |" in card
    changed = (*words, "data.validation_part=0.2", "train.eval_every=2", "peft.rank=4", "peft.alpha=8")
    for accepted in ((), ("--accept-changes",)):
        refused = meshwright(*changed, "--out", "run", *accepted)
        assert refused.code == 2
        assert "peft.rank gives other tensors than the checkpoint has" in refused.err
        assert "--accept-changes resumes" not in refused.err
        assert "importing torch" not in refused.err
    command = refused.err.partition("meshwright convert")[2].partition(",")[0]
    assert meshwright("convert", *shlex.split(command)).code == 0
    assert meshwright(*changed, "--out", "other", "--model", "run-merged").code == 0
    for typed in ("peft.targets=qkv", "peft.method=dora", "optimizer.name=lion"):
        assert meshwright(*words, typed, "--out", "run", "--accept-changes").code == 2


def test_data_is_checked_before_a_gpu_is_rented(here: Path, meshwright: Any) -> None:
    write_chats(here / "chats.jsonl")
    chat = [{"role": "usr", "content": "x"}, {"role": "assistant", "content": "y"}]
    good = (here / "chats.jsonl").read_text().splitlines()
    lines = [good[0], '{"messages": [', json.dumps({"messages": chat}), "[1]", good[1]]
    (here / "broken.jsonl").write_text("\n".join(lines))
    (here / "tickets.csv").write_text("ticket,priority,reply_text\n1,high,hello\n2,low,bye\n")
    (here / "short.csv").write_text("prompt,response\na,b\nc\nd,e,f\n")
    check = ("check", SFT, "--gpus", "1xRTX4090")
    [missing] = meshwright(*check, "data.dataset=chat.jsonl", "--json").json["findings"]
    assert (missing["rule"], missing["severity"]) == ("data.missing-file", "warning")
    assert missing["fix"] == ["data.dataset=chats.jsonl"]
    for name, places in (
        ("broken.jsonl", ("broken.jsonl:2: not JSON", ":3: message 0 has the unknown role usr", ":4: a sample must")),
        ("tickets.csv", ("match no known conversation schema",)),
        ("short.csv", ("short.csv:3: the row does not have", "short.csv:4: the same")),
    ):
        [found] = meshwright(*check, f"data.dataset={name}", "--json").json["findings"]
        assert (found["rule"], found["severity"]) == ("data.rows", "error")
        assert all(place in found["message"] for place in places), found
        trained = meshwright("train", SFT, "--tiny", "--dataset", name)
        assert found["message"] in trained.err
        assert "\nfix:   " in trained.err
        alone = meshwright("check", name, "--json")
        assert (alone.code, alone.json["findings"][0]["message"]) == (1, found["message"])
        words = ("recommend", "qwen3-0.6b", "--goal", "sft", "--gpus", "1xRTX4090", "--dataset", name, "--json")
        assert found["message"] in [one["message"] for one in meshwright(*words).json["findings"]]
    assert "sed '2d;3d;4d' broken.jsonl > broken_kept.jsonl" in meshwright("check", "broken.jsonl").out.replace(
        "\n", ""
    )
    clean = meshwright("check", "chats.jsonl")
    assert "chats.jsonl, a dataset: ok" in clean.out
    assert "12 conversations (messages from messages)" in clean.out
    launch = ("launch", SFT, "--gpus", "1xRTX4090", "--scheduler", "slurm", "--dataset")
    assert "chat.jsonl is not on this machine" in meshwright(*launch, "chat.jsonl").err
    refused = meshwright(*launch, "broken.jsonl")
    assert refused.code != 0
    assert "nothing was written" in refused.err
    assert "broken.jsonl:3: message 0 has the unknown role usr" in refused.err


def test_every_surface_gives_the_same_verdict_and_the_first_fix_makes_it_fit(meshwright: Any) -> None:
    for model in ("llama3.1-8b", "qwen3-4b"):
        typed = ("recommend", model, "--gpus", "1xRTX4090", "--goal", "lora")
        answer = meshwright(*typed, "--json").json
        fit = answer["estimate"]["fit"]
        plan = library.recommend(model, "1xRTX4090", "lora")
        assert f": {fit}\n" in meshwright(*typed).out
        assert f": {fit}\n" in str(plan)
        assert f": {fit}<" in plan._repr_html_()
        assert fit in ("may not fit", "probably fits")  # by the calibration
        [tight] = answer["findings"]
        fixed = meshwright(*typed, *tight["fix"], "--json").json
        assert (fixed["estimate"]["fit"], fixed["findings"]) == ("fits", [])
    typed = ("recommend", "llama3.1-8b", "--gpus", "1xRTX4090", "--json", "--goal")
    tight = meshwright(*typed, "lora").json
    offered = [one for one in tight["suggestions"] if "peft.method=qlora" in one["overrides"]]
    assert bool(offered) == (tight["estimate"]["fit"] == "may not fit")
    assert meshwright(*typed, "lora", "peft.method=qlora").json["estimate"]["fit"] == "fits"
    lora, *others = meshwright(*typed, "sft").json["options"]
    assert lora["title"] == "LoRA"
    assert [one["title"] for one in others] == (["QLoRA"] if lora["fit"] != "fits" else [])
    checked = library.check("llama3_8b_peft_config", gpus="1xRTX4090", overrides=["data.seq_length=2048"])
    assert f": {checked.estimate.fit}" in str(checked)


def test_samples_show_what_is_in_the_loss(here: Path, meshwright: Any) -> None:
    write_chats(here / "chats.jsonl")
    words = ("samples", SFT, "--dataset", "chats.jsonl", "data.tokenizer=bytes")
    shown = meshwright(*words, "--count", "1")
    assert "loss    | it is 0<|im_end|>\n" in shown.out
    assert "context | <|bos|><|im_start|>user\n        | what is 0<|im_end|>\n" in shown.out
    assert "12 of 12 conversations used (0 of them truncated), 0 dropped; the longest has 40 tokens" in shown.out
    answer = meshwright(*words, "seq_length=38", "--json").json
    assert (answer["kept"], answer["truncated"], len(answer["samples"])) == (12, 2, 2)
    rows = [json.loads(line) for line in (here / "chats.jsonl").read_text().splitlines()]
    rows[0]["messages"][0]["content"] *= 900
    (here / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    refused = meshwright("train", SFT, "--tiny", "--dataset", "long.jsonl", "seq_length=16").err
    assert "fix:   data.seq_length=64 | data.seq_length=8192\n" in refused
    warned = meshwright("train", SFT, "--tiny", "--dataset", "long.jsonl", "seq_length=38", "train.steps=1").err
    assert "data.seq_length=64 fits 91% of the conversations, 8192 all" in warned
    assert "loss_mask" in meshwright("explain", "loss mask").out
    assert meshwright("samples", "qwen3_600m_pretrain_config", "--dataset", "chats.jsonl").code == 2


def test_small_answers_say_what_happened(here: Path, meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for typed, wanted in (("2h", "02:00:00"), ("90min", "01:30:00"), ("1d12h", "1-12:00:00"), ("soon", "1-00:00:00")):
        refused = meshwright("launch", SFT, "--gpus", "1xRTX4090", "--scheduler", "slurm", "--time", typed)
        assert f"fix:   --time {wanted}\n" in refused.err
    write_chats(here / "chats.jsonl")
    hook = sys.excepthook
    words = {"tiny": True, "quiet": True, "dataset": "chats.jsonl"}
    for out, rate in (("a", "0.01"), ("b", "0.001")):
        for steps, lr in ((2, "0.01"), (4, rate)):
            overrides = [f"train.steps={steps}", f"lr={lr}", "data.validation_part=0.2"]
            library.train(SFT, out=out, overrides=overrides, accept_changes=True, **words)
    assert sys.excepthook is hook
    [changed] = [one for one in meshwright("compare", "a", "b", "--json").json["differences"] if "lr" in one["field"]]
    assert changed["values"] == [0.01, "0.01, 0.001 from step 3"]
    _once.cache_clear()  # each line is logged once per process
    evaluated = meshwright("evaluate", "a", "data.packing=false").err
    assert "used for validation" in evaluated
    assert "trains them" not in evaluated


def test_the_doctor_names_the_rate_first_and_describes_a_plateau(here: Path, meshwright: Any) -> None:
    losses = [5.5 - 0.1 * i for i in range(20)] + [3.6 + 0.3 * i for i in range(8)] + [6.0] * 60
    norms = [1.0] * 28 + [0.001] * 60
    settings = msgspec.to_builtins(library.recipe(SFT))
    settings["optimizer"]["lr"] = 0.5
    header = {"kind": "header", "recipe": SFT, "settings": settings, "tiny": True, "world": 1}
    rows = [
        {"kind": "step", "step": i + 1, "loss": x, "grad_norm": n}
        for i, (x, n) in enumerate(zip(losses, norms, strict=True))
    ]
    (here / "run").mkdir()
    lines = (json.dumps(one, separators=(",", ":")) for one in (header, *rows))
    (here / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    [found] = [one for one in meshwright("doctor", "run", "--json").json["findings"] if one["rule"] == "loss.diverging"]
    assert "It no longer rises but sits on a plateau" in found["message"]
    assert found["remedies"][0]["try"][0].startswith("optimizer.lr=")
