"""A TOML file can describe a known GPU, a changed one or a custom one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.clusters import Cluster, cluster, gpu
from meshwright.errors import InputError

OWN_GPU = """
nodes = 2
gpus_per_node = 4
[gpu]
name = "Prototype"
arch = "hopper"
capability = 9.0
memory_gib = 64
peak_tflops = { bf16 = 500, fp8 = 1000 }
hbm_gb_s = 3000
nvlink_gb_s = 200
nvlink_domain = 4
network_gb_s = 25
"""

Read = Callable[[str], Cluster]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def write_and_read(text: str) -> Cluster:
        path = tmp_path / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return cluster(str(path))

    return write_and_read


def test_a_known_gpu(read: Read) -> None:
    found = read('gpu = "h100"\nnodes = 4')
    assert found == Cluster(gpu("H100"), 4, 8, file=found.file)


def test_gpu_values_can_be_overridden(read: Read) -> None:
    text = (
        'gpu = "H100"\nnodes = 2\ngpus_per_node = 4\nmemory_gib = 94\nnetwork_gb_s = 25\npeak_tflops = { bf16 = 900 }'
    )
    changed = read(text)
    assert (changed.world, changed.nvlink_domain) == (8, 4)
    assert (changed.gpu.memory_gib, changed.gpu.network_gb_s) == (94.0, 25.0)
    assert changed.gpu.peak_tflops == gpu("H100").peak_tflops | {"bf16": 900.0}
    assert gpu("H100").peak_tflops["bf16"] == 989.5


def test_a_custom_gpu(read: Read) -> None:
    own = read(OWN_GPU)
    assert str(own) == "2x4xPrototype"
    assert (own.gpu.gpus_per_node, own.gpu.peak_tflops) == (4, {"bf16": 500.0, "fp8": 1000.0})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "gpu is missing"),
        ("gpu = 8", "must be the name of a GPU"),
        ('gpu = "H10"', "did you mean H100"),
        ('gpu = "H100"\nnode = 4', "nodes"),
        ('gpu = "H100"\nmemory = 4', "did you mean memory_gib"),
        ('gpu = "H100"\nnodes = 0', "nodes = 0: must be an integer"),
        ('gpu = "H100"\nnodes = 1.5', "nodes = 1.5: must be an integer"),
        ('gpu = "H100"\nnodes = true', "nodes = True: must be an integer"),
        ('gpu = "H100"\ngpus_per_node = "8"', "gpus_per_node = '8': must be an integer"),
        ('gpu = "H100"\nnodes = 1000000', "exceed the maximum of 1000000 GPUs"),
        ('gpu = "H100"\nmemory_gib = -3', "memory_gib = -3: must be a positive number"),
        ('gpu = "H100"\nmemory_gib = nan', "memory_gib = nan: must be a positive number"),
        ('gpu = "H100"\nhbm_gb_s = inf', "hbm_gb_s = inf: must be a positive number"),
        ('gpu = "H100"\nnetwork_gb_s = "fast"', "must be a positive number"),
        ('gpu = "H100"\narch = "pascal"', "must be one of volta"),
        ('gpu = "H100"\nlink = "string"', "must be one of nvlink"),
        ('gpu = "H100"\nname = ""', "must be a non-empty string"),
        ('gpu = "H100"\npeak_tflops = 900', "peak_tflops must be a table"),
        ('gpu = "H100"\npeak_tflops = { bf61 = 900 }', "did you mean bf16"),
        (f'gpu = "H100"\nnodes = 0x{"f" * 5000}', "nodes = a huge number"),
        (OWN_GPU.replace("memory_gib = 64\n", ""), "missing memory_gib"),
        (OWN_GPU + "colour = 3", "unknown key colour"),
        ("gpu = ", "not valid TOML"),
        (f"a = {'[' * 5000}", "not valid TOML"),
    ],
)
def test_bad_files_say_what_is_wrong(read: Read, text: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text)
    assert caught.value.field == "gpus"
    assert str(caught.value.value).endswith("cluster.toml")
    assert reason in caught.value.reason


@pytest.mark.parametrize("path", ["nowhere.toml", "no/such/file", "/", "bad\0name.toml", "x" * 5000 + ".toml"])
def test_missing_files(path: str) -> None:
    with pytest.raises(InputError, match="file not found"):
        cluster(path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid TOML"):
        cluster(str(path))


keys = st.sampled_from(["gpu", "nodes", "gpus_per_node", "memory_gib", "peak_tflops", "name", "arch", "nvlink_domain"])
values = st.sampled_from(
    ['"H100"', '""', "0", "8", "-1", "1e400", "nan", "true", "[]", "{}", "{ bf16 = 1 }", "1979-05-27"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(keys, values))
def test_nothing_but_an_input_error_escapes(read: Read, table: dict[str, str]) -> None:
    with suppress(InputError):
        assert read("\n".join(f"{key} = {value}" for key, value in table.items())).world >= 1


def test_host_memory_can_be_set_and_has_a_default(read: Read) -> None:
    assert read('gpu = "H100"').gpu.host_gib == 256
    assert read('gpu = "H100"\nhost_gib = 96').gpu.host_gib == 96
    assert read(OWN_GPU).gpu.host_gib == 128
    assert read(OWN_GPU + "host_gib = 32\n").gpu.host_gib == 32
    with pytest.raises(InputError, match="positive"):
        read('gpu = "H100"\nhost_gib = -1')
