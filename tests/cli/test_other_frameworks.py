"""check and export of other frameworks' files, as a user calls them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.test_mutations import MODULES

TOML = """\
[model]
dim = 4096
n_layers = 32
n_heads = 32
n_kv_heads = 8
vocab_size = 128256
ffn_hidden_dim = 14336
max_seq_len = 4096

[train]
batch_size = 2
seq_len = 4096

[distributed]
tp = 3
"""
SCRIPT = """\
#!/bin/bash
GPUS=$(touch {mark}; nvidia-smi -L | wc -l)
torchrun --nproc-per-node $GPUS pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size `cat size` --global-batch-size 64 \\
  --train-iters 10 --lr 1e-4 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000
"""


def refused(answer: Any) -> dict[str, Any]:
    assert answer.code == 2, answer.out
    assert answer.err.startswith("error: ")
    assert "Traceback" not in answer.err
    error: dict[str, Any] = answer.json["error"]
    assert error["message"]
    assert error["value"]
    return error


def test_findings_name_file_line_and_fix(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "7b.toml"
    file.write_text(TOML)
    answer = meshwright("check", str(file), "--gpus", "3x8xH100", "--json")
    assert answer.code == 1
    assert answer.json["framework"] == "kempnerforge"
    assert answer.json["ok"] is False
    heads = next(f for f in answer.json["findings"] if f["rule"] == "heads.attention")
    assert (heads["file"], heads["line"], heads["field"]) == (str(file), 15, "distributed.tp")
    assert heads["fix"]
    sizes = dict(one.split(" = ") for one in heads["fix"])
    steps = int(sizes.pop("train.grad_accum_steps", 1))
    assert all(key.startswith("distributed.") for key in sizes)
    ranks = 24 // (int(sizes["distributed.tp"]) * int(sizes.get("distributed.pp", 1)))
    assert ranks * 2 * steps == 16  # the global batch of the file stays
    shown = meshwright("check", str(file), "--gpus", "3x8xH100")
    assert f"{file}:15" in shown.out.replace("\n", "")
    assert shown.code == 1


def test_our_own_files_are_detected_and_get_lines_too(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "llama3_8b_pretrain_config"\n\n[layout]\ntp = 3\n')
    answer = meshwright("check", str(file), "--json")
    assert answer.code == 1
    assert answer.json["framework"] == "meshwright"
    assert {f["line"] for f in answer.json["findings"] if f["field"] == "layout.tp"} == {4}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", b"\x00\x01\x02", "binary"),
        ("a.toml", b"\xff\xfe[\x00", "UTF-16"),
        ("a.sh", b"\x7fELF\x02\x01\x01\x00", "binary"),
        ("a.yaml", b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n" + b"".join(
            f"{chr(100 + i)}: &{chr(100 + i)} [{','.join(['*' + chr(99 + i)] * 9)}]\n".encode() for i in range(9)
        ), "expand"),
        ("a.yaml", b"x: !!python/object/apply:os.system ['true']\n", "tag"),
        ("a.yaml", b"x: !Thing {}\n", "tag"),
        ("a.yaml", b"services:\n  web:\n    image: nginx\n", "no supported framework"),
        ("a.json", b'{"name": "left-pad", "version": "1.0.0"}', "no supported framework"),
        ("a.toml", b'[tool.poetry]\nname = "x"\n', "no supported framework"),
        ("a.sh", b"#!/bin/bash\necho hello\n", "no supported framework"),
        ("a.py", b"print('hello')\n", "no supported framework"),
        ("a.py", b"def broken(:\n", ""),
        ("a.json", b'{"a": 1, "a": 2}', "twice"),
        ("a.cfg", b"a = 1\n", "format"),
        ("a.yaml", b"", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_the_reason(
    meshwright: Any, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    error = refused(meshwright("check", str(file), "--json"))
    assert words in error["message"]
    assert str(file) in error["value"]


def test_a_huge_file_is_refused_without_reading_it(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as out:
        out.truncate(50_000_000)
    began = time.process_time()
    assert "bytes" in refused(meshwright("check", str(file), "--json"))["message"]
    assert time.process_time() - began < 0.5


def test_a_path_that_is_not_a_file_is_an_error(meshwright: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in ("missing.yaml", "pipe.yaml", "."):
        refused(meshwright("check", str(tmp_path / name), "--json"))
    assert "llama3_8b_pretrain_config" in str(refused(meshwright("check", "lama3_8b_pretrain_config", "--json"))["fix"])


def test_a_script_is_never_run_and_unresolved_values_are_reported(meshwright: Any, tmp_path: Path) -> None:
    mark, file = tmp_path / "was_run", tmp_path / "train.sh"
    file.write_text(SCRIPT.replace("{mark}", str(mark)))
    answer = meshwright("check", str(file), "--gpus", "8xH100", "--json")
    assert not mark.exists()
    assert answer.json["framework"] == "megatron-lm"
    assert [one["line"] for one in answer.json["unresolved"] if "micro" in one["key"]] == [4]


def test_includes_that_go_in_circles_are_refused(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("source ./b.sh\ntorchrun pretrain_gpt.py --bf16\n")
    (tmp_path / "b.sh").write_text(". ./a.sh\n")
    error = refused(meshwright("check", str(tmp_path / "a.sh"), "--json"))
    assert "b.sh" in error["message"] + error["value"]


def test_the_framework_can_be_given(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "7b.toml"
    file.write_text(TOML)
    assert meshwright("check", str(file), "--framework", "kempnerforge", "--json").json["framework"] == "kempnerforge"
    assert "megatron-lm" in str(refused(meshwright("check", str(file), "--framework", "megatron-ml", "--json"))["fix"])
    other = refused(meshwright("check", str(file), "--framework", "megatronlm", "--json"))
    assert other["fix"] == ["--framework kempnerforge"]
    refused(meshwright("check", str(file), "--engine", "megatron", "--json"))


def test_export_writes_files_and_lists_what_it_cannot_say(meshwright: Any, tmp_path: Path) -> None:
    words = ("export", "kempner_7b_12gpu_tp4_config", "--to", "kempnerforge", "--out", str(tmp_path / "out"), "--json")
    answer = meshwright(*words)
    assert answer.code == 0
    ((name, text),) = answer.json["files"].items()
    assert (tmp_path / "out" / name).read_text() == text
    assert {"field", "value", "reason"} == answer.json["unmapped"][0].keys()
    assert meshwright(*words).code == 0  # the same again is fine
    (tmp_path / "out" / name).write_text("mine")
    assert meshwright(*words).code == 3
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_export_has_the_findings_there(meshwright: Any) -> None:
    answer = meshwright("export", "kempner_7b_12gpu_tp4_config", "--to", "kempnerforge", "layout.tp=3", "--json")
    assert answer.code == 1
    assert "heads.attention" in {finding["rule"] for finding in answer.json["findings"]}


def test_export_to_an_unknown_framework(meshwright: Any) -> None:
    assert "torchtitan" in str(
        refused(meshwright("export", "llama3_8b_pretrain_config", "--to", "torchtitanic", "--json"))["fix"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("framework", MODULES)
def test_checking_a_file_takes_under_three_tenths_of_a_second(tmp_path: Path, framework: str) -> None:
    """Of CPU time, the start of the process included; slow because a busy machine makes it fail."""
    import resource

    module = importlib.import_module(f"tests.frameworks.test_{framework}")
    case = module.CASES[0]
    file = tmp_path / Path(case.path or module.PATH).name
    file.write_text(case.text)
    command = [sys.executable, "-m", "meshwright", "check", str(file), "--model", "llama3-8b", "--gpus", "8xH100"]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    spent = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, check=False, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode in (0, 1), done.stderr
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3, spent


def test_a_job_of_another_framework_ships_its_config(meshwright: Any, tmp_path: Path) -> None:
    words = ("launch", "kempner_7b_12gpu_tp4_config", "--to", "kempnerforge", "--scheduler", "slurm", "--time", "10:00")
    answer = meshwright(*words, "--write", str(tmp_path), "--json")
    assert answer.code == 0
    config = next(name for name in answer.json["files"] if name.endswith(".toml"))
    script = next(text for name, text in answer.json["files"].items() if name.endswith(".sbatch"))
    assert "torchrun --nnodes=3 --rdzv-backend=c10d" in script
    assert f"scripts/train.py {config}" in script
    assert (tmp_path / config).is_file()
    assert any("precision.master" in note for note in answer.json["notes"])
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    refused(meshwright(*words, "--write", str(tmp_path), "--tiny", "--json"))
