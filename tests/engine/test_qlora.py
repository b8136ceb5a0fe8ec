"""Four-bit base weights: NF4 codes, equality with lora on unpacked weights, parity of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from tests.engine import expert_cases, parity
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from tests.engine.test_adapters import PEFT, STEPS, recipe, trainer_of
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.engine.data.mock import Mock
from meshwright.engine.kernels import nf4
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model import adapters
from meshwright.engine.model.build import transformers_config
from meshwright.engine.model.init import InitSpec
from meshwright.engine.model.nf4_linear import weights_to_fill
from meshwright.engine.trainer import Trainer
from meshwright.errors import InputError
from meshwright.recipes import types

QLORA = msgspec.structs.replace(PEFT, method="qlora")
# Wide enough that two ranks can split rows at blocks of 64.
WIDTHS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
WIDE: dict[str, dict[str, Any]] = {
    "llama_wide": {**FAMILIES["llama"], **WIDTHS},
    "qwen3_moe_wide": {**FAMILIES["qwen3_moe"], **WIDTHS, "moe_intermediate_size": 128},
    "gpt_oss_wide": {**FAMILIES["gpt_oss"], **WIDTHS},
    "gpt2_wide": {**FAMILIES["gpt2"], "n_embd": 128, "n_inner": 128},
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use models with several blocks per row, and start B away from zero, so that A has a gradient from step 1."""
    monkeypatch.setattr(adapters, "INIT_B", InitSpec("uniform", -0.3, 0.3))
    for name, values in WIDE.items():
        monkeypatch.setitem(FAMILIES, name, parity.shallow(values, types.Layout()))


# Codes


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = nf4.packed_shapes(tuple(weight.shape))
    out = torch.empty(codes, dtype=torch.uint8), torch.empty(scales, dtype=weight.dtype)
    nf4.pack(weight, *out)
    return out


def codes_of_a_ramp(rank: int, world: int) -> dict[str, Any]:
    ramp = torch.linspace(-1.0, 1.0, 64)
    levels = 3.0 * torch.tensor(nf4.LEVELS).repeat(4)
    rows = torch.stack([ramp, levels, torch.zeros(64)])
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        codes, scales = packed(rows.to(dtype))
        found[str(dtype)] = ([bytes(row.tolist()).hex() for row in codes], scales.flatten().tolist())
    codes, scales = packed(rows)
    found["exact"] = torch.equal(nf4.unpack(codes, scales)[1], levels)
    return found


# What bitsandbytes 0.50.2 stores for the same rows, block size 64, fp32 scales.
RAMP = "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff"


def test_codes_equal_bitsandbytes() -> None:
    found = run(1, codes_of_a_ramp)[0]
    for dtype in ("torch.float32", "torch.bfloat16"):
        codes, scales = found[dtype]
        assert codes == [RAMP, "0123456789abcdef" * 4, "77" * 32]
        assert scales == [1.0, 3.0, 0.0]
    assert found["exact"]


def stored_bits(rank: int, world: int, compute: Any) -> tuple[float, set[str]]:
    """Return the bits per weight of packed layers, and which linear layers still have a weight."""
    peft = msgspec.structs.replace(QLORA, targets=("qkv", "proj", "fc1", "fc2"))
    given = recipe(peft=peft, precision=types.Precision(compute=compute, master=compute))
    stage = trainer_of("qwen3_moe_wide", given).stages[0]
    parts = [p for name, p in stage.named_parameters() if "_codes" in name or "_scales" in name]
    assert not any(p.requires_grad for p in parts)
    count = sum(2 * p.numel() for p in parts if p.dtype == torch.uint8)
    dense = {name for name, p in stage.named_parameters() if p.ndim > 1 and p.dtype != torch.uint8}
    return 8 * sum(p.nbytes for p in parts) / count, {name for name in dense if "lora" not in name}


@pytest.mark.parametrize(("compute", "bits"), [("fp32", 4.5), ("bf16", 4.25)])
def test_a_weight_takes_four_bits_and_a_fraction_of_a_scale(compute: str, bits: float) -> None:
    found, dense = run(1, stored_bits, compute)[0]
    assert found == bits
    left = ("scales", "embed_tokens.weight", "lm_head.weight", "gate.weight")
    assert all(name.endswith(left) for name in dense), dense


# Equality with lora


def like_lora(rank: int, world: int, family: str) -> float:
    """Return the largest difference of loss and gradients from lora on the dequantized weights."""
    four = trainer_of(family, recipe(peft=QLORA))
    plain = trainer_of(family, recipe(peft=PEFT))
    unpacked = {name: tensor.clone() for name, tensor in unpacked_weights(four.stages[0])}
    apart = 0.0
    with torch.no_grad():
        for name, parameter in plain.stages[0].named_parameters():
            apart = max(apart, expert_cases.differ(parameter, unpacked[name].view(parameter.shape)))
            parameter.copy_(unpacked[name].view(parameter.shape))
    assert apart > 1e-2  # quantization changes the weights
    batch = plain.loader.batch(0)
    losses = [float(one.forward_backward(batch).sum()) for one in (four, plain)]
    gradients = [
        {name: p.grad for name, p in one.stages[0].named_parameters() if p.grad is not None} for one in (four, plain)
    ]
    assert set(gradients[0]) == set(gradients[1])
    worst = max(expert_cases.differ(gradients[0][name], gradients[1][name]) for name in gradients[0])
    return max(worst, abs(losses[0] - losses[1]) / losses[1])


def unpacked_weights(stage: nn.Module) -> Any:
    """Yield every dequantized weight of a stage under the model's name."""
    own = dict(stage.named_parameters())
    for name, tensor in weights_to_fill(stage):
        if name in own:
            yield name, own[name].detach()
            continue
        path, _, last = name.rpartition(".")
        module = stage.get_submodule(path)
        codes = last.replace("weight", "base_codes") if last.startswith("weight") else f"{last}_codes"
        found = nf4.unpack(getattr(module, codes), getattr(module, codes.replace("_codes", "_scales")))
        tensor.copy_(found.view(tensor.shape))
        yield name, tensor


@pytest.mark.parametrize("family", ["llama_wide", "qwen3_moe_wide", "gpt_oss_wide", "gpt2_wide", "nemotron_h"])
def test_qlora_is_lora_on_unpacked_weights(family: str) -> None:
    assert run(1, like_lora, family)[0] < 1e-5


FEW_TARGETS = msgspec.structs.replace(QLORA, targets=("qkv",))


def packed_paths(rank: int, world: int, family: str) -> tuple[list[str], list[str]]:
    """Return the linear layers of the decoder that are not packed, and those with adapters."""
    stage = trainer_of(family, recipe(peft=FEW_TARGETS)).stages[0]
    names = [name for name, _ in stage.named_parameters()]
    left = [name for name in names if "proj" in name and name.endswith(("weight", "down_proj", "gate_up_proj"))]
    return left, [name for name in names if name.endswith("lora_A")]


@pytest.mark.parametrize("family", ["llama_wide", "qwen3_moe_wide"])
def test_targets_choose_the_adapters_not_what_is_packed(family: str) -> None:
    left, adapted = run(1, packed_paths, family)[0]
    assert left == []
    assert adapted
    assert all("self_attn" in name for name in adapted)


def test_layers_without_adapters_train_the_same_with_tp() -> None:
    peft = msgspec.structs.replace(QLORA, targets=("qkv", "fc2"))  # of layers that tp splits by columns, and by rows
    found = parity.differences("llama_wide", 2, recipe({"tp": 2, "sp": True}, peft), STEPS)
    assert max(found.values()) <= parity.TOLERANCE, found


# Parity of layouts

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "tp": (2, {"tp": 2}),
    "tp-sp": (2, {"tp": 2, "sp": True}),
    "tp-fsdp": (4, {"tp": 2, "sp": True}),
    "pp": (2, {"pp": 2}),
    "cp": (2, {"cp": 2}),
    "ep": (2, {"ep": 2}),
    "etp": (2, {"etp": 2}),
    "recompute": (2, {"recompute": "full"}),
}
QUICK = {("llama_wide", "fsdp")}  # experts on one rank are above, adapters with pp are in test_adapters.py
TRIED = [
    *(("llama_wide", name) for name in LAYOUTS if name not in ("ep", "etp")),
    *(("qwen3_moe_wide", name) for name in LAYOUTS if name != "tp"),  # experts need sp with tp
    *((family, name) for family in ("gpt_oss_wide", "nemotron_h") for name in ("fsdp", "ep", "pp")),
    ("gpt_oss_wide", "etp"),
    ("gpt2_wide", "tp-sp"),
]


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in TRIED]
)
def test_qlora_trains_the_same_in_every_layout(family: str, name: str) -> None:
    world, layout = LAYOUTS[name]
    found = parity.differences(family, world, recipe(layout, QLORA), STEPS)
    assert max(found.values()) <= parity.TOLERANCE, found


@pytest.mark.slow
def test_qlora_trains_the_same_when_compiled() -> None:
    given = recipe({}, QLORA, kernels=types.Kernels(compile=True))
    found = parity.differences("llama_wide", 1, given, STEPS)
    assert max(found.values()) <= parity.TOLERANCE, found


def kept_for_backward(rank: int, world: int, recompute: str) -> int:
    """Return the bytes that compiled layers save for the backward pass, without weights."""
    parity.compile_without_a_compiler()
    trainer = trainer_of("llama_wide", recipe({"recompute": recompute}, QLORA, kernels=types.Kernels(compile=True)))
    stage = trainer.stages[0]
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    tokens, kwargs = trainer.loader.batch(0).micro_batches(parity.MICRO_BATCH)[0]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage(tokens, **kwargs)
    return sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.slow
def test_recomputed_compiled_layers_save_little() -> None:
    full, none = (run(1, kept_for_backward, recompute)[0] for recompute in ("full", "none"))
    assert full < none / 5


def refused(rank: int, world: int, family: str, layout: dict[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        trainer_of(family, recipe(layout, QLORA))
    return str(error.value)


@pytest.mark.parametrize(("family", "axis"), [("llama", "tp"), ("qwen3_moe", "etp")])
def test_a_shard_that_splits_a_block_is_an_error(family: str, axis: str) -> None:
    assert all("not divide" in message for message in run(2, refused, family, {axis: 2}))


def packed_from_a_folder(rank: int, world: int, folder: str, layout: dict[str, Any]) -> list[str]:
    """Return the linear layers whose codes differ from those of the folder's weights."""
    from safetensors.torch import load_file

    given = recipe(layout, QLORA)
    config = transformers_config(FAMILIES["llama_wide"])
    source = Mock(config.vocab_size, given.data.seq_length, 1)
    mesh = build_mesh(given.layout, "cpu")
    trainer = Trainer(given, config, mesh, torch.device("cpu"), source, Path(folder))
    stored = load_file(f"{folder}/model.safetensors")
    wrong = []
    for name, codes in trainer.stages[0].named_parameters():
        if name.endswith("base_codes"):
            whole = codes.full_tensor() if isinstance(codes, DTensor) else codes
            expected = packed(stored[name.replace("base_codes", "weight")])[0]
            wrong += [] if torch.equal(whole, expected) else [name]
    return wrong


def write_folder(rank: int, world: int, folder: str) -> None:
    config = transformers_config(FAMILIES["llama_wide"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_weights_of_a_folder_are_packed_as_they_are_read(tmp_path: Path, layout: dict[str, Any]) -> None:
    run(1, write_folder, str(tmp_path))
    assert run(2, packed_from_a_folder, str(tmp_path), layout) == [[], []]
