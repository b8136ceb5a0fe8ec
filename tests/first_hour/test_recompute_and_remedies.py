"""Recompute of an MoE plan, remedies that start, and batches that divide."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from tests.doctor import fake_runs

import meshwright as library
from meshwright import costs, doctor, rules
from meshwright.cli.run import run
from meshwright.frameworks.applied_fixes import fixed_text
from meshwright.notes import collected_notes
from meshwright.planner.explain import why_changed
from meshwright.planner.search import has_headroom
from meshwright.planner.space import MODULE_SETS
from meshwright.recipes.overrides import apply

MOE = "qwen3-30b-a3b"
NODES = "16x8xH100"


def test_no_single_override_of_recompute_beats_the_recommended_plan() -> None:
    case = library.recommend(MOE, gpus=NODES, goal="pretrain").case
    step_s = float(costs.step_time(case).step_s)
    for kind in ("none", "selective", "full"):
        for modules in ((), *MODULE_SETS) if kind == "selective" else ((),):
            other = case.replace(recompute=kind, recompute_modules=modules, recompute_layers=0)
            if bool(rules.legal(other)) and has_headroom(float(costs.memory(other).total), other):
                assert float(costs.step_time(other).step_s) > 0.97 * step_s, (kind, modules)


def test_the_reason_of_recompute_names_the_modules_that_were_compared() -> None:
    plan = library.recommend(MOE, gpus=NODES, goal="pretrain")
    base = msgspec.structs.replace(plan.base.layout, recompute="selective", recompute_modules=("moe",))
    full = plan.case.replace(recompute="full", recompute_modules=())
    assert "all else equal, selective of moe" in why_changed(full, "recompute", "selective", base)
    assert why_changed(full, "recompute_modules", ("moe",), base) == "follows recompute"
    more = plan.case.replace(recompute="selective", recompute_modules=("layernorm", "moe"))
    assert "all else equal, moe: -1% step time" in why_changed(more, "recompute_modules", ("moe",), base)


def test_pinned_selective_recompute_is_as_fast_as_the_same_found_without_the_pin() -> None:
    free = library.recommend(MOE, gpus=NODES, goal="pretrain")
    pinned = library.recommend(MOE, gpus=NODES, goal="pretrain", overrides=["layout.recompute=selective"])
    assert free.case.recompute == pinned.case.recompute == "selective"
    assert float(pinned.estimate.step_s) <= 1.02 * float(free.estimate.step_s)
    typed = ["layout.recompute=selective", "layout.recompute_modules=moe"]
    own = library.recommend(MOE, gpus=NODES, goal="pretrain", overrides=typed)
    assert own.case.recompute_modules == ("moe",)


OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.93 GiB. GPU 1 has a total capacity of "
    "79.11 GiB of which 1.21 GiB is free. Process 1122 has 77.89 GiB memory in use. Of the allocated memory 74.02 GiB "
    "is allocated by PyTorch, and 1.77 GiB is reserved by PyTorch but unallocated.\n"
)
EXPORTS = [
    ("megatron-lm", "pretrain", MOE, "*.sh"),
    ("megatron-lm", "sft", "qwen3-8b", "*.sh"),
    ("torchtitan", "pretrain", "qwen3-8b", "*.toml"),
    ("automodel", "sft", "qwen3-8b", "*.yaml"),
    ("kempnerforge", "pretrain", "qwen3-8b", "*.toml"),
    ("deepspeed", "sft", "qwen3-8b", "*.json"),
    ("accelerate", "sft", "qwen3-8b", "*.yaml"),
]


@pytest.mark.parametrize(("framework", "goal", "model", "name"), EXPORTS)
def test_every_remedy_of_an_out_of_memory_passes_check(
    framework: str, goal: str, model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    library.export(model, to=framework, gpus="4x8xH100", goal=goal, out="job")
    Path("run.log").write_text(OOM)
    file = next(Path("job").rglob(name))
    found = library.diagnose("run.log", recipe=str(file), gpus="4x8xH100", model=model)
    remedies = next(one.remedies for one in found.findings if one.id == "memory.out-of-memory")
    typed = [one.there for one in remedies if one.there]
    assert typed
    before = {one.name: one.read_text() for one in Path("job").iterdir()}
    for settings in typed:
        _write(Path("job"), file.name, settings)
        result = library.check(str(file), gpus="4x8xH100", model=model)
        assert not [one.message for one in result.findings if one.severity == "error"], settings
        for one, text in before.items():
            (Path("job") / one).write_text(text)


def _write(folder: Path, name: str, settings: tuple[str, ...]) -> None:
    """Write a remedy into the file, and into the program next to it."""
    for text in settings:
        program = re.fullmatch(r"(\w+\.py): (\w+)=(\S+)", text)
        if program is not None:
            path = folder / program[1]
            path.write_text(re.sub(rf"\b{program[2]}=[^,]+", f"{program[2]}={program[3]}", path.read_text()))
            continue
        fixed = fixed_text((folder / name).read_text(), name, [text])
        assert not fixed.left
        (folder / name).write_text(fixed.text)


def test_the_optimizer_in_host_memory_comes_with_the_flag_that_it_needs(tmp_path: Path) -> None:
    library.export(MOE, to="megatron-lm", gpus="4x8xH100", goal="pretrain", out=str(tmp_path / "job"))
    (tmp_path / "run.log").write_text(OOM)
    script = next((tmp_path / "job").glob("*.sh"))
    found = library.diagnose(str(tmp_path / "run.log"), recipe=str(script), gpus="4x8xH100", model=MOE)
    flags = [one.there for finding in found.findings for one in finding.remedies]
    assert ("--optimizer-cpu-offload", "--use-precision-aware-optimizer") in flags


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge", "automodel"])
def test_an_export_says_that_the_folder_of_the_model_has_no_tokenizer(framework: str, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = {"model_type": "qwen3", "intermediate_size": 3072, "vocab_size": 64000, "head_dim": 64, **sizes}
    (folder / "config.json").write_text(json.dumps(config))

    def warnings(name: str, *overrides: str) -> list[tuple[str, ...]]:
        typed = {"to": framework, "gpus": "8xH100", "goal": "pretrain", "out": str(tmp_path / name)}
        found = library.export(str(folder), overrides=list(overrides), **typed).checked.findings
        return [one.fix for one in found if "has no tokenizer" in one.message]

    assert warnings("a", "data.dataset=/data/text_document") == [("data.tokenizer=FOLDER",)]
    assert not warnings("b")  # random tokens
    (folder / "tokenizer.json").write_text("{}")
    assert not warnings("c", "data.dataset=/data/text_document")


OWN_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 96,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 44,
    "vocab_size": 64000,
    "max_position_embeddings": 32768,
}
TITAN = """[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[training]
local_batch_size = 4
global_batch_size = 500
seq_len = 8192
steps = 1000

[parallelism]
tensor_parallel_degree = 16

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def test_a_batch_of_other_divisors_is_offered_where_it_is_much_faster(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OWN_MOE))
    found = library.recommend(str(tmp_path), gpus="24x8xH100", goal="pretrain").suggestions
    texts = [" ".join(one.overrides) for one in found if one.title == "fit the batch to the GPUs"]
    assert any("train.global_batch_size=1152" in one for one in texts)
    assert any("train.global_batch_size=1536 optimizer.lr=" in one for one in texts)  # 27 % less time per token


def test_check_names_the_batch_that_divides_next_to_a_slow_repair(tmp_path: Path) -> None:
    file = tmp_path / "titan_8b.toml"
    file.write_text(TITAN)
    notes = " ".join(library.check(str(file), gpus=NODES).notes)
    assert "training.global_batch_size = 512" in notes


def test_explain_lists_the_keys_of_many_fixes_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(["explain", "memory.tight"])
    line = next(one for one in capsys.readouterr().out.splitlines() if one.strip().startswith("fix"))
    assert line.count("layout.micro_batch_size") == 1
    assert " or layout" not in line


PROFILE = """gpu = "H100"
source = "fitted to 1 run of megatron.log"
clock = 0.6485
engines = ["megatron"]
families = ["qwen"]
largest_world = 128
runs = 1
error_pct = 13.22
error_before_pct = 31.28
"""


def test_compare_says_that_a_calibration_was_applied_and_whose_runs_it_has(tmp_path: Path) -> None:
    (tmp_path / "meg.toml").write_text(PROFILE)
    with collected_notes() as notes:
        library.compare(
            "qwen3-8b",
            gpus="8xH100",
            goal="pretrain",
            engines="meshwright,megatron",
            calibration=str(tmp_path / "meg.toml"),
        )
    assert any(one.startswith("calibration of H100") and "applied" in one for one in notes)
    assert any("its runs are of megatron: meshwright may differ" in one for one in notes)


def test_advice_on_uncertain_memory_has_its_cheapest_fix_with_its_cost() -> None:
    plan = library.recommend("qwen3-8b", gpus="4xA100-40", goal="pretrain")
    for one in plan.findings:
        if one.rule == "memory.uncertain" and one.fix:
            after = float(costs.step_time(plan.case.rebuild(apply(plan.case.recipe, one.fix))).step_s)
            slower = after / float(plan.estimate.step_s) - 1
            assert (f"takes {slower:.0%} longer" in one.message) == (slower >= 0.05)
            assert slower < 0.2


def test_advice_on_uncertain_memory_shards_weights_again_before_it_recomputes_more() -> None:
    found = library.recommend("qwen3-14b", gpus="4xL40S", goal="qlora", seq=8192)
    fix = next(one.fix for one in found.findings if one.rule == "memory.uncertain")
    layout = found.recipe.layout
    held = (f"layout.micro_batch_size={layout.micro_batch_size}", f"layout.recompute={layout.recompute}")
    assert fix == ("layout.reshard_after_forward=true", *held)


def slow_run_remedies(recipe: str, gpus: str, writer: str) -> list[doctor.Remedy]:
    made = fake_runs.case(recipe, gpus, fake_runs.ENGINE[writer])
    log = fake_runs.LOG_WRITERS[writer](fake_runs.at_estimated_speed(made, 40, slower=2.0))
    found = doctor.examine(doctor.read_text(log, "log"), made).findings
    return [remedy for one in found if one.id == "speed.low-mfu" for remedy in one.remedies]


@pytest.mark.parametrize(
    ("writer", "trace"),
    [
        ("own", ""),
        ("megatron", "--profile --use-pytorch-profiler --profile-step-start 10 --profile-step-end 12"),
        ("torchtitan", "profiling.enable_profiling = true"),
        ("kempnerforge", "profiling.enable = true"),
        ("automodel", None),  # has no setting: a command around the training
    ],
)
def test_low_mfu_offers_what_is_faster_before_a_trace(writer: str, trace: str | None) -> None:
    *estimated, clocks, last = slow_run_remedies("llama3_8b_pretrain_config", "8xH100", writer)
    ratios = [one.step_ratio or 1.0 for one in estimated]
    assert ratios == sorted(ratios)
    assert max(ratios) < 1
    assert len(estimated[0].try_) > len(estimated[-1].try_)  # several changes together are the fastest
    assert all(one.fits for one in estimated)
    assert "nvidia-smi" in clocks.try_[0]
    if trace is None:
        assert last.try_[0].startswith("nsys profile ")
    else:
        assert last.try_ == ("train.profile=true",)
        assert " ".join(last.there).startswith(trace)


def test_low_mfu_says_that_nothing_is_faster() -> None:
    clocks, trace = slow_run_remedies("llama3_8b_peft_config", "1xH100", "megatron")
    assert clocks.why.startswith("no other layout or kernel is much faster by the cost model")
    assert "--profile" in trace.there
