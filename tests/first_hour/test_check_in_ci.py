"""`check` in the CI of a team: folders, accepted findings, baselines, deeply nested files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEEP = "[" * 100_000
TOO_DEEP = "is nested too deeply"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("check", "deep.json"),
        ("check", "deep.json", "--framework", "deepspeed"),
        ("estimate", "deep.json", "--gpus", "8xH100"),
        ("import", "deep.json"),
        ("models", "deep.json"),
        ("samples", "llama3_8b_sft_config", "--dataset", "deep.json", "data.tokenizer=bytes"),
    ],
    ids=" ".join,
)
def test_json_that_is_nested_too_deeply_is_bad_input(meshwright: Any, words: tuple[str, ...]) -> None:
    Path("deep.json").write_text(DEEP)
    answer = meshwright(*words, "--json")
    assert answer.code == 2, answer.err
    assert TOO_DEEP in json.loads(answer.out)["error"]["message"]


@pytest.mark.parametrize("verb", ["doctor", "calibrate"])
def test_deep_json_is_no_log(meshwright: Any, verb: str) -> None:
    Path("deep.json").write_text(DEEP)
    answer = meshwright(verb, "deep.json")
    assert answer.code == 2
    assert "no training found in it" in answer.err


@pytest.mark.parametrize("text", ['{"a":' * 100_000, DEEP + "]" * 100_000, '[{"messages":' + DEEP])
def test_any_deep_json_file_is_bad_input(meshwright: Any, text: str) -> None:
    Path("deep.json").write_text(text)
    answer = meshwright("check", "deep.json")
    assert (answer.code, TOO_DEEP in answer.err) == (2, True)


def test_one_deep_row_of_a_dataset_is_a_finding_with_its_line(meshwright: Any) -> None:
    Path("chats.jsonl").write_text('{"text": "a"}\n' + DEEP + "\n")
    answer = meshwright("check", "chats.jsonl")
    assert answer.code == 1
    assert f"chats.jsonl:2: {TOO_DEEP}" in answer.out


@pytest.mark.parametrize(("name", "text"), [("metrics.jsonl", '{"step":' + DEEP), ("trainer_state.json", DEEP)])
def test_a_run_folder_with_deep_json_is_bad_input(meshwright: Any, name: str, text: str) -> None:
    Path("run").mkdir()
    Path("run", name).write_text(text + "\n")
    for verb in ("doctor", "calibrate"):
        assert meshwright(verb, "run").code == 2


MEGATRON = """\
#!/bin/bash
{above}torchrun --nproc-per-node 8 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --swiglu \\
  --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --lr 3e-4 --bf16 \\
  --tensor-model-parallel-size 3 --train-iters 1000 --vocab-size 128256 --tokenizer-type NullTokenizer
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"

[parallelism]
{above}tensor_parallel_degree = 3{beside}

[training]
seq_len = 8192
steps = 100
"""
RULES = ("heads.attention", "heads.kv-heads", "torchtitan.sequence-parts")
ALL = "# meshwright: ignore[heads.*, heads.kv-heads, torchtitan.sequence-parts]"


def write_ci(above: str = "", beside: str = "") -> None:
    Path("ci/nested").mkdir(parents=True, exist_ok=True)
    Path("ci/run.sh").write_text(MEGATRON.format(above=""))
    Path("ci/nested/titan.toml").write_text(TITAN.format(above=above, beside=beside))
    Path("ci/notes.yaml").write_text("on: push\njobs: {}\n")
    Path("ci/rows.json").write_text('[{"messages": []}]')


def test_a_folder_is_checked_file_by_file_and_says_what_it_skips(meshwright: Any) -> None:
    write_ci()
    answer = meshwright("check", "ci/")
    assert answer.code == 1
    assert "ci/run.sh" in answer.out
    assert "ci/nested/titan.toml" in answer.out
    assert "skipped ci/notes.yaml: " in answer.out
    assert "skipped ci/rows.json: a dataset" in answer.out
    assert "2 files checked" in answer.out
    assert "2 skipped" in answer.out


def test_a_quoted_glob_is_expanded(meshwright: Any) -> None:
    write_ci()
    assert "1 file checked" in meshwright("check", "ci/**/*.toml").out
    several = meshwright("check", "ci/*.sh", "ci/**/*.toml", "--json")
    assert [one["file"] for one in several.json["files"]] == ["ci/run.sh", "ci/nested/titan.toml"]
    empty = meshwright("check", "ci/**/*.nothing")
    assert (empty.code, "no file matches" in empty.err) == (2, True)


def test_the_json_of_several_files_has_one_verdict(meshwright: Any) -> None:
    write_ci()
    Path("ci/broken.toml").write_text("[model\n")
    answer = meshwright("check", "ci", "--json")
    assert answer.code == 2
    assert answer.json["ok"] is False
    assert [one["file"] for one in answer.json["failed"]] == ["ci/broken.toml"]
    assert {one["file"] for one in answer.json["findings"]} == {"ci/run.sh", "ci/nested/titan.toml"}
    alone = meshwright("check", "ci/broken.toml", "ci/run.sh", "--format", "json")
    assert (alone.code, alone.json["ok"]) == (2, False)


def test_a_named_file_that_no_framework_reads_is_skipped_on_request(meshwright: Any) -> None:
    write_ci()
    assert meshwright("check", "ci/notes.yaml").code == 2
    answer = meshwright("check", "ci/notes.yaml", "--skip-unknown")
    assert (answer.code, "skipped ci/notes.yaml" in answer.out) == (0, True)


@pytest.mark.parametrize(("above", "beside"), [(f"{ALL} measured on our nodes\n", ""), ("", f"  {ALL} measured")])
def test_a_comment_accepts_findings_on_its_line_or_the_next(meshwright: Any, above: str, beside: str) -> None:
    write_ci(above, beside)
    Path("ci/run.sh").unlink()
    answer = meshwright("check", "ci", "--json")
    accepted = answer.json["ignored"]
    assert {one["rule"] for one in accepted} >= {"heads.attention", "heads.kv-heads"}
    assert {one["by"] for one in accepted} == {"comment"}
    assert all(one["reason"].startswith("measured") for one in accepted)
    assert not {one["rule"] for one in answer.json["findings"]} & {one["rule"] for one in accepted}
    assert f"{len(accepted)} findings ignored" in meshwright("check", "ci").out


def test_a_comment_above_a_continued_command_covers_all_its_lines(meshwright: Any) -> None:
    Path("run.sh").write_text(MEGATRON.format(above="# meshwright: ignore[heads.attention] known\n"))
    answer = meshwright("check", "run.sh", "--json")
    assert "heads.attention" in {one["rule"] for one in answer.json["ignored"]}


def test_a_comment_that_accepts_nothing_is_reported(meshwright: Any) -> None:
    write_ci(above="# meshwright: ignore[heads.atention] x\n# meshwright: ignore[saving.never]\n# meshwright: ignore\n")
    notes = meshwright("check", "ci/nested/titan.toml", "--json").json["notes"]
    text = "\n".join(notes)
    assert "ignore[heads.atention] names an unknown rule; did you mean heads.attention" in text
    assert "ignore[saving.never] matches no finding" in text
    assert "the comment names no rule" in text


def test_ignore_takes_rules_with_did_you_mean(meshwright: Any) -> None:
    write_ci()
    ignored = [word for rule in RULES for word in ("--ignore", rule)]
    answer = meshwright("check", "ci/nested/titan.toml", *ignored, "--ignore", "heads.*", "--json")
    assert (answer.code, answer.json["ok"], {one["by"] for one in answer.json["ignored"]}) == (0, True, {"option"})
    wrong = meshwright("check", "ci/nested/titan.toml", "--ignore", "heads.atention")
    assert (wrong.code, "did you mean heads.attention" in wrong.err) == (2, True)


def test_a_baseline_accepts_known_findings_and_names_stale_ones(meshwright: Any) -> None:
    write_ci()
    written = meshwright("check", "ci", "--write-baseline", "known.json")
    assert written.code == 0, written.err
    assert meshwright("check", "ci", "--baseline", "known.json").code == 0
    moved = "\n\n" + TITAN.format(above="", beside="")
    Path("ci/nested/titan.toml").write_text(moved)
    assert meshwright("check", "ci", "--baseline", "known.json").code == 0  # lines do not matter
    Path("ci/nested/titan.toml").write_text(TITAN.format(above="", beside="").replace("= 3", "= 2"))
    answer = meshwright("check", "ci", "--baseline", "known.json", "--json")
    assert answer.code == 0
    assert "heads.attention" in {one["rule"] for one in answer.json["stale"]}
    assert "stale in the baseline: ci/nested/titan.toml" in meshwright("check", "ci", "--baseline", "known.json").out
    Path("ci/run.sh").unlink()
    gone = meshwright("check", "ci", "--baseline", "known.json", "--json").json["stale"]
    assert "ci/run.sh" in {one["file"] for one in gone}
    Path("known.json").write_text("[]")
    assert meshwright("check", "ci", "--baseline", "known.json").code == 2


def test_a_new_finding_beside_known_ones_counts(meshwright: Any) -> None:
    write_ci()
    assert meshwright("check", "ci", "--write-baseline", "known.json").code == 0
    text = Path("ci/nested/titan.toml").read_text().replace("[training]\n", "[training]\nno_such_key = 1\n")
    Path("ci/nested/titan.toml").write_text(text)
    answer = meshwright("check", "ci", "--baseline", "known.json", "--fail-on", "warning", "--json")
    assert (answer.code, len(answer.json["findings"])) == (1, 1)


def test_fail_on_picks_the_exit_code(meshwright: Any) -> None:
    write_ci()
    words = ("check", "ci/nested/titan.toml", "--ignore", "heads.*", "--ignore", "torchtitan.sequence-parts")
    text = Path("ci/nested/titan.toml").read_text() + "\n[checkpoint]\nenable = false\n"
    Path("ci/nested/titan.toml").write_text(text)
    warned = meshwright(*words, "--json")
    assert {one["severity"] for one in warned.json["findings"]} == {"warning"}, warned.json["findings"]
    assert (warned.code, warned.json["ok"]) == (0, True)
    strict = meshwright(*words, "--fail-on", "warning", "--json")
    assert (strict.code, strict.json["ok"]) == (1, False)
    assert meshwright("check", "ci/nested/titan.toml", "--fail-on", "never").code == 0
    assert "--fail-on warning" in meshwright("check", "ci/nested/titan.toml", "--strict").err


def test_github_annotations_escape_what_the_workflow_reads(meshwright: Any) -> None:
    Path("a,b:c").mkdir()
    Path("a,b:c/titan.toml").write_text(TITAN.format(above="", beside=""))
    answer = meshwright("check", "a,b:c/titan.toml", "--format", "github")
    assert answer.code == 1
    first = next(line for line in answer.out.splitlines() if "heads.attention" in line)
    assert first.startswith("::error file=a%2Cb%3Ac/titan.toml,line=6,title=meshwright heads.attention::")
    Path("broken.toml").write_text("[model\n")
    broken = meshwright("check", "broken.toml", "--format", "github")
    assert (broken.code, broken.out.startswith("::error file=broken.toml")) == (2, True)


YAML = Path(__file__).parents[1] / "frameworks" / "automodel" / "sft.yaml"
DEGREES = """\
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[parallelism]
tensor_parallel_degree = {tp}
data_parallel_shard_degree = {shard}

[training]
local_batch_size = 1
seq_len = 8192
steps = 100
"""


def test_a_gpu_type_alone_is_as_many_as_the_layout_needs(meshwright: Any) -> None:
    text = YAML.read_text()
    Path("open.yaml").write_text(text.replace("tp_size: 1", "tp_size: 4"))
    Path("stated.yaml").write_text(text.replace("tp_size: 1", "tp_size: 4").replace("dp_size: none", "dp_size: 4"))
    Path("one.yaml").write_text(text)
    Path("open.toml").write_text(DEGREES.format(tp=4, shard=-1))
    Path("stated.toml").write_text(DEGREES.format(tp=4, shard=4))
    on = {}
    for name in ("open.yaml", "stated.yaml", "one.yaml", "open.toml", "stated.toml"):
        answer = meshwright("check", name, "--gpus", "H200", "--json")
        assert answer.code == 0, (name, answer.out)
        assert not [one for one in answer.json["findings"] if one["rule"].startswith(("topology.", "automodel.mesh"))]
        unknown = any("the number of H200 is unknown" in note for note in answer.json["notes"])
        on[name] = answer.json["gpus"] or ("any" if unknown else "")
    assert on == {
        "open.yaml": "any",
        "stated.yaml": "2x8xH200",
        "one.yaml": "1xH200",
        "open.toml": "any",
        "stated.toml": "2x8xH200",
    }


def test_what_is_wrong_on_any_number_of_a_gpu_type_is_repaired(meshwright: Any) -> None:
    Path("heads.yaml").write_text(YAML.read_text().replace("tp_size: 1", "tp_size: 3"))
    answer = meshwright("check", "heads.yaml", "--gpus", "H200", "--json")
    assert answer.code == 1
    assert {one["rule"] for one in answer.json["findings"] if one["severity"] == "error"} >= {"heads.attention"}
    assert answer.json["repair"]["overrides"] == ["distributed.tp_size: 1"]


def test_http_and_mcp_take_rules_but_no_paths() -> None:
    from meshwright.api.verbs import VERBS

    for surface in ("http", "mcp"):
        names = VERBS["check"].input_schema(surface)["properties"]  # type: ignore[arg-type]
        assert {"ignore", "fail_on"} <= set(names)
        assert not {"baseline", "write_baseline", "format", "more", "skip_unknown"} & set(names)


def test_python_checks_one_file_per_call() -> None:
    import meshwright as mw
    from meshwright.errors import InputError

    write_ci()
    found = mw.check("ci/nested/titan.toml", ignore=["heads.*", "torchtitan.sequence-parts"])
    assert found.ok
    assert found.ignored
    for wrong in ({"target": "ci"}, {"target": "ci/run.sh", "more": ["ci/run.sh"]}):
        with pytest.raises(InputError):
            mw.check(**wrong)  # type: ignore[arg-type]


def test_the_sample_repository_fails_on_its_one_wrong_config(meshwright: Any) -> None:
    sample = Path(__file__).parents[2] / "examples" / "ci_repository"
    shutil.copytree(sample, "repository")
    answer = meshwright("check", "repository", "--gpus", "8xH100", "--json")
    assert answer.code == 1
    assert {one["file"] for one in answer.json["findings"]} == {"repository/configs/llama3_8b.toml"}
    assert [one["reason"] for one in answer.json["ignored"]] == ["the image of our cluster sets it"]


@pytest.mark.slow
def test_many_files_are_checked_in_several_processes(folder: Path) -> None:
    for number in range(24):
        Path(f"t{number:02}.toml").write_text(TITAN.format(above="", beside="").replace("= 3", f"= {number % 2 + 2}"))
    command = [sys.executable, "-m", "meshwright", "check", ".", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [one["file"] for one in found["files"]] == [f"t{number:02}.toml" for number in range(24)]
    assert [one["ok"] for one in found["files"]] == [number % 2 == 0 for number in range(24)]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "layout.tensor_parallel=2"), "layout.tp=2"),
        (("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "layout.pipeline_parallel=2"), "layout.pp=2"),
        (("recommend", "llama3-8b", "--gpus", "8xA100-60", "--goal", "sft"), "8xA100-40 | 8xA100-80"),
        (("--json", "gpus", "h100"), "meshwright gpus h100 --json"),
    ],
)
def test_a_slip_is_answered_with_what_to_type(meshwright: Any, words: tuple[str, ...], meant: str) -> None:
    answer = meshwright(*words)
    assert answer.code == 2
    assert meant in answer.err


def test_python_says_which_value_is_missing_and_lists_only_its_functions() -> None:
    import meshwright as mw

    with pytest.raises(mw.InputError, match="model: must be given, not None"):
        mw.recommend(None, "8xH100", "sft")  # type: ignore[arg-type]
    assert [name for name in dir(mw) if not name.startswith("__")] == sorted(mw.__all__)


def test_model_names_complete_with_either_separator() -> None:
    from meshwright import api

    for kind in ("models", "targets"):
        assert "llama3-8b" in api.starting_with(kind, "llama3-")
        assert "llama3_8b" in api.starting_with(kind, "llama3_")


def test_the_table_of_engines_says_what_may_not_fit() -> None:
    from meshwright.cli.compare_report import _side_row

    band = {"step_low_s": 1.0, "step_high_s": 1.2}
    memory = {"total": 75.0, "capacity": 80.0}
    figures = {"step_s": 1.1, "tokens_per_s_per_gpu": 1.0, "mfu": 0.4, "band": band, "memory_gib": memory}
    estimate = {"fits": True, "fit": "may not fit", **figures}
    names = ("tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "micro_batch_size")
    layout: dict[str, object] = dict.fromkeys(names, 1)
    layout |= {"strategy": "zero3", "sp": False, "gradient_accumulation": 1, "recompute": "none", "offload": "none"}
    side = {
        "rank": 1,
        "name": "deepspeed",
        "engine": "deepspeed",
        "estimate": estimate,
        "layout": layout,
        "changes": [],
    }
    assert _side_row(side)[3] == "75/80 may not fit"
