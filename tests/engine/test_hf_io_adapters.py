"""Adapters: peft loads and merges what the engine saves; every layout loads and saves the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import folder_cases as cases
from tests.engine.ranks import run
from tests.engine.test_adapters import EVERYTHING, NO_EXPERTS

from meshwright.engine import hf_io
from meshwright.engine.model import adapters
from meshwright.engine.model.init import InitSpec
from meshwright.errors import InputError
from meshwright.recipes import types

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialize B away from zero, so that a lost adapter shows."""
    monkeypatch.setattr(adapters, "INIT_B", InitSpec("uniform", -0.1, 0.1))


def peft(method: Any = "lora", targets: Any = ("qkv", "proj", "fc1", "fc2"), **extra: Any) -> types.Peft:
    return types.Peft(**{"method": method, "rank": 4, "alpha": 8.0, "targets": targets, **extra})


def through_peft(rank: int, world: int, family: str, given: types.Peft, base: str, out: str) -> list[float]:
    """Return the errors of peft's model, its merged model and our merged folder against the engine."""
    from peft import PeftModel

    stages, mesh, config = cases.start(family, cases.recipe(peft=given), base)
    found = cases.engine_logits(stages[0])
    hf_io.save_adapters(stages, mesh, given, Path(out) / "adapters", base)
    hf_io.save_model(stages, mesh, config, Path(out) / "merged", dtype=torch.float32, merged=True)
    model = PeftModel.from_pretrained(cases.load(base)[0], Path(out) / "adapters")
    plain = cases.logits(cases.load(base)[0])
    theirs = cases.logits(model)
    merged_model, issues = cases.load(Path(out) / "merged")
    assert not issues
    assert cases.differ(plain, found) > 1e-3  # the adapters have an effect
    merged = cases.logits(model.merge_and_unload())
    return [cases.differ(one, found) for one in (theirs, merged, cases.logits(merged_model))]


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", peft()),
        ("llama", peft("rslora")),
        pytest.param("qwen2", peft("dora"), marks=pytest.mark.slow),
        pytest.param("gpt2", peft(), marks=pytest.mark.slow),
        ("gpt2", peft("dora")),
        ("qwen3_moe", peft()),
        ("qwen3_moe", peft(targets=("fc2",))),
        pytest.param("gpt_oss", peft(), marks=pytest.mark.slow),
        ("deepseek_v3", peft()),
        pytest.param("qwen3_next", peft(), marks=pytest.mark.slow),
        ("nemotron_h", peft(targets=("qkv", "proj", "fc1", "fc2", "mamba_in"))),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.method}-{'+'.join(value.targets)}",
)
def test_peft_matches_the_engine(family: str, given: types.Peft, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base = cases.write(tmp_path / "base", family)
    assert max(run(1, through_peft, family, given, str(base), str(tmp_path))[0]) <= TOLERANCE


def save(rank: int, world: int, family: str, layout: dict[str, Any], given: types.Peft, base: str, out: str) -> None:
    stages, mesh, config = cases.start(family, cases.recipe(layout, given), base)
    hf_io.save_adapters(stages, mesh, given, Path(out) / "adapters", base)
    hf_io.save_model(stages, mesh, config, Path(out) / "merged", dtype=torch.float32, merged=True)


def load_and_save(
    rank: int, world: int, family: str, layout: dict[str, Any], given: types.Peft, base: str, out: str
) -> None:
    """Load adapters into a model with other initial ones, and save them again."""
    sections = {"train": types.Train(global_batch_size=8, steps=100, seed=99)}
    stages, mesh, _ = cases.start(family, cases.recipe(layout, given, **sections), base)
    hf_io.load_adapters(stages, Path(out) / "adapters")
    hf_io.save_adapters(stages, mesh, given, Path(out) / "again", base)


LAYOUTS = [
    ("gpt2", peft("dora"), 2, {"tp": 2}),
    pytest.param("qwen3_moe", peft(), 2, {"ep": 2}, marks=pytest.mark.slow),
    ("nemotron_h", peft(targets=NO_EXPERTS[:3]), 2, {"pp": 2}),
    pytest.param("gpt_oss", peft(), 2, {"etp": 2}, marks=pytest.mark.slow),
    pytest.param("llama", peft(), 4, {"tp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "given", "world", "layout"), LAYOUTS)
def test_every_layout_saves_and_loads_the_same_adapters(
    family: str, given: types.Peft, world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    base = str(cases.write(tmp_path / "base", family))
    run(1, save, family, {}, given, base, str(tmp_path / "one"))
    run(world, save, family, layout, given, base, str(tmp_path / "many"))
    assert cases.same(tmp_path / "one" / "adapters", tmp_path / "many" / "adapters")
    settings = [
        json.loads((tmp_path / who / "adapters" / "adapter_config.json").read_text()) for who in ("one", "many")
    ]
    assert settings[0] == settings[1]
    one, many = (cases.tensors(tmp_path / who / "merged") for who in ("one", "many"))
    assert one.keys() == many.keys()
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 1e-6
    run(world, load_and_save, family, layout, given, base, str(tmp_path / "one"))
    assert cases.same(tmp_path / "one" / "adapters", tmp_path / "one" / "again")


def save_error(rank: int, world: int, family: str, given: types.Peft, out: str) -> str:
    stages, mesh, _ = cases.start(family, cases.recipe(peft=given), None)
    with pytest.raises(InputError) as error:
        hf_io.save_adapters(stages, mesh, given, Path(out), "base")
    assert not list(Path(out).glob("*"))
    return f"{error.value} {error.value.fix}"


def test_adapters_unsupported_by_peft_are_rejected_with_a_fix(tmp_path: Path) -> None:
    extra = run(1, save_error, "nemotron_h", peft(targets=EVERYTHING), str(tmp_path))[0]
    assert "out_proj" in extra
    assert "merged=True" in extra


def in_four_bits(rank: int, world: int, base: str, out: str) -> str:
    given = peft("qlora", ("qkv",))
    stages, mesh, config = cases.start("llama", cases.recipe(peft=given), base)
    hf_io.save_adapters(stages, mesh, given, Path(out) / "adapters", base)
    with pytest.raises(InputError, match="4 bits") as error:
        hf_io.save_model(stages, mesh, config, Path(out) / "merged", dtype=torch.float32, merged=True)
    return str(error.value.field)


def test_qlora_adapters_are_saved_but_4_bit_weights_are_not(tmp_path: Path) -> None:
    base = str(cases.write(tmp_path / "base", "llama"))
    assert run(1, in_four_bits, base, str(tmp_path))[0] == "peft.method"
    run(1, load_and_save, "llama", {}, peft(targets=("qkv",)), base, str(tmp_path))  # the saved adapters are plain LoRA
    assert cases.same(tmp_path / "adapters", tmp_path / "again")
    assert not (tmp_path / "merged").exists()


def load_error(rank: int, world: int, given: types.Peft, folder: str) -> str:
    stages, _, _ = cases.start("llama", cases.recipe(peft=given), None)
    with pytest.raises(InputError) as error:
        hf_io.load_adapters(stages, Path(folder))
    return f"{error.value.field}: {error.value}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (peft(alpha=16.0), "peft.alpha"),
        (peft("dora"), "use_dora"),
        (peft(rank=8, alpha=16.0), "peft.rank"),
        (peft(targets=("qkv",)), "peft.targets"),
    ],
    ids=["alpha", "dora", "rank", "targets"],
)
def test_mismatched_adapters_are_rejected(given: types.Peft, expected: str, tmp_path: Path) -> None:
    base = str(cases.write(tmp_path / "base", "llama"))
    run(1, save, "llama", {}, peft(), base, str(tmp_path))
    assert expected in run(1, load_error, given, str(tmp_path / "adapters"))[0]
