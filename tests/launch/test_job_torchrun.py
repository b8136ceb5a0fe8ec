"""torchrun commands: one node, several nodes with a rendezvous, and hosts with fixed ranks."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.jobs import TRAIN, job

from meshwright.errors import InputError
from meshwright.launch.artifacts import Launch, write
from meshwright.launch.commands import on_hosts, on_torchrun
from meshwright.launch.job import Variable


def only(launch: Launch) -> list[str]:
    assert len(launch.commands) == 1
    return shlex.split(launch.commands[0])


def test_one_node_is_standalone() -> None:
    assert only(on_torchrun(job("8xH100"))) == ["torchrun", "--standalone", "--nproc-per-node=8", *TRAIN]


def test_several_nodes_use_a_rendezvous() -> None:
    words = only(on_torchrun(job("4x8xH100", head="fe80::1", port=1234, max_restarts=2)))
    assert words == [
        "torchrun", "--nnodes=4", "--rdzv-backend=c10d", "--rdzv-id=try_it", "--rdzv-endpoint=[fe80::1]:1234",
        "--nproc-per-node=8", "--max-restarts=2", *TRAIN,
    ]  # fmt: skip


def test_several_nodes_need_a_rendezvous_host() -> None:
    with pytest.raises(InputError) as refused:
        on_torchrun(job("2x8xH100"))
    assert refused.value.field == "--head"


def test_a_given_interpreter_starts_torchrun() -> None:
    words = only(on_torchrun(job("8xH100", python="/venv/bin/python")))
    assert words[:3] == ["/venv/bin/python", "-m", "torch.distributed.run"]


def test_the_environment_precedes_the_command() -> None:
    advised = (
        Variable("X", None, "must not be set"),
        Variable("Y", "1", "must be"),
        Variable("Z", "2", "overridden by the user"),
    )
    words = only(on_torchrun(job("8xH100", advised=advised, env={"Z": "3", "A": "b c"})))
    assert words[: words.index("torchrun")] == ["env", "-u", "X", "Y=1", "Z=3", "A=b c"]


def test_hosts_have_a_command_each() -> None:
    launch = on_hosts(job("3x4xH100", hosts=("10.0.0.1", "b", "C.site"), port=5000))
    assert launch.places == ("10.0.0.1", "b", "c.site")
    for rank, command in enumerate(launch.commands):
        words = shlex.split(command)
        assert words[1:6] == [
            "--nnodes=3", f"--node-rank={rank}", "--master-addr=10.0.0.1", "--master-port=5000", "--nproc-per-node=4",
        ]  # fmt: skip
        assert words[6:] == list(TRAIN)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b", "c"), ("a", "a"), ("a", "A"), ("a", ""), ()])
def test_every_node_has_one_host(hosts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refused:
        on_hosts(job("2x8xH100", hosts=hosts))
    assert refused.value.field == "--hosts"


def test_the_hosts_decide_the_nodes_in_the_fix() -> None:
    with pytest.raises(InputError) as refused:
        on_hosts(job("2x8xH100", hosts=("a", "b", "c")))
    assert refused.value.fix == ("--gpus 3x8xH100",)


@given(nodes=st.integers(2, 40), per=st.integers(1, 8))
def test_ranks_are_all_there_once(nodes: int, per: int) -> None:
    launch = on_hosts(job(f"{nodes}x{per}xH100", hosts=tuple(f"n{i}" for i in range(nodes))))
    options = [dict(word[2:].split("=") for word in shlex.split(one)[1:6]) for one in launch.commands]
    ranks = [int(one["node-rank"]) * int(one["nproc-per-node"]) + local for one in options for local in range(per)]
    assert ranks == list(range(nodes * per))
    assert {one["nnodes"] for one in options} == {str(nodes)}


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(words=st.lists(TEXT, max_size=4), value=TEXT)
def test_user_arguments_are_quoted(words: list[str], value: str) -> None:
    try:
        launch = job("8xH100", words=("x", *words), env={"A": value})
    except InputError:
        return
    assert only(on_torchrun(launch)) == [
        "env",
        f"A={value}",
        "torchrun",
        "--standalone",
        "--nproc-per-node=8",
        "x",
        *words,
    ]


def test_a_shell_passes_arguments_unchanged(tmp_path: Path) -> None:
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/bash\nprintf "%s\\0" "$A" "$@"\n')
    fake.chmod(0o755)
    words = ("x", "it's", 'a"b', "$HOME", "`id`", "a b", "*", "\\", "")
    command = on_torchrun(job("8xH100", words=words, env={"A": "$(id)"})).commands[0]
    done = subprocess.run(
        ["bash", "-c", command], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout.split("\0")[:-1] == ["$(id)", "--standalone", "--nproc-per-node=8", *words]


def test_files_are_not_overwritten_by_default(tmp_path: Path) -> None:
    launch = Launch(scheduler="slurm", files={"a.sbatch": "one\n"}, commands=())
    write(launch, str(tmp_path / "new"))
    assert write(launch, str(tmp_path / "new")) == (str(tmp_path / "new" / "a.sbatch"),)  # same content
    other = Launch(scheduler="slurm", files={"a.sbatch": "two\n"}, commands=())
    with pytest.raises(InputError) as refused:
        write(other, str(tmp_path / "new"))
    assert "--overwrite" in refused.value.fix
    write(other, str(tmp_path / "new"), overwrite=True)
    assert (tmp_path / "new" / "a.sbatch").read_text() == "two\n"
