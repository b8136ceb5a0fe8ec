"""Clusters are parsed in all usual forms; anything else is an InputError with a fix."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.clusters import Cluster, Gpu, cluster, default_nodes, gpu, gpus
from meshwright.errors import InputError


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name", "domain"),
    [
        ("8xH100", 1, 8, "H100", 8),
        ("64xH100", 8, 8, "H100", 8),
        ("4x8xH100", 4, 8, "H100", 8),
        ("8x4xH200", 8, 4, "H200", 4),
        ("1xH200", 1, 1, "H200", 1),
        ("72xGB200", 18, 4, "GB200", 72),
        ("2xGB200", 1, 2, "GB200", 2),
        ("256xVR200", 64, 4, "VR200", 72),
        ("16xA100-40", 2, 8, "A100-40", 8),
        ("8xH100-PCIe", 1, 8, "H100-PCIe", 2),
        ("8", 1, 8, "H100", 8),
        ("16", 2, 8, "H100", 8),
        ("4x8", 4, 8, "H100", 8),
        ("  8 x h100 ", 1, 8, "H100", 8),
        ("8×H100", 1, 8, "H100", 8),
        ("8X8XH100", 8, 8, "H100", 8),
        ("4 × 8 × H100 SXM", 4, 8, "H100", 8),
        ("8xNVIDIA H100 80GB HBM3", 1, 8, "H100", 8),
        ("8xRTX4090", 1, 8, "RTX4090", 8),
        ("8xMI300X", 1, 8, "MI300X", 8),
        ("H100x8", 1, 8, "H100", 8),
        ("RTX 4090 x 2", 1, 2, "RTX4090", 2),
        ("12xH200", 3, 4, "H200", 4),
        ("11xH100", 11, 1, "H100", 1),
        ("1x16xH100", 1, 16, "H100", 8),
        ("008xH100", 1, 8, "H100", 8),
        ("1000000xH100", 125_000, 8, "H100", 8),
    ],
)
def test_parsed_clusters(text: str, nodes: int, per_node: int, name: str, domain: int) -> None:
    read = cluster(text)
    assert (read.nodes, read.gpus_per_node, read.gpu.name, read.nvlink_domain) == (nodes, per_node, name, domain)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ("18xGB200 NVL72 | GB200 NVL72 x18 | GB200NVL72x18 | GB200-NVL72:18 | 18 NVL72 GB200", "324x4xGB200"),
        ("18 racks GB200 NVL72 | 18 racks of GB200 | 18 GB200 NVL72 racks | 18x DGX GB200", "324x4xGB200"),
        ("GB200 NVL72 | NVL72 GB200 | DGX-GB200 | 72xGB200-NVL72", "18x4xGB200"),
        ("24xDGX-H100 | 24 DGX H100 80GB | DGX H100 x 24 | 24 HGX-H100 nodes | 24 DGX H100 systems", "24x8xH100"),
        ("24 nodes H100 | 24 H100 nodes | 24 nodes x 8 GPUs | 192 H100 (24 nodes) | 24 nodes", "24x8xH100"),
        ("p5.48xlarge:24 | p5.48xlarge x 24 | 24xp5.48xlarge", "24x8xH100"),
        ("2x8xHGX-B200 | 2xDGX-B200 | 2xDGX B200", "2x8xB200"),
        ("DGX B200 | HGX-B200 | 8xHGX-B200", "8xB200"),
        ("8xDGX-B200 | 8 HGX-B200 nodes | 8x8xHGX-B200", "8x8xB200"),
    ],
)
def test_racks_systems_and_nodes_in_any_order(texts: str, expected: str) -> None:
    assert {text: str(cluster(text)) for text in texts.split(" | ")} == dict.fromkeys(texts.split(" | "), expected)


def test_systems_of_an_unknown_size_are_an_error() -> None:
    with pytest.raises(InputError, match="the number of GPUs of this system is not known"):
        cluster("DGX GH200")


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("", "the cluster is empty", "8xH100"),
        ("   ", "the cluster is empty", "8xH100"),
        ("0", "at least one", "8xH100"),
        ("0xH100", "at least one", "8xH100"),
        ("0x8xH100", "at least one", "8xH100"),
        ("8x0xH100", "at least one", "8xH100"),
        ("-8xH100", "-8 is not a positive integer", "8xH100"),
        ("-1", "-1 is not a positive integer", "8xH100"),
        ("7.5", "7.5 is not a positive integer", "8xH100"),
        ("7.5xH100", "7.5 is not a positive integer", "8xH100"),
        ("1e3xH100", "1e3 is not a positive integer", "8xH100"),
        ("1,024xH100", "1,024 is not a positive integer", "8xH100"),
        ("1000001xH100", "more than 1000000", None),
        ("1001x1000xH100", "more than 1000000", None),
        ("9" * 5000, "more than 1000000", None),
        ("8x" + "h100" * 10_000, "too long", "8xH100"),  # takes minutes unless its length is checked first
        ("a cluster", "not a cluster", "8xH100"),
        ("8xH100x2", "both counts come before the GPU", "2x8xH100"),
        ("2xA100x80", "unknown GPU a100x80", None),
        ("2x4x8xH100", "not a cluster", "8xH100"),
        ("8x", "not a cluster", "8xH100"),
        ("xH100", "not a cluster", "8xH100"),
        ("8xH10", "did you mean H100", "8xH100"),
        ("4x8xH10", "did you mean H100", "4x8xH100"),
        ("8xTPU", "TPUs are not among them", "8xH100"),
        ("８xH100", "not a cluster", "8xH100"),
    ],
)
def test_bad_input_names_field_value_and_fix(text: str, reason: str, fix: str | None) -> None:
    with pytest.raises(InputError) as caught:
        cluster(text)
    error = caught.value
    assert error.field == "gpus"
    assert error.value == text.strip()[:200]
    assert reason in error.reason
    assert fix is None or error.fix[0] == fix


catalogued = st.sampled_from(gpus())
clusters = st.builds(Cluster, catalogued, st.integers(1, 1000), st.integers(1, 1000))


@given(clusters)
def test_a_cluster_reads_back_from_its_own_text(written: Cluster) -> None:
    rack = written.gpu.nvlink_domain
    assume(written.gpus_per_node != rack or rack == written.gpu.gpus_per_node)  # a whole rack is read as its nodes
    assert cluster(str(written)) == written


@given(catalogued, st.integers(1, 1_000_000))
def test_a_count_becomes_equal_nodes_of_at_most_the_usual_size(known: Gpu, count: int) -> None:
    read = cluster(f"{count}x{known.name}")
    assert read.world == count
    assert read.gpus_per_node <= read.gpu.gpus_per_node
    if count % read.gpu.gpus_per_node == 0:
        assert read.gpus_per_node == read.gpu.gpus_per_node


def test_default_nodes() -> None:
    assert default_nodes(12, gpu("H200")) == (3, 4)  # also right for nodes of 8 and 4


@given(st.text() | st.from_regex(r"\A[-+0-9.x× ]{0,8}[A-Za-z0-9 x-]{0,8}\Z"))
def test_nothing_but_an_input_error_escapes(text: str) -> None:
    with suppress(InputError):
        assert cluster(text).world >= 1
