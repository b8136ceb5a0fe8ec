"""Item 1: one table says what each engine executes; rules, estimate, plans and docs follow it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.advice.opened_data import samples_of, write_files

import meshwright.engine
from meshwright import clusters, costs, rules
from meshwright.choices import ENGINES
from meshwright.engine.evaluation import Validation
from meshwright.engine.schedules import learning_rate
from meshwright.recipes import index, load, overrides
from meshwright.recipes.capabilities import CAPABILITIES, FP8_PARTS, executed, substitutes
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import Recipe, field_value, keys_by_flat_name, recipe_fields

DENSE, MOE, MLA = "llama3_8b_pretrain_config", "qwen3_30b_a3b_pretrain_config", "deepseek_v2_lite_pretrain_config"
SFT, PEFT = "llama3_8b_sft_config", "llama3_8b_peft_config"
VISION = "qwen25_vl_3b_sft_config"


def case_of(recipe: Recipe, engine: Any = "meshwright", on: str = "") -> Case:
    return Case(recipe, model_of(recipe), clusters.cluster(on or recipe.cluster), engine, memory_of=costs.memory)


# The walk: every field changes what the engine builds or computes, or yields a finding.


class Finding(NamedTuple):
    """The value yields a finding that points at the field."""

    value: str
    recipe: str = DENSE
    context: tuple[str, ...] = ()


class Built(NamedTuple):
    """The value changes the trainer that the engine builds."""

    value: str
    recipe: str = DENSE
    context: tuple[str, ...] = ()
    world: int = 8


class Computed(NamedTuple):
    """The value changes what a function of the engine returns."""

    value: str
    result: Callable[[Recipe], Any]
    context: tuple[str, ...] = ()
    recipe: str = DENSE


class Opened(NamedTuple):
    """The value changes the samples that the engine opens, or those it holds out."""

    value: str
    context: tuple[str, ...] = ()
    recipe: str = SFT
    held_out: bool = False


class Ran(NamedTuple):
    """The value changes what a tiny run writes."""

    value: str
    context: tuple[str, ...] = ()


class Read(NamedTuple):
    """A file of the engine reads it while it runs: the run loop, the data or the checkpoints."""

    file: str


def _rates(recipe: Recipe) -> list[float]:
    return [learning_rate(recipe.schedule, recipe.optimizer.lr, 1000, step) for step in range(0, 1000, 50)]


def _config(recipe: Recipe) -> Any:
    from meshwright.engine.model_families import family_of

    return family_of(recipe).config_for(recipe)


def _validated_steps(recipe: Recipe) -> list[bool]:
    run = SimpleNamespace(recipe=recipe, state=SimpleNamespace(records=[]))
    return [Validation.due(run, step) for step in range(1, 1000)]  # type: ignore[arg-type]  # what it reads


def _determinism(recipe: Recipe) -> bool:
    import torch

    from meshwright.engine.worker import set_determinism

    set_determinism(recipe, torch.device("cpu"))
    found = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    return found


CHATS = ("data.dataset={chats}", "data.tokenizer=bytes", "data.seq_length=64", "data.packing=false")
CHATS = (*CHATS, "train.global_batch_size=4", "train.steps=4")
BLEND = (*CHATS, "data.blend={chats}:4.0,{pairs}:1.0")
TEXT = ("data.dataset={text}", "data.tokenizer=bytes", "data.seq_length=32", "train.global_batch_size=4")
ANNEAL = (*BLEND, "data.anneal_steps=2", "data.anneal_blend={chats}:1.0")
WORSE = ("train.eval_every=1", "optimizer.lr=1.0", "schedule.warmup_steps=0")  # the last step is not the best
SAVING = ("checkpoint.save_every=1", "checkpoint.keep=1", "checkpoint.export=none")
ADAPTERS = (PEFT, ("layout.tp=1",))
EXPERTS = ("layout.ep=2",)
PIPELINE = ("layout.pp=2",)
CONTEXT = ("layout.cp=4",)
FP8 = ("precision.matmul=fp8_tensor",)
SHORT = ("schedule.warmup_steps=100",)

WALK: dict[str, Finding | Built | Computed | Opened | Ran | Read] = {
    # layout
    "layout.strategy": Built("ddp"),
    "layout.tp": Built("1", context=("layout.sp=false",)),
    "layout.pp": Built("2"),
    "layout.vp": Built("2", context=(*PIPELINE, "layout.pp_schedule=interleaved_1f1b")),
    "layout.cp": Built("2"),
    "layout.ep": Built("2", MOE),
    "layout.etp": Built("2", MOE),
    "layout.dp_shard": Finding("3"),
    "layout.dp_replicate": Built("2"),
    "layout.sp": Built("false"),
    "layout.micro_batch_size": Built("2"),
    "layout.recompute": Built("full"),
    "layout.recompute_modules": Built("[layernorm]", context=("layout.recompute=selective",)),
    "layout.recompute_layers": Built("1", context=("layout.recompute=full",)),
    "layout.pp_schedule": Built("gpipe", context=PIPELINE),
    "layout.pp_micro_batches": Finding("2", context=(*PIPELINE, "train.global_batch_size=64")),
    "layout.stage_layers": Built("[3,1]", context=PIPELINE),
    "layout.embedding_as_layer": Finding("true"),
    "layout.head_as_layer": Finding("true"),
    "layout.cp_comm": Built("a2a", context=CONTEXT),
    "layout.cp_inner": Built("4", context=("layout.tp=1", "layout.sp=false", "layout.cp=8", "layout.cp_comm=a2a+ring")),
    "layout.offload": Built("params"),
    "layout.reshard_after_forward": Built("false"),
    "layout.defer_grad_sync": Finding("false", context=PIPELINE),
    # kernels
    "kernels.attention": Built("flex"),
    "kernels.scan": Finding("fla"),
    "kernels.compile": Built("true"),
    "kernels.cuda_graphs": Finding("full_iteration"),
    "kernels.cuda_graph_scope": Finding("[attn]"),
    "kernels.te_rng_tracker": Finding("true"),
    "kernels.overlap_grad_reduce": Finding("false"),
    "kernels.overlap_param_gather": Finding("false"),
    "kernels.tp_comm_overlap": Finding("true", context=("layout.tp=2", "layout.sp=true")),
    "kernels.loss": Built("fused_linear"),
    "kernels.deterministic": Computed("true", _determinism),
    # moe
    "moe.balancing": Built("none", MOE, EXPERTS),
    "moe.aux_loss": Built("0.02", MOE, EXPERTS),
    "moe.router_z_loss": Built("0.02", MOE, EXPERTS),
    "moe.capacity_factor": Finding("1.0", MOE),
    "moe.router_dtype": Built("bf16", MOE, EXPERTS),
    "moe.dispatcher": Finding("deepep", MOE, ("moe.dispatcher=alltoall",)),
    "moe.grouped_gemm": Finding("false", MOE),
    "moe.shared_expert_overlap": Finding("true", MLA, ("moe.shared_expert_overlap=false",)),
    "moe.ep_overlap": Finding("true", MOE),
    "moe.force_balance": Finding("true", MOE),
    # precision
    "precision.compute": Built("fp16"),
    "precision.matmul": Built("fp8_tensor"),
    "precision.master": Built("bf16"),
    "precision.moments": Built("bf16"),
    "precision.frozen": Finding("fp32", PEFT),
    "precision.grads": Finding("bf16"),
    "precision.reduce": Built("bf16"),
    "precision.fp8_gather": Built("true", context=FP8),
    "precision.first_last_bf16": Built("true", context=FP8),
    # optimizer and schedule
    "optimizer.name": Built("lion"),
    "optimizer.lr": Computed("0.001", _rates, SHORT),
    "optimizer.weight_decay": Built("0.05"),
    "optimizer.beta1": Built("0.8"),
    "optimizer.beta2": Built("0.9"),
    "optimizer.eps": Built("1e-6"),
    "optimizer.clip_grad": Finding("0"),
    "optimizer.muon_momentum": Built("0.9", context=("optimizer.name=muon",)),
    "optimizer.muon_ns_steps": Built("3", context=("optimizer.name=muon",)),
    "schedule.name": Computed("linear", _rates, SHORT),
    "schedule.warmup_steps": Computed("77", _rates),
    "schedule.decay_steps": Computed("700", _rates, SHORT),
    "schedule.min_lr": Computed("1e-5", _rates, SHORT),
    "schedule.wsd_decay_steps": Computed("300", _rates, (*SHORT, "schedule.name=wsd")),
    "schedule.wsd_decay_style": Computed("linear", _rates, (*SHORT, "schedule.name=wsd")),
    # peft
    "peft.method": Built("dora", *ADAPTERS),
    "peft.rank": Built("4", *ADAPTERS),
    "peft.alpha": Built("7", *ADAPTERS),
    "peft.dropout": Built("0.1", *ADAPTERS),
    "peft.targets": Built("[qkv]", *ADAPTERS),
    # data
    "data.dataset": Opened("{pairs}", CHATS),
    "data.tokenizer": Opened("{tokenizer}", CHATS),
    "data.blend": Opened("{chats}:1.0,{pairs}:4.0", BLEND),
    "data.seq_length": Opened("32", CHATS),
    "data.packing": Opened("true", CHATS),
    "data.pad_to_max_length": Finding("true"),
    "data.images": Computed("false", lambda r: type(_config(r)).__name__, recipe=VISION),
    "data.columns": Opened("prompt:prompt,response:other", (*CHATS[1:], "data.dataset={pairs}")),
    "data.documents": Opened("line", (*TEXT, "data.packing=true"), DENSE),
    "data.split": Opened("test", (*CHATS[1:], "data.dataset={split}")),
    "data.validation": Opened("{pairs}", (*CHATS, "data.validation_part=0.5"), held_out=True),
    "data.validation_part": Opened("0.7", (*CHATS, "data.validation_part=0.3"), held_out=True),
    "data.train_on": Opened("all", CHATS),
    "data.chat_template": Opened("{template}", CHATS),
    "data.merge_system": Opened("true", (*CHATS[1:], "data.dataset={ruled}")),
    "data.truncation": Opened("drop", ("data.seq_length=95", *(one for one in CHATS if "length" not in one))),
    "data.group_by_length": Opened("true", CHATS),
    "data.streaming": Opened("true", CHATS),
    "data.temperature": Opened("5.0", BLEND),
    "data.anneal_blend": Opened("{pairs}:1.0", ANNEAL),
    "data.anneal_steps": Opened("3", (*ANNEAL[:-1], "data.anneal_blend={pairs}:1.0")),
    "data.prefetch": Read("trainer.py"),
    "data.workers": Read("trainer.py"),
    # train
    "train.global_batch_size": Built("64"),
    "train.steps": Computed("300", lambda r: learning_rate(r.schedule, r.optimizer.lr, r.train.steps, 200), SHORT),
    "train.epochs": Finding("2"),
    "train.seed": Opened("7", CHATS),
    "train.init_std": Computed("0.01", lambda r: _config(r).initializer_range),
    "train.z_loss": Built("0.0001"),
    "train.mtp_loss": Finding("0.1"),
    "train.per_token_loss": Built("true"),
    "train.eval_every": Computed("300", _validated_steps, ("train.eval_every=200",)),
    "train.eval_steps": Finding("3"),
    "train.early_stop_patience": Finding("3"),
    "train.early_stop_delta": Finding("0.1"),
    "train.log_every": Ran("3", ("train.log_every=1",)),
    "train.profile": Ran("true", ("train.steps=12",)),
    "train.freeze": Finding("[vision]"),
    "train.check_nan": Read("worker.py"),
    # checkpoint
    "checkpoint.pretrained": Read("initial_weights.py"),
    "checkpoint.folder": Read("train.py"),
    "checkpoint.save_every": Ran("1", ("checkpoint.save_every=2",)),
    "checkpoint.keep": Ran("3", SAVING),
    "checkpoint.keep_best": Ran("false", (*SAVING, *WORSE)),
    "checkpoint.milestone_every": Ran("2", SAVING),
    "checkpoint.async_save": Read("checkpoint/save.py"),
    "checkpoint.resume": Read("worker.py"),
    "checkpoint.grace_s": Read("worker.py"),
    "checkpoint.export": Ran("consolidated", SAVING),
}
SECTIONS = ("data", "train", "optimizer", "schedule", "precision", "peft", "moe", "layout", "kernels", "checkpoint")
TESTS = Path(__file__).parents[1]


def test_the_walk_has_every_field() -> None:
    assert sorted(WALK) == sorted(key for key in recipe_fields() if key.split(".")[0] in SECTIONS)


def with_value(one: Finding | Computed, key: str) -> tuple[Recipe, Recipe]:
    """Return the recipe in the field's context, and the same with the field changed."""
    before = overrides.apply(load(one.recipe), one.context)
    after = overrides.apply(before, [f"{key}={one.value}"])
    assert field_value(after, key) != field_value(before, key)
    return before, after


@pytest.mark.parametrize("key", [key for key, one in WALK.items() if isinstance(one, Finding)])
def test_an_ignored_field_yields_a_finding(key: str) -> None:
    before, after = (
        {finding.field for finding in rules.check(case_of(recipe)) if finding.rule}
        for recipe in with_value(WALK[key], key)  # type: ignore[arg-type]
    )
    assert key in after - before


@pytest.mark.parametrize("key", [key for key, one in WALK.items() if isinstance(one, Computed)])
def test_a_field_changes_what_is_computed(key: str) -> None:
    one = WALK[key]
    assert isinstance(one, Computed)
    before, after = with_value(one, key)
    assert one.result(before) != one.result(after)


BUILT = [key for key, one in WALK.items() if isinstance(one, Built)]
QUICK = ("layout", "kernels")  # the others take 0.3 s each too


@pytest.mark.parametrize(
    "key", [key if key.startswith(QUICK) else pytest.param(key, marks=pytest.mark.slow) for key in BUILT]
)
def test_a_field_changes_what_the_engine_builds(key: str) -> None:
    from tests.advice.built_trainer import built

    one = WALK[key]
    assert isinstance(one, Built)
    changed = (*one.context, f"{key}={one.value}")
    before, after = built(one.recipe, one.context, one.world), built(one.recipe, changed, one.world)
    assert [part for part in before if before[part] != after[part]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("key", [key for key, one in WALK.items() if isinstance(one, Opened)])
def test_a_field_changes_the_samples(
    key: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    one = WALK[key]
    assert isinstance(one, Opened)
    before = overrides.apply(load(one.recipe), [text.format(**files) for text in one.context])
    after = overrides.apply(before, [f"{key}={one.value.format(**files)}"])
    assert samples_of(before, one.held_out) == samples_of(before, one.held_out)  # the same recipe, the same samples
    assert samples_of(before, one.held_out) != samples_of(after, one.held_out)


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, one in WALK.items() if isinstance(one, Ran)])
def test_a_field_changes_what_a_run_writes(meshwright: Any, tmp_path: Path, key: str) -> None:
    one = WALK[key]
    assert isinstance(one, Ran)

    def written(name: str, *changes: str) -> Any:
        out = tmp_path / name
        set_keys = {text.partition("=")[0] for text in changes}
        given = [text for text in ("train.steps=4", *one.context) if text.partition("=")[0] not in set_keys]
        if sum(text.startswith("train.steps") for text in given) > 1:
            given.remove("train.steps=4")
        ended = meshwright("train", DENSE, "--tiny", "--out", str(out), *given, *changes)
        assert ended.code == 0, ended.err
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        shown = [line.split()[1] for line in (ended.out + ended.err).splitlines() if line.startswith("step ")]
        files = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
        return files, [(row["kind"], row.get("step")) for row in rows], shown

    assert written("before") != written("after", f"{key}={one.value}")


ENGINE = Path(meshwright.engine.__file__).parent


def reads(source: str, name: str) -> bool:
    """Return whether the source reads an attribute of this name."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return any(node.attr == name and isinstance(node.ctx, ast.Load) for node in found)


@pytest.mark.parametrize("key", [key for key, one in WALK.items() if isinstance(one, Read)])
def test_the_engine_reads_the_field(key: str) -> None:
    one = WALK[key]
    assert isinstance(one, Read)
    assert reads((ENGINE / one.file).read_text(), key.split(".")[1])


def test_a_field_that_nothing_reads_would_fail_the_walk() -> None:
    source = "\n".join(path.read_text() for path in ENGINE.rglob("*.py"))
    assert "kernels.compile" in source
    unread = ("data.pad_to_max_length", "kernels.te_rng_tracker", "kernels.cuda_graph_scope", "moe.ep_overlap")
    assert not [key for key in unread if key in source]


# The table.


def test_every_row_names_a_field_and_values_that_exist() -> None:
    keys = keys_by_flat_name()
    for row in CAPABILITIES:
        assert row.field in keys, row.field
        assert set(row.runs) <= set(ENGINES), row.field
        assert set(row.instead) <= set(row.runs), row.field
        assert set(row.why) == set(row.instead), row.field
        assert row.refusing == () or row.rule in rules.RULES or row.field == "matmul", row.field
    assert set(FP8_PARTS) == set(ENGINES)


def test_what_runs_needs_no_further_substitute() -> None:
    for entry in [*index.entries(False)[::4], *index.entries(True)[::9]]:
        case = case_of(load(entry.name))
        assert substitutes(executed(case)) == {}, entry.name


def test_columns_are_substituted_where_the_engine_ignores_a_value() -> None:
    case = case_of(load(DENSE)).replace(overlap_grad_reduce=False, strategy=np.array(["fsdp2", "megatron_fsdp"]))
    assert executed(case).overlap_grad_reduce.tolist() == [True, False]
    offloads = np.array(["none", "optimizer", "params", "activations"])
    found = executed(case_of(load(DENSE)).replace(offload=offloads)).offload
    assert found.tolist() == ["none", "params", "params", "activations"]


# The estimate.

OFF = {
    "kernels.cuda_graphs": "none",
    "kernels.cuda_graph_scope": (),
    "kernels.te_rng_tracker": False,
    "kernels.tp_comm_overlap": False,
    "moe.dispatcher": "alltoall",
    "moe.shared_expert_overlap": False,
    "moe.ep_overlap": False,
    "data.pad_to_max_length": False,
}


def changed_by_turning_off(names: list[str]) -> list[str]:
    found = []
    for name in names:
        recipe = load(name)
        asked, off = (costs.estimate(case_of(one)) for one in (recipe, overrides.change(recipe, OFF)[0]))
        if (asked.step_s, asked.memory.total) != (off.step_s, off.memory.total):
            found.append(name)
    return found


def test_settings_that_the_engine_ignores_are_not_priced() -> None:
    assert changed_by_turning_off([e.name for e in [*index.entries(False)[::7], *index.entries(True)[::12]]]) == []


@pytest.mark.slow
def test_settings_that_the_engine_ignores_are_priced_in_no_recipe() -> None:
    assert changed_by_turning_off([e.name for e in [*index.entries(False), *index.entries(True)]]) == []


def test_an_engine_that_executes_them_is_priced_with_them() -> None:
    recipe = load("deepseek_v3_pretrain_config")
    asked, off = (costs.estimate(case_of(one, "megatron")).step_s for one in (recipe, overrides.change(recipe, OFF)[0]))
    assert off > 1.02 * asked


def test_fp8_of_an_moe_is_priced_where_it_applies() -> None:
    gains = {}
    for engine in ("meshwright", "megatron"):
        case = case_of(load("deepseek_v3_pretrain_config"), engine)
        plain, fp8 = (costs.step_time(case.replace(matmul=name)).step_s for name in ("same", "fp8_tensor"))
        gains[engine] = 1 - fp8 / plain
    assert 0 < gains["meshwright"] < 0.10
    assert gains["megatron"] > 2 * gains["meshwright"]


# What a user types.


def test_recommend_writes_what_runs(meshwright: Any) -> None:
    answer = meshwright("recommend", "qwen3-next-80b-a3b", "--gpus", "4x8xH100", "--goal", "sft", "--json").json
    changes = {change["field"]: change for change in answer["changes"]}
    assert (changes["moe.dispatcher"]["from"], changes["moe.dispatcher"]["to"]) == ("deepep", "alltoall")
    assert changes["moe.dispatcher"]["kind"] == "layout"
    assert "meshwright ignores it" in changes["moe.dispatcher"]["why"]
    assert not [f for f in answer["findings"] if f["rule"].startswith("engine.ignores")]


def test_a_value_that_the_user_sets_stays_and_is_reported(meshwright: Any) -> None:
    answer = meshwright(
        "recommend",
        "llama3-8b",
        "--gpus",
        "8xH100",
        "--goal",
        "pretrain",
        "kernels.cuda_graphs=full_iteration",
        "--json",
    ).json
    found = {finding["rule"]: finding for finding in answer["findings"]}
    assert found["engine.ignores-cuda-graphs"]["severity"] == "warning"
    assert found["engine.ignores-cuda-graphs"]["fix"] == ["kernels.cuda_graphs=none"]


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        ("kernels.attention=te", "kernels.attention-supported"),
        ("moe.capacity_factor=1.25", "moe.no-capacity"),
        ("layout.strategy=zero1", "strategy.supported"),
        ("precision.matmul=fp8_block", "precision.format-supported"),
    ],
)
def test_check_refuses_what_the_engine_refuses(meshwright: Any, typed: str, rule: str) -> None:
    answer = meshwright("check", MOE, typed, "--json")
    assert answer.code == 1
    assert rule in {f["rule"] for f in answer.json["findings"] if f["severity"] == "error"}


@pytest.mark.parametrize(
    ("typed", "fields"),
    [
        (("num_layers_per_virtual_pipeline_stage=2", "layout.pp=4"), {"vp": 4, "pp_schedule": "interleaved_1f1b"}),
        (
            ("recompute_granularity=full", "recompute_method=block", "recompute_num_layers=1"),
            {"recompute": "full", "recompute_layers": 1},
        ),
        (
            ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"),
            {"recompute": "full", "recompute_layers": 0},
        ),
    ],
)
def test_keys_of_megatron_do_what_megatron_does(typed: tuple[str, ...], fields: dict[str, Any]) -> None:
    layout = overrides.apply(load(DENSE), typed).layout
    assert {name: getattr(layout, name) for name in fields} == fields


@pytest.mark.parametrize(
    "typed",
    [
        ("recompute_num_layers=1",),
        ("recompute_granularity=selective", "recompute_num_layers=1"),
        ("recompute_granularity=full", "recompute_num_layers=1"),
        ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=2"),
        ("num_layers_per_virtual_pipeline_stage=2",),
        ("num_layers_per_virtual_pipeline_stage=3", "pipeline_model_parallel_size=4"),
    ],
)
def test_keys_of_megatron_without_effect_are_refused(meshwright: Any, typed: tuple[str, ...]) -> None:
    answer = meshwright("recipe", DENSE, *typed, "--json")
    assert answer.code == 2
    assert answer.json["error"]["fix"]
