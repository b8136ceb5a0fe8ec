"""Multi-token prediction equals a reference with transformers, and trains the same in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine import parity
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from torch.nn import functional

from meshwright.engine.data.mock import Mock
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.data.sampler import Loader
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import build_model, transformers_config
from meshwright.engine.model.mtp import mtp_depth
from meshwright.engine.trainer import Trainer
from meshwright.errors import InputError
from meshwright.models import config_of, find
from meshwright.recipes import types

WEIGHT = 0.3  # large, so that errors show in the gradients
TRAIN = types.Train(global_batch_size=parity.BATCH, steps=100, mtp_loss=WEIGHT)
TP_SP = {"tp": 2, "sp": True}
ZBV = {"pp": 2, "vp": 2, "pp_schedule": "zbv"}


@pytest.fixture(autouse=True)
def tied_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3_5_tied", {**FAMILIES["qwen3_5"], "tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        pytest.param("deepseek_v3", 2, {}, marks=pytest.mark.slow),  # packed documents below train in this layout
        pytest.param("deepseek_v3", 2, {"strategy": "ddp"}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, TP_SP, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, {"pp": 2}, marks=pytest.mark.slow),
        ("deepseek_v3", 2, ZBV),
        pytest.param("deepseek_v3", 2, {"cp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, {"ep": 2, "recompute": "full"}, marks=pytest.mark.slow),
        ("deepseek_v3", 2, {**TP_SP, "ep": 2, "recompute": "full"}),
        pytest.param("deepseek_v3", 8, {**TP_SP, "pp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 2, {"cp": 2, "cp_comm": "a2a"}, marks=pytest.mark.slow),
        pytest.param(
            "glm4_moe",
            2,
            {**ZBV, "recompute": "selective", "recompute_modules": ("core_attn", "layernorm")},
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3_next", 2, TP_SP, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 2, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_tied", 2, {}, marks=pytest.mark.slow),
        ("qwen3_5_tied", 2, {"pp": 2}),  # embedding and head on different ranks
        pytest.param("qwen3_5_tied", 4, {**ZBV, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", 2, {"ep": 2}, marks=pytest.mark.slow),  # DeepSeek V3 has expert ranks above
        pytest.param("nemotron_h", 4, {**TP_SP, "pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_layouts_train_like_one_process(family: str, world: int, layout: dict[str, Any]) -> None:
    given = parity.recipe(types.Layout(micro_batch_size=parity.MICRO_BATCH, **layout), train=TRAIN)
    worst = parity.differences(family, world, given, steps=2)
    assert max(worst.values()) <= parity.TOLERANCE, worst


def test_packed_documents_train_like_one_process() -> None:
    data = types.Data(seq_length=parity.SEQ, packing=True)
    given = parity.recipe(types.Layout(micro_batch_size=parity.MICRO_BATCH), train=TRAIN, data=data)
    worst = parity.differences("deepseek_v3", 2, given, steps=2)
    assert max(worst.values()) <= parity.TOLERANCE, worst


def _trainer(family: str, layout: types.Layout, weight: float = WEIGHT) -> Trainer:
    config = transformers_config(FAMILIES[family])
    train = types.Train(global_batch_size=parity.BATCH, steps=100, mtp_loss=weight)
    moe = types.Moe(balancing="none", aux_loss=0.0, router_z_loss=0.0)
    given = parity.recipe(layout, train=train, moe=moe)
    source = Mock(config.vocab_size, parity.SEQ, given.train.seed)
    return Trainer(given, config, build_mesh(layout, "cpu"), torch.device("cpu"), source)


def _both(rank: int, world: int, family: str) -> dict[str, float]:
    """Return relative differences of losses and two gradients between the engine and the reference below."""
    trainer = _trainer(family, types.Layout(micro_batch_size=parity.BATCH))
    stage = trainer.stages[0]
    tokens = torch.from_numpy(trainer.loader.source.samples(range(parity.BATCH)).tokens)
    expected = _reference(family, stage, tokens)
    losses = trainer.forward_backward(trainer.loader.batch(0))
    found = {
        "main": losses[0],
        "mtp": losses[2],
        "embedding": stage.embedding.weight.grad,
        "projection": stage.mtp.fc.weight.grad,
    }
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in found}


def _reference(family: str, stage: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    config = transformers_config(FAMILIES[family])
    config._attn_implementation = "eager"
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    _load(model, stage, "")
    body, n = model.model, config.num_hidden_layers
    layer = type(body.layers[-1])(config, n - 1)
    _load(layer, stage, "mtp.layers.0.")
    fc, before = stage.mtp.fc.weight.detach().clone().requires_grad_(), []
    body.norm.register_forward_pre_hook(lambda module, given: before.append(given[0]))
    length = tokens.shape[1] - 1
    logits = model(tokens[:, :-1]).logits
    main = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def norm(x: torch.Tensor) -> torch.Tensor:  # a new norm's weights are ones
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)

    both = torch.cat([norm(body.embed_tokens(tokens[:, 1:])), norm(before[0])], -1)
    places = torch.arange(length)[None]
    out = layer(
        both @ fc.T,
        attention_mask=torch.full((length, length), float("-inf")).triu(1)[None, None],
        position_ids=places,
        position_embeddings=body.rotary_emb(both, places),
    )
    second = model.lm_head(norm(out[0] if isinstance(out, tuple) else out))
    mtp = functional.cross_entropy(second[:, :-1].flatten(0, 1), tokens[:, 2:].flatten())
    (main + WEIGHT * mtp).backward()
    return {
        "main": main.detach(),
        "mtp": mtp.detach(),
        "embedding": body.embed_tokens.weight.grad,
        "projection": fc.grad,
    }


def _load(module: torch.nn.Module, stage: Any, prefix: str) -> None:
    """Copy the stage's weights under a prefix into a transformers module, in its shapes."""
    held = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    with torch.no_grad():
        for name, parameter in (*module.named_parameters(), *module.named_buffers()):
            parameter.copy_(held[prefix + name].reshape(parameter.shape))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_loss_equals_the_reference(family: str) -> None:
    differences = run(1, _both, family)[0]
    assert max(differences.values()) < 1e-5, differences


def _reported(rank: int, world: int, layout: types.Layout) -> list[tuple[float, float]]:
    trainer = _trainer("deepseek_v3", layout)
    return [(result.loss, result.mtp_loss) for result in map(trainer.step, (0, 0, 0))]


def test_its_loss_is_reported_separately_and_falls() -> None:
    alone = run(1, _reported, types.Layout(micro_batch_size=2))[0]
    assert alone[-1][1] < alone[0][1]
    assert alone[0][0] != alone[0][1]


@pytest.mark.slow
def test_every_stage_reports_its_loss() -> None:
    ends = run(2, _reported, types.Layout(micro_batch_size=2, pp=2))
    assert ends[0] == ends[1]
    np.testing.assert_allclose(ends[0], run(1, _reported, types.Layout(micro_batch_size=2))[0], rtol=1e-5)


def _evaluated(rank: int, world: int) -> tuple[float, float]:
    values = []
    for weight in (0.0, WEIGHT):
        trainer = _trainer("glm4_moe", types.Layout(micro_batch_size=2), weight)
        values.append(trainer.evaluate(trainer.loader.source, 1))
    return values[0], values[1]


def test_evaluation_uses_the_next_token_only() -> None:
    without, with_mtp = run(1, _evaluated)[0]
    assert without == pytest.approx(with_mtp, rel=1e-6)


class _FixedSamples:
    def __init__(self, samples: Samples) -> None:
        self.fixed = samples

    def samples(self, numbers: Any) -> Samples:
        return self.fixed


def _model_kwargs(rank: int, world: int, samples: Samples) -> dict[str, Any]:
    loader = Loader(
        _FixedSamples(samples),
        build_mesh(types.Layout(), "cpu"),
        global_batch=1,
        micro_batch=1,
        positions=torch.arange(6),
        per_token=True,
        device=torch.device("cpu"),
        mtp=True,
    )
    return {name: value[0].tolist() for name, value in loader.batch(0).model_kwargs.items()}


def test_labels_two_ahead_stay_in_their_sample_and_document() -> None:
    tokens = np.arange(10, 17)[None]
    counted = np.array(
        [[False, True, True, False, True, True]]
    )  # a prompt token first; a document ends after the fourth
    documents = np.array([[0, 0, 0, 0, 1, 1]])
    kwargs = run(1, _model_kwargs, Samples(tokens, counted, documents))[0]
    assert kwargs["next_tokens"] == [11, 12, 13, 14, 15, 16]
    assert kwargs["labels_2"] == [12, 13, -100, -100, 16, -100]
    assert kwargs["weights_2"] == pytest.approx([1 / 3, 1 / 3, 0, 0, 1 / 3, 0])


PUBLISHED = ("qwen35_800m", "qwen3_next_80b_a3b", "glm45_air_106b", "nemotron_3_super", "deepseek_v3")


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_the_parameters_of_the_catalog(name: str) -> None:
    model: Any = build_model(transformers_config(config_of(name)).get_text_config(), torch.bfloat16, mtp=True)
    assert sum(p.numel() for p in model.mtp.parameters()) == find(name).params.mtp


@pytest.mark.parametrize("family", ["llama", "olmoe"])
def test_a_model_without_it_is_an_error(family: str) -> None:
    config = transformers_config(FAMILIES[family])
    with pytest.raises(InputError, match="has none"):
        build_model(config, torch.float32, mtp=True)


def test_a_model_with_several_is_an_error() -> None:
    config = transformers_config({**FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 2})
    assert mtp_depth(config) == 2
    with pytest.raises(InputError, match="one is supported"):
        build_model(config, torch.float32, mtp=True)
