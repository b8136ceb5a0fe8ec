"""Update rules compared with torch and the published formulas, in one process and on sharded parameters."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.ranks import run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter

from meshwright.engine.optimizers import LocalOptimizer, build_optimizer
from meshwright.engine.optimizers.elementwise import AdamW, ScheduleFreeAdamW
from meshwright.engine.optimizers.exchange import ranks_of
from meshwright.engine.optimizers.grouping import decays, is_hidden_matrix
from meshwright.engine.optimizers.muon import Muon, matrix_dims, orthogonalize
from meshwright.engine.scaling import LossScale
from meshwright.errors import InputError
from meshwright.recipes.types import Optimizer, Precision

RULES = ("adamw", "muon", "lion", "schedule_free_adamw", "sgd")
FP32 = Precision()


def seeded(*shape: int, seed: int = 0, scale: float = 0.3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def built(parameters: dict[str, Tensor], precision: Precision = FP32, **options: Any) -> LocalOptimizer:
    return build_optimizer(parameters.items(), Optimizer(**options), precision, "cpu")  # type: ignore[arg-type]


def descend(parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for step in range(steps):
        for i, parameter in enumerate(parameters.values()):
            parameter.grad = seeded(*parameter.shape, seed=100 * step + i).to(parameter.dtype)
        optimizer.step()


SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 6), "model.layers.0.self_attn.q_proj.bias": (8,)}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {key: Parameter(seeded(*shape, seed=i).to(dtype)) for i, (key, shape) in enumerate(SHAPES.items())}


# --- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "decay", "hidden"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (4, 4), True, True),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False, False),
        ("model.layers.0.input_layernorm.weight", (4,), False, False),
        ("model.embed_tokens.weight", (4, 4), True, False),
        ("lm_head.weight", (4, 4), True, False),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 2, 4, 4), True, True),
        ("model.layers.0.mlp.experts.down_proj", (2, 4, 4), True, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, 8), False, False),
        ("model.layers.0.mlp.gate.weight", (4, 4), True, True),
        ("model.layers.0.self_attn.sinks", (4,), False, False),
        ("model.layers.0.mixer.A_log", (4,), False, False),
        ("model.layers.0.mixer.D", (4,), False, False),
        ("model.layers.0.mixer.dt_bias", (4,), False, False),
        ("model.layers.0.mixer.conv1d.weight", (4, 1, 4), True, False),
        ("model.visual.patch_embed.proj.weight", (4, 3, 2, 2), True, False),
    ],
)
def test_weight_decay_and_hidden_matrices_are_decided_by_name_and_shape(
    name: str, shape: tuple[int, ...], decay: bool, hidden: bool
) -> None:
    parameter = Parameter(torch.zeros(shape))
    assert decays(name, parameter) is decay
    assert is_hidden_matrix(name, parameter) is hidden


def test_frozen_parameters_are_excluded() -> None:
    parameters = weights()
    parameters["model.layers.0.self_attn.q_proj.weight"].requires_grad_(False)
    optimizer = built(parameters)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


@pytest.mark.parametrize("rule", RULES)
def test_state_allocated_before_the_first_step_changes_nothing(rule: str) -> None:
    early, late = weights(), weights()
    optimizer = built(early, name=rule, lr=1e-2)
    optimizer.allocate_state()
    kept = [id(value) for state in optimizer.state.values() for value in state.values()]
    assert kept
    descend(early, optimizer)
    descend(late, built(late, name=rule, lr=1e-2))
    assert [id(value) for state in optimizer.state.values() for value in state.values()] == kept
    for mine, other in zip(early.values(), late.values(), strict=True):
        assert torch.equal(mine, other)


# --- against torch and the papers ---------------------------------------------------------------------------------


def reference_adamw(parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    matrix, vector = parameters.values()
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_torchs(dtype: torch.dtype) -> None:
    ours, theirs = weights(dtype), weights(dtype)
    precision = Precision(master="bf16", moments="bf16") if dtype == torch.bfloat16 else FP32
    descend(ours, built(ours, precision, lr=1e-2))
    descend(theirs, reference_adamw(theirs))
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7 if dtype == torch.float32 else 4e-3)


def test_adamw_in_mixed_dtypes_is_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamW, "_has_one_dtype", lambda self, parameter: False)
    ours, theirs = weights(), weights()
    descend(ours, built(ours, lr=1e-2))
    descend(theirs, reference_adamw(theirs))
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "moments", "first", "second"),
    [
        (torch.float32, "bf16", torch.bfloat16, torch.float32),
        (torch.bfloat16, "fp32", torch.float32, torch.float32),
        (torch.bfloat16, "bf16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_moments_have_the_dtypes_of_the_recipe(
    dtype: torch.dtype, moments: Any, first: torch.dtype, second: torch.dtype
) -> None:
    parameters, exact = weights(dtype), weights()
    optimizer = built(parameters, Precision(moments=moments), lr=1e-2)
    descend(parameters, optimizer)
    descend(exact, built(exact, lr=1e-2))
    for parameter, other in zip(parameters.values(), exact.values(), strict=True):
        assert optimizer.state[parameter]["exp_avg"].dtype == first
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == second
        torch.testing.assert_close(parameter.float(), other, rtol=1e-2, atol=1e-2)


def test_muon_is_torchs() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for shape in ((8, 6), (6, 12)):
        ours, theirs = {name: Parameter(seeded(*shape))}, {name: Parameter(seeded(*shape))}
        optimizer = built(ours, name="muon", lr=1e-2)
        assert isinstance(optimizer, Muon)
        optimizer.format = torch.bfloat16  # as torch's
        descend(ours, optimizer)
        reference = torch.optim.Muon(theirs.values(), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        descend(theirs, reference)
        moved = (theirs[name] - seeded(*shape)).abs().max()
        assert float((ours[name] - theirs[name]).abs().max() / moved) < 1e-2


def test_newton_schulz_moves_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(seeded(3, 10, 7), 5))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (3, 5, 4, 2), (3, 5, 4)])
def test_muon_takes_stacked_experts_matrix_by_matrix(shape: tuple[int, ...]) -> None:
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": Parameter(seeded(*shape))}
    descend(stacked, built(stacked, name="muon", lr=1e-2), steps=1)
    dims = matrix_dims(shape)
    singles = seeded(*shape).movedim(dims, (-2, -1)).reshape(-1, 5, 4)
    gradients = seeded(*shape, seed=0).movedim(dims, (-2, -1)).reshape(-1, 5, 4)
    got = next(iter(stacked.values())).detach().movedim(dims, (-2, -1)).reshape(-1, 5, 4)
    for one, gradient, expected in zip(singles, gradients, got, strict=True):
        alone = {"model.layers.0.mlp.up_proj.weight": Parameter(one.clone())}
        optimizer = built(alone, name="muon", lr=1e-2)
        parameter = next(iter(alone.values()))
        parameter.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-6)


def test_lion_follows_its_paper() -> None:
    parameters = weights()
    optimizer = built(parameters, name="lion", lr=1e-2, beta1=0.9, beta2=0.99)
    expected = [one.detach().clone() for one in parameters.values()]
    moments = [torch.zeros_like(one) for one in expected]
    for step in range(4):
        for i, decay in enumerate((0.1, 0.0)):
            gradient = seeded(*expected[i].shape, seed=100 * step + i)
            direction = torch.sign(0.9 * moments[i] + 0.1 * gradient)
            expected[i] = expected[i] - 1e-2 * (direction + decay * expected[i])
            moments[i] = 0.99 * moments[i] + 0.01 * gradient
    descend(parameters, optimizer, steps=4)
    for got, want in zip(parameters.values(), expected, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_but_for_the_decoupled_decay(momentum: float) -> None:
    ours, theirs = weights(), weights()
    descend(ours, built(ours, name="sgd", lr=1e-2, beta1=momentum, weight_decay=0.0))
    descend(theirs, torch.optim.SGD(theirs.values(), lr=1e-2, momentum=momentum))
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, other)
    shrunk = weights()
    optimizer = built(shrunk, name="sgd", lr=1e-2, weight_decay=0.5)
    for parameter in shrunk.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for got, before, factor in zip(shrunk.values(), weights().values(), (1 - 5e-3, 1.0), strict=True):
        torch.testing.assert_close(got, before * factor)


def test_schedule_free_follows_its_paper() -> None:
    """Algorithm 1 of arXiv 2405.15682 in its notation x, y, z, with a learning rate that warms up."""
    parameters = weights()
    optimizer = built(parameters, name="schedule_free_adamw", weight_decay=0.1)
    assert isinstance(optimizer, ScheduleFreeAdamW)
    matrix = next(iter(parameters.values()))
    x = z = matrix.detach().clone()
    second, total = torch.zeros_like(x), 0.0
    for step in range(6):
        lr = 1e-2 * min(1.0, (step + 1) / 3)
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(matrix.detach(), y, rtol=1e-5, atol=1e-6)
        gradient = seeded(*x.shape, seed=step)
        second = 0.95 * second + 0.05 * gradient**2
        z = z - lr * (gradient / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8) + 0.1 * y)
        total += lr**2
        x = x + lr**2 / total * (z - x)
        for group in optimizer.param_groups:
            group["lr"] = lr
        matrix.grad = gradient
        optimizer.step()
    trained = matrix.detach().clone()
    optimizer.eval_mode()
    torch.testing.assert_close(matrix.detach(), x, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="train_mode"):
        optimizer.step()
    optimizer.train_mode()
    torch.testing.assert_close(matrix.detach(), trained, rtol=1e-5, atol=1e-6)


def test_schedule_free_refuses_what_it_cannot_evaluate() -> None:
    with pytest.raises(InputError, match="beta1"):
        built(weights(), name="schedule_free_adamw", beta1=0.0)


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_gives_back_every_bit(name: str) -> None:
    precision = Precision(moments="bf16")
    ours = weights()
    optimizer = built(ours, precision, name=name)
    descend(ours, optimizer, steps=3)
    saved = copy.deepcopy(optimizer.state_dict())
    twins = {key: Parameter(one.detach().clone()) for key, one in ours.items()}
    other = built(twins, precision, name=name)
    other.load_state_dict(saved)
    for one, twin in zip(ours.values(), twins.values(), strict=True):
        for key, value in optimizer.state[one].items():
            assert other.state[twin][key].dtype == value.dtype
    descend(ours, optimizer, steps=2)
    descend(twins, other, steps=2)
    assert all(torch.equal(one, twin) for one, twin in zip(ours.values(), twins.values(), strict=True))


# --- sharded parameters -----------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model with an embedding, matrices sharded in both dimensions and unevenly, a vector and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 8)
        self.q_proj = nn.Linear(8, 6)
        self.o_proj = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.q_proj.bias.data = seeded(6, seed=9)
        self.experts = nn.Module()
        for i, (name, shape) in enumerate(EXPERTS.items()):
            self.experts.register_parameter(name, Parameter(seeded(*shape, seed=50 + i)))
        for i, one in enumerate((self.embed_tokens, self.q_proj, self.o_proj)):
            one.weight.data = seeded(*one.weight.shape, seed=i)

    def forward(self, tokens: Tensor) -> Tensor:
        return (
            self.norm(self.o_proj(self.q_proj(self.embed_tokens(tokens)))).pow(3).sum()
        )  # squares would sum to a constant


EXPERTS = {"gate_up_proj": (4, 2, 6, 5), "down_proj": (4, 5, 6), "interleaved": (4, 5, 6, 2), "replicated": (2, 3, 4)}


def _shard(model: Tiny, rank: int) -> None:
    """Shard the dense part by tp 2 and dp_shard 2, and experts on other meshes by expert, inside, and both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    parallelize_module(model, mesh["tp"], {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
    experts = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    places = {
        "gate_up_proj": (experts, [Shard(0)]),
        "down_proj": (pair, [Shard(0), Shard(2)]),
        "interleaved": (experts, [Shard(1)]),
        "replicated": (pair, [Replicate(), Shard(1)]),
    }
    for name, (where, placements) in places.items():
        full = getattr(model.experts, name).detach()
        model.experts.register_parameter(name, Parameter(distribute_tensor(full, where, placements)))
    ignored = set(model.experts.parameters())
    fully_shard(model, mesh=mesh["dp_shard"], ignored_params=ignored)


def _train(model: Tiny, optimizer: LocalOptimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        model(torch.tensor([1, 2, 3, 4, 7 + step % 3])).backward()
        for i, expert in enumerate(model.experts.parameters()):
            gradient = seeded(*expert.shape, seed=1000 * step + i)
            if isinstance(expert, DTensor):
                expert.grad = distribute_tensor(gradient, expert.device_mesh, expert.placements)
            else:
                expert.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def _full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    gaps = [
        float((_full(one) - _full(theirs[key])).abs().max() / _full(theirs[key]).abs().max().clamp(min=1e-3))
        for key, one in ours.items()
    ]
    return max(gaps)


def _parity(rank: int, world: int, name: str, moments: Any) -> tuple[float, float]:
    options = Optimizer(name=name, lr=1e-2)
    single, sharded = Tiny(), Tiny()
    _shard(sharded, rank)
    optimizers = []
    for model in (single, sharded):
        optimizers.append(build_optimizer(model.named_parameters(), options, Precision(moments=moments), "cpu"))
        _train(model, optimizers[-1], 3)
    weights_apart = _farthest(dict(sharded.named_parameters()), dict(single.named_parameters()))
    full = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    states: list[dict[str, Any]] = [
        get_optimizer_state_dict(model, optimizer, options=full)
        for model, optimizer in zip((single, sharded), optimizers, strict=True)
    ]
    if rank:  # only rank 0 gets the full state
        return weights_apart, 0.0
    tensors = [{k: v for k, v in state.items() if isinstance(v, Tensor) and "." in k} for state in states]
    assert tensors[0]
    return weights_apart, _farthest(tensors[1], tensors[0])


def _of_every_rule(rank: int, world: int, work: Any, rules: tuple[tuple[Any, ...], ...]) -> dict[Any, Any]:
    return {rule: work(rank, world, *rule) for rule in rules}


@cache
def every_rule(work: Any, rules: tuple[tuple[Any, ...], ...]) -> list[dict[Any, Any]]:
    """Return the results of all rules by rank: four ranks are started once."""
    return run(4, _of_every_rule, work, rules)


@pytest.mark.parametrize("name", RULES)
def test_sharded_parameters_are_updated_like_unsharded_ones(name: str) -> None:
    for found in every_rule(_parity, tuple((rule, "fp32") for rule in RULES)):
        weights_apart, states_apart = found[name, "fp32"]
        assert weights_apart < 1e-5
        assert states_apart < 1e-5


def _checkpoint(rank: int, world: int, name: str, flat: bool) -> bool:
    options, precision = Optimizer(name=name, lr=1e-2), Precision(moments="bf16")
    ours, twin = Tiny(), Tiny()
    _shard(ours, rank)
    _shard(twin, rank)
    optimizer, other = (build_optimizer(one.named_parameters(), options, precision, "cpu") for one in (ours, twin))
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    get_optimizer_state_dict(ours, optimizer, options=how)  # before the first step: must not count as one
    _train(ours, optimizer, 2)
    for one, copied in zip(ours.parameters(), twin.parameters(), strict=True):
        copied.data.copy_(one.data)
    saved = copy.deepcopy(get_optimizer_state_dict(ours, optimizer, options=how))
    set_optimizer_state_dict(twin, other, saved, options=how)
    assert [group["step"] for group in other.param_groups] == [2] * len(other.param_groups)
    _train(ours, optimizer, 2, first=2)
    _train(twin, other, 2, first=2)
    return all(torch.equal(_local(a), _local(b)) for a, b in zip(ours.parameters(), twin.parameters(), strict=True))


# Every rule in one of torch's two forms of a state, and the first rule in both; the other combinations are slow.
SAVED = ((RULES[0], True), *((name, bool(number % 2)) for number, name in enumerate(RULES)))
SAVED_SLOW = tuple((name, flat) for name in RULES for flat in (False, True) if (name, flat) not in SAVED)


@pytest.mark.parametrize(
    ("name", "flat"), [*SAVED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SAVED_SLOW)]
)
def test_torch_checkpoints_support_the_state_of_sharded_parameters(name: str, flat: bool) -> None:
    cases = SAVED if (name, flat) in SAVED else SAVED_SLOW
    assert all(found[name, flat] for found in every_rule(_checkpoint, cases))


def _traced(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (world, 1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        return ranks_of(mesh)


def test_a_mesh_is_read_while_a_step_is_traced() -> None:
    assert run(2, _traced) == [[0, 1]] * 2


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RULES)
def test_a_step_can_be_traced_on_tensors_without_data(name: str, moments: Any) -> None:
    with FakeTensorMode():
        parameters = {key: Parameter(torch.empty(shape)) for key, shape in SHAPES.items()}
        optimizer = built(parameters, Precision(moments=moments), name=name)
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    assert {tuple(one.shape) for state in optimizer.state.values() for one in state.values()} == {(8, 6), (8,)}


# --- loss scale ---------------------------------------------------------------------------------------------------


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(good_steps=2)
    gradient = torch.tensor([2.0**16, 2.0**17])
    assert scale.unscale([gradient])
    assert gradient.tolist() == [1.0, 2.0]
    scale.update(True)
    scale.update(True)
    assert scale.value == 2.0**17
    assert not scale.unscale([torch.tensor([1.0, float("inf")])])
    scale.update(True)
    scale.update(False)
    assert scale.value == 2.0**16
    scale.update(True)
    other = LossScale(good_steps=2)
    other.load_state_dict(scale.state_dict())
    other.update(True)
    assert other.value == 2.0**17


def _overflow_on_one(rank: int, world: int, bad: int) -> list[bool]:
    scale = LossScale()
    mesh = init_device_mesh("cpu", (world,))
    full = torch.ones(world)
    full[bad] = float("nan")
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    return [scale.unscale([sharded] if rank < world - 1 else [sharded, torch.ones(2)]), scale.unscale([torch.ones(2)])]


def test_all_ranks_agree_on_an_overflow() -> None:
    assert run(3, _overflow_on_one, 1) == [[False, True]] * 3
