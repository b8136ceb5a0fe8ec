"""A team's extension adds GPUs, models, recipes, rules and framework keys; a broken one is reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "examples" / "extension"
SCRIPT = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --swiglu \\
  --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights \\
  --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 3e-4 --bf16 --use-distributed-optimizer \\
  --mock-data --tokenizer-type NullTokenizer --acme-log-server logs
"""


def answer(*words: str, extensions: Path | None = SAMPLE, path: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Run a command with extensions in a process of its own; catalogues are read once per process."""
    env = {k: v for k, v in os.environ.items() if k != "MESHWRIGHT_EXTENSIONS"}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (ROOT / "src", path)))), "XDG_CONFIG_HOME": os.devnull}
    if extensions is not None:
        env["MESHWRIGHT_EXTENSIONS"] = str(extensions)
    command = [sys.executable, "-m", "meshwright", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    return done.returncode, json.loads(done.stdout)


def test_nothing_is_added_without_an_extension() -> None:
    assert answer("recipe", "acme_3b_pretrain_config", extensions=None)[0] == 2


def test_gpu_and_model_and_recipe_function() -> None:
    code, plan = answer("recommend", "acme_3b", "--gpus", "16xACME-H100", "--goal", "pretrain")
    assert code == 0
    assert plan["recipe"]["name"] == "acme_3b_pretrain_config"
    assert plan["estimate"]["memory_gib"]["capacity"] == pytest.approx(79.65, abs=0.01)


def test_recipe_file_is_found_like_a_shipped_one() -> None:
    code, found = answer("recipe", "acme-8b-sft")
    assert code == 0
    assert found["recipe"]["train"]["global_batch_size"] == 64
    assert {row["name"] for row in answer("recipes", "acme")[1]["recipes"]} >= {
        "acme_8b_sft_config",
        "acme_3b_pretrain_config",
    }


def test_rule_reports_with_a_fix_that_was_tried() -> None:
    code, found = answer("check", "acme_3b_pretrain_config", "train.global_batch_size=4096")
    findings = {finding["rule"]: finding for finding in found["findings"]}
    assert code == 1
    assert findings["acme.batch-tokens"]["message"] == "33,554,432 tokens per step; at most 8 Mi are approved"
    assert findings["acme.batch-tokens"]["fix"] == ["train.global_batch_size=1024"]


def test_framework_keys(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    plain = answer("check", str(script), "--gpus", "8xH100", extensions=None)[1]["findings"]
    extended = answer("check", str(script), "--gpus", "8xH100")[1]["findings"]
    assert any(finding["field"] == "acme_log_server" for finding in plain)
    assert not any(finding["field"] == "acme_log_server" for finding in extended)
    script.write_text(SCRIPT.replace("--seq-length 4096", "").replace("logs", "logs --acme-seq 4096"))
    assert not any(f["rule"] == "key.unknown" for f in answer("check", str(script), "--gpus", "8xH100")[1]["findings"])


def test_installed_package(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "meshwright_ext_acme")
    assert answer("recipe", "acme_3b_pretrain_config", extensions=None, path=tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("gpus.toml", "[X]\narch = 'hopper'\n", "missing"),
        ("gpus.toml", "[H100]\n" + (SAMPLE / "gpus.toml").read_text().split("]\n", 1)[1], "exists already"),
        ("gpus.toml", "no toml", "Expected"),
        ("models.json", '[{"name": "x"}]', "config"),
        ("recipes.py", "import nothing_of_that_name", "nothing_of_that_name"),
        ("rules.py", (ROOT / "src/meshwright/rules/network.py").read_text(), "network.tensor-parallel-domain"),
        ("recipes/llama3_8b_sft_config.toml", 'base = "llama3_8b_sft_config"', "exists already"),
    ],
)
def test_broken_extension_is_named(tmp_path: Path, file: str, text: str, reason: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    code, found = answer("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", extensions=tmp_path)
    assert code == 2
    assert found["error"]["field"] == "extension"
    assert found["error"]["value"].endswith(file)
    assert reason in found["error"]["message"]


def test_keys_of_an_unknown_framework_are_named(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[megatron]\n"--x" = {}\n')
    (tmp_path / "train.sh").write_text(SCRIPT)
    code, found = answer("check", str(tmp_path / "train.sh"), extensions=tmp_path)
    assert code == 2
    assert "megatron" in found["error"]["message"]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    code, found = answer("gpus", extensions=tmp_path / "missing")
    assert code == 2
    assert found["error"]["field"] == "MESHWRIGHT_EXTENSIONS"
