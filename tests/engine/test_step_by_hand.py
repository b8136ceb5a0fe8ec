"""The training step is the plain loop written here: losses, scaling, clipping, skipped steps, evaluation, sums."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from meshwright import extras
from meshwright.engine import gradients, trainer
from meshwright.engine.data.finite import FiniteSource
from meshwright.engine.data.sampler import Batch
from meshwright.engine.mesh import SOLO, GroupInfo
from meshwright.engine.optimizers import base, build_optimizer, eight_bit, elementwise
from meshwright.engine.schedules import learning_rate
from meshwright.engine.trainer import StepCallbacks, Trainer
from meshwright.errors import InputError
from meshwright.recipes import types

CPU = torch.device("cpu")
BATCH, MICRO, SEQ, VOCAB = 8, 2, 6, 11
PAIR = GroupInfo(2, 0, None, (0, 1))


# --- learning rates --------------------------------------------------------------------------------------------------


def expected_rates(name: str, warmup: int, end: int, low: float, peak: float, steps: int) -> Iterator[float]:
    """Yield the rate of every step, from the definition of each schedule."""
    low, last = min(low, peak), end or steps - 1
    for step in range(steps):
        if step < warmup:
            yield peak / (warmup + 1) * (step + 1)
            continue
        done = min(max((step - warmup) / (last - warmup), 0.0), 1.0) if last > warmup else float(step > warmup)
        if name == "constant":
            yield peak
        elif name == "inverse_sqrt":
            yield max(low, peak * math.sqrt((warmup + 1) / (min(step, max(last, warmup)) + 1)))
        else:
            share = {
                "cosine": 0.5 + 0.5 * math.cos(math.pi * done),
                "linear": 1 - done,
                "wsd": 1 - math.sqrt(max(done - 0.8, 0.0) / 0.2),
                "rex": (1 - done) / (0.5 + 0.5 * (1 - done)),
            }[name]
            yield low + share * (peak - low)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant", "inverse_sqrt", "rex"])
def test_every_rate_is_the_one_of_the_formula(name: Any) -> None:
    for warmup, end, low in ((0, 0, 0.0), (3, 0, 0.1), (3, 9, 0.1), (0, 7, 0.7), (5, 5, 0.1), (3, 9, 9.0)):
        schedule = types.Schedule(name=name, warmup_steps=warmup, decay_steps=end, min_lr=low)
        found = [learning_rate(schedule, 2.0, 14, step) for step in range(14)]
        wanted = list(expected_rates(name, warmup, end, low, 2.0, 14))
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-7), (warmup, end, low)


# --- one rank --------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A stage with an embedding and a head, whose losses have three different parts."""

    def __init__(self, first: bool = True, last: bool = True, tied: bool = False, mtp: bool = False) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(3)
        self.embedding, self.lm_head = nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB, bias=False)
        for one in (self.embedding, self.lm_head):
            one.weight.data = torch.randn(one.weight.shape, generator=make)
        self.first, self.last, self.embedding_on_last_stage = first, last, mtp
        self.partial_grads: frozenset[str] = frozenset()
        self.losses: list[Tensor] = []
        self.names = SimpleNamespace(body="body", embedding="embedding")
        self.tied = self.head_is_tied = tied
        self.head_weight = "lm_head.weight"
        self.syncs: list[Any] = []

    def shared_name(self, name: str) -> str:
        return name

    @property
    def body(self) -> Any:
        return SimpleNamespace(config=SimpleNamespace(tie_word_embeddings=self.tied))

    def forward(self, tokens: Tensor, labels: Tensor, weights: Tensor, **_: Tensor) -> Tensor:
        loss = tiny_loss(self.embedding.weight, self.lm_head.weight, tokens, labels, weights)
        self.losses.append(torch.stack([loss, 0.25 * loss, 3 * loss]).detach())
        return loss.reshape(1)

    def set_requires_gradient_sync(self, on: bool) -> None:
        self.syncs.append(on)

    def reshard(self) -> None:
        self.syncs.append("reshard")


def tiny_loss(embedding: Tensor, head: Tensor, tokens: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    logits = embedding[tokens] @ head.T
    every = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (every * weights.flatten()).sum()


class Data:
    """Numbered batches; some weights are infinite in step `bad`."""

    def __init__(self, seed: int = 0, bad: int = -1) -> None:
        self.seed, self.bad = seed, bad

    def batch(self, step: int) -> Batch:
        make = torch.Generator().manual_seed(100 * self.seed + step)
        tokens, labels = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=make) for _ in range(2))
        weights = torch.rand(BATCH, SEQ, generator=make) / (BATCH * SEQ)
        weights = weights * math.inf if step == self.bad else weights
        kwargs = {"labels": labels, "weights": weights}
        return Batch(tokens, kwargs, [BATCH * step + i for i in range(BATCH)], 10 + 7 * step, 99 + step, 3 + step)


class Batches:
    """A loader over `Data`, or over a finite set of it."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def batch(self, step: int) -> Batch:
        found: Batch = getattr(self.source, "source", self.source).batch(step)
        return found


class ByHand(Trainer):
    def _make_stages(self) -> Any:
        return [Tiny()]

    def _make_loader(self, source: Any) -> Any:
        return Batches(source)


class Watch(StepCallbacks):
    """Refuses a step, stops after one, and records what it receives."""

    def __init__(self, refused: int = -1, stops: bool = False) -> None:
        self.refused, self.stops = refused, stops
        self.seen: list[Any] = []

    def allows(self, step: int, losses: Tensor, norm: Tensor, samples: list[int]) -> bool:
        self.seen.append((step, len(losses), samples[0]))
        return step != self.refused

    def wants_to_stop(self) -> bool:
        return self.stops

    def on_stop_vote(self, stops: Tensor) -> None:
        self.seen.append(float(stops))


def mesh_of(**groups: Any) -> Any:
    usual = dict.fromkeys(("world", "pp", "dp", "cp", "tp", "stage", "etp", "ends", "experts", "sequence"), SOLO)
    return SimpleNamespace(**{**usual, **groups})


def recipe(goal: Any = "pretrain", **sections: Any) -> types.Recipe:
    given: dict[str, Any] = {
        "layout": types.Layout(micro_batch_size=MICRO, tp=1),
        "precision": types.Precision(compute="fp32"),
        "optimizer": types.Optimizer(name="sgd", lr=2.0, beta1=0.0, weight_decay=0.0, clip_grad=0.3),
        "schedule": types.Schedule(name="linear", warmup_steps=1, min_lr=0.0),
        "train": types.Train(global_batch_size=BATCH, steps=6),
        "data": types.Data(seq_length=SEQ),
    }
    return types.Recipe(name="tiny", model="llama3_8b", goal=goal, cluster="1xH100", **{**given, **sections})


def trainer_of(given: types.Recipe, source: Any = None, mesh: Any = None) -> Any:
    return ByHand(given, SimpleNamespace(), mesh or mesh_of(), CPU, source or Data())


def by_hand(steps: int, clip: float, refused: int = -1, bad: int = -1, factor: float = 1.0) -> list[tuple[Any, ...]]:
    """Return loss, mtp loss, norm, rate and skip of every step, and the weights at the end."""
    start = Tiny()
    weights = [start.embedding.weight.detach().clone(), start.lm_head.weight.detach().clone()]
    data, found = Data(bad=bad), []
    for step, lr in zip(range(steps), (1.0, 2.0, 1.5, 1.0, 0.5, 0.0), strict=False):
        batch = data.batch(step)
        inputs = [one.clone().requires_grad_() for one in weights]
        loss = tiny_loss(*inputs, batch.tokens, **batch.model_kwargs)
        moves = torch.autograd.grad(loss, inputs)
        norm = math.sqrt(sum(float(one.square().sum()) for one in moves))
        skipped = step in (refused, bad)
        limit = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        if not skipped:
            weights = [one - lr * factor * limit * move for one, move in zip(weights, moves, strict=True)]
        found.append((1.25 * float(loss), 3 * float(loss), norm, lr, skipped))
    return [*found, (weights,)]


def agree(made: Any, expected: list[tuple[Any, ...]], watch: StepCallbacks, tolerance: float = 1e-5) -> None:
    """Train as many steps as expected; the results and the weights are equal."""
    *steps, (weights,) = expected
    for number, (loss, mtp, norm, lr, skipped) in enumerate(steps):
        got = made.step(number, watch)
        if skipped and not math.isfinite(norm):
            assert not math.isfinite(got.grad_norm)
        else:
            assert (got.loss, got.mtp_loss, got.grad_norm) == pytest.approx((loss, mtp, norm), rel=tolerance)
        assert (got.lr, got.skipped) == (pytest.approx(lr), skipped)
        assert (got.step, got.tokens, got.computed) == (number, 10 + 7 * number, 99 + number)
    for parameter, wanted in zip(made.stages[0].parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=10 * tolerance, atol=tolerance)
        assert parameter.grad is None


def _one_rank(rank: int, world: int) -> None:
    watch = Watch(refused=2)
    agree(trainer_of(recipe()), by_hand(4, 0.3, refused=2), watch)
    assert watch.seen[:4] == [(0, 3, 0), 0.0, (1, 3, BATCH), 0.0]
    plain = recipe(optimizer=types.Optimizer(name="sgd", lr=2.0, beta1=0.0, weight_decay=0.0, clip_grad=0.0))
    made = trainer_of(plain)
    made.optimizer.param_groups[0]["lr_scale"] = 0.5
    agree(made, by_hand(3, 0.0, factor=0.5), Watch())
    half = trainer_of(recipe(precision=types.Precision(compute="fp16")), Data(bad=1))
    assert half.scale.value == 2.0**16
    agree(half, by_hand(3, 0.3, bad=1), Watch())
    assert half.scale.value == 2.0**15
    assert trainer_of(recipe()).scale is None
    _factor_of_the_optimizer()
    _routers_and_dropout()
    _evaluation()
    _accumulation()
    _parts_of_the_trainer()
    _gradients_of_ends()
    _updates()
    _eight_bits()


def _factor_of_the_optimizer() -> None:
    made = trainer_of(recipe())
    inner, seen = made.optimizer, []
    gradient = Tiny().lm_head.weight.detach()
    made.stages[0].lm_head.weight.grad = gradient.clone()
    made.optimizer = SimpleNamespace(takes_factor=True, param_groups=inner.param_groups, step=lambda: seen.append(1))
    made.update(torch.tensor(3.0), 0.1)
    assert float(made.optimizer.factor) == pytest.approx(0.1, rel=1e-5)
    assert seen == [1]
    assert torch.equal(made.stages[0].lm_head.weight.grad, gradient)  # the optimizer multiplies, not the trainer
    for total, limit, wanted in ((3.0, 0.0, 1.0), (3.0, 1.5, 0.5), (1.0, 2.0, 1.0), (0.0, 1.0, 1.0)):
        assert float(gradients.clip_factor(torch.tensor(total), limit)) == pytest.approx(wanted, rel=1e-5)


def _routers_and_dropout() -> None:
    state = SimpleNamespace(counts=None, sums=None, settings=SimpleNamespace(kind="none"))
    made = trainer_of(recipe(precision=types.Precision(compute="fp16")), mesh=mesh_of(dp=PAIR))
    made.routers = [state]
    assert made.micro_batches == 2
    made.forward_backward(made.loader.batch(0))
    assert state.scale == 2.0**16 / 4
    batch = made.loader.batch(1)
    lora, dry = types.Peft(dropout=0.1), types.Peft(dropout=0.0)
    for goal, peft, has in (("sft", lora, False), ("peft", dry, False), ("peft", lora, True)):
        one = trainer_of(recipe(goal=goal, peft=peft))
        found = one._with_dropout_keys(batch)
        assert ("dropout_keys" in found.model_kwargs) is has
        if has:
            wanted = trainer.token_keys(one.recipe.train.seed, batch.numbers, torch.arange(SEQ))
            assert torch.equal(found.model_kwargs["dropout_keys"], wanted)


def _evaluation() -> None:
    def mean(steps: int, per_token: bool, counted: int = BATCH) -> float:
        total, shares = 0.0, 0
        for step in range(steps):
            batch, tiny = Data(5).batch(step), Tiny()
            rows = slice(0, counted)
            kwargs = {key: value[rows] for key, value in batch.model_kwargs.items()}
            loss = float(tiny_loss(tiny.embedding.weight, tiny.lm_head.weight, batch.tokens[rows], **kwargs))
            share = batch.target_tokens if per_token else 1
            total, shares = total + loss * share, shares + share
        return total / shares

    made = trainer_of(recipe())
    modes: list[str] = []
    made.optimizer.eval_mode = lambda: modes.append("eval")
    made.optimizer.train_mode = lambda: modes.append("train")
    kept = made.loader.source
    found = made.measure(Data(5), 3)
    assert (found.loss, found.tokens, found.samples) == (pytest.approx(mean(3, False), rel=1e-5), 51, 12)
    assert (modes, made.loader.source is kept, made.stages[0].training) == (["eval", "train"], True, True)
    assert made.evaluate(Data(5), 3) == pytest.approx(mean(3, False), rel=1e-5)
    assert made.measure(Data(5), 0).loss == 0.0
    watch = Watch(stops=True)
    assert made.measure(Data(5), 3, watch) is None
    assert made.evaluate(Data(5), 3, Watch(stops=True)) is None
    assert watch.seen == [1.0]
    by_token = trainer_of(recipe(train=types.Train(global_batch_size=BATCH, steps=6, per_token_loss=True)))
    assert by_token.measure(Data(5), 3).loss == pytest.approx(mean(3, True), rel=1e-5)
    finite = FiniteSource(Data(5), 5)  # three of four micro batches of the first step
    assert made.measure(finite, 1).loss == pytest.approx(mean(1, True, 6), rel=1e-5)
    assert [made._filled_micro_batches(finite, step) for step in (0, 1)] == [3, 0]
    pairs = trainer_of(recipe(), mesh=mesh_of(dp=PAIR))
    assert [pairs._filled_micro_batches(FiniteSource(None, 13), step) for step in (0, 1, 2)] == [2, 2, 0]
    assert pairs._filled_micro_batches(Data(), 9) == 2
    piped, calls = trainer_of(recipe()), []
    piped.pipeline = SimpleNamespace(
        evaluate=lambda *given: calls.append(given), step=lambda *given: calls.append(given)
    )
    assert piped.measure(Data(5), 2).loss == 0.0
    assert [len(one) for one in calls] == [2, 2]
    assert torch.equal(piped.forward_backward(Data().batch(0)), torch.zeros(3))
    assert calls[-1][2] == 1.0


def _accumulation() -> None:
    """FSDP reduces gradients in the last micro batch only if that is deferred, and drops gathered weights."""
    kept = trainer.FSDPModule
    trainer.FSDPModule = Tiny  # type: ignore[misc,assignment]
    try:
        for defer, wanted in ((True, [False] * 3 + [True]), (False, [True] * 4)):
            made = trainer_of(recipe(layout=types.Layout(micro_batch_size=MICRO, defer_grad_sync=defer)))
            made.forward_backward(made.loader.batch(0))
            assert made.stages[0].syncs == wanted
        made.stages[0].syncs.clear()
        made.measure(Data(), 1)
        assert made.stages[0].syncs == ["reshard"]
    finally:
        trainer.FSDPModule = kept  # type: ignore[misc]


def _parts_of_the_trainer() -> None:
    """The loader, the pipeline and the optimizer get what the recipe says."""
    for loss, routers in ((0.0, []), (0.1, [1])):
        made = trainer_of(recipe(train=types.Train(global_batch_size=BATCH, steps=6, mtp_loss=loss)))
        made.routers = routers
        loader = Trainer._make_loader(made, Data())
        assert loader.mtp is bool(loss)
        assert loader.token_mask is (bool(routers) and trainer.masks_padding(made.recipe, padded_end=False))
        loader.close()
    kept_pipeline, kept_build = trainer.Pipeline, trainer.build_optimizer
    seen: dict[str, Any] = {}
    trainer.Pipeline = lambda *given, **named: named  # type: ignore[misc,assignment]
    trainer.build_optimizer = lambda *given: seen.update(device=given[3])  # type: ignore[assignment,return-value]
    try:
        for sp, sent in ((False, 3), (True, 1)):
            layout = types.Layout(micro_batch_size=MICRO, pp=2, cp=2, tp=3, sp=sp)
            config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=5))
            made = ByHand(recipe(layout=layout), config, mesh_of(), CPU, Data())  # type: ignore[arg-type]
            named: Any = made.pipeline
            assert (named["hidden"].shape, named["tokens"].shape) == ((MICRO, sent, 5), (MICRO, 3))
        assert trainer_of(recipe()).pipeline is None
        for offload, device in (("none", "cuda"), ("optimizer", "cpu"), ("params", "cpu"), ("activations", "cuda")):
            given = recipe(layout=types.Layout(micro_batch_size=MICRO, offload=offload))  # type: ignore[arg-type]
            ByHand(given, SimpleNamespace(), mesh_of(), torch.device("cuda"), Data())
            assert seen["device"] == device
    finally:
        trainer.Pipeline, trainer.build_optimizer = kept_pipeline, kept_build  # type: ignore[misc]


def _gradients_of_ends() -> None:
    """The copies of the embedding at both ends of a pipeline are summed, and counted once in the norm."""
    cases = [(f, last, tied, mtp) for f in (True, False) for last in (True, False) for tied in (0, 1) for mtp in (0, 1)]
    for first, last, tied, mtp in cases:
        stage: Any = Tiny(first, last, bool(tied), bool(mtp))
        found = [id(one) for one in gradients._copied_at_ends(stage)]
        embedding, head = id(stage.embedding.weight), id(stage.lm_head.weight)
        wanted = [] if first == last else [embedding] * (tied or mtp) if first else [head] * tied + [embedding] * mtp
        assert found == wanted, (first, last, tied, mtp)
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        counted = [id(one) for one in gradients._counted([stage])]
        assert counted == [one for one in (embedding, head) if not (last and one in wanted)]
    ends: Any = [Tiny(True, False, True, True), Tiny(False, True, True, True)]
    ends[1].embedding.weight.requires_grad_(True)
    for number, stage in enumerate(ends):
        for place, parameter in enumerate(stage.parameters()):
            parameter.grad = torch.full_like(parameter, 10.0 ** (2 * number + place))
    ends[0].lm_head.weight.grad = None
    mesh = mesh_of(stage=PAIR)
    assert gradients._other_end(ends, mesh_of(ends=PAIR)) is SOLO
    assert gradients._other_end(ends[:1], mesh_of(ends=PAIR)) is PAIR
    assert gradients._other_end(ends[1:], mesh_of(ends=PAIR)) is PAIR
    gradients.finish(ends, mesh)
    total = 1.0 + 1000.0 + 100.0
    for weight in (ends[0].embedding.weight, ends[1].lm_head.weight, ends[1].embedding.weight):
        assert torch.equal(weight.grad, torch.full_like(weight, total))
    count = VOCAB * 4
    assert float(gradients.norm(ends, mesh)) == pytest.approx(math.sqrt(count * total**2 / 2))
    gradients.scale(ends, torch.tensor(0.5))
    assert float(gradients.norm(ends, mesh_of())) == pytest.approx(0.5 * math.sqrt(count) * total)
    for stage in ends:
        stage.zero_grad()
    gradients.scale(ends, torch.tensor(0.5))
    assert float(gradients.norm(ends, mesh)) == 0.0


# --- updates ---------------------------------------------------------------------------------------------------------


def named(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    make = torch.Generator().manual_seed(1)
    return {
        f"layers.{i}.{'weight' if len(shape) > 1 else 'bias'}": Parameter(
            (torch.randn(shape, generator=make) * 0.3).to(dtype)
        )
        for i, shape in enumerate(shapes)
    }


def descend(parameters: dict[str, Any], optimizer: Any, steps: int = 4, factor: float = 1.0) -> None:
    make = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in parameters.values():
            parameter.grad = (torch.randn(parameter.shape, generator=make) * 0.2 * factor).to(parameter.dtype)
        optimizer.step()


def torch_adamw(parameters: dict[str, Any], lr: float = 1e-2) -> torch.optim.Optimizer:
    split = [
        {"params": [one], "weight_decay": 0.1 if one.ndim > 1 else 0.0} for one in parameters.values() if one.numel()
    ]
    return torch.optim.AdamW(split, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def _updates() -> None:
    shapes = ((3, 4), (5,), (2, 3), (0, 4), (7,))
    kept_bucket, kept_gpu = base.BUCKET, elementwise.on_gpu
    try:
        base.BUCKET = 11
        sizes = [[one.numel() for one in bucket] for bucket in base.buckets(list(named(*shapes).values()))]
        assert sizes == [[12], [5, 6], [7]]
        for on_gpu in (False, True):  # the single pass of a GPU has a plain form on a CPU
            elementwise.on_gpu = lambda tensor, on=on_gpu: on  # type: ignore[assignment,misc]
            for moments in ("fp32", "bf16"):
                ours, theirs = named(*shapes), named(*shapes)
                precision = types.Precision(moments=moments)  # type: ignore[arg-type]
                optimizer = build_optimizer(ours.items(), types.Optimizer(lr=1e-2), precision, "cpu")
                assert optimizer.takes_factor is on_gpu
                optimizer.factor = torch.tensor(0.5) if on_gpu else None
                descend(ours, optimizer)
                descend(theirs, torch_adamw(theirs), factor=0.5 if on_gpu else 1.0)
                for mine, other in zip(ours.values(), theirs.values(), strict=True):
                    close = 1e-6 if moments == "fp32" else 2e-3
                    torch.testing.assert_close(mine, other, rtol=close, atol=close)
    finally:
        base.BUCKET, elementwise.on_gpu = kept_bucket, kept_gpu
    _first_steps()


def _first_steps() -> None:
    """A first step without a learning rate makes the state and is not counted; a parameter without gradient stays."""
    ours = named((3, 4), (5,))
    optimizer = build_optimizer(ours.items(), types.Optimizer(lr=1e-2), types.Precision(), "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    assert len(optimizer.state) == 2
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    before = [one.detach().clone() for one in ours.values()]
    first, second = ours.values()
    second.grad = torch.ones(5)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])
    assert optimizer.step() is None


# --- 8-bit moments ---------------------------------------------------------------------------------------------------


def _fake_torchao() -> dict[str, ModuleType]:
    """Return torchao's functions of 8-bit moments, written from the paper: nearest of 256 levels, scale = largest."""
    wide, levels = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256) ** 4
    found = ModuleType("torchao.optim.quant_utils")

    def scale_tensor(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
        blocks = values.view(-1, block)
        scale = blocks.abs().amax(-1).clamp(min=1e-12)
        return (blocks / scale.view(-1, 1)).view(values.shape), scale

    def quantize(values: Tensor, known: Tensor) -> Tensor:
        return (values.unsqueeze(-1) - known).abs().argmin(-1).to(torch.uint8)

    found.create_dynamic_map = lambda signed: (wide.sign() * wide**2 if signed else levels).tolist()  # type: ignore[attr-defined]
    found.scale_tensor, found.quantize_8bit_with_qmap = scale_tensor, quantize  # type: ignore[attr-defined]
    return {"torchao": ModuleType("torchao"), "torchao.optim": ModuleType("torchao.optim"), found.__name__: found}


def _eight_bits() -> None:
    """The update is AdamW's up to the rounding of the moments, in chunks of rows and in one piece."""
    kept_modules, kept_require, kept_chunk = dict(sys.modules), extras.require, eight_bit.CHUNK
    sys.modules.update(_fake_torchao())
    extras.require = lambda *given: None
    eight_bit._levels_on.cache_clear()
    try:
        for shape, block in (
            ((64, 64), 64), ((64, 63), 0), ((63, 64), 0), ((4096,), 0), ((2, 32, 96), 32), ((256, 16), 0),
            ((8, 512), 256),
        ):  # fmt: skip
            assert eight_bit.block_length(torch.empty(shape)) == block, shape
        results = []
        for chunk in (64 * 3, 1 << 22, 1):
            eight_bit.CHUNK = chunk
            ours, theirs = named((70, 64), (6,)), named((70, 64), (6,))
            wanted = types.Optimizer(name="adamw8bit", lr=1e-2)
            optimizer = build_optimizer(ours.items(), wanted, types.Precision(), "cpu")
            assert not optimizer.takes_factor
            descend(ours, optimizer)
            descend(theirs, torch_adamw(theirs))
            matrix, other = next(iter(ours.values())), next(iter(theirs.values()))
            start = next(iter(named((70, 64), (6,)).values()))
            assert float((matrix - other).abs().mean() / (other - start).abs().mean()) < 0.05
            torch.testing.assert_close(list(ours.values())[1], list(theirs.values())[1], rtol=1e-6, atol=1e-6)
            state = optimizer.state[matrix]
            assert {key: tuple(value.shape) for key, value in state.items()} == {
                "exp_avg_codes": (70, 64), "exp_avg_scales": (70, 1), "exp_avg_sq_codes": (70, 64),
                "exp_avg_sq_scales": (70, 1),
            }  # fmt: skip
            results.append(matrix.detach().clone())
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        one = named((70, 64))
        _one_exact_step(one, build_optimizer(one.items(), wanted, types.Precision(), "cpu"))
    finally:
        extras.require, eight_bit.CHUNK = kept_require, kept_chunk
        for name in set(sys.modules) - set(kept_modules):
            del sys.modules[name]
        sys.modules.update(kept_modules)
        eight_bit._levels_on.cache_clear()


def _one_exact_step(parameters: dict[str, Any], optimizer: Any) -> None:
    """The first step does not depend on stored moments, so it is AdamW's exactly."""
    other = named((70, 64))
    descend(parameters, optimizer, 1)
    descend(other, torch_adamw(other), 1)
    for mine, theirs in zip(parameters.values(), other.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# --- two ranks -------------------------------------------------------------------------------------------------------


class Adapters(nn.Module):
    """Experts with adapters, one of which is replicated over etp."""

    has_gate, is_concatenated = False, False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = Parameter(torch.zeros(1, 2, 2))
        self.up_proj_lora_A, self.up_proj_lora_B = (Parameter(torch.zeros(1, 2, 2)) for _ in range(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = Adapters(), nn.Linear(2, 2)


def _two_ranks(rank: int, world: int) -> None:
    both = GroupInfo(2, rank, dist.group.WORLD, (0, 1))
    _losses_of_ranks(rank, both)
    stage: Any = Tiny(first=rank == 0, last=rank == 1, tied=True)
    stage.block, stage.narrow = Block(), Parameter(torch.zeros(3, dtype=torch.bfloat16))
    stage.partial_grads = frozenset({"narrow", "block.gate.weight"})
    for parameter in stage.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    stage.block.gate.bias.grad = None
    gradients.finish([stage], mesh_of(tp=both, etp=both, ends=both, stage=both, world=both))
    summed = {"narrow", "block.gate.weight", "block.experts.up_proj_lora_A"}
    summed |= {"embedding.weight"} if rank == 0 else {"lm_head.weight"}
    for name, parameter in stage.named_parameters():
        if parameter.grad is not None:
            wanted = 3.0 if name in summed else 1.0 + rank
            assert torch.equal(parameter.grad, torch.full_like(parameter, wanted)), name
    counted = [
        p for n, p in stage.named_parameters() if not (rank == 1 and n == "lm_head.weight") and p.grad is not None
    ]
    own = torch.tensor(sum(float(p.grad.float().square().sum()) for p in counted) / 2)
    dist.all_reduce(own)
    assert float(gradients.norm([stage], mesh_of(stage=both, world=both))) == pytest.approx(math.sqrt(float(own)))
    _shards(both)


def _losses_of_ranks(rank: int, both: GroupInfo) -> None:
    """Losses are summed over data-parallel ranks and not over tp; every rank has a vote to stop."""
    for groups, wanted in (({"world": both, "dp": both}, [4.0, 6.0]), ({"world": both, "tp": both}, [2.0, 3.0])):
        made = trainer_of(recipe(), mesh=mesh_of(**groups))
        losses, stops = made._reduce_losses(torch.tensor([2.0, 3.0]), Watch(stops=rank == 1))
        assert (losses.tolist(), float(stops)) == (wanted, 1.0)


def _shards(both: GroupInfo) -> None:
    """Each shard counts as often as ranks of the stage hold it; a gradient sharded otherwise is an error."""
    mesh = init_device_mesh("cpu", (2,))
    full, four = torch.ones(4, 2), mesh_of(stage=GroupInfo(4, 0))
    sharded = Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    copied = Parameter(distribute_tensor(full, mesh, [Replicate()]))
    found = [gradients.copies(one, four) for one in (sharded, copied, Parameter(full))]
    assert found == [2, 4, 4]
    sharded.grad = distribute_tensor(full, mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="placements"):
        base._has_gradient(sharded)
    sharded.grad = distribute_tensor(full, mesh, [Shard(0)])
    assert base._has_gradient(sharded)
    copied.grad = None
    assert not base._has_gradient(copied)
    narrow = Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)]))
    with pytest.raises(InputError, match="32 values"):
        eight_bit._zero_scales(narrow, 64)
    scales: Any = eight_bit._zero_scales(narrow, 32)
    assert (scales.shape, scales.to_local().shape, scales.placements) == ((64, 2), (64, 1), narrow.placements)


def test_one_rank_steps_like_a_plain_loop() -> None:
    run(1, _one_rank)


def test_two_ranks_sum_what_each_has() -> None:
    run(2, _two_ranks)
