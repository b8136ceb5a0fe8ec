"""The page of checks: an example at once, a link to every result, and the corrected file."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
from tests.web.html import Page
from tests.web.test_pages import read

from meshwright.frameworks import fixed_text
from meshwright.web import example_files, presenters

TITAN = """# my run
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
global_batch_size = 7  # odd
seq_len = 8192
steps = 1000

[parallelism]
tensor_parallel_degree = 3
"""
AUTOMODEL = """step_scheduler:
  global_batch_size: 7
  local_batch_size: 1
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B
distributed:
  strategy: fsdp2
  tp_size: 3
"""
PEFT = """peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  match_all_linear: true
  dim: 16
"""
LORA = AUTOMODEL.replace("size: 7", "size: 8").replace("size: 3", "size: 1") + PEFT
DEEPSPEED = """{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "train_batch_size": 100,
 "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}"""


def test_the_page_opens_with_an_example_that_is_checked(client: Any) -> None:
    page = read(client, "/check")
    assert "example" in page.text
    assert page.numbers["findings.error"] >= 3
    assert "Apply fixes" in page.text
    assert "Memory of this layout" not in page.text, "64 GPUs are not divisible by 48: it cannot be built"


@pytest.mark.parametrize(
    ("name", "text", "more", "kept", "changed"),
    [
        ("run.toml", TITAN, {}, "global_batch_size = 7  # odd", "tensor_parallel_degree = 8"),
        ("run.yaml", AUTOMODEL, {}, "  strategy: fsdp2", "  tp_size: 2"),
        (
            "ds_config.json",
            DEEPSPEED,
            {"model": "llama3-8b"},
            '"train_micro_batch_size_per_gpu": 3',
            '"train_batch_size": 96',
        ),
        ("pretrain.sh", example_files.SCRIPT, {}, "--bf16 --train-iters 1000", "--tensor-model-parallel-size 4 \\"),
    ],
)
def test_fixes_are_written_into_the_file(
    client: Any, name: str, text: str, more: dict[str, str], kept: str, changed: str
) -> None:
    gpus = example_files.SCRIPT_GPUS if name.endswith(".sh") else "8xH100"
    reply = client.post("/check", data={"text": text, "name": name, "gpus": gpus, "apply": "1", **more})
    page = Page(reply.text)
    assert page.wrong == []
    assert "Corrected file" in page.text
    assert kept in page.text
    assert changed in page.text
    assert page.numbers["findings.error"] == 0


def test_a_renamed_key_leaves_the_corrected_file(client: Any) -> None:
    text = LORA.replace("  dim: 16", "  dimm: 16")
    asked = {"text": text, "name": "run.yaml", "gpus": "8xH100", "corrected": True}
    answer = client.post("/api/check", json=asked).json()
    assert [one["fix"] for one in answer["findings"] if one["severity"] == "error"] == [["peft.dim: 16"]]
    assert answer["corrected"]["text"] == LORA
    assert client.post("/api/check", json={**asked, "text": LORA}).json()["ok"]


def test_a_result_is_linked(client: Any) -> None:
    query = urlencode({"text": TITAN, "name": "run.toml", "gpus": "8xH100"})
    page = Page(client.get(f"/check?{query}").text)
    assert page.wrong == []
    assert "tensor_parallel_degree = 3" in page.text
    link = next(line for line in page.text.split() if line.startswith("/check?") and "text=" in line)
    assert Page(client.get(link).text).numbers == page.numbers


@pytest.mark.parametrize(
    ("text", "fix", "expected"),
    [
        ("python a.py --tp 4\n", "--tp 2", "python a.py --tp 2\n"),
        ("python a.py --tp=4 --x\n", "--tp 2", "python a.py --tp 2 --x\n"),
        ("python a.py --micro_batch_size 4", "--micro-batch-size 1", "python a.py --micro_batch_size 1"),
        ("python a.py --tp ${TP} --x 1", "--tp 2", "python a.py --tp 2 --x 1"),
        ("ARGS=(--tp 4)\n", "--pp 2", "ARGS=(--tp 4 --pp 2)\n"),
        ("python a.py \\\n  --tp 4 \\\n  $MORE\n", "--pp 2", "python a.py \\\n  --tp 4 \\\n  --pp 2 \\\n  $MORE\n"),
        ("#!/bin/sh\nx\n", "export A=1", "#!/bin/sh\nexport A=1\nx\n"),
        ("export A=2\n", "export A=1", "export A=1\n"),
        ("#SBATCH --nodes=2\nx", "#SBATCH --nodes=4", "#SBATCH --nodes=4\nx"),
        ("torchrun --nproc-per-node 4 a.py", "torchrun --nproc-per-node 8", "torchrun --nproc-per-node 8 a.py"),
        ("python a.py --use-x --tp 4", "without --use-x", "python a.py --tp 4"),
        ("python a.py --tp-size 4 --tp 4", "--tp 2", "python a.py --tp-size 4 --tp 2"),
    ],
)
def test_scripts_keep_all_else(text: str, fix: str, expected: str) -> None:
    assert fixed_text(text, "run.sh", [fix]).text == expected


def test_what_is_no_setting_is_left_to_the_user() -> None:
    made = fixed_text("a: 1\n", "run.yaml", ["use more GPUs", "a: 2"])
    assert (made.text, made.applied, made.left) == ("a: 2\n", ("a: 2",), ("use more GPUs",))
    assert fixed_text("x = 1", "train.py", ["x=2"]).left == ("x=2",)
    assert fixed_text("python a.py --x 1", "a.sh", ["--data-path PREFIX"]).to_complete == ("--data-path PREFIX",)


def test_a_diff_has_the_changed_lines_and_few_others() -> None:
    before = "\n".join(map(str, range(50)))
    after = before.replace("\n20\n", "\ntwenty\nmore\n").replace("\n40\n", "\n")
    rows = presenters.diff_lines(before, after)
    assert [row for row in rows if row[0] in ("add", "remove")] == [
        ("remove", "20"),
        ("add", "twenty"),
        ("add", "more"),
        ("remove", "40"),
    ]
    assert [row[0] for row in rows].count("skip") == 3
    assert presenters.diff_lines("a\nb", "c") == [("remove", "a"), ("remove", "b"), ("add", "c")]
