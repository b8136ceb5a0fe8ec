"""Patches show in names, tracebacks and lists, and leave classes, copies and compiled graphs as they were."""

from __future__ import annotations

import copy
import pickle
import tomllib
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshwright.engine import patching
from meshwright.engine.kernels.gated_norms import GATED_NORMS, fuse_gated_norms
from meshwright.engine.kernels.norms import fuse_norms
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.model.build import build_model, transformers_config
from meshwright.engine.parallelize.recompute import apply_recompute
from meshwright.engine.patching import Patch, apply, base_class, patches, symbol
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes import types


class Doubled(Patch):
    tag = "Doubled"

    def forward(self, x: torch.Tensor) -> Any:
        return 2 * super().forward(x)


class PlusOne(Patch):
    tag = "PlusOne"

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + 1


class Failing(Patch):
    tag = "Failing"

    def forward(self, x: torch.Tensor) -> Any:
        raise RuntimeError("on purpose")


def identity() -> nn.Linear:
    linear = nn.Linear(2, 2, bias=False)
    nn.init.eye_(linear.weight)
    return linear


def test_names_show_patches_in_the_order_they_were_applied() -> None:
    first, second = identity(), identity()
    for module, order in ((first, (Doubled, PlusOne)), (second, (PlusOne, Doubled))):
        for patch in order:
            apply(module, patch)
    assert repr(nn.Sequential(first, second)).splitlines()[1:3] == [
        "  (0): Linear[Doubled, PlusOne](in_features=2, out_features=2, bias=False)",
        "  (1): Linear[PlusOne, Doubled](in_features=2, out_features=2, bias=False)",
    ]
    x = torch.tensor([[1.0, 3.0]])
    assert first(x).tolist() == [[3.0, 7.0]]  # the last one applied runs first, around the others
    assert second(x).tolist() == [[4.0, 8.0]]


def test_a_patch_can_go_below_another() -> None:
    linear = identity()
    apply(linear, Doubled)
    apply(linear, PlusOne, under=Doubled)
    assert type(linear).__name__ == "Linear[PlusOne, Doubled]"
    assert linear(torch.zeros(1, 2)).tolist() == [[2.0, 2.0]]


def test_a_traceback_names_the_patch() -> None:
    linear = identity()
    apply(linear, Failing)
    try:
        linear(torch.zeros(1, 2))
    except RuntimeError:
        shown = traceback.format_exc()
    assert "in Failing.forward" in shown


def test_a_patched_module_stays_what_it_was() -> None:
    linear = identity()
    apply(linear, Doubled)
    assert isinstance(linear, nn.Linear)
    assert isinstance(linear, Doubled)
    assert base_class(linear) is nn.Linear
    assert type(linear).__module__ == nn.Linear.__module__
    assert list(linear.state_dict()) == ["weight"]


def test_the_same_patch_is_not_applied_twice() -> None:
    linear = identity()
    apply(linear, Doubled)
    with pytest.raises(ValueError, match=r"Linear\[Doubled\] already has the patch Doubled"):
        apply(linear, Doubled)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_keep_the_class(copied: Any) -> None:
    linear = identity()
    apply(linear, Doubled)
    other = copied(linear)
    assert type(other) is type(linear)
    assert other.weight is not linear.weight
    assert torch.equal(other.weight, linear.weight)
    assert other(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_all_layers_of_a_model_share_one_class_and_one_graph() -> None:
    torch._dynamo.reset()
    model: Any = build_model(transformers_config(FAMILIES["llama"]), torch.float32)
    fuse_norms(model)
    layers = dict(enumerate(model.model.layers))
    apply_recompute(layers, types.Layout(recompute="full"), compiled=True)
    assert {type(layer).__name__ for layer in layers.values()} == {"LlamaDecoderLayer[Recompute]"}
    assert len({type(layer) for layer in layers.values()}) == 1
    assert patches(model)["model.layers.1"] == ("Recompute",)
    assert patches(model)["model.layers.1.input_layernorm"] == ("FusedNorm",)
    assert "model.layers.1.mlp" not in patches(model)

    patched = nn.ModuleList([identity() for _ in range(3)])
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for linear in patched:
        apply(linear, Doubled)
        linear.compile(backend=count, fullgraph=True)
        linear(torch.ones(1, 2))
    assert graphs == 1


def sharded(rank: int, world: int) -> tuple[str, dict[str, tuple[str, ...]], bool]:
    model = nn.Sequential(identity())
    apply(model[0], Doubled)
    fully_shard(model[0], mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    out = model(torch.ones(1, 2))
    out.sum().backward()
    assert base_class(model[0]) is nn.Linear
    name = type(model[0]).__name__
    apply(model[0], PlusOne)  # also on top of FSDP's class
    return name, patches(model), bool(torch.equal(model(torch.ones(1, 2)), out + 1))


def test_fsdp_goes_on_top() -> None:
    name, found, right = run(1, sharded)[0]
    assert name == "FSDPLinear[Doubled]"
    assert found == {"0": ("Doubled", "PlusOne")}
    assert right


def test_a_missing_symbol_is_an_error_that_names_it_and_the_version() -> None:
    import transformers

    with pytest.raises(MeshwrightError) as caught:
        symbol("transformers.masking_utils", "ALL_MASKS")
    assert f"transformers {transformers.__version__} has no transformers.masking_utils.ALL_MASKS" in caught.value.reason
    assert patching.SUPPORTED["transformers"] in caught.value.reason
    assert caught.value.fix == ('pip install "transformers==5.17.*"',)
    with pytest.raises(MeshwrightError, match=r"has no transformers\.no_such_module\.anything"):
        symbol("transformers.no_such_module", "anything")


def test_a_missing_library_is_an_error_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(patching, "import_module", missing)
    with pytest.raises(InputError) as caught:
        symbol("diffusers", "FluxTransformer2DModel")
    assert caught.value.fix[0].endswith('pip install "meshwright[diffusion]"')


@pytest.mark.parametrize(
    ("change", "name"),
    [(use_chunked_scans, "torch_chunk_gated_delta_rule"), (fuse_gated_norms, "Qwen3NextRMSNormGated")],
)
def test_a_renamed_scan_or_norm_is_not_skipped_silently(
    change: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(transformers_config(FAMILIES["qwen3_next"]), torch.float32)
    monkeypatch.delattr(f"transformers.models.qwen3_next.modeling_qwen3_next.{name}")
    with pytest.raises(MeshwrightError, match=name):
        change(model)


def test_every_gated_norm_of_the_table_exists() -> None:
    for model_type, (name, _) in GATED_NORMS.items():
        assert issubclass(symbol(f"transformers.models.{model_type}.modeling_{model_type}", name), nn.Module)


def test_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    required = [line for group in project["optional-dependencies"].values() for line in group]
    for library, oldest in patching.SUPPORTED.items():
        assert f"{library}>={oldest}" in required
