"""Adapters equal the peft library's, train the same in every layout, and are all that is trained."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from tests.engine import expert_cases, parity
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.engine.data.mock import Mock
from meshwright.engine.experts.expert_params import add_expert_adapter, first_proj
from meshwright.engine.kernels import dropout_keys
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model import adapters
from meshwright.engine.model.build import build_model, transformers_config
from meshwright.engine.model.init import InitSpec
from meshwright.engine.model.stage import Stage
from meshwright.engine.trainer import Trainer
from meshwright.engine.vision.vision_modules import VISION_MODULES
from meshwright.errors import InputError
from meshwright.recipes import adapter_targets, types

EVERYTHING = ("qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out")
NO_EXPERTS = ("qkv", "proj", "mamba_in", "mamba_out")
PEFT = types.Peft(rank=4, alpha=8.0, targets=EVERYTHING)
TP_SP = {"tp": 2, "sp": True}
STEPS = 2


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start B away from zero, so that A has a gradient from the first step on."""
    monkeypatch.setattr(adapters, "INIT_B", InitSpec("uniform", -0.3, 0.3))


def recipe(layout: dict[str, Any] | None = None, peft: types.Peft = PEFT, **sections: Any) -> types.Recipe:
    given = parity.recipe(types.Layout(**{"micro_batch_size": parity.MICRO_BATCH, **(layout or {})}), **sections)
    return msgspec.structs.replace(given, goal="peft", peft=peft)


def trainer_of(family: str, given: types.Recipe) -> Trainer:
    config = transformers_config(FAMILIES[family])
    source = Mock(config.vocab_size, given.data.seq_length, given.train.seed)
    return Trainer(given, config, build_mesh(given.layout, "cpu"), torch.device("cpu"), source)


# Equality with the peft library


def joined(tensors: dict[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    """Return tensors under transformers' names and shapes; segments of a split one are concatenated."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = name if name in names else re.sub(r"_\d+$", "", name)
        found[whole] = torch.cat([found[whole], tensor]) if whole in found else tensor
    return found


def like_peft(rank: int, world: int, family: str, given: types.Peft) -> float:
    """Return the largest difference of loss and gradients from transformers with the peft library's adapters."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners import tuners_utils

    # The library rejects output projections of state-space layers because fused kernels would skip the adapter; there
    # are none here.
    tuners_utils._check_lora_target_modules_mamba = lambda *_: None
    trainer = trainer_of(family, recipe(peft=given))
    stage = trainer.stages[0]
    batch = trainer.loader.batch(0)
    loss = trainer.forward_backward(batch).sum()

    config = transformers_config(FAMILIES[family])
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    paths = [name for name, module in stage.named_modules() if hasattr(module, "lora_scale")]
    settings = LoraConfig(
        r=given.rank,
        lora_alpha=given.alpha,
        target_modules=paths,
        use_rslora=given.method == "rslora",
        use_dora=given.method == "dora",
    )
    names = {name for name, _ in model.named_parameters()}
    names |= {f"{path}.{part}" for path in paths for part in ("lora_A", "lora_B", "lora_magnitude")}
    wrapped: Any = get_peft_model(model, settings)
    theirs = {own_name(name): p for name, p in wrapped.named_parameters()}
    ours = joined({name: p.detach() for name, p in stage.named_parameters()}, names)
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name].view(parameter.shape))

    logits = wrapped(batch.tokens, use_cache=False).logits
    each = functional.cross_entropy(logits.flatten(0, 1), batch.model_kwargs["labels"].flatten(), reduction="none")
    expected = (each * batch.model_kwargs["weights"].flatten()).sum()
    expected.backward()
    gradients = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    gradients = joined(gradients, names)
    assert set(gradients) == {name for name, p in theirs.items() if p.grad is not None}
    assert all(float(gradient.abs().max()) > 1e-6 for gradient in gradients.values())
    worst = float((loss - expected).abs() / expected)
    return max(worst, *(expert_cases.differ(gradients[n], theirs[n].grad) for n in gradients))


def own_name(name: str) -> str:
    """Return our name of a parameter of the peft library."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return re.sub(r"\.lora_(A|B|magnitude)(_vector)?\.default\.weight$", r".lora_\1", name)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", PEFT),
        ("llama", types.Peft(method="rslora", rank=4, alpha=4.0, targets=("qkv", "fc2"))),
        ("llama", types.Peft(method="dora", rank=4, alpha=8.0)),
        ("qwen2", types.Peft(method="dora", rank=4, alpha=8.0)),
        ("qwen3_moe", types.Peft(rank=4, alpha=8.0, targets=("qkv", "proj"))),
        ("nemotron_h", types.Peft(rank=4, alpha=8.0, targets=NO_EXPERTS)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.method}-{'+'.join(value.targets)}",
)
def test_one_process_equals_the_peft_library(family: str, given: types.Peft) -> None:
    pytest.importorskip("peft")
    assert run(1, like_peft, family, given)[0] < 2e-5


def experts_like_merged(rank: int, world: int, family: str) -> float:
    """Return the largest difference of output and gradients from experts with weights W + s·B·A."""
    block, x = expert_cases.ours(family), expert_cases.inputs()[0]
    own, scale = block.experts.requires_grad_(False), 0.7
    merged: dict[str, torch.Tensor] = {}
    for name in (first_proj(own), "down_proj"):
        add_expert_adapter(own, name, 4, scale, torch.float32)
        a, b = (nn.init.normal_(getattr(own, f"{name}_lora_{part}"), std=0.3) for part in "AB")
        product = torch.einsum("e...r,eri->e...i", b, a)
        if own.is_transposed:
            product = product.movedim(-1, 1)
        merged[f"experts.{name}"] = getattr(own, name) + scale * product
    trained = {name: p for name, p in own.named_parameters() if "lora" in name}
    outs = [expert_cases.forward(block, x)]
    for name in trained:  # the second run has the adapters merged into its weights
        delattr(own, name)
    out = torch.func.functional_call(block, merged, (x,))
    outs.append(out[0] if isinstance(out, tuple) else out)
    found, wanted = (torch.autograd.grad(out.square().sum(), list(trained.values()), retain_graph=True) for out in outs)
    worst = max(expert_cases.differ(one, other) for one, other in zip(found, wanted, strict=True))
    return max(worst, expert_cases.differ(outs[0], outs[1]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_adapted_experts_equal_merged_experts(family: str) -> None:
    assert run(1, experts_like_merged, family)[0] < 1e-5


# Parity of layouts

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "hsdp": (4, {"dp_replicate": 2, "micro_batch_size": 1}),
    "tp": (2, {"tp": 2}),
    "tp-sp": (2, TP_SP),
    "tp4-copied-kv": (4, {"tp": 4, "sp": True}),
    "pp": (2, {"pp": 2}),
    "zbv": (2, {"pp": 2, "vp": 2, "pp_schedule": "zbv"}),
    "cp": (2, {"cp": 2}),
    "ep": (2, {"ep": 2}),
    "etp": (2, {"etp": 2}),
    "ep-tp-sp": (2, {**TP_SP, "ep": 2}),
    "recompute": (2, {**TP_SP, "recompute": "full"}),
}
DENSE = ("fsdp", "tp-sp", "pp", "cp")
SPARSE = (*DENSE, "ep", "etp")
TRIED = {
    "llama": (*DENSE, "hsdp", "tp", "tp4-copied-kv", "zbv", "recompute"),
    "gpt2": DENSE,
    "qwen3_moe": (*SPARSE, "zbv"),
    "deepseek_v3": (*SPARSE, "ep-tp-sp"),
    "nemotron_h": SPARSE,
    "gpt_oss": ("ep", "etp"),
    "qwen3_next": ("tp-sp", "cp"),
    "qwen3_5": ("tp-sp", "cp"),
}
QUICK = {("deepseek_v3", "ep-tp-sp"), ("nemotron_h", "cp")}  # sharded adapters of experts are in test_qlora.py


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if (family, name) in QUICK else [pytest.mark.slow])
        for family, names in TRIED.items()
        for name in names
    ],
)
def test_adapters_train_the_same_in_every_layout(family: str, name: str) -> None:
    world, layout = LAYOUTS[name]
    found = parity.differences(family, world, recipe(layout), STEPS)
    assert max(found.values()) <= parity.TOLERANCE, found


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "tp-sp"),
        pytest.param("nemotron_h", "cp", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp-sp", marks=pytest.mark.slow),
        pytest.param("llama", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_dora_trains_the_same_in_every_layout(family: str, name: str) -> None:
    targets = NO_EXPERTS if family == "nemotron_h" else EVERYTHING
    peft = msgspec.structs.replace(PEFT, method="dora", targets=targets)
    world, layout = LAYOUTS[name]
    found = parity.differences(family, world, recipe(layout, peft), STEPS)
    assert max(found.values()) <= parity.TOLERANCE, found


DROPOUT = msgspec.structs.replace(PEFT, dropout=0.3, targets=("qkv", "proj", "fc1", "fc2"))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "tp-sp"),
        ("llama", "pp"),
        pytest.param("llama", "cp", marks=pytest.mark.slow),
        pytest.param("gpt2", "hsdp", marks=pytest.mark.slow),
        pytest.param("llama", "recompute", marks=pytest.mark.slow),
        pytest.param("llama", "zbv", marks=pytest.mark.slow),
        pytest.param("llama", "tp4-copied-kv", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp-sp", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "ep-tp-sp", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_the_same_in_every_layout(family: str, name: str) -> None:
    targets = ("qkv", "proj") if family == "deepseek_v3" else DROPOUT.targets
    world, layout = LAYOUTS[name]
    given = recipe(layout, msgspec.structs.replace(DROPOUT, targets=targets))
    found = parity.differences(family, world, given, STEPS)
    assert max(found.values()) <= parity.TOLERANCE, found


def dropout_statistics(rank: int, world: int) -> dict[str, Any]:
    """Return the fractions that dropout keeps, and what the mask depends on."""
    keys = dropout_keys.token_keys(7, [5, 6, 2**40], torch.arange(50))
    x = torch.ones(3, 50, 400)
    out = dropout_keys.apply_dropout(x, keys, 11, 0, 0.25)
    others = {
        "adapter": dropout_keys.apply_dropout(x, keys, 12, 0, 0.25),
        "layer": dropout_keys.apply_dropout(x, dropout_keys.layer_keys(keys, 3), 11, 0, 0.25),
        "seed": dropout_keys.apply_dropout(x, dropout_keys.token_keys(8, [5, 6, 2**40], torch.arange(50)), 11, 0, 0.25),
        "token": out.roll(1, 1),
        "sample": out.roll(1, 0),
        "channel": out.roll(1, 2),
    }
    return {
        "mean": float(out.mean()),
        "kept": float((out > 0).float().mean()),
        "by_token": float((out > 0).float().mean(2).std()),
        "part": torch.equal(dropout_keys.apply_dropout(x[..., 100:], keys, 11, 100, 0.25), out[..., 100:]),
        "alike": {name: float(((one > 0) == (out > 0)).float().mean()) for name, one in others.items()},
    }


def test_dropout_keeps_the_mean_and_depends_on_everything() -> None:
    found = run(1, dropout_statistics)[0]
    assert found["mean"] == pytest.approx(1.0, abs=0.01)
    assert found["kept"] == pytest.approx(0.75, abs=0.01)
    assert found["by_token"] == pytest.approx((0.75 * 0.25 / 400) ** 0.5, rel=0.3)  # like independent draws
    assert found["part"]
    independent = 0.75**2 + 0.25**2
    assert found["alike"] == {name: pytest.approx(independent, abs=0.01) for name in found["alike"]}


def dropout_and_none(rank: int, world: int) -> list[float]:
    """Return training losses with and without dropout, and the same in evaluation."""
    noisy, plain = (trainer_of("llama", recipe(peft=peft)) for peft in (DROPOUT, PEFT))
    batch = plain.loader.batch(0)
    trained = [float(one.forward_backward(batch).sum()) for one in (noisy, plain)]
    return [*trained, *(one.evaluate(one.loader.source, 1) for one in (noisy, plain))]


@pytest.mark.usefixtures("wide")
def test_dropout_is_for_training_only() -> None:
    noisy, plain, *evaluated = run(1, dropout_and_none)[0]
    assert noisy != pytest.approx(plain, rel=1e-4)
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


# Frozen weights


def steps(rank: int, world: int, family: str, given: types.Recipe, count: int = STEPS) -> dict[str, Any]:
    """Return which parameters changed in some steps, and which have optimizer state."""
    trainer = trainer_of(family, given)
    stage = trainer.stages[0]
    before = {name: local(p).clone() for name, p in stage.named_parameters()}
    for number in range(count):
        trainer.step(number)
    names = {id(p): name for name, p in stage.named_parameters()}
    return {
        "changed": {n for n, p in stage.named_parameters() if not torch.equal(local(p), before[n])},
        "state": {names[id(p)] for p in trainer.optimizer.state},
        "formats": {n: str(p.dtype) for n, p in stage.named_parameters()},
        "biases": [float(b.abs().sum()) for n, b in stage.named_buffers() if n.endswith("_bias")],
    }


def local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


@pytest.mark.parametrize(("family", "world", "layout"), [("deepseek_v3", 2, {"ep": 2}), ("qwen3", 1, {})])
def test_only_adapters_change_and_have_state(family: str, world: int, layout: dict[str, Any]) -> None:
    sections = {
        "optimizer": types.Optimizer(lr=1e-2, weight_decay=0.1),
        "moe": types.Moe(balancing="bias", aux_loss=0.01, router_z_loss=0.01),
    }
    for found in run(world, steps, family, recipe(layout, **sections)):
        trained = {name for name in found["formats"] if "lora_" in name}
        assert trained
        assert found["changed"] == found["state"] == trained
        assert not any(found["biases"])  # a frozen router is not balanced either


def state_bytes(rank: int, world: int, given: types.Recipe) -> tuple[int, int, set[str]]:
    """Return the optimizer's bytes, the number of trained values, and frozen parameters with a gradient."""
    trainer = trainer_of("llama", given)
    trained = [p for p in trainer.stages[0].parameters() if p.requires_grad]
    trainer.forward_backward(trainer.loader.batch(0))
    frozen = {n for n, p in trainer.stages[0].named_parameters() if not p.requires_grad and p.grad is not None}
    trainer.step(0)
    kept = [t for state in trainer.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]
    return sum(t.nbytes for t in kept), sum(p.numel() for p in trained), frozen


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_frozen_weights_have_no_gradient_and_no_optimizer_state(method: Any) -> None:
    peft = msgspec.structs.replace(PEFT, method=method)
    state, trained, frozen = run(1, state_bytes, recipe(peft=peft, optimizer=types.Optimizer(lr=1e-2)))[0]
    assert state == 2 * 4 * trained  # two moments in fp32
    assert not frozen


@pytest.mark.usefixtures("wide")
def test_frozen_weights_are_stored_in_the_compute_dtype() -> None:
    given = recipe(
        peft=msgspec.structs.replace(PEFT, rank=8),  # needed by the bf16 grouped GEMM
        precision=types.Precision(compute="bf16", master="fp32"),
        data=types.Data(seq_length=8),  # bf16 is slow on CPUs
        train=types.Train(global_batch_size=parity.MICRO_BATCH, steps=100),
    )
    found = run(1, steps, "qwen3_moe", given, 1)[0]
    assert found["changed"] == {name for name in found["formats"] if "lora_" in name}
    for name, kind in found["formats"].items():
        assert kind == ("torch.float32" if "lora_" in name else "torch.bfloat16")


def first_loss(rank: int, world: int, given: types.Recipe) -> float:
    return trainer_of("qwen3_moe", given).step(0).loss


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapted_model_starts_as_the_model_itself(method: Any) -> None:
    given = recipe(peft=types.Peft(method=method, rank=4, targets=("qkv", "proj")))
    whole = msgspec.structs.replace(given, goal="pretrain")
    losses = [run(1, first_loss, one)[0] for one in (given, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# Targets, and errors


def stage_of(family: str) -> Stage:
    config = transformers_config(FAMILIES[family])
    model = build_model(config, torch.float32)
    return Stage(model, range(config.num_hidden_layers), first=True, last=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_layers_for_every_target(family: str) -> None:
    mixers = {"mamba_in", "mamba_out"} if family == "nemotron_h" else set()
    for target in {"qkv", "proj", "fc1", "fc2"} | mixers:
        starts = adapters.add_adapters(stage_of(family), types.Peft(targets=(target,)), torch.float32)
        assert {name[-1] for name in starts} == {"A", "B"}


def test_vision_encoders_are_not_adapted() -> None:
    stage = stage_of("llama")
    first = {"encoder": "model.layers.0", "blocks": "model.layers.0.mlp", "projector": ()}  # as if it were an encoder
    stage.vision_modules = replace(VISION_MODULES["gemma3"], **first)
    starts = adapters.add_adapters(stage, PEFT, torch.float32)
    assert {name.split(".")[2] for name in starts} == {"1", "2", "3"}
    assert not hasattr(stage.get_submodule("model.layers.0.self_attn.q_proj"), "lora_A")


def test_targets_of_a_few_paths() -> None:
    found = {path: adapter_targets.group_of(path) for path in EXPECTED}
    assert found == EXPECTED


EXPECTED = {
    "transformer.h.0.attn.c_attn": "qkv",
    "transformer.h.0.attn.c_proj": "proj",
    "transformer.h.0.mlp.c_proj": "fc2",
    "model.layers.0.self_attn.kv_b_proj": "qkv",
    "model.layers.0.self_attn.kv_a_proj_with_mqa": "",
    "model.layers.0.mlp.shared_experts.up_proj": "fc1",
    "model.layers.0.mlp.gate": "",
    "model.layers.0.linear_attn.out_proj": "proj",
    "model.layers.0.mixer.out_proj": "mamba_out",
    "lm_head": "",
}


@pytest.mark.parametrize(
    ("family", "peft", "field"),
    [
        ("llama", types.Peft(method="dora", dropout=0.1), "peft.dropout"),
        ("qwen3_moe", types.Peft(dropout=0.1), "peft.dropout"),
        ("nemotron_h", types.Peft(dropout=0.1, targets=("mamba_in",)), "peft.dropout"),
        ("qwen3_moe", types.Peft(method="dora"), "peft.method"),
        ("llama", types.Peft(targets=("mamba_in",)), "peft.targets"),
    ],
)
def test_unsupported_settings_are_errors(family: str, peft: types.Peft, field: str) -> None:
    with pytest.raises(InputError) as refused:
        adapters.add_adapters(stage_of(family), peft, torch.float32)
    assert refused.value.field == field


class Mixer(nn.Module):
    """A state-space mixer whose fused kernel reads the weight of its output projection in training."""

    def __init__(self) -> None:
        super().__init__()
        self.out_proj = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.out_proj.weight) if self.training else self.out_proj(x)


def skips_adapter(rank: int, world: int) -> bool:
    mixer = Mixer()
    adapters._adapt(mixer.out_proj, PEFT, torch.float32)
    adapters._disable_fused_mixer(mixer)
    mixer.train()
    mixer(torch.ones(1, 4)).sum().backward()
    return mixer.out_proj.lora_A.grad is None  # type: ignore[union-attr]


def test_no_fused_kernel_skips_an_adapter() -> None:
    assert not run(1, skips_adapter)[0]
