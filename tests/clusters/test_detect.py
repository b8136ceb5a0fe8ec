"""`auto` parses nvidia-smi output, or raises an error with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.clusters import cluster, read_nvidia_smi
from meshwright.errors import InputError


def test_one_gpu() -> None:
    read = read_nvidia_smi("NVIDIA H200, 143771 MiB\n")
    assert str(read) == "1xH200"
    assert read.gpu.memory_gib == 140.4


def test_eight_gpus() -> None:
    assert str(read_nvidia_smi("NVIDIA H100 80GB HBM3, 81559 MiB\n" * 8)) == "8xH100"


def test_the_memory_is_the_one_reported() -> None:
    read = read_nvidia_smi("NVIDIA A100-SXM4-40GB, 40960 MiB\nNVIDIA A100-SXM4-40GB, 40536 MiB\n")
    assert (str(read), read.gpu.memory_gib) == ("2xA100-40", 39.59)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "no GPU found on this machine"),
        ("No devices were found\n", "no GPU found on this machine"),
        ("NVIDIA H100 80GB HBM3, 81559 MiB\nNVIDIA L40S, 46068 MiB\n", "several GPU types"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb, 9856 MiB\n", "slice of a GPU"),
        ("Tesla K80, 11441 MiB\n", "TOML file"),
        ("NVIDIA TITAN V, 12288 MiB\n", "unknown GPU NVIDIA TITAN V"),
        ("NVIDIA GB10, [N/A]\n", "TOML file"),
        ("NVIDIA H100 80GB HBM3, 0 MiB\n", "reports the memory"),
    ],
)
def test_unusable_machines_get_a_fix(output: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        read_nvidia_smi(output)
    assert reason in caught.value.reason
    assert (caught.value.field, caught.value.value, caught.value.fix) == ("gpus", "auto", ["8xH100"])


@given(st.text() | st.lists(st.text(), min_size=2, max_size=3).map(", ".join))
def test_nothing_but_an_input_error_escapes(output: str) -> None:
    with pytest.raises(InputError):
        read_nvidia_smi(output)


def _install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_auto_runs_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, monkeypatch, 'echo "NVIDIA B200, 183359 MiB"; echo "NVIDIA B200, 183359 MiB"')
    assert str(cluster("Auto")) == "2xB200"


def test_auto_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError, match=r"no GPU found on this machine .* pass the cluster to plan for, such as 8xH100"
    ):
        cluster("auto")


def test_auto_with_a_broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_nvidia_smi(tmp_path, monkeypatch, 'echo "Failed to initialize NVML" >&2; exit 9')
    with pytest.raises(InputError, match="nvidia-smi failed: Failed to initialize NVML"):
        cluster("auto")
