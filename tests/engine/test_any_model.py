"""Model types without layers of our own train through transformers' own forward pass.

The sweep over all types is benchmarks/engine_types.py; these are of different kinds: parallel residuals, ALiBi-capable
attention without transformers' interface, scaled logits with windows, per-type rotary tables, state space, chunked
attention with experts.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.ranks import run
from torch import nn

from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.behaviour import behaviour_of, block_order_of, with_isolated_documents
from meshwright.engine.model.build import build_model, runs_own_layers, transformers_config
from meshwright.engine.model.config import distinct_layer_types, tiny
from meshwright.engine.model.transformers_stage import LogitTransform, find_logit_transform
from meshwright.engine.trainer import Trainer
from meshwright.errors import InputError
from meshwright.json_text import decode_float
from meshwright.recipes import types

TOKENS, SAMPLES = 32, 2
KINDS = ("gpt_neox", "falcon", "cohere2", "olmo3", "mamba2", "llama4_text")
QUICK = ("gpt_neox", "mamba2")  # a block of attention and one of another kind


def small(kind: str, layers: int = 2, **changes: Any) -> Any:
    """Return --tiny of a type's default config."""
    default = transformers.AutoConfig.for_model(kind).get_text_config()
    values = json.loads(default.to_json_string(use_diff=True), object_hook=decode_float)
    config = transformers_config({**values, "model_type": default.model_type, **changes})
    return tiny(config, max(layers, distinct_layer_types(config)))


def recipe(**changes: Any) -> types.Recipe:
    sections: dict[str, Any] = {
        "layout": types.Layout(),
        "precision": types.Precision(compute="fp32"),
        "optimizer": types.Optimizer(name="sgd", lr=0.05, beta1=0.0, weight_decay=0.0),
        "schedule": types.Schedule(name="constant", warmup_steps=0, min_lr=0.0),
        "train": types.Train(global_batch_size=SAMPLES, steps=4),
        "data": types.Data(seq_length=TOKENS),
        "moe": types.Moe(aux_loss=0.0),
    }
    sections["goal"] = "pretrain"
    return types.Recipe(name="any", model="llama3_8b", cluster="1xH100", **{**sections, **changes})


def train(config: Any, given: types.Recipe, folder: str, steps: int = 2) -> list[tuple[float, float]]:
    """Return loss and gradient norm of some steps."""
    source = Mock(config.vocab_size, TOKENS, 0)
    mesh = build_mesh(given.layout, "cpu")
    trainer = Trainer(given, config, mesh, torch.device("cpu"), source, Path(folder))
    done = [trainer.step(i) for i in range(steps)]
    trainer.close()
    return [(one.loss, one.grad_norm) for one in done]


def plain_loop(config: Any, folder: str, steps: int = 2) -> list[tuple[float, float]]:
    """Save a random model and return what a plain loop over it gets."""
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    found = []
    for step in range(steps):
        samples = Mock(config.vocab_size, TOKENS, 0).samples([SAMPLES * step + i for i in range(SAMPLES)])
        tokens = torch.from_numpy(samples.tokens).long()
        logits = model(input_ids=tokens[:, :TOKENS], use_cache=False).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 : TOKENS + 1].flatten())
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((float(loss), float(torch.sqrt(torch.stack([(g**2).sum() for g in gradients]).sum()))))
        factor = min(1.0, 1.0 / found[-1][1])  # the recipe clips
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * factor * parameter.grad
        model.zero_grad()
    return found


def _compare_all(rank: int, world: int, folder: str, kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {kind: _compare(rank, kind, f"{folder}/{kind}") for kind in kinds}


def _compare(rank: int, kind: str, folder: str) -> dict[str, Any]:
    config = small(kind)
    found: dict[str, Any] = {}
    if rank == 0:
        found["plain"] = plain_loop(config, folder)
    torch.distributed.barrier()
    recompute = types.Layout(recompute="full")
    found["ours"] = train(config, recipe(), folder)
    found["recompute"] = train(config, recipe(layout=recompute), folder)
    if rank == 0:
        found["own"] = runs_own_layers(config)
    return found


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(KINDS, marks=pytest.mark.slow)])
def test_two_ranks_equal_a_plain_loop_over_the_model(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """FSDP2 on two ranks, with and without recompute: losses and gradient norms of two steps."""
    found = run(2, _compare_all, str(tmp_path), kinds)[0]
    for kind, ours in itertools.product(kinds, ("ours", "recompute")):
        assert not found[kind]["own"]
        for (loss, norm), (expected, expected_norm) in zip(found[kind][ours], found[kind]["plain"], strict=True):
            assert loss == pytest.approx(expected, rel=2e-5), kind
            assert norm == pytest.approx(expected_norm, rel=2e-4), kind


UNTIED = {"tie_word_embeddings": False}
STAGED = ("gpt_neox", "mamba2", "cohere2", "olmo3", "llama4_text", "bloom")


def _staged(rank: int, world: int, folder: str, kinds: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        config, place = small(kind, **UNTIED), f"{folder}/{kind}"
        plain = plain_loop(config, place) if rank == 0 else []
        torch.distributed.barrier()
        found[kind] = {
            "plain": plain,
            "stages": train(config, recipe(layout=types.Layout(pp=2)), place),
            "recompute": train(config, recipe(layout=types.Layout(pp=2, recompute="full")), place),
        }
    return found


@pytest.mark.parametrize("kinds", [("gpt_neox", "bloom"), pytest.param(STAGED, marks=pytest.mark.slow)])
def test_two_stages_equal_a_plain_loop_over_the_model(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Whole blocks on two pipeline stages: losses and gradient norms of two steps."""
    found = run(2, _staged, str(tmp_path), kinds)[0]
    for kind, ours in itertools.product(kinds, ("stages", "recompute")):
        for (loss, norm), (expected, expected_norm) in zip(found[kind][ours], found[kind]["plain"], strict=True):
            assert loss == pytest.approx(expected, rel=2e-5), kind
            assert norm == pytest.approx(expected_norm, rel=2e-4), kind


def _unsplit(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("gpt_neox", "zamba2", "gemma3n_text"):
        try:
            found[kind] = block_order_of(small(kind)).before
        except InputError as error:
            found[kind] = (error.field, error.reason)
    return found


def test_a_model_whose_layers_need_more_than_hidden_states_has_no_stages() -> None:
    found = run(1, _unsplit)[0]
    assert found["gpt_neox"] == ("gpt_neox.embed_in",)
    assert {found[kind][0] for kind in ("zamba2", "gemma3n_text")} == {"layout.pp"}
    assert "its layers also receive what other modules compute" in found["zamba2"][1]
    assert "its layers do not receive one vector per token" in found["gemma3n_text"][1]


def _adapters(rank: int, world: int, folder: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]], int]:
    config = small("gpt_neox")
    plain = plain_loop(config, folder)
    given = recipe(goal="peft", peft=types.Peft(rank=4))
    source = Mock(config.vocab_size, TOKENS, 0)
    mesh = build_mesh(given.layout, "cpu")
    trainer = Trainer(given, config, mesh, torch.device("cpu"), source, Path(folder))
    adapted = [name for name, p in trainer.stages[0].named_parameters() if p.requires_grad]
    done = [trainer.step(i) for i in range(2)]
    trainer.close()
    assert all("lora" in name for name in adapted)
    return plain, [(one.loss, one.grad_norm) for one in done], len(adapted)


def test_adapters_on_every_linear_layer_of_the_blocks(tmp_path: Path) -> None:
    plain, adapted, count = run(1, _adapters, str(tmp_path / "model"))[0]
    assert adapted[0][0] == pytest.approx(plain[0][0], rel=2e-5)
    assert adapted[1][0] != adapted[0][0]
    assert count == 2 * 4 * 2  # two layers, four linear layers, A and B


def _behaviours(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("gpt_neox", "mamba2", "doge"):
        measured = behaviour_of(small(kind))
        found[kind] = (measured.attention, measured.isolates)
    packed = recipe(goal="sft", data=types.Data(seq_length=TOKENS, packing=True))
    found["kept"] = with_isolated_documents(packed, small("gpt_neox"), {}).data.packing
    found["unpacked"] = with_isolated_documents(packed, small("mamba2"), {}).data.packing
    try:
        with_isolated_documents(packed, small("mamba2"), {"data.packing": True})
    except InputError as error:
        found["refused"] = (error.field, error.fix)
    for kind in ("cohere2", "gpt_neox", "granite"):
        with_scale = {"logit_scale": 0.125} if kind == "cohere2" else {}
        found[f"{kind} logits"] = find_logit_transform(build_model(small(kind, **with_scale), torch.float32))
    return found


def test_what_a_type_does_is_measured() -> None:
    """Whether it is causal (doge only with eager attention), keeps documents apart, and what it does with logits."""
    found = run(1, _behaviours)[0]
    assert found["gpt_neox"] == (None, True)
    assert found["mamba2"] == (None, False)
    assert found["doge"] == ("eager", True)
    assert (found["kept"], found["unpacked"]) == (True, False)
    assert found["refused"] == ("data.packing", ("data.packing=false",))
    assert found["cohere2 logits"] == LogitTransform(0.125)
    assert found["gpt_neox logits"] == LogitTransform()


def _limits(rank: int, world: int, folder: str) -> list[tuple[str | None, tuple[str, ...]]]:
    config, found = small("gpt_neox"), []
    for changes in ({"layout": types.Layout(tp=2)}, {"precision": types.Precision(matmul="fp8_tensor")}):
        try:
            train(config, recipe(**changes), folder)
        except InputError as error:
            found.append((error.field, error.fix))
    return found


def test_what_needs_layers_of_our_own_is_refused(tmp_path: Path) -> None:
    """Callers of the engine that skip the rules get the same refusal."""
    found = run(2, _limits, str(tmp_path))[0]
    assert found == [("layout.tp", ("layout.tp=1",)), ("precision.matmul", ("precision.matmul=same",))]


def _balancing(rank: int, world: int, folder: str) -> tuple[float, float]:
    """Return the gradient norm of a step with the model's own balancing loss: ours, and a plain loop's."""
    config, weight = small("granitemoe"), 0.5
    plain_loop(config, folder, steps=0)
    given = recipe(moe=types.Moe(aux_loss=weight), optimizer=types.Optimizer(name="sgd", lr=0.0, weight_decay=0.0))
    ours = train(config, given, folder, steps=1)[0][1]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    tokens = torch.from_numpy(Mock(config.vocab_size, TOKENS, 0).samples([0, 1]).tokens).long()
    for sample in tokens:  # micro batches of one
        out = model(input_ids=sample[None, :TOKENS], use_cache=False, output_router_logits=True)
        loss = nn.functional.cross_entropy(out.logits[0].float(), sample[1 : TOKENS + 1])
        ((loss + weight * out.aux_loss) / SAMPLES).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return ours, float(torch.sqrt(torch.stack([(g**2).sum() for g in gradients]).sum()))


def test_the_balancing_loss_is_the_model_s_own(tmp_path: Path) -> None:
    ours, expected = run(1, _balancing, str(tmp_path / "model"))[0]
    assert ours == pytest.approx(expected, rel=1e-4)


def _without_a_loss(rank: int, world: int, folder: str) -> float:
    """Return the loss of a step of a type whose config has a balancing loss that its code does not compute."""
    config = small("llama4_text")
    assert config.router_aux_loss_coef
    plain_loop(config, folder, steps=0)
    return train(config, recipe(moe=types.Moe(aux_loss=0.01)), folder, steps=1)[0][0]


def test_a_balancing_loss_that_only_the_config_has_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(1, _without_a_loss, str(tmp_path / "model"))[0] > 0
    assert "nothing balances its experts" in capfd.readouterr().err
