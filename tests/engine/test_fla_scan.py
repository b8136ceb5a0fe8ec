"""fla's kernels get the right arguments: with a plain `fla` in place of Triton they equal our own scans."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.engine import fake_fla, scans, test_delta_rule, test_sft_data_documents, test_state_space
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from torch import Tensor, nn

from meshwright import extras
from meshwright.engine import parallelize
from meshwright.engine.kernels import delta_rule, fla_scan, scan_choice, state_space
from meshwright.engine.kernels.gated_norms import fuse_gated_norms
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.model.build import build_model, transformers_config
from meshwright.engine.parallelize.document_isolation import isolate_documents, isolates_documents
from meshwright.engine.patching import patches
from meshwright.errors import InputError
from meshwright.recipes.types import Kernels

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2], [5] * 10 + [6]])
MODELS = ("nemotron_h", "qwen3_next", "qwen3_5")
differences = partial(scans.differences, floor=1e-6)


def by_document(scan: Any, tokens: int) -> Any:
    """Run a scan on each document alone; tensors without tokens are shared."""

    def isolated(*tensors: Tensor) -> Tensor:
        rows = []
        for row, ids in enumerate(DOCUMENTS):
            ends = [0, *(ids.diff().nonzero().flatten() + 1).tolist(), tokens]
            parts = []
            for first, last in pairwise(ends):
                parts.append(scan(*(t[row : row + 1, first:last] if t.dim() > 2 else t for t in tensors)))
            rows.append(torch.cat(parts, 1))
        return torch.cat(rows)

    return isolated


@pytest.mark.parametrize("packed", [False, True])
def test_fla_scans_equal_ours(packed: bool) -> None:
    documents, tokens = (DOCUMENTS if packed else None), DOCUMENTS.shape[1]
    delta = [one.detach().double().requires_grad_() for one in test_delta_rule.inputs(2, tokens, 2, 3, 4, 5)]
    space = [one.detach().double().requires_grad_() for one in test_state_space.inputs(2, tokens, 2, 3, 5, 4)]

    def rule(kernels: Any, *tensors: Tensor, **options: Any) -> Tensor:
        found: Tensor = kernels.gated_delta_rule(*tensors, norm=True, **options)
        return found

    def scan(kernels: Any, x: Tensor, dt: Tensor, a_log: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        settings = {"softplus": True, "limits": test_state_space.LIMITS, **options}
        found: Tensor = kernels.state_space_scan(x, dt, -a_log.exp(), *rest, **settings)
        return found

    for function, own, tensors, outcome in (
        (rule, delta_rule, delta, test_delta_rule.outcome),
        (scan, state_space, space, test_state_space.outcome),
    ):
        expected = outcome(by_document(partial(function, own), tokens) if packed else partial(function, own), tensors)
        with fake_fla.installed() as calls:
            found = outcome(partial(function, fla_scan, documents=documents), tensors)
        worst = differences(found, expected)
        assert max(worst.values()) < 1e-9, worst
        boundaries = [call["cu_seqlens"] for _, call in calls]
        assert len(boundaries) == 2  # once in each pass
        expected_ends = [0, 5, 7, 11, 21, 22] if packed else None
        assert [None if one is None else one.tolist() for one in boundaries] == [expected_ends] * 2
        if packed:
            assert boundaries[0] is boundaries[1]  # fla caches by identity


def mixers(family: str) -> tuple[nn.Module, nn.Module]:
    """Two equal tiny mixers, each inside a holder: for our kernels and for fla's."""
    config = transformers_config(FAMILIES[family])
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        model = build_model(config, torch.float32)
        mixer: Any = next(module for module in model.modules() if hasattr(module, "conv1d"))
        mixer.to_empty(device="cpu") if mixer.conv1d.weight.is_meta else None
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        mixer.conv1d.weight.requires_grad_(False)  # a frozen weight has no gradient
        made.append(nn.ModuleList([mixer.double()]))
    return made[0], made[1]


def through(holder: nn.Module, documents: Tensor | None) -> dict[str, Tensor]:
    """The output of a mixer and the gradients of its input and its trained weights."""
    mixer: Any = holder[0]  # type: ignore[index]  # a list of one module
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(2, DOCUMENTS.shape[1], mixer.hidden_size, generator=generator)
    hidden = hidden.to(mixer.out_proj.weight).requires_grad_()
    out = mixer(hidden, documents=documents) if documents is not None else mixer(hidden)
    weights = torch.randn(out.shape, generator=generator).to(out)
    named = {name: one for name, one in mixer.named_parameters() if one.requires_grad}
    grads = torch.autograd.grad((out * weights).sum(), (hidden, *named.values()))
    return dict(zip(("out", "hidden", *named), (out.detach(), *grads), strict=True))


@pytest.mark.parametrize("family", MODELS)
def test_mixers_run_fla_with_and_without_packed_documents(family: str) -> None:
    with fake_fla.installed() as calls:
        for documents in (None, DOCUMENTS):
            own, fla = mixers(family)
            assert (use_chunked_scans(own), use_chunked_scans(fla, "fla")) == (1, 1)
            if documents is not None:
                isolate_documents(own)
                isolate_documents(fla)
                assert patches(fla)["0"] == ("FlaScan", "DocBoundaries")
                assert isolates_documents(own)
                assert not isolates_documents(fla)  # shapes do not depend on the data: one compiled graph
            expected = through(own, documents)
            assert not calls
            worst = differences(through(fla, documents), expected)
            assert max(worst.values()) < 1e-6, worst  # transformers computes decays in fp32
            kinds = {kind for kind, _ in calls}
            assert kinds == {"convolution", "state space" if family == "nemotron_h" else "delta"}
            assert all((call["cu_seqlens"] is None) == (documents is None) for _, call in calls)
            calls.clear()


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_packed_documents_are_isolated_by_boundaries(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelize, "scan_kernel", lambda *_: "fla")  # before ranks are forked
    with fake_fla.installed():
        found = run(1, test_sft_data_documents.document_losses, family)[0]
    assert found["packed"] == found["others changed"]
    assert found["packed"] == pytest.approx(found["alone"], rel=1e-5)
    assert abs(found["in one document"] - found["in one document, others changed"]) > 1e-4


def test_a_compiled_mixer_with_fla_is_one_graph_and_recomputes() -> None:
    from torch.utils.checkpoint import checkpoint

    with fake_fla.installed() as calls:
        eager, compiled = mixers("nemotron_h")
        for holder in (eager, compiled):
            use_chunked_scans(holder, "fla")
            isolate_documents(holder)
        expected = through(eager, DOCUMENTS)
        mixer: Any = compiled[0]  # type: ignore[index]
        inner = mixer.forward
        mixer.forward = lambda *args, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)
        mixer.compile(fullgraph=True, backend="aot_eager")
        worst = differences(through(compiled, DOCUMENTS), expected)
    assert max(worst.values()) < 1e-9, worst
    assert len({id(call["cu_seqlens"]) for _, call in calls}) == 1  # the boundaries were copied to the host once


def test_where_fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(scan: Any, device_type: str, deterministic: bool = False) -> str:
        return scan_choice.scan_kernel(Kernels(scan=scan, deterministic=deterministic), device_type)

    def note(scan: Any, device_type: str) -> str:
        return scan_choice.missing_note(Kernels(scan=scan), device_type)

    monkeypatch.setattr(scan_choice, "AUTO_TRITON", False)
    monkeypatch.setattr(fla_scan, "AUTO_FLA", False)
    monkeypatch.setattr(fla_scan, "capability", lambda: (9, 0))
    monkeypatch.setattr(fla_scan, "_triton", lambda: (3, 7, 1))
    monkeypatch.setattr(extras, "_problem", lambda package: "")
    assert choose("auto", "cuda") == "torch"
    assert [choose("fla", "cuda"), choose("torch", "cuda"), choose("fla", "drygpu")] == ["fla", "torch", "torch"]
    with pytest.raises(InputError, match="need a CUDA GPU, and this run is on CPU") as refused:
        choose("fla", "cpu")
    assert (refused.value.field, refused.value.fix) == ("kernels.scan", ("kernels.scan=torch",))
    monkeypatch.setattr(fla_scan, "AUTO_FLA", True)
    assert [choose("auto", "cuda"), choose("auto", "cpu"), choose("auto", "drygpu")] == ["fla", "torch", "torch"]
    assert choose("auto", "cuda", deterministic=True) == "torch"
    assert note("auto", "cuda") == ""
    # Triton 3.6 comes with torch 2.11.
    monkeypatch.setattr(fla_scan, "_triton", lambda: (3, 6, 0))
    assert choose("auto", "cuda") == "torch"
    with pytest.raises(
        InputError, match=r"Triton 3\.6\.0 computes wrong gradients .* on Hopper GPUs; 3\.7\.1 is right"
    ):
        choose("fla", "cuda")
    monkeypatch.setattr(fla_scan, "capability", lambda: (8, 0))
    assert choose("auto", "cuda") == "fla"
    monkeypatch.setattr(extras, "_problem", lambda package: extras.MISSING)
    assert choose("auto", "cuda") == "torch"
    assert "slower than fla's: fla-core is not installed; run: " in note("auto", "cuda")
    assert note("auto", "cuda").endswith(extras.install_command("fla-core"))
    assert [note("torch", "cuda"), note("auto", "cpu")] == ["", ""]
    with pytest.raises(InputError, match="fla-core is not installed; run: "):
        choose("fla", "cuda")


def test_a_mixer_that_does_not_fit_keeps_our_scan() -> None:
    _, holder = mixers("qwen3_next")
    mixer: Any = holder[0]  # type: ignore[index]
    mixer.head_k_dim = 512
    with pytest.raises(InputError, match="Qwen3NextGatedDeltaNet cannot run fla's kernels: its state is 512 wide"):
        use_chunked_scans(holder, "fla", required=True)
    mixer.head_k_dim, mixer.activation = 128, "gelu"
    assert "its activation is gelu" in fla_scan.fits(mixer)
    assert use_chunked_scans(holder, "fla") == 1
    assert patches(holder)["0"] == ("ChunkedScan",)


def test_gated_norms_apply_beside_fla() -> None:
    _, holder = mixers("nemotron_h")
    assert use_chunked_scans(holder, "fla") == 1
    assert fuse_gated_norms(holder) == 1
