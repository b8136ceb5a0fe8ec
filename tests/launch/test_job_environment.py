"""Environment variables of engines: set exactly when the frameworks require them."""

from __future__ import annotations

import pytest

from meshwright import recipe
from meshwright.clusters import cluster
from meshwright.launch.environment import TABLE, advised, threads
from meshwright.recipes.overrides import apply

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def required(gpus: str, *overrides: str, engine: str = "megatron") -> dict[str, str | None]:
    base = recipe("qwen3_30b_a3b_pretrain_config", ["layout.tp=1", "layout.cp=1", "layout.sp=false"])
    changed = apply(base, list(overrides))
    return {one.name: one.value for one in advised(changed, cluster(gpus), engine)}


@pytest.mark.parametrize(
    ("gpus", "overrides", "value"),
    [
        ("8xH100", ("layout.tp=2", "layout.strategy=zero1"), "1"),
        ("8xA100-80", ("layout.cp=2", "layout.strategy=zero1"), "1"),
        ("8xH100", ("layout.strategy=zero1",), "absent"),
        ("8xB200", ("layout.tp=2", "layout.strategy=zero1"), "absent"),
        ("8xH100", ("layout.tp=2", "layout.strategy=zero1", "moe.ep_overlap=true"), "absent"),
        ("8xH100", ("layout.tp=2", "layout.strategy=megatron_fsdp"), None),
        ("8xH100", ("layout.tp=2", "layout.strategy=fsdp2"), None),
    ],
)
def test_one_queue_when_megatron_requires_it(gpus: str, overrides: tuple[str, ...], value: str | None) -> None:
    assert required(gpus, *overrides).get(CONNECTIONS, "absent") == value


def test_graphs_of_transformer_engine() -> None:
    assert required("8xH100", "kernels.cuda_graphs=transformer_engine")["NCCL_GRAPH_REGISTER"] == "0"
    assert "NCCL_GRAPH_REGISTER" not in required("8xH100", "kernels.cuda_graphs=none")


def test_our_own_engine_requires_nothing() -> None:
    assert required("8xH100", "layout.tp=2", engine="meshwright") == {}


def test_every_variable_has_a_reason() -> None:
    assert all(one.why and "\n" not in one.why for one in TABLE)
    assert threads(4).value == "4"
