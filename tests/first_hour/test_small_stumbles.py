"""Small things that new users stumbled over: each test types what was typed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as package
from meshwright.api.labels import TITLES, VALUES
from meshwright.cli.budget_report import _shown
from meshwright.planner import sizing

SOURCE = Path(package.__file__).parent
PRETRAIN = "llama3_8b_pretrain_config"
ON_EIGHT = ("llama3-8b", "--gpus", "8xH100")


@pytest.fixture
def chats(tmp_path: Path) -> str:
    path = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    path.write_text(f"{json.dumps(row)}\n" * 40)
    return str(path)


# One's own data.


def test_recommend_takes_a_dataset(meshwright: Any, chats: str) -> None:
    typed = ("recommend", *ON_EIGHT, "--goal", "sft", "--dataset", chats, "data.packing=false", "--json")
    answer = meshwright(*typed).json
    assert answer["contract"]["dataset"] == chats
    assert f"--dataset {chats}" in answer["commands"]["meshwright"]
    (note,) = answer["notes"]
    assert "40 samples" in note
    assert "train.epochs=3" in note  # the recipe's steps repeat them
    by_epochs = meshwright(*typed, "train.epochs=2").json
    assert (by_epochs["budget"]["steps"], by_epochs.get("notes")) == (10, None)
    for command in ("estimate", "plan"):
        other = meshwright(command, *typed[1:]).json
        assert chats in json.dumps(other.get("contract") or other["plans"][0]["contract"])


def test_a_dataset_elsewhere_is_noted_and_a_contradiction_refused(meshwright: Any, chats: str) -> None:
    typed = ("recommend", *ON_EIGHT, "--goal", "sft", "--dataset")
    assert "is not on this machine" in meshwright(*typed, "/data/other.jsonl", "--json").json["notes"][0]
    assert "notes" not in meshwright(*typed, "squad", "--json").json  # a name, not a file
    refused = meshwright(*typed, chats, "data.dataset=squad", "--json")
    assert (refused.code, refused.json["error"]["field"]) == (2, "data.dataset")


def test_several_files_lead_to_a_blend(meshwright: Any, tmp_path: Path, chats: str) -> None:
    more = tmp_path / "more.csv"
    more.write_text("prompt,response\nq,a\n")
    blend = f"data.blend={chats}:1.0,{more}:1.0"
    for typed in (
        ("--dataset", f"{chats},{more}"),
        ("--dataset", chats, "--dataset", str(more)),
        ("--dataset", chats, str(more)),
    ):
        refused = meshwright("train", "llama3_8b_sft_config", "--tiny", *typed, "--json")
        assert refused.code == 2
        assert refused.json["error"]["fix"] == [blend], typed
    assert meshwright("recipe", "llama3_8b_sft_config", blend).code == 0
    twice = meshwright("recommend", *ON_EIGHT, "--gpus", "8xA100", "--goal", "sft", "--json")
    assert (twice.code, twice.json["error"]["fix"]) == (2, ["--gpus 8xA100"])
    assert "2 times" in twice.json["error"]["message"]


@pytest.mark.parametrize("typed", ["0.62 /far/a 0.38 /far/b", "/far/a 0.62 /far/b 0.38", "/far/a:0.62,/far/b:0.38"])
def test_weights_in_the_name_of_a_dataset_lead_to_a_blend(meshwright: Any, typed: str) -> None:
    words = {
        "train": ("train", PRETRAIN, "--tiny", "--dataset", typed),
        "recommend": ("recommend", PRETRAIN, "--gpus", "8xH100", "--dataset", typed),
        "export": ("export", PRETRAIN, "--to", "megatron-lm", "--gpus", "8xH100", f"data.dataset={typed}"),
        "launch": ("launch", PRETRAIN, "--to", "megatron-lm", "--scheduler", "slurm", "--dataset", typed),
    }
    for verb, line in words.items():
        refused = meshwright(*line, "--json").json["error"]
        assert (refused["field"], refused["fix"]) == ("data.dataset", ["data.blend=/far/a:0.62,/far/b:0.38"]), verb
    written = meshwright(*words["export"][:-1], refused["fix"][0]).out
    assert "--data-path 0.62 /far/a 0.38 /far/b" in written


def test_plans_have_a_budget(meshwright: Any) -> None:
    typed = ("plan", *ON_EIGHT, "--goal", "pretrain", "--top", "2")
    budgets = [p["budget"] for p in meshwright(*typed, "--tokens", "1T", "--price", "2EUR", "--json").json["plans"]]
    assert [(b["tokens"], b["price"], b["currency"]) for b in budgets] == [(1e12, 2.0, "EUR")] * 2
    assert budgets[0]["days"] <= budgets[1]["days"]
    assert budgets[0]["cost"] == pytest.approx(2 * budgets[0]["gpu_hours"])
    shown = meshwright(*typed, "--tokens", "1T", "--price", "2EUR").out
    assert "cost EUR" in shown
    assert "GPU-hours" in shown
    assert "budget" not in meshwright(*typed, "--json").json["plans"][0]
    assert meshwright(*typed, "--tokens", "many").code == 2


def test_size_lists_the_gpus_that_one_owns(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "gpu_counts", lambda node, most=0: [1, 2, 8, 64, 2048])  # the real list takes seconds
    typed = ("size", "llama3-8b", "--goal", "pretrain", "--tokens", "1T", "--gpus", "17x8xH100")
    answer = meshwright(*typed, "--json").json
    (own,) = [s for s in answer["sizes"] if s["gpus"] == 136]
    assert answer["own"] == 136
    shown = meshwright(*typed).out
    assert f"{own['gpu_hours']:,.0f}" in shown
    assert "yours     136 GPUs" in shown
    assert "GPU-hours" in shown
    small = meshwright("size", "llama3-405b", "--goal", "pretrain", "--gpu", "2x8xH100").out
    assert "yours     16 GPUs (does not fit)" in small


def test_size_of_many_counts_lists_those_near_ones_own() -> None:
    sizes = [
        {"gpus": 8 * n, "fits": True, "tokens_per_s": 1000.0 * n, "goodput": {"share": 1.0}} for n in range(1, 1000)
    ]
    answer = {
        "sizes": sizes,
        "smallest": sizes[3],
        "most_efficient": sizes[600],
        "own": 136,
        "node": 8,
        "in_time": None,
    }
    listed = [one["gpus"] for one in _shown(answer)]
    assert {32, 136} <= set(listed)
    assert max(listed[:-1]) <= 4 * 136
    assert listed[-1] == 4808  # the most efficient


# Options in other tools' words.


@pytest.mark.parametrize(
    ("command", "option", "written"),
    [
        ("generate", ("--max-new-tokens", "5"), "--max-tokens 5"),
        ("generate", ("--max_new_tokens=5",), "--max-tokens 5"),
        ("generate", ("--do-sample",), "--temperature 1"),
        ("evaluate", ("--limit", "10"), "--samples 10"),
        ("launch", ("--nodelist", "n[1-4]"), "--sbatch nodelist=n[1-4]"),
        ("launch", ("--mail-user", "me@here"), "--sbatch mail-user=me@here"),
        ("launch", ("--mail", "me@here"), "--sbatch mail-user=me@here --sbatch mail-type=END,FAIL"),
        ("launch", ("-w", "n1"), "--sbatch nodelist=n1"),
        ("launch", ("-x", "n2"), "--sbatch exclude=n2"),
        ("launch", ("--exclusive",), "--sbatch exclusive"),
        ("launch", ("--gres", "gpu:8"), "--sbatch gres=gpu:8"),
        ("launch", ("-c", "12"), "--cpus-per-rank 12"),
        ("launch", ("-N", "2"), "--gpus 2x8xH100"),
    ],
)
def test_options_of_other_tools_lead_to_ours(
    meshwright: Any, command: str, option: tuple[str, ...], written: str
) -> None:
    error = meshwright(command, "llama3_8b_sft_config", *option, "--json").json["error"]
    assert error["fix"] == [written]
    assert written in error["message"]


def test_slurm_options_as_sbatch_has_them(meshwright: Any) -> None:
    job = ("launch", "llama3_8b_sft_config", "--gpus", "8xH100", "--scheduler", "slurm")
    short = ("-p", "gpu", "-A", "lab", "-t", "2:00:00", "-J", "mine", "-q", "high", "-C", "h100")
    more = ("--sbatch", "nodelist=n[1-4]", "--sbatch", "mail-user=me@here")
    (script,) = meshwright(*job, *short, *more, "--json").json["files"].values()
    for line in (
        "partition=gpu", "account=lab", "time=02:00:00", "job-name=mine", "qos=high", "constraint=h100",
        "nodelist=n[1-4]", "mail-user=me@here",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in script


# Our own words.


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "error: --out: contract fields differ from the checkpoints in the run folder: optimizer.lr was 1e-05 and "
            "is 2e-05",
            "error.contract-differs",
        ),
        ("the estimated peak is 52.4 GiB of 23.5 GiB usable", "memory.peak"),
        ("3 micro batches cannot fill pp=8 stages", "schedule.micro-batches"),
        (
            "train.steps=1000 with 8 samples each repeat the 40 samples of chats.jsonl 200 times; fix: train.epochs=3 "
            "or train.steps=15",
            "error.data-repeated",
        ),
    ],
)
def test_our_own_messages_are_explained(meshwright: Any, text: str, name: str) -> None:
    answer = meshwright("explain", text, "--json").json
    assert answer["matches"][0]["name"] == name
    assert answer["matches"][0]["fix"]


def test_every_title_of_an_option_is_explained(meshwright: Any) -> None:
    found: set[str] = set()
    for path in sorted((SOURCE / "planner").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Suggestion", "Variant"):
                found |= {str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}
    from meshwright.planner import faster_step, four_bit, levers

    found |= {faster_step.TITLE, four_bit.TITLE, *(title for title, *_ in levers.STATES)}
    found.discard("")  # a suggestion that is only tried
    assert len(found) >= 8
    for title in sorted(found):
        answer = meshwright("explain", f"{title}:", "--json").json
        assert answer["kind"] == "term", title
        assert answer["meaning"]
    assert meshwright("explain", "a leaner step (layout)", "--json").json["meaning"] == TITLES["a leaner step"]


def test_values_say_what_they_are_and_which_engines_run_them(meshwright: Any) -> None:
    answer = meshwright("explain", "zbv", "--json").json
    assert answer["field"]["key"] == "layout.pp_schedule"
    assert "V" in answer["meaning"]
    assert answer["meaning"].endswith("Executed by meshwright, torchtitan, automodel.")
    for value in VALUES:
        assert meshwright("explain", value, "--json").json["field"], value  # a field takes it


def test_options_are_explained(meshwright: Any) -> None:
    for typed in ("--accept-changes", "accept-changes"):
        answer = meshwright("explain", typed, "--json").json
        assert (answer["kind"], answer["about"]) == ("option", "--accept-changes")
        assert "contract fields differ" in answer["meaning"]
    assert "launch" in meshwright("explain", "-p", "--json").json["meaning"]


def test_explain_prints_what_an_engine_executes(meshwright: Any) -> None:
    own = meshwright("explain", "capabilities", "--json").json
    rows = {row["field"]: row for row in own["capabilities"]}
    assert own["kind"] == "capabilities"
    assert rows["kernels.cuda_graphs"]["executes"] == "none (others ignored)"
    assert rows["layout.tp"]["executes"] == "1 with strategy=ddp (others refused)"
    assert "data.seq_length" not in rows  # executed with every value
    theirs = meshwright("explain", "capabilities of megatron-bridge", "--json").json
    assert theirs["about"] == "capabilities of megatron"
    assert {"kernels.compile", "layout.pp_schedule"} <= {row["field"] for row in theirs["capabilities"]}
    shown = meshwright("explain", "capabilities", "fsdp1").out
    assert "tensor parallelism is not implemented in this engine" in shown


def test_the_doctor_has_one_spread(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    speeds = [4200 + n * 7919 % 1900 for n in range(1, 81)]  # uneven steps, and a run that slows down
    log.write_text(
        "".join(
            f"step {n}/80  loss {4 - n / 40:.3f}  lr 3.0e-05  grad norm 1.20  tokens/s/GPU {speed - 12 * n:,}\n"
            for n, speed in enumerate(speeds, start=1)
        )
    )
    answer = meshwright("doctor", str(log), "--json").json
    (figure,) = [one["measured"] for one in answer["figures"] if one["name"] == "spread of step times"]
    uneven = [one for one in answer["findings"] if one["rule"] == "speed.uneven-steps"]
    evidence = [one for finding in uneven for one in finding["evidence"]]
    assert [one["value"] for one in evidence] == [pytest.approx(figure, abs=1e-4)]


def test_settings_that_follow_from_the_model_are_not_dropped(meshwright: Any, tmp_path: Path) -> None:
    written = meshwright(
        "export", "llama3_8b_pretrain_config", "--to", "megatron-lm", "--gpus", "8xH100", "--json"
    ).json
    (text,) = written["files"].values()
    assert "--rotary-base 500000" in text
    same, other = tmp_path / "llama3_8b_pretrain_config.sh", tmp_path / "other" / "llama3_8b_pretrain_config.sh"
    other.parent.mkdir()
    same.write_text(text)
    other.write_text(text.replace("--rotary-base 500000", "--rotary-base 10000"))
    dropped = [
        {one["key"] for one in meshwright("import", str(path), "--json").json["not_imported"]} for path in (same, other)
    ]
    assert dropped == [set(), set()]
    imported = [meshwright("import", str(path)).out for path in (same, other)]
    assert ["rope_theta = 10000" in text for text in imported] == [False, True]
