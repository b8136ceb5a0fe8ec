"""The catalogue has plausible, sourced values and finds GPUs by any usual name."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.each import each

from meshwright.clusters import Gpu, gpu, gpus
from meshwright.clusters.catalogue import normalize_name
from meshwright.clusters.tables import PRECISIONS
from meshwright.errors import InputError

DATA_CENTRE = ("A100-40", "A100-80", "H100", "H100-96", "H100-PCIe", "H100-NVL", "H200", "H800", "H20", "B200", "B300")
RACKS_AND_OTHERS = ("GB200", "GB300", "R100", "VR200", "L40S", "RTX4090", "RTX5090", "GH200", "H200-NVL")
AMD = ("MI300X", "MI325X", "MI350X", "MI355X")

every_gpu = each("known", gpus())


@pytest.mark.parametrize("name", DATA_CENTRE + RACKS_AND_OTHERS + AMD)
def test_known_types_are_there(name: str) -> None:
    assert gpu(name).name == name


@every_gpu
def test_every_entry_names_its_source(known: Gpu) -> None:
    assert len(known.source) > 20


@every_gpu
def test_values_are_plausible(known: Gpu) -> None:
    assert 9 < known.memory_gib < 300
    assert 250 < known.hbm_gb_s < 25_000
    assert known.network_gb_s < known.nvlink_gb_s < known.hbm_gb_s
    assert known.gpus_per_node in (1, 4, 8)
    assert known.nvlink_domain in (1, 2, 4, 8, 72)


@every_gpu
def test_peaks_are_dense_and_ordered(known: Gpu) -> None:
    peaks = [known.peak_tflops[p] for p in PRECISIONS if p in known.peak_tflops]
    assert peaks == sorted(peaks)
    if known.arch in ("volta", "turing"):
        assert known.peak_tflops.keys() == {"fp32", "fp16"}  # bf16 and tf32 came with Ampere
        return
    assert {"fp32", "tf32", "bf16"} <= known.peak_tflops.keys()
    if known.arch == "cdna4":  # has no TF32 unit
        assert known.peak_tflops["tf32"] == known.peak_tflops["fp32"]
        return
    assert known.peak_tflops["tf32"] == pytest.approx(known.peak_tflops["bf16"] / 2, rel=0.02)


@every_gpu
def test_fp8_doubles_bf16(known: Gpu) -> None:
    if "fp8" in known.peak_tflops and known.arch != "rubin":  # Rubin's fp8 path is wider than twice its bf16 path
        assert known.peak_tflops["fp8"] == pytest.approx(2 * known.peak_tflops["bf16"], rel=0.03)


@every_gpu
def test_precisions_follow_the_architecture(known: Gpu) -> None:
    assert ("fp8" in known.peak_tflops) == (known.arch not in ("volta", "turing", "ampere"))
    assert ("fp4" in known.peak_tflops) == (known.arch in ("blackwell", "rubin"))


@every_gpu
def test_announced_values_have_a_note(known: Gpu) -> None:
    assert ("Announced" in known.note) == (known.arch == "rubin")


@every_gpu
def test_pcie_domain_is_the_node(known: Gpu) -> None:
    if known.link == "pcie":
        assert known.nvlink_domain == known.gpus_per_node


def test_no_name_matches_two_gpus() -> None:
    owners: dict[str, set[str]] = {}
    for known in gpus():
        for written in (known.name, *known.aliases):
            owners.setdefault(normalize_name(written), set()).add(known.name)
    assert {key: names for key, names in owners.items() if len(names) > 1} == {}


@every_gpu
def test_every_alias_is_found(known: Gpu) -> None:
    assert {gpu(alias).name for alias in (known.name, *known.aliases)} == {known.name}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100"),
        ("H100-SXM", "H100"),
        ("h100_80gb", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("H100-96GB-HBM2e-500W", "H100-96"),
        ("a100", "A100-80"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("A100-SXM4-40GB", "A100-40"),
        ("A800-80", "A800"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("gb300-nvl72", "GB300"),
        ("rubin", "R100"),
        ("vera rubin", "VR200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("rtx 5090", "RTX5090"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070-Ti-Super"),
        ("rtx 3090 24GB", "RTX3090"),
    ],
)
def test_usual_names(written: str, name: str) -> None:
    assert gpu(written).name == name


@pytest.mark.parametrize(
    ("typo", "meant"), [("H10", "H100"), ("GB20", "GB200"), ("MI300Y", "MI300X"), ("GH20", "GH200")]
)
def test_typos_suggest_the_nearest_name(typo: str, meant: str) -> None:
    with pytest.raises(InputError, match="did you mean") as caught:
        gpu(typo)
    assert caught.value.fix[0] == meant


@pytest.mark.parametrize("written", ["RTX 6000", "Quadro RTX 6000"])
def test_rtx_6000_alone_is_refused(written: str) -> None:
    """A Turing card with 24 GB, an Ada card with 48 and a Blackwell card with 96 share the name."""
    with pytest.raises(InputError, match="unknown GPU"):
        gpu(written)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("A100-64", ("A100-80", 64)), ("NVIDIA A100-SXM-64GB", ("A100-80", 64)), ("RTX4090-48", ("RTX4090", 48))],
)
def test_a_variant_is_described_by_what_differs(name: str, variant: tuple[str, int]) -> None:
    with pytest.raises(InputError) as caught:
        gpu(name)
    assert caught.value.reason.endswith(
        'a cluster file names what differs: gpu = "{}" and memory_gib = {}'.format(*variant)
    )


def test_a_memory_that_the_catalogue_has_is_no_variant() -> None:
    with pytest.raises(InputError) as caught:
        gpu("A100x80")
    assert "variant" not in caught.value.reason


def test_nonsense_lists_known_names() -> None:
    with pytest.raises(InputError, match="known: A10, A100-40"):
        gpu("§§§")


def test_a_gpu_can_be_hashed() -> None:
    assert len({hash(known) for known in gpus()}) == len(gpus())


def test_the_package_imports_nothing_heavy() -> None:
    code = "import sys, meshwright.clusters as c; c.cluster('8xH100'); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
