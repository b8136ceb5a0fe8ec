"""NCCL's own lines and variables are used; a straggler is not a slow network; token budgets count the typed length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_doctor_files_and_ranks import MEGATRON
from tests.first_hour.test_doctor_stated_values import finding, megatron

NCCL = "node07:4211:4390 [0] NCCL INFO "
NO_DEVICE = f"{NCCL}NET/IB : No device found.\n"
SOCKET = f"{NCCL}NET/Socket : Using [0]eth0:10.1.0.7<0>\n{NCCL}Using network Socket\n"
IB = f"{NCCL}NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.1.0.7<0>\n{NCCL}Using network IB\n"


def doctor(meshwright: Any, folder: Path, text: str, gpus: str = "12x8xA100-80") -> dict[str, Any]:
    log, file = folder / "train.log", folder / "run.sh"
    log.write_text(text)
    file.write_text(MEGATRON.format(length=8192))
    answer: dict[str, Any] = meshwright("doctor", str(log), "--recipe", str(file), "--gpus", gpus, "--json").json
    return answer


def ids(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


def slow() -> str:
    return megatron(seconds=lambda step: 50.0)


@pytest.mark.parametrize(
    "lines",
    [
        SOCKET,
        NO_DEVICE + SOCKET,
        f"{NCCL}Assigned NET plugin Socket to comm\n",
        f"{NCCL}Channel 00/0 : 7[7] -> 8[0] [send] via NET/Socket/0\n",
        f"[rank0]: {NCCL}NET/Socket : Using [0]eth0:10.1.0.7<0>\n",
        IB + SOCKET,  # after a restart
    ],
)
def test_sockets_between_nodes_are_the_first_finding(meshwright: Any, tmp_path: Path, lines: str) -> None:
    answer = doctor(meshwright, tmp_path, lines + slow())
    assert ids(answer)[0] == "speed.tcp-sockets"
    assert "speed.low-mfu" not in ids(answer)
    found = finding(answer, "speed.tcp-sockets")
    assert "NCCL uses TCP sockets" in found["message"]
    assert "between 12 nodes" in found["message"]
    assert found["remedies"][0]["try"] == ["unset NCCL_IB_DISABLE NCCL_NET"]


def test_the_variable_that_forces_sockets_is_named(meshwright: Any, tmp_path: Path) -> None:
    line = f"{NCCL}NCCL_IB_DISABLE set by environment to 1.\n"
    found = finding(doctor(meshwright, tmp_path, line + SOCKET + slow()), "speed.tcp-sockets")
    assert found["remedies"][0]["try"] == ["unset NCCL_IB_DISABLE"]


@pytest.mark.parametrize(
    "lines",
    [
        IB,
        SOCKET + IB,
        SOCKET + f"{NCCL}Using network AWS Libfabric\n",
        f"{NCCL}NET/Socket : Using [0]eth0:10.1.0.7<0>\n{NCCL}Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA\n",
    ],
)
def test_other_networks_are_not_sockets(meshwright: Any, tmp_path: Path, lines: str) -> None:
    answer = doctor(meshwright, tmp_path, lines + slow())
    assert "speed.tcp-sockets" not in ids(answer)
    assert "speed.low-mfu" in ids(answer)


def test_sockets_at_the_estimated_speed_or_on_one_node_are_no_finding(meshwright: Any, tmp_path: Path) -> None:
    assert "speed.tcp-sockets" not in ids(doctor(meshwright, tmp_path, SOCKET + megatron()))
    log = tmp_path / "one.log"
    log.write_text(SOCKET + slow())
    typed = ("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "data.seq_length=8192", "--json")
    assert "speed.tcp-sockets" not in ids(meshwright(*typed).json)


@pytest.mark.parametrize("text", ["NCCL INFO Using network Socket", NO_DEVICE.strip(), SOCKET])
def test_explain_knows_the_lines_of_sockets(meshwright: Any, text: str) -> None:
    answer = meshwright("explain", text, "--json").json
    assert answer["about"] == "speed.tcp-sockets"
    assert any("NCCL_IB_DISABLE" in one for one in answer["fix"])


OTHERS = ("nccl_debug", "NCCL_IB_TIMEOUT=22", "FI_CXI_DEFAULT_CQ_SIZE", "FI_CXI_ATS", "FI_MR_CACHE_MONITOR")


@pytest.mark.parametrize(
    "text", ["NCCL_IB_DISABLE", "NCCL_IB_DISABLE=1", "export NCCL_IB_DISABLE=1", "NCCL_FOO", *OTHERS]
)
def test_explain_knows_variables(meshwright: Any, text: str) -> None:
    assert "environment variable" in meshwright("explain", text).out


def test_explain_names_the_variable_that_is_misspelled(meshwright: Any) -> None:
    assert "did you mean NCCL_IB_TIMEOUT?" in meshwright("explain", "NCCL_IB_TIMOUT").err


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Slingshot", "FI_PROVIDER=cxi"),
        ("libfabric", "aws-ofi-nccl"),
        ("how often to save", "checkpoint.save_every"),
        ("checkpoint interval", "time that a save blocks"),
        ("energy", "kWh"),
        ("how much energy", "kWh"),
        ("power", "nvidia-smi -q -d POWER"),
    ],
)
def test_explain_knows_words_of_clusters(meshwright: Any, text: str, meaning: str) -> None:
    assert meaning in meshwright("explain", text).out


DS = '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}'
PROGRAM = (
    "train.py --model_name_or_path Qwen/Qwen3-8B --deepspeed ds.json --bf16 true --output_dir out --max_steps 100 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 2"
)
LAUNCHERS = {
    "deepspeed": "deepspeed --hostfile hostfile --num_nodes 2 --num_gpus 8",
    "deepspeed without nodes": "deepspeed --hostfile hostfile",
    "accelerate": "accelerate launch --num_machines 2 --num_processes 16",
    "torchrun": "torchrun --nnodes 2 --nproc-per-node 8",
    "srun": "srun --nodes 2 --ntasks-per-node 8 python",
}


@pytest.mark.parametrize("variable", ["NCCL_IB_DISABLE=1", "NCCL_SOCKET_IFNAME=lo", "NCCL_NET=Socket"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_exports_are_checked_with_every_launcher(meshwright: Any, tmp_path: Path, launcher: str, variable: str) -> None:
    (tmp_path / "ds.json").write_text(DS)
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\nexport {variable}\n{LAUNCHERS[launcher]} {PROGRAM}\n")
    found = finding(meshwright("check", str(script), "--gpus", "2x8xH200", "--json").json, "launch.environment")
    assert variable in found["message"]
    assert "on 2 nodes" in found["message"]
    assert found["fix"] == [f"unset {variable.partition('=')[0]}"]


def test_one_node_may_turn_infiniband_off(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DS)
    script = tmp_path / "run.sh"
    script.write_text(f"export NCCL_IB_DISABLE=1\ndeepspeed --num_gpus 8 {PROGRAM}\n")
    assert "launch.environment" not in ids(meshwright("check", str(script), "--gpus", "8xH200", "--json").json)


TIMERS = """(min, max) time across ranks (ms):
    forward-backward ...............................: ({0:.2f}, 15950.22)
    {1}all-grads-sync .................................: ({2:.2f}, {3:.2f})
    optimizer ......................................: (21.9, 22.4)
"""
COMPUTE = "forward-compute ................................: (3100.10, 5200.22)\n    "


def with_timers(shortest: float, longest: float, compute: str = "") -> str:
    timers = TIMERS.format(12_000, compute, shortest, longest)
    return "".join(line + timers for line in megatron().splitlines(keepends=True))


@pytest.mark.parametrize("compute", ["", COMPUTE])
def test_a_straggler_is_not_a_slow_network(meshwright: Any, tmp_path: Path, compute: str) -> None:
    answer = doctor(meshwright, tmp_path, with_timers(30, 6290, compute))
    assert "speed.stragglers" in ids(answer)
    assert "speed.slow-network" not in ids(answer)
    slow_links = doctor(meshwright, tmp_path, with_timers(6100, 6290))
    assert "speed.slow-network" in ids(slow_links)
    assert "speed.stragglers" not in ids(slow_links)


@pytest.mark.parametrize(
    ("typed", "steps"),
    [
        (("--seq", "8k"), 317_892),
        (("--seq=8k",), 317_892),
        (("data.seq_length=8192",), 317_892),
        (("--seq", "8k", "train.global_batch_size=1536"), 158_946),
    ],
)
def test_a_refused_token_budget_counts_the_typed_length(meshwright: Any, typed: tuple[str, ...], steps: int) -> None:
    line = ("compare", "nemotron_h_8b", "--gpus", "16x8xH200", "--goal", "pretrain", "--tokens", "2T")
    fixed = meshwright(*line, "train.global_batch_size=768", *typed)
    assert fixed.code == 2
    assert f"fix:   train.steps={steps}\n" in fixed.err


@pytest.mark.parametrize("text", ["checkpoint storage", "mtbf"])
def test_explain_knows_storage_and_mtbf(meshwright: Any, text: str) -> None:
    answer = meshwright("explain", text, "--json").json
    assert answer["kind"] == "term"
    assert answer["meaning"]


def test_accepted_errors_are_not_called_ok_without_a_word(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(MEGATRON.format(length=8192).replace("parallel-size 4", "parallel-size 3"))
    typed = ("check", "run.sh", "--gpus", "12x8xA100-80")
    meshwright(*typed, "--write-baseline", "base.json")
    accepted = meshwright(*typed, "--baseline", "base.json")
    assert accepted.code == 0
    assert "errors ignored" in accepted.out.splitlines()[0]
    assert "see the ignored errors" in accepted.out
    assert "(see the findings)" not in accepted.out


def test_a_line_of_a_config_and_its_script_is_annotated_once(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(DS.replace("{", '{"train_batch_size": 200, ', 1))
    Path("run.sh").write_text(f"deepspeed --num_nodes 2 --num_gpus 8 {PROGRAM}\n")
    answer = meshwright("check", ".", "--gpus", "2x8xH200", "--format", "github")
    lines = [line for line in answer.out.splitlines() if "deepspeed.batch-arithmetic" in line]
    assert len(lines) == 1
    assert "2 files checked, 1 error" in answer.out
    sarif = meshwright("check", ".", "--gpus", "2x8xH200", "--format", "sarif").out
    assert sarif.count('"ruleId": "deepspeed.batch-arithmetic"') == 1


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_pods_of_several_nodes_get_a_note_on_rdma(meshwright: Any, kind: str) -> None:
    typed = (
        "launch",
        "llama3_8b_pretrain_config",
        "--scheduler",
        "kubernetes",
        "--image",
        "a/b:1",
        "--dataset",
        "mock",
    )
    several = meshwright(*typed, "--kind", kind, "--gpus", "2x8xH200")
    assert "rdma/hca" in several.out + several.err
    assert "hostNetwork" in several.out + several.err
    one = meshwright(*typed, "--kind", kind, "--gpus", "8xH200")
    assert "rdma/hca" not in one.out + one.err


@pytest.mark.parametrize("runs", [1, 5])
def test_a_plan_says_that_its_calibration_rests_on_one_run(meshwright: Any, tmp_path: Path, runs: int) -> None:
    file = tmp_path / "cal.toml"
    file.write_text(f'gpu = "H200"\nsource = "fitted to {runs} runs"\nclock = 1.3\nruns = {runs}\n')
    line = ("recommend", "llama3-8b", "--goal", "pretrain", "--gpus", "8xH200", "--calibration", str(file))
    assert ("rests on one run" in meshwright(*line).out) == (runs == 1)


def timed_out(rank: int) -> str:
    work = "WorkNCCL(SeqNum=184213, OpType=_ALLGATHER_BASE, NumelIn=3342336, NumelOut=213909504, Timeout(ms)=600000)"
    place = f"[rank{rank}]:[E1112 11:19:53.267817514 ProcessGroupNCCL.cpp:683] [Rank {rank}]"
    return f"{place} Watchdog caught collective operation timeout: {work} ran for 600021 milliseconds.\n"


@pytest.mark.parametrize(
    ("gpus", "silent"),
    [
        (("--gpus", "16x8xH200"), "124 of 128 ranks report nothing"),
        (("--gpus", "cluster.toml"), "60 of 64 ranks report nothing"),
        ((), "44 of at least 48 ranks report nothing"),
    ],
)
def test_silent_ranks_are_suspects_without_a_model_too(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], silent: str
) -> None:
    """It said that none is behind and blamed the network, as long as the log did not name the model."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text('gpu = "H200"\nnodes = 8\n')
    step = " iteration {:8d}/   47684 | elapsed time per iteration (ms): 31050.0 | lm loss: 1.6E+00 |\n"
    ended = "srun: error: node06: task 5: Exited with exit code 1\n"
    reports = "".join(timed_out(rank) for rank in (41, 40, 47, 8))
    Path("train.log").write_text("".join(step.format(one) for one in range(10, 260, 10)) + reports + ended)
    found = finding(meshwright("doctor", "train.log", *gpus, "--json").json, "run.failed-hang")
    assert silent in found["message"]
    assert "none is behind" not in found["message"]
    assert not any("nccl-tests" in one for remedy in found["remedies"] for one in remedy["try"])
    assert ("42-46 on node06" in found["message"]) == bool(gpus)
    assert "9-15, 42-46 (node06)" not in found["message"]
