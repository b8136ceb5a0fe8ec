"""Answers name their unit, their currency and the reason; errors list every wrong cell and a fix that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import rules
from meshwright.clusters import cluster
from meshwright.display import duration
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of

TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
{line}
[parallelism]
data_parallel_shard_degree = 8
"""
TABLE = """name,framework,model,gpus,seq_length,micro_batch_size,global_batch_size,tp,precision,step_time_s
a,torchtitn,llama3-8b,8xH100,8k,1,8,x,bf16,1.3
b,torchtitan,llama3-8b,8xH100,8192,1,8,1,bf61,1.3s
c,torchtitan,llama3-8b,8xH10,8192,1,8,1,bf16,1
d,torchtitan,llama3-8b,8xH100,8192,1,8,1,bf16,
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_gpu_type_has_the_one_currency(meshwright: Any) -> None:
    typed = ("size", "llama3-8b", "--goal", "sft", "--gpu", "H100,A100", "--tokens", "1B", "--max-gpus", "2")
    found = meshwright(*typed, "--price", "H100=2.5EUR,A100=1.6", "--json").json
    assert [one["currency"] for one in found["compared"]] == ["EUR", "EUR"]
    refused = meshwright(*typed, "--price", "H100=$2.5,A100=1.6EUR").err
    assert "names EUR and USD: costs are compared in one currency" in refused
    assert "--price H100=PRICE,A100-80=PRICE --currency EUR" in refused


def test_the_fix_of_a_price_is_one_word_of_a_shell(meshwright: Any) -> None:
    refused = meshwright("size", "llama3-8b", "--goal", "sft", "--gpu", "H100", "--price", "2.5 EUR").err
    assert "--tokens 1T --price '2.5 EUR'" in refused


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('mixed_precision_reduce = "bfloat16"', 'training.mixed_precision_reduce = "float32"'),
        ('dtype = "bf16"', 'training.dtype = "bfloat16"'),
        ('dtype = "fp32"', 'training.dtype = "float32"'),
    ],
)
def test_a_refused_value_has_a_fix_that_passes(meshwright: Any, line: str, fix: str) -> None:
    Path("train.toml").write_text(TITAN.format(line=line))
    (found,) = meshwright("check", "train.toml", "--gpus", "8xH100", "--json").json["findings"]
    assert found["fix"] == [fix]
    Path("train.toml").write_text(TITAN.format(line=fix.removeprefix("training.")))
    assert meshwright("check", "train.toml", "--gpus", "8xH100").code == 0


@pytest.mark.parametrize("typed", [[], ["layout.tp=1", "layout.sp=false"]])
def test_a_dry_run_offers_a_layout_before_another_batch(meshwright: Any, typed: list[str]) -> None:
    refused = meshwright("dryrun", "llama3_8b_pretrain_config", "--gpus", "96xH100", *typed).err
    fix = refused.split("fix:")[1].replace("'", "").split()
    assert "layout.pp=3" in fix
    assert not any("global_batch_size" in one for one in fix)
    recipe = override.apply(index.load("llama3_8b_pretrain_config"), [*typed, *fix])
    assert not rules.check(Case(recipe, model_of(recipe), cluster("96xH100")), ("error",))


def test_every_wrong_cell_of_a_table_is_listed(meshwright: Any) -> None:
    Path("runs.csv").write_text(TABLE)
    lines = meshwright("calibrate", "runs.csv", "--out", "mine.toml").err
    assert "column framework=torchtitn: unknown framework" in lines
    for cell in (
        "line 2, column seq_length = 8k: must be an integer from 1, without unit (fix: 8192)",
        "line 2, column tp = x: ",
        "line 3, column precision = bf61: ",
        "line 3, column step_time_s = 1.3s: ",
        "line 4, column gpus = 8xH10: unknown GPU h10; did you mean H100? (fix: 8xH100)",
        "line 5, column step_time_s = blank: nothing was measured",
    ):
        assert cell in lines


def test_a_long_list_of_wrong_cells_ends_with_their_number(meshwright: Any) -> None:
    header, row = TABLE.splitlines()[0], "a,torchtitan,llama3-8b,8xH100,8192,1,8,x,bf16,1.3"
    Path("runs.csv").write_text("\n".join([header, *[row] * 15]))
    assert "and 5 more wrong cells" in meshwright("calibrate", "runs.csv", "--out", "mine.toml").err


def test_why_no_layout_divides_the_gpus(meshwright: Any) -> None:
    typed = ("recommend", "qwen3-30b-a3b", "--gpus", "96xH100", "--goal", "pretrain", "--engine", "torchtitan")
    refused = meshwright(*typed).err
    assert "the factor 3 of 96 does not divide the batch" in refused
    assert "32 attention heads are not divisible by tp=3" in refused
    assert "torchtitan does not support pp=3 for qwen3_moe models" in refused
    assert "seq_length=4096 is not divisible by 2 × cp = 2 × 3" in refused


def test_times_have_the_unit_of_their_size(meshwright: Any) -> None:
    shown = meshwright("compare", "llama3_8b_sft_config", "llama3_70b_pretrain_config", "train.steps=100").out
    assert "100 steps of 65,536 tokens take 6.81 minutes on 2xH100" in shown
    assert [duration(one) for one in (0.0042, 0.5, 2.5)] == ["6.05 minutes", "12.0 hours", "2.50 days"]
    assert [duration(one, 30) for one in (30.3, 29.9, 45)] == ["30.30 days", "29.90 days", "45.0 days"]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (("layout.tp=4", "layout.pp=1"), "async tensor parallelism (tp=4) needs a compiled model on torchtitan"),
        (("layout.tp=1", "layout.pp=1", "layout.cp=2"), "on this cluster, all else equal, False: "),
    ],
)
def test_a_rules_reason_is_about_the_layout_of_the_plan(meshwright: Any, layout: tuple[str, ...], reason: str) -> None:
    """The recipe has tp=8."""
    words = ("recommend", "llama3-70b", "--goal", "pretrain", "--gpus", "64xH200", "--engine", "torchtitan")
    answer = meshwright(*words, *layout, "--json")
    (why,) = (one["why"] for one in answer.json["changes"] if one["field"] == "kernels.compile")
    assert why.startswith(reason)


def test_notes_on_the_typed_budget_come_first(meshwright: Any) -> None:
    words = ("estimate", "llama3_8b_sft_config", "--gpus", "8xH100", "layout.tp=1", "layout.sp=false")
    answer = meshwright(*words, "--tokens", "300k", "--days", "2", "kernels.compile=true", "--json").json
    first, *others, last = answer["budget"]["notes"]
    assert first.startswith("--days 2 is met")
    assert "train.steps=5 to train these tokens" in others[0]
    assert last.startswith("compiling before the first step")
