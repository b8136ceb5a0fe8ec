"""KempnerForge: findings in configs, and export round trips."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

import meshwright as library
from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.accumulation import kept_accumulation
from meshwright.frameworks.types import SourcedValue
from meshwright.models import find
from meshwright.recipes import index, pretrain
from meshwright.recipes.overrides import apply

VALID = """\
[model]
dim = 4096
n_layers = 32
n_heads = 32
n_kv_heads = 8
vocab_size = 128256
ffn_dim_multiplier = 1.3
max_seq_len = 4096
rope_theta = 500000.0

[train]
batch_size = 4
seq_len = 4096
max_steps = 500
grad_accum_steps = 8
activation_checkpointing = "full"

[optimizer]
lr = 3e-4

[scheduler]
warmup_steps = 50

[distributed]
dp_shard = 16
tp = 1

[checkpoint]
dir = "runs/7b"
"""
MOE = replaced(
    VALID,
    ("dim = 4096", "dim = 2048"),
    ("ffn_dim_multiplier = 1.3", "ffn_hidden_dim = 7168\nnum_experts = 8"),
    ("n_heads = 32", "n_heads = 16"),
    ("dp_shard = 16\ntp = 1", "dp_shard = -1\nep = 2"),
    ("seq_len = 4096\nmax_steps", "seq_len = 4096\ncompile_model = false\nmax_steps"),
)
PATH = "7b.toml"
CASES = (
    Case("valid", VALID, gpus="2x8xH100"),
    Case("valid without GPUs", VALID),
    Case("valid with experts", MOE, gpus="2x8xH200"),
    Case("valid with data of several kinds", VALID + '\n[[data.datasets]]\npath = "a"\nweight = 0.5\n', gpus="16xH100"),
    Case("unknown key", replaced(VALID, ("tp = 1", "tensor_parallel = 1")), [("key.unknown", 26)], "16xH100"),
    Case("not a number", replaced(VALID, ("tp = 1", 'tp = "many"')), [("value.invalid", 26)], "16xH100"),
    Case(
        "more ranks than GPUs",
        replaced(VALID, ("dp_shard = 16\ntp = 1", "dp_shard = 4\ntp = 8")),
        [("topology.shard-product", 25)],
        "16xH100",
    ),
    Case("no such world", VALID, [("topology.shard-product", 25)], "3x8xH200"),
    Case("heads", replaced(VALID, ("n_kv_heads = 8", "n_kv_heads = 5")), [("kempnerforge.sizes", 5)], "16xH100"),
    Case(
        "longer than the rotary table",
        replaced(VALID, ("seq_len = 4096\nmax_steps", "seq_len = 8192\nmax_steps")),
        [("kempnerforge.seq-len-beyond-rope", 13)],
        "16xH200",
    ),
    Case("nothing to evaluate", VALID + "\n[eval]\nenabled = true\n", [("kempnerforge.no-evaluation-data", 32)]),
    Case(
        "negative",
        replaced(VALID, ("batch_size = 4", "batch_size = 0")),
        [("value.invalid", 12), ("kempnerforge.out-of-range", 12)],
        "16xH200",
    ),
    Case(
        "ratio",
        replaced(VALID, ("warmup_steps = 50", "warmup_steps = 50\nmin_lr_ratio = 1.5")),
        [("kempnerforge.out-of-range", 23)],
    ),
    Case("schedule", VALID + "\n[profiling]\nstart_step = 9\nend_step = 8\n", [("kempnerforge.profiling-range", 33)]),
    Case("memory", replaced(VALID, ("dp_shard = 16", "dp_shard = 1")), [("memory.state", 0)], "1xA100-40"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert found(case, PATH, "kempnerforge") == list(case.expected)


def test_finding_has_line_and_fix_in_toml() -> None:
    text = replaced(VALID, ("dp_shard = 16\ntp = 1", "dp_shard = 4\ntp = 8"))
    content = frameworks.content_of(text, "runs/7b.toml")
    result = frameworks.check(frameworks.framework("kempnerforge"), content, gpus="16xH100")
    assert not result.ok
    finding = result.findings[0]
    assert (finding.file, finding.line, finding.field) == ("runs/7b.toml", 25, "distributed.dp_shard")
    assert all(" = " in one and one.startswith("distributed.") for one in finding.fix), finding.fix


def test_global_batch_follows_from_gpus() -> None:
    content = frameworks.content_of(replaced(VALID, ("dp_shard = 16", "dp_shard = -1")), "7b.toml")
    for gpus, batch in (("16xH100", 4 * 8 * 16), ("64xH100", 4 * 8 * 64)):
        result = frameworks.check(frameworks.framework("kempnerforge"), content, gpus=gpus)
        assert result.recipe.train.global_batch_size == batch
        assert result.model is not None
        assert result.model.params.total == find("llama3_8b").params.total


def test_a_fix_of_the_layout_keeps_the_global_batch() -> None:
    text = replaced(VALID, ("batch_size = 4", "batch_size = 32"), ('activation_checkpointing = "full"\n', ""))
    content = frameworks.content_of(text, PATH)
    result = frameworks.check(frameworks.framework("kempnerforge"), content, gpus="16xH100")
    (fix,) = (one.fix for one in result.findings if one.rule == "memory.peak")
    sizes = dict(text.split(" = ") for text in fix)
    assert int(sizes["train.batch_size"]) * int(sizes["train.grad_accum_steps"]) == 32 * 8
    for one in fix:
        key, _, value = one.rpartition(".")[2].partition(" = ")
        text = replaced(text, (f"{key} = {32 if key == 'batch_size' else 8}", f"{key} = {value}"))
    fixed = frameworks.check(frameworks.framework("kempnerforge"), frameworks.content_of(text, PATH), gpus="16xH100")
    assert fixed.ok
    assert fixed.recipe.train.global_batch_size == result.recipe.train.global_batch_size


@pytest.mark.parametrize(
    ("overrides", "batch", "steps"),
    [
        (["layout.tp=2", "layout.micro_batch_size=2", "layout.dp_shard=-1"], 512, 32),
        (["layout.micro_batch_size=2", "train.global_batch_size=256"], 256, 8),
        (["train.batch_size=2"], 256, 8),  # its own key: the global batch follows, as in the file
    ],
)
def test_an_override_of_the_layout_keeps_the_global_batch(overrides: list[str], batch: int, steps: int) -> None:
    content = frameworks.content_of(VALID, PATH)
    result = frameworks.check(frameworks.framework("kempnerforge"), content, gpus="16xH200", overrides=overrides)
    assert result.recipe.train.global_batch_size == batch
    assert result.ok
    layout = result.recipe.layout
    assert batch == layout.micro_batch_size * (16 // layout.tp) * steps


def test_no_plan_interleaves_stages_that_its_program_does_not_build() -> None:
    text = replaced(VALID, ("dp_shard = 16\ntp = 1", 'dp_shard = -1\npp = 2\npp_schedule = "interleaved_1f1b"'))
    content = frameworks.content_of(text, PATH)
    result = frameworks.check(frameworks.framework("kempnerforge"), content, gpus="16xH100")
    assert ("schedule.supported", 27) in {(one.rule, one.line) for one in result.findings}
    made = library.plan("llama3-8b", "4x4xA100-40", "pretrain", engine="kempnerforge", overrides=["layout.pp=2"])
    assert made.plans
    assert {(one.recipe.layout.vp, one.recipe.layout.pp_schedule) for one in made.plans} <= {(1, "1f1b"), (1, "gpipe")}


def test_the_steps_that_keep_a_global_batch_are_integers() -> None:
    theirs = frameworks.framework("kempnerforge")
    recipe = index.load("llama3_8b_pretrain_config")

    def kept(steps: int, *overrides: str) -> dict[str, int] | None:
        stated = {"train.grad_accum_steps": SourcedValue(steps, 1, PATH)}
        before = apply(recipe, ["layout.micro_batch_size=4", "layout.tp=4"])
        return kept_accumulation(theirs, stated, before, apply(before, overrides))

    assert kept(2, "layout.micro_batch_size=1", "layout.tp=1", "layout.pp=2") == {"train.grad_accum_steps": 4}
    assert kept(2, "layout.micro_batch_size=2", "layout.tp=2") == {}
    assert kept(2, "train.global_batch_size=1024") == {"train.grad_accum_steps": 4}
    assert kept(1, "layout.tp=1") is None
    assert kept_accumulation(frameworks.framework("torchtitan"), {}, recipe, apply(recipe, ["layout.tp=1"])) == {}


def test_command_overrides_file(tmp_path: Path) -> None:
    (tmp_path / "7b.toml").write_text(VALID)
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nnodes 2 --nproc-per-node 8 scripts/train.py 7b.toml \\\n  --distributed.tp=3\n")
    content = frameworks.open_file(script)
    result = frameworks.check(frameworks.detect_framework(content), content)
    assert [(f.rule, Path(f.file).name, f.line) for f in result.findings if f.rule == "heads.attention"] == [
        ("heads.attention", "run.sh", 2)
    ]


def test_missing_config_of_command_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun scripts/train.py none.toml\n")
    with pytest.raises(InputError, match="not found"):
        frameworks.check(frameworks.framework("kempnerforge"), frameworks.open_file(script))


FIELDS = draws(
    layout__tp=st.sampled_from([1, 2, 4, 8]),
    layout__pp=st.sampled_from([1, 2]),
    layout__micro_batch_size=st.sampled_from([1, 2, 4]),
    layout__recompute=st.sampled_from(["none", "selective", "full"]),
    train__steps=st.integers(1, 10**6),
    train__seed=st.integers(0, 2**31),
    train__z_loss=st.floats(0, 1),
    train__eval_every=st.integers(0, 10**4),
    optimizer__name=st.sampled_from(["adamw", "muon", "lion", "schedule_free_adamw"]),
    optimizer__lr=st.floats(1e-6, 1),
    optimizer__beta1=st.floats(0, 0.999),
    optimizer__clip_grad=st.floats(0.1, 10),
    schedule__name=st.sampled_from(["cosine", "linear", "wsd", "constant", "rex"]),
    schedule__warmup_steps=st.integers(0, 10**4),
    schedule__min_lr=st.floats(0, 1e-6),
    precision__matmul=st.sampled_from(["same", "fp8_tensor"]),
    kernels__compile=st.booleans(),
    kernels__loss=st.sampled_from(["vocab_parallel", "chunked"]),
    data__dataset=st.sampled_from(["mock", "/data/tokens", 'with "quotes"']),
    data__packing=st.booleans(),
    checkpoint__save_every=st.integers(1, 10**4),
    checkpoint__keep=st.integers(1, 9),
    checkpoint__async_save=st.booleans(),
)
ALWAYS = {"precision.master": "bf16", "precision.moments": "bf16", "precision.grads": "bf16", "train.eval_steps": 20,
          "schedule.wsd_decay_style": "linear"}  # fmt: skip


@settings(max_examples=25)
@given(FIELDS, st.sampled_from(["llama3_8b", "llama2_7b", "kempner_moe"]))
def test_export_round_trip(values: dict[str, object], model: str) -> None:
    recipe = changed(pretrain(model, 64, global_batch_size=1024), {**ALWAYS, **values})
    sp = recipe.layout.tp > 1 and recipe.layout.pp == 1 and model != "kempner_moe"
    assert unmapped("kempnerforge", changed(recipe, {"layout.sp": sp}), model, "64xH100") == {}


def test_a_whole_validation_set_is_reported_not_written_as_zero() -> None:
    recipe = changed(pretrain("llama3_8b", 64, global_batch_size=1024), {**ALWAYS, "train.eval_steps": 0})
    recipe = changed(recipe, {"train.eval_every": 100, "layout.sp": False, "checkpoint.save_every": 0})
    lost = unmapped("kempnerforge", recipe, "llama3_8b", "64xH100")
    assert lost.keys() >= {"train.eval_steps", "checkpoint.save_every"}


def test_shipped_recipes_lose_only_listed_fields() -> None:
    theirs = frameworks.framework("kempnerforge")
    for name in (name for name in index.names() if name.startswith("kempner")):
        recipe = index.load(name)
        written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        lost = {one.field for one in written.unmapped}
        without_data = {"train.eval_every"} if not recipe.data.validation else set()
        assert lost <= {"precision.master", "precision.moments", "precision.grads", "layout.sp"} | without_data, name


def test_unsupported_recipe_is_rejected() -> None:
    theirs = frameworks.framework("kempnerforge")
    for name in ("llama3_8b_sft_config", "deepseek_v3_pretrain_config"):
        recipe = index.load(name)
        with pytest.raises(InputError):
            frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
