"""Typing errors in a cluster file: what was probably meant is named, and no real GPU is refused."""

from pathlib import Path

import pytest

from meshwright.clusters import Cluster, gpus
from meshwright.clusters.parse import assumptions, cluster
from meshwright.errors import InputError

FIELDS = ("memory_gib", "hbm_gb_s", "nvlink_gb_s", "network_gb_s", "host_gib", "capability")


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def file(text: str) -> str:
    Path("own.toml").write_text(text + "\n")
    return "own.toml"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("memory_gb", "memory_gib"),
        ("gpu_count", "gpus_per_node"),
        ("hbm_bandwidth", "hbm_gb_s"),
        ("bf16_tflops", "peak_tflops"),
        ("cpu_memory_gb", "host_gib"),
        ("nvlink_size", "nvlink_gb_s or nvlink_domain"),
        ("memory_size", "memory_gib"),
    ],
)
def test_unknown_keys_name_what_was_meant(key, meant):
    for text in (f'gpu = "H100"\n{key} = 4', f'[gpu]\nname = "Own"\n{key} = 4'):
        with pytest.raises(InputError, match=f"unknown key {key}; did you mean {meant}"):
            cluster(file(text))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("memory_gib = 81920", "no GPU has that, known ones have 10 to 287.98 GiB; 81920 MiB are memory_gib = 80"),
        ("hbm_gb_s = 3.35", "3.35 TB/s are hbm_gb_s = 3350"),
        ("peak_tflops = { bf16 = 0.9895 }", "0.9895 PFLOP/s are peak_tflops.bf16 = 989.5"),
        ("capability = 90", "90 of an sm_ name are capability = 9"),
        ("host_gib = 2097152", "host_gib = 2.09715e+06: no GPU has that"),
        ('network_gb_s = "40000 Gb/s"', "network_gb_s = 5000: no GPU has that, known ones have 1.5625 to 200 GB/s"),
    ],
)
def test_values_in_another_unit_are_refused(line, reason):
    with pytest.raises(InputError) as error:
        cluster(file(f'gpu = "H100"\n{line}'))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("memory_gib = 9.6", "memory_gib = 9.6 is 0.12 times the 79.65 GiB of H100; was memory_gib = 96 meant?"),
        ("memory_gib = 20", "a part of a GPU (MIG) or another GPU also has another memory_gib, hbm_gb_s"),
        ("nvlink_gb_s = 900", "counts both directions together: nvlink_gb_s = 450"),
        ("peak_tflops = { bf16 = 1979 }", "counts sparse matrices: peak_tflops.bf16 = 989.5"),
        ("host_gib = 2048", "16,384 GiB for the 8 of a node; for 2048 GiB per node write host_gib = 256"),
    ],
)
def test_values_that_no_variant_has_are_noted(line, reason):
    assert reason in assumptions(file(f'gpu = "H100"\n{line}'))[0].message


def test_the_note_is_printed_with_the_plan(meshwright):
    own = file('gpu = "H100"\nmemory_gib = 9.6')
    printed = meshwright("recommend", "llama3-8b", "--gpus", own, "--goal", "sft").out
    assert "was memory_gib = 96 meant?" in printed


@pytest.mark.parametrize("line", ["memory_gib = 96", "memory_gib = 40", "nvlink_gb_s = 31.5", "host_gib = 512"])
def test_variants_that_exist_raise_nothing(line):
    assert not read(f'gpu = "H100"\n{line}').unlikely


def read(text: str) -> Cluster:
    return cluster(file(text))


@pytest.mark.parametrize("known", gpus(), ids=lambda one: one.name)
def test_shipped_gpus_raise_nothing(known):
    facts = [f"{name} = {getattr(known, name)}" for name in FIELDS]
    peaks = ", ".join(f"{precision} = {peak}" for precision, peak in known.peak_tflops.items())
    facts.append(f"peak_tflops = {{ {peaks} }}")
    assert not read("\n".join([f'gpu = "{known.name}"', *facts])).unlikely


@pytest.mark.parametrize("typed", [["--storage-gb-s", "20"], ["storage_gb_s=20"], ["cluster.storage_gb_s=20"]])
def test_keys_of_cluster_files_typed_in_a_command_name_the_file(meshwright, typed):
    command = ["recommend", "llama3-8b", "--goal", "sft", "--gpus"]
    error = meshwright(*command, "8xH100", *typed).err
    assert "storage_gb_s is a key of a cluster file; write storage_gb_s = 20 in a cluster file beside gpu" in error
    if typed[0].startswith("--"):
        assert "storage_gb_s = 20 in own.toml" in meshwright(*command, file('gpu = "H100"'), *typed).err
    assert meshwright(*command, file('gpu = "H100"\nstorage_gb_s = 20')).code == 0


def test_a_budget_names_where_the_speed_of_checkpoints_is_set(meshwright):
    typed = ("recommend", "llama3-8b", "--goal", "sft", "--gpus", "8xH100", "--tokens", "10B")
    assert "storage_gb_s in a cluster file sets the speed" in meshwright(*typed).out


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('gpus = "6x8xH200"', 'gpu = "H200", nodes = 6, gpus_per_node = 8'),
        ('gpus = "48xH200"', 'gpu = "H200", nodes = 6, gpus_per_node = 8'),
        ('cluster = "4xA100-40"', 'gpu = "A100-40", gpus_per_node = 4'),
        ('gpu = "8xH200"\nnodes = 6', 'gpu = "H200", gpus_per_node = 8'),
    ],
)
def test_a_cluster_in_a_file_as_it_is_typed_names_its_parts(line, parts):
    with pytest.raises(InputError, match=f"a file has its parts: {parts}$"):
        cluster(file(line))


def test_cluster_files_are_compared_by_size(meshwright):
    file('gpu = "A100-40"\nnodes = 24\ngpus_per_node = 4')
    Path("rented.toml").write_text('gpu = "B200"\n')
    error = meshwright("compare", "qwen3-14b", "own.toml", "rented.toml", "--goal", "pretrain", "--json").json["error"]
    assert "describes a cluster" in error["message"]
    assert error["fix"][0] == "meshwright size qwen3-14b --goal pretrain --gpu own.toml,rented.toml"


def test_an_option_for_the_network_is_a_line_of_a_cluster_file(meshwright):
    typed = ("recommend", "qwen3-30b-a3b", "--goal", "pretrain", "--gpus")
    line = 'network_gb_s_per_node = "25 Gb/s"'
    error = meshwright(*typed, "5x4xA100-40", "--network", "25GbE").err
    assert f'{line} in a cluster file beside gpu = "A100-40", nodes = 5 and gpus_per_node = 4' in error
    own = file(f'gpu = "A100-40"\nnodes = 5\ngpus_per_node = 4\n{line}')
    assert cluster(own).gpu.network_gb_s == pytest.approx(25 / 8 / 4)
    assert 'network_gb_s_per_node = "50 GB/s" in own.toml' in meshwright(*typed, own, "--ib", "50GB/s").err
    assert "host_gib = 512 in a cluster file" in meshwright(*typed, "8xH100", "--ram", "512").err
    assert "--sbatch network=hsn" in meshwright("launch", "x.sh", "--gpus", "8xH100", "--network", "hsn").err


def test_keys_in_a_section_name_the_line_to_remove():
    text = '[cluster]\ngpu = "H100"\nnodes = 2\n'
    with pytest.raises(InputError, match=r"remove the line \[cluster\]"):
        read(text)
    assert read(text.replace("[cluster]\n", "")).nodes == 2
