"""Item 6: every command takes every file, import and export convert them, compare puts a job on all engines."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.test_mutations import MODULES

from meshwright.choices import ENGINES
from meshwright.recipes import files

MEGATRON = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=4
torchrun --nproc-per-node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention \\
  --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \\
  --untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256 \\
  --micro-batch-size 1 --global-batch-size 512 --train-iters 10000 --lr 1.5e-4 --min-lr 1.5e-5 --bf16 \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \\
  --recompute-activations --mock-data --tokenizer-type NullTokenizer --log-throughput
"""
TORCHTITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 8192
steps = 1000
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "none"
"""
DEEPSPEED = json.dumps(
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
)
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
KEMPNERFORGE = """\
[model]
dim = 2048
n_layers = 20
n_heads = 16
n_kv_heads = 16
vocab_size = 32000
ffn_hidden_dim = 5632
max_seq_len = 4096
[train]
batch_size = 2
seq_len = 4096
[distributed]
tp = 2
"""
BRIDGE = """\
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config

cfg = llama3_8b_pretrain_config()
cfg.model.tensor_model_parallel_size = 2
cfg.train.global_batch_size = 128
"""
STRIDE = 25  # of the example configs; all of them are slow
PROGRAM = ("data.seq_length=4096", "layout.recompute=none", "layout.micro_batch_size=1")
"""What the program of DeepSpeed and Accelerate sets, and not their config."""
FILES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "megatron-lm": ("train.sh", MEGATRON, ("--gpus", "4x8xH100")),
    "torchtitan": ("titan.toml", TORCHTITAN, ("--gpus", "8xH100")),
    "deepspeed": ("ds.json", DEEPSPEED, ("--gpus", "8xH100", "--model", "llama3-8b", *PROGRAM[:2])),
    "accelerate": ("acc.yaml", ACCELERATE, ("--gpus", "8xH100", "--model", "llama3-8b", *PROGRAM)),
    "kempnerforge": ("kf.toml", KEMPNERFORGE, ("--gpus", "8xH100")),
    "megatron-bridge": ("bridge.py", BRIDGE, ("--gpus", "8xH100")),
    "automodel": (
        "sft.yaml",
        (Path(__file__).parents[1] / "frameworks" / "automodel" / "sft.yaml").read_text(encoding="utf-8"),
        ("--gpus", "8xH100"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text, _ in FILES.values():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("framework", FILES)
def test_estimate_gives_the_figures_and_findings_of_check(meshwright: Any, folder: Path, framework: str) -> None:
    name, _, options = FILES[framework]
    checked = meshwright("check", name, *options, "--json").json
    answer = meshwright("estimate", name, *options, "--json")
    assert checked["framework"] == framework
    assert checked["estimate"] is not None
    assert answer.json["estimate"] == checked["estimate"]
    assert answer.json["findings"] == checked["findings"]
    assert answer.json["question"]["engine"] == checked["engine"]
    assert answer.code == (0 if answer.json["estimate"]["fits"] and checked["ok"] else 1)


def corpus() -> list[tuple[str, str, str, str | None, str | None]]:
    """Return the example configs of the framework tests: framework, file name, text, GPUs, model."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"tests.frameworks.test_{name}")
        found += [(name, one.path or module.PATH, one.text, one.gpus, one.model) for one in module.CASES]
    return found


def same_figures(meshwright: Any, folder: Path, row: tuple[str, str, str, str | None, str | None]) -> bool:
    """Check and estimate one file; return whether check has figures, which must then be the same."""
    framework, path, text, gpus, model = row
    name = Path(path).name
    (folder / name).write_text(text)
    options = [
        "--gpus",
        gpus or "8x8xH100",
        "--model",
        model or "llama3-8b",
        "--framework",
        framework.replace("_", "-"),
    ]
    checked = meshwright("check", name, *options, "--json")
    estimated = meshwright("estimate", name, *options, "--json")
    assert estimated.code in (0, 1, 2), estimated.err
    if checked.code == 2:
        assert estimated.code == 2
        return False
    assert estimated.json["findings"] == checked.json["findings"]
    theirs = checked.json["estimate"]
    if theirs is None:
        return False
    for key in ("memory_gib", "step_s", "step_parts_s", "mfu", "band"):
        assert estimated.json["estimate"][key] == theirs[key], (framework, name, key)
    return True


def test_estimate_agrees_with_check_on_the_example_configs(meshwright: Any, folder: Path) -> None:
    rows = corpus()
    assert {row[0] for row in rows} == set(MODULES)
    assert sum(same_figures(meshwright, folder, row) for row in rows[::STRIDE]) >= len(rows) // STRIDE // 2


@pytest.mark.slow
def test_estimate_agrees_with_check_on_every_example_config(meshwright: Any, folder: Path) -> None:
    rows = corpus()
    assert sum(same_figures(meshwright, folder, row) for row in rows) >= len(rows) // 2


@pytest.mark.parametrize("framework", FILES)
def test_plan_keeps_the_contract_of_the_file(meshwright: Any, folder: Path, framework: str) -> None:
    name, _, options = FILES[framework]
    estimate = meshwright("estimate", name, *options, "--json").json
    best = meshwright("plan", name, *options, "--top", "1", "--json").json["plans"][0]
    for key in ("seq_length", "global_batch_size", "lr", "optimizer", "precision"):
        assert best["contract"][key] == estimate["contract"][key], key
    assert best["question"]["engine"] == estimate["question"]["engine"]
    if estimate["estimate"]["fits"]:
        assert best["estimate"]["step_s"] <= estimate["estimate"]["step_s"] * 1.001


@pytest.mark.parametrize("framework", FILES)
def test_import_writes_a_recipe_that_reads_back(meshwright: Any, folder: Path, framework: str) -> None:
    name, _, options = FILES[framework]
    answer = meshwright("import", name, *options, "--out", "mine.toml", "--json")
    assert answer.code == 0, answer.out
    assert answer.json["framework"] == framework
    assert (folder / "mine.toml").read_text() == answer.json["text"]
    recipe = files.from_file("mine.toml")
    gpus = options[1]
    theirs = meshwright("estimate", name, *options, "--engine", "meshwright", "--json").json
    ours = meshwright("estimate", "mine.toml", "--gpus", gpus, "--json").json
    length = theirs["contract"]["steps"] or ours["contract"]["steps"]  # a file may not say how long it trains
    assert ours["contract"] == {**theirs["contract"], "steps": length}
    assert ours["layout"] == theirs["layout"]
    assert ours["estimate"]["memory_gib"] == theirs["estimate"]["memory_gib"]
    printed = meshwright("recipe", name, *options, "--json")
    assert printed.json["recipe"]["layout"]["tp"] == recipe.layout.tp


def test_import_lists_what_did_not_survive_and_what_was_assumed(meshwright: Any, folder: Path) -> None:
    answer = meshwright("import", "train.sh", "--json").json
    dropped = {one["key"]: one for one in answer["not_imported"]}
    assert dropped["log_throughput"]["line"] == 11
    assert not {"swiglu", "num_layers", "group_query_attention", "vocab_size", "mock_data"} & dropped.keys()
    assumed = {one["field"]: one["value"] for one in answer["assumed"]}
    assert assumed == {"gpu": "H100", "layout.strategy": "fsdp2"}
    accelerate = meshwright("import", "acc.yaml", "--model", "llama3-8b", "--json").json
    fields = {one["field"] for one in accelerate["assumed"]}
    assert {"data.seq_length", "layout.recompute", "goal", "gpu"} <= fields
    tuned = meshwright("import", "acc.yaml", "--model", "llama3-8b", "--goal", "sft", *PROGRAM, "--json").json
    assert tuned["goal"] == "sft"
    assert not {"data.seq_length", "layout.recompute", "goal"} & {one["field"] for one in tuned["assumed"]}


def test_a_file_that_is_wrong_is_imported_without_the_wrong_setting(meshwright: Any, folder: Path) -> None:
    (folder / "titan.toml").write_text(TORCHTITAN.replace("tensor_parallel_degree", "tensor_paralel_degree"))
    answer = meshwright("import", "titan.toml", "--gpus", "8xH100", "--json")
    assert answer.code == 1
    assert [(one["rule"], one["line"]) for one in answer.json["findings"]] == [
        ("key.unknown", 15),
        ("memory.tight", 10),
    ]
    for verb in ("recipe", "dryrun"):
        refused = meshwright(verb, "titan.toml", "--gpus", "8xH100", "--json")
        assert refused.code == 2
        assert "titan.toml:15" in refused.json["error"]["message"]
        assert "meshwright check titan.toml" in refused.json["error"]["fix"]


def test_a_file_of_no_framework_gets_no_framework_to_try(meshwright: Any, folder: Path) -> None:
    """None of them would find a command in it."""
    (folder / "notes.txt").write_text("buy milk\n")
    answer = meshwright("export", "notes.txt", "--to", "torchtitan", "--json")
    assert answer.code == 2
    assert (answer.json["error"]["field"], answer.json["error"]["fix"]) == ("file", [])


@pytest.mark.parametrize(
    ("words", "field", "fix"),
    [
        (("estimate", "titan.toml"), "gpus", "--gpus 8xH100"),
        (("import", "ds.json", "--gpus", "8xH100"), "model", "--model llama3-8b"),
        (("estimate", "titan.toml", "--gpus", "8xH100", "--goal", "sft"), "goal", "--goal pretrain"),
        (("estimate", "llama3-8b", "--gpus", "8xH100", "--framework", "torchtitan"), "framework", "remove --framework"),
        (("import", "llama3_8b_sft_config"), "file", "the path of a config or script"),
    ],
)
def test_what_a_file_leaves_open_is_asked_for(
    meshwright: Any, folder: Path, words: tuple[str, ...], field: str, fix: str
) -> None:
    answer = meshwright(*words, "--json")
    assert answer.code == 2
    assert answer.json["error"]["field"] == field
    assert fix in answer.json["error"]["fix"]


def test_export_converts_between_frameworks(meshwright: Any, folder: Path) -> None:
    answer = meshwright("export", "titan.toml", "--to", "megatron-lm", "--gpus", "8xH100", "--out", "mlm", "--json")
    assert answer.code == 0, answer.out
    script = next(folder.glob("mlm/*.sh"))
    back = meshwright("estimate", str(script), "--gpus", "8xH100", "--json").json
    first = meshwright("estimate", "titan.toml", "--gpus", "8xH100", "--json").json
    for key in ("seq_length", "global_batch_size", "lr", "optimizer", "steps"):
        assert back["contract"][key] == first["contract"][key], key
    assert (back["layout"]["tp"], back["layout"]["micro_batch_size"]) == (2, 1)
    titan = meshwright("export", "train.sh", "--to", "torchtitan", "--json").json
    assert "layout.strategy" in {one["field"] for one in titan["assumed"]}
    assert not [one for one in titan["findings"] if one["rule"] == "strategy.supported"]
    assert "tensor_parallel_degree = 8" in titan["files"]["config.toml"]
    assert {"log_throughput"} <= {one["key"] for one in titan["not_imported"]}


def test_check_takes_several_files(meshwright: Any, folder: Path) -> None:
    names = ("train.sh", "titan.toml", "llama3_8b_pretrain_config")
    answer = meshwright("check", *names, "--gpus", "4x8xH100", "--json")
    assert answer.code == 0, answer.out
    assert [one["framework"] for one in answer.json["files"]] == ["megatron-lm", "torchtitan", "meshwright"]
    (folder / "titan.toml").write_text(TORCHTITAN.replace("degree = 2", "degree = 3"))
    worse = meshwright("check", *names, "--gpus", "4x8xH100", "--json")
    assert (worse.code, worse.json["ok"]) == (1, False)
    (folder / "notes.txt").write_text("buy milk\n")
    worst = meshwright("check", "notes.txt", *names, "--gpus", "4x8xH100", "--json")
    assert worst.code == 2
    assert [one["file"] for one in worst.json["failed"]] == ["notes.txt"]
    assert worst.json["files"][0]["framework"] == "megatron-lm"
    shown = meshwright("check", *names, "--gpus", "4x8xH100")
    assert all(name in shown.out for name in names)


def test_launch_writes_the_recipe_of_a_file(meshwright: Any, folder: Path) -> None:
    words = ("launch", "titan.toml", "--gpus", "8xH100", "--scheduler", "slurm", "--write", "jobs", "--json")
    answer = meshwright(*words, "--to", "meshwright")
    assert answer.code == 0, answer.out
    assert files.from_file(folder / "jobs" / "titan.toml").layout.tp == 2
    job = next(text for name, text in answer.json["files"].items() if not name.endswith(".toml"))
    assert "meshwright train titan.toml" in job
    other = meshwright("launch", "titan.toml", "--to", "megatron-lm", *words[2:-2], "mlm_jobs", "--json")
    assert other.code == 0, other.out
    assert any("pretrain_gpt.py" in text for text in other.json["files"].values())


def test_recommend_keeps_the_contract_of_a_file(meshwright: Any, folder: Path) -> None:
    first = meshwright("estimate", "train.sh", "--json").json
    answer = meshwright("recommend", "train.sh", "--json").json
    assert answer["contract"] == first["contract"]
    assert answer["question"]["engine"] == "megatron"
    assert [one["field"] for one in answer["question"]["assumed"]] == ["gpu"]
    elsewhere = meshwright("recommend", "titan.toml", "--gpus", "16xH100", "--engine", "meshwright", "--json")
    assert elsewhere.code == 0
    assert elsewhere.json["contract"]["global_batch_size"] == 16
    assert " titan.toml " in elsewhere.json["commands"]["meshwright"]
    missing = meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--json")
    assert (missing.code, missing.json["error"]["field"]) == (2, "goal")


def test_compare_puts_one_job_on_all_engines(meshwright: Any, folder: Path) -> None:
    answer = meshwright("compare", "titan.toml", "--gpus", "8xH100", "--json").json
    sides = {one["name"]: one for one in answer["sides"]}
    assert sides.keys() == set(ENGINES)
    assert [one["rank"] for one in answer["sides"]] == list(range(1, len(ENGINES) + 1))
    contracts = [side["contract"] for side in sides.values()]
    assert all(contract == contracts[0] for contract in contracts)
    assert {one["field"] for one in sides["deepspeed"]["lost"]} >= {"checkpoint.export"}
    for side in sides.values():
        assert side["reasons"]
        if side["ok"]:
            band = side["estimate"]["band"]
            assert band["step_low_s"] < side["estimate"]["step_s"] < band["step_high_s"]
    best = answer["sides"][0]
    assert best["name"] in answer["answer"]
    # the file is for torchtitan: unless another engine is faster beyond the uncertainty, nothing is converted
    fastest = max(side["relative_speed"] for side in sides.values() if side["ok"])
    titan = sides["torchtitan"]
    if fastest / titan["relative_speed"] < 1.1:
        assert best["name"] == "torchtitan"


def test_compare_says_what_each_engine_cannot_do(meshwright: Any, folder: Path) -> None:
    words = ("compare", "llama3-8b", "--gpus", "8xH100", "--goal", "lora", "--engines", "all", "--json")
    sides = {one["name"]: one for one in meshwright(*words).json["sides"]}
    assert "adapters" in sides["kempnerforge"]["reasons"][0]
    assert "fine-tuning" in sides["torchtitan"]["reasons"][0]
    assert sides["meshwright"]["ok"]
    assert not sides["torchtitan"]["ok"]
    words = (
        "compare",
        "llama3_70b_pretrain_config",
        "--gpus",
        "64xH100",
        "layout.cp=2",
        "--engines",
        "kempnerforge,megatron",
    )
    answer = meshwright(*words, "--json").json
    limits = {one["name"]: {c["field"]: c["effect"] for c in one["cannot"]} for one in answer["sides"]}
    assert limits["kempnerforge"].get("layout.cp") == "refused" or not answer["sides"][-1]["ok"]
    assert "layout.cp" not in limits["megatron"]


def test_compare_two_files(meshwright: Any, folder: Path) -> None:
    (folder / "full.sh").write_text(
        MEGATRON.replace(
            "--recompute-activations",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        )
    )
    answer = meshwright("compare", "full.sh", "train.sh", "--gpus", "4x8xH100", "--json")
    assert answer.code == 0
    assert answer.json["targets"] == ["full.sh", "train.sh"]
    changed = {one["field"]: one["values"] for one in answer.json["differences"]}
    assert changed["layout.recompute"] == ["full", "selective"]
    assert "data.seq_length" not in changed
    assert answer.json["sides"][0]["name"] == "train.sh"
    single = meshwright("estimate", "full.sh", "--gpus", "4x8xH100", "--json").json
    assert answer.json["sides"][1]["estimate"] == single["estimate"]
    several = meshwright("compare", "full.sh", "train.sh", "--engines", "all", "--json")
    assert (several.code, several.json["error"]["field"]) == (2, "engines")
    wrong = meshwright("compare", "full.sh", "--engines", "megatorn", "--json")
    assert wrong.code == 2
    assert "megatron" in wrong.json["error"]["message"]


def test_a_shape_without_a_name_is_estimated_and_not_trained(meshwright: Any, folder: Path) -> None:
    biased = MEGATRON.replace("--swiglu --disable-bias-linear", "--num-experts 8 --moe-router-topk 2")
    (folder / "moe.sh").write_text(
        biased.replace("--num-layers 80 --hidden-size 8192", "--num-layers 16 --hidden-size 2048")
    )
    assert meshwright("estimate", "moe.sh", "--json").json["estimate"]["memory_gib"]["total"] > 0
    refused = meshwright("recipe", "moe.sh", "--json")
    assert (refused.code, refused.json["error"]["field"]) == (2, "model")
    answer = meshwright("compare", "moe.sh", "--engines", "meshwright,megatron", "--json").json
    sides = {one["name"]: one for one in answer["sides"]}
    assert "cannot build it" in sides["meshwright"]["reasons"][0]
    assert sides["megatron"]["rank"] == 1


def test_requests_send_files_as_text() -> None:
    from meshwright.mcp.executor import reply

    sent = {"recipe": TORCHTITAN, "name": "titan.toml", "gpus": "8xH100"}
    for name, extra in (("estimate", {}), ("plan", {"top": 1}), ("compare", {"engines": "meshwright,torchtitan"})):
        found = reply(name, {**sent, **extra})
        assert "error" not in found.answer, found.answer
    export = reply("export", {**sent, "to": "megatron-lm"}).answer
    assert "pretrain_gpt.py" in next(iter(export["files"].values()))
    recommended = reply("recommend", sent).answer
    assert recommended["contract"]["global_batch_size"] == 16
    refused = reply("estimate", {"target": "/etc/titan.toml", "gpus": "8xH100"}).answer
    assert "not allowed" in refused["error"]["message"]
