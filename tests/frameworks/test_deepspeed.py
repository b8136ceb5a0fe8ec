"""DeepSpeed: findings in its configs, and recipes exported and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.models import find
from meshwright.recipes import index, pretrain, sft

PATH = "ds_config.json"
VALID = """\
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}
  },
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
  },
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 100, "total_num_steps": 1000}
  }
}
"""
AUTO = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_allow_untested_optimizer": true,
  "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
  "bf16": {"enabled": "auto"},
  "zero_optimization": {
    "stage": 2,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": "auto",
    "round_robin_gradients": true
  }
}
"""
ON = "8xH100"


def broken(name: str, old: str, new: str, *expected: tuple[str, int], gpus: str | None = ON) -> Case:
    return Case(name, replaced(VALID, (old, new)), expected, gpus)


CASES = (
    Case("valid", VALID, gpus=ON),
    Case("valid without GPUs", VALID),
    Case("valid with a model", VALID, gpus=ON, model="llama3_8b"),
    Case("valid with auto", AUTO, gpus=ON),
    Case("valid with auto and a model", AUTO, model="llama3_8b"),
    Case("valid without ZeRO", '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}', model="llama32_1b"),
    broken(
        "batch of other GPUs",
        '"gradient_accumulation_steps": 4',
        '"gradient_accumulation_steps": 2',
        ("deepspeed.batch-arithmetic", 2),
    ),
    broken(
        "batch that no GPUs make",
        '"train_batch_size": 64',
        '"train_batch_size": 60',
        ("deepspeed.batch-arithmetic", 2),
        gpus=None,
    ),
    broken(
        "accumulation that rounds to nothing",
        '  "gradient_accumulation_steps": 4,\n',
        "",
        ("deepspeed.batch-arithmetic", 2),
        gpus="128xH100",
    ),
    Case("no batch", '{\n"zero_optimization": {"stage": 1}\n}', [("deepspeed.no-batch-size", 0)]),
    broken(
        "no micro batch at all",
        '"train_micro_batch_size_per_gpu": 2',
        '"train_micro_batch_size_per_gpu": 0',
        ("value.invalid", 3),
    ),
    broken("quoted", '"train_batch_size": 64', '"train_batch_size": "64"', ("deepspeed.quoted-value", 2)),
    broken("quoted learning rate", '{"lr": 1e-4', '{"lr": "1e-4"', ("deepspeed.quoted-value", 16)),
    broken(
        "two dtypes",
        '"bf16": {"enabled": true},',
        '"bf16": {"enabled": true}, "fp16": {"enabled": true},',
        ("deepspeed.two-dtypes", 6),
    ),
    broken("bool instead of a section", '"bf16": {"enabled": true}', '"bf16": true', ("deepspeed.not-a-section", 6)),
    broken("unknown stage", '"stage": 3', '"stage": 4', ("value.invalid", 8)),
    broken("keys of stage 3", '"stage": 3', '"stage": 2', ("deepspeed.stage-too-low", 11)),
    broken("offloaded parameters", '"overlap_comm": true,', '"offload_param": {"device": "cpu"},', gpus=ON),
    Case(
        "parameter offload without stage 3",
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2,\n"offload_param": {"device": "cpu"}}}',
        [("deepspeed.stage-too-low", 2)],
    ),
    Case(
        "optimizer offload without ZeRO",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 0,\n"offload_optimizer": {"device": "cpu"}}}',
        [("deepspeed.stage-too-low", 2)],
    ),
    broken("no NVMe path", '"device": "cpu"', '"device": "nvme"', ("deepspeed.no-nvme-path", 12)),
    broken("unknown device", '"device": "cpu"', '"device": "gpu"', ("value.invalid", 12)),
    broken("unknown in ZeRO", '"overlap_comm"', '"overlap_com"', ("key.unknown", 9)),
    broken("unknown top-level key", '"gradient_clipping"', '"grad_clipping"', ("key.unused", 5)),
    broken("unknown section", '"bf16": {', '"precision": {', ("deepspeed.ignored-section", 6)),
    broken("negative clipping", '"gradient_clipping": 1.0', '"gradient_clipping": -1.0', ("value.invalid", 5)),
    broken("negative bucket", '"reduce_bucket_size": 5e8', '"reduce_bucket_size": -1', ("deepspeed.out-of-range", 10)),
    broken(
        "old name",
        '"overlap_comm": true,',
        '"stage3_gather_fp16_weights_on_model_save": true,',
        ("deepspeed.renamed", 9),
    ),
    broken("old and new name", '"overlap_comm": true,', '"cpu_offload": true,', ("deepspeed.renamed", 9)),
    broken("removed", '"gradient_clipping": 1.0,', '"amp": {"enabled": false, "opt_level": "O1"},', ("key.removed", 5)),
    broken("removed from ZeRO", '"overlap_comm": true,', '"mics_shard_size": 8,', ("key.removed", 9)),
    broken("misspelled optimizer", '"AdamW"', '"AdmW"', ("value.invalid", 15)),
    broken("removed optimizer", '"AdamW"', '"OneBitAdam"', ("value.invalid", 15)),
    broken(
        "unknown communication dtype name",
        '"gradient_clipping": 1.0,',
        '"communication_data_type": "float32",',
        ("value.invalid", 5),
    ),
    broken("momentum for Lion", '"AdamW",\n    "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8',
           '"Lion",\n    "params": {"lr": 1e-4, "momentum": 0.9', ("deepspeed.optimizer-argument", 16)),
    broken("momentum for Adam", '"eps": 1e-8', '"momentum": 0.9', ("deepspeed.optimizer-argument", 16)),
    broken("total steps without a decay", '"WarmupDecayLR"', '"WarmupLR"', ("deepspeed.optimizer-argument", 20)),
    broken("negative group", '"overlap_comm": true,', '"zero_hpz_partition_size": -1,', ("deepspeed.out-of-range", 9)),
    broken("removed chunk size", '"overlap_comm": true,', '"partition_stream_chunk_size": 1,', ("key.unknown", 9)),
    broken("no eps", '"AdamW"', '"Lion"', ("deepspeed.optimizer-argument", 16)),
    broken(
        "untested and slow",
        '"AdamW"',
        '"SGD"',
        ("deepspeed.untested-optimizer", 15),
        ("deepspeed.optimizer-argument", 16),
        ("deepspeed.optimizer-argument", 16),
        ("deepspeed.slow-cpu-optimizer", 15),
    ),
    broken("clipping in the optimizer", '"eps": 1e-8', '"max_grad_norm": 1.0', ("key.removed", 16)),
    broken("torch's Adam on the CPU", '"eps": 1e-8', '"torch_adam": true', ("deepspeed.slow-cpu-optimizer", 16)),
    broken("unknown argument", '"eps": 1e-8', '"epsilon": 1e-8', ("key.unknown", 16)),
    broken("no total steps", ', "total_num_steps": 1000', "", ("deepspeed.scheduler", 19)),
    broken("decreasing warmup", '"warmup_min_lr": 0', '"warmup_min_lr": 0.1', ("deepspeed.scheduler", 20)),
    broken("zero warmup", '"warmup_num_steps": 100', '"warmup_num_steps": 0', ("deepspeed.zero-warmup", 20)),
    broken("no scheduler type", '"type": "WarmupDecayLR",', "", ("deepspeed.no-type", 20)),
    broken("misspelled scheduler", '"WarmupDecayLR"', '"WarmupDecay"', ("deepspeed.scheduler", 19)),
    broken("different peak", '"warmup_max_lr": 1e-4', '"warmup_max_lr": 2e-4', ("deepspeed.lr-overridden", 16)),
    broken("default peak", '"warmup_max_lr": 1e-4, ', "", ("deepspeed.lr-overridden", 16)),
    broken(
        "pipeline",
        '"gradient_clipping": 1.0,',
        '"pipeline": {"stages": 2},',
        ("deepspeed.pipeline-zero-stage", 8),
        gpus=None,
    ),
    broken("sum", '"gradient_clipping": 1.0,', '"gradient_allreduce_op": "sum",', ("deepspeed.gradient-sum", 5)),
    broken(
        "contiguous",
        '"gradient_clipping": 1.0,',
        '"activation_checkpointing": {"partition_activations": true, "contiguous_memory_optimization": true},',
        ("deepspeed.contiguous-checkpoints", 5),
    ),
    broken(
        "fraction",
        '"gradient_clipping": 1.0,',
        '"fp16": {"loss_scale_window": 0.5},',
        ("deepspeed.whole-number", 5),
    ),
    broken("auto not filled", '"overlap_comm": true', '"sub_group_size": "auto"', ("deepspeed.auto-not-filled", 9)),
    broken("unknown dtype", '"gradient_clipping": 1.0', '"communication_data_type": "int8"', ("value.invalid", 5)),
    broken("not a boolean", '"overlap_comm": true', '"overlap_comm": "maybe"', ("value.invalid", 9)),
    broken(
        "sequence parallel size",
        '"gradient_clipping": 1.0,',
        '"sequence_parallel_size": 3,',
        ("deepspeed.batch-arithmetic", 2),
        ("deepspeed.sequence-parallel", 5),
    ),
    Case(
        "gradient dtype without ZeRO",
        '{"train_batch_size": 8,\n"bf16": {"enabled": true},\n"data_types": {"grad_accum_dtype": "fp32"}}',
        [("deepspeed.gradient-dtype", 3)],
    ),
    broken(
        "bf16 moments without bf16 master weights",
        '"bf16": {"enabled": true}',
        '"bf16": {"enabled": true, "bf16_optimizer_states": true}',
        ("deepspeed.dtype-needs-zero", 6),
    ),
    Case(
        "partial offload without stage 3",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 1,\n"offload_optimizer": {"ratio": 0.5}}}',
        [("deepspeed.partial-offload", 2)],
    ),
    broken(
        "tensor parallelism with stage 3",
        '"gradient_clipping": 1.0,',
        '"tensor_parallel": {"autotp_size": 2},',
        ("deepspeed.tp-with-stage-3", 5),
    ),
    Case(
        "state does not fit",
        replaced(AUTO, ('"stage": 2', '"stage": 0')),
        [("memory.state", 10)],
        "8xA100-40",
        "llama3_70b",
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert found(case, PATH, "deepspeed") == list(case.expected)


def test_every_rule_has_a_case() -> None:
    found_somewhere = {rule for case in CASES for rule, _ in case.expected}
    elsewhere = {"deepspeed.device-map"}  # of a program with a config: tests/first_hour/test_trl_and_trainer_scripts.py
    assert {rule.id for rule in frameworks.framework("deepspeed").rules} <= found_somewhere | elsewhere


def test_duplicate_keys_are_rejected() -> None:
    with pytest.raises(InputError, match="train_batch_size"):
        frameworks.content_of('{"train_batch_size": 8,\n"train_batch_size": 16}', "ds_config.json")


def test_fixes_are_json() -> None:
    content = frameworks.content_of(replaced(VALID, ('"stage": 3', '"stage": 2')), "ds_config.json")
    (finding,) = frameworks.check(frameworks.framework("deepspeed"), content).findings
    assert finding.fix == ('"zero_optimization": {"stage": 3}',)
    assert (finding.file, finding.severity) == ("ds_config.json", "warning")


@pytest.mark.parametrize("batch", ['"train_batch_size": "auto"', '"train_batch_size": 64'])
def test_state_that_does_not_fit_in_stage_2_is_sharded_by_stage_3(batch: str) -> None:
    content = frameworks.content_of(f'{{{batch}, "zero_optimization": {{"stage": 2}}}}', "ds_config.json")
    typed = ["layout.micro_batch_size=1", "data.seq_length=4096", "layout.recompute=full"]
    result = frameworks.check(
        frameworks.framework("deepspeed"), content, gpus="8x8xH200", model=find("llama3-70b"), overrides=typed
    )
    (finding,) = (one for one in result.findings if one.rule == "memory.state")
    assert finding.fix == ('"zero_optimization": {"stage": 3}',)


@pytest.mark.parametrize(
    ("text", "gpus", "micro", "batch"),
    [
        ('{"train_batch_size": 64, "gradient_accumulation_steps": 2}', "8xH100", 4, 64),
        ('{"train_batch_size": 64}', "16xH100", 4, 64),
        ('{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}', "8xH100", 3, 48),
        ('{"train_micro_batch_size_per_gpu": 3}', "8xH100", 3, 24),
        ('{"train_batch_size": 64, "tensor_parallel": {"autotp_size": 2}}', "16xH100", 4, 32),
    ],
)
def test_missing_batch_size_is_derived(text: str, gpus: str, micro: int, batch: int) -> None:
    result = frameworks.check(frameworks.framework("deepspeed"), frameworks.content_of(text, "c.json"), gpus=gpus)
    assert result.findings == ()
    assert (result.recipe.layout.micro_batch_size, result.recipe.train.global_batch_size) == (micro, batch)


def test_zero_stages_map_to_strategies() -> None:
    for stage, strategy, freed in ((0, "ddp", True), (1, "zero1", True), (2, "fsdp2", False), (3, "fsdp2", True)):
        text = f'{{"train_batch_size": 8, "zero_optimization": {{"stage": {stage}}}}}'
        layout = frameworks.check(
            frameworks.framework("deepspeed"), frameworks.content_of(text, "c.json")
        ).recipe.layout
        assert (layout.strategy, layout.reshard_after_forward) == (strategy, freed)


def script(folder: Path, config: str, command: str) -> frameworks.Content:
    (folder / "ds.json").write_text(config)
    (folder / "run.sh").write_text(command)
    return frameworks.open_file(folder / "run.sh")


def test_trainer_arguments_fill_in_auto(tmp_path: Path) -> None:
    command = (
        "deepspeed --num_nodes 2 --num_gpus 8 train.py --deepspeed ds.json --bf16 True --fp16 False \\\n"
        "  --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 2 \\\n"
        "  --gradient_accumulation_steps 4 --max_grad_norm 0.5 --gradient_checkpointing --max_seq_length 2048\n"
    )
    content = script(tmp_path, AUTO, command)
    result = frameworks.check(frameworks.detect_framework(content), content)
    assert result.findings == ()
    assert result.model is not None
    assert result.model.name == find("llama3_8b").name
    recipe = result.recipe
    assert (recipe.goal, recipe.layout.recompute, recipe.data.seq_length) == ("sft", "full", 2048)
    assert (recipe.train.global_batch_size, recipe.optimizer.clip_grad) == (2 * 4 * 16, 0.5)


def test_arguments_that_disagree_with_the_config_are_reported(tmp_path: Path) -> None:
    command = "deepspeed train.py \\\n --deepspeed ds.json \\\n --learning_rate 2e-5\n"
    content = script(tmp_path, VALID, command)
    result = frameworks.check(frameworks.detect_framework(content), content)
    assert {(f.rule, Path(f.file).name, f.line) for f in result.findings} == {
        ("deepspeed.argument-mismatch", "run.sh", 3)
    }


AUTO_BATCH = {"train_micro_batch_size_per_gpu": "auto"}
HALF = (
    "deepspeed --num_gpus 8 train.py --deepspeed ds.json {flag} --model_name_or_path meta-llama/Meta-Llama-3-8B "
    "--per_device_train_batch_size 2 --output_dir out --max_seq_length 2048 --gradient_checkpointing\n"
)


@pytest.mark.parametrize(("flag", "section"), [("--bf16", "fp16"), ("--fp16", "bf16"), ("--bf16 True", "fp16")])
def test_a_half_precision_format_excludes_the_other_in_the_config(tmp_path: Path, flag: str, section: str) -> None:
    config = json.dumps({section: {"enabled": True}, "zero_optimization": {"stage": 2}})
    content = script(tmp_path, config, HALF.format(flag=flag))
    found = frameworks.check(frameworks.detect_framework(content), content).findings
    mismatch = next(one for one in found if one.rule == "deepspeed.argument-mismatch")
    assert f"--{section} False, as {flag.split()[0]} is on, and {section}.enabled=True" in mismatch.message
    assert mismatch.fix == (f'"{section}": {{"enabled": "auto"}}',)


@pytest.mark.parametrize(("flag", "compute"), [("--bf16", "bf16"), ("--fp16", "fp16"), ("", "fp32")])
@pytest.mark.parametrize("section", [{}, {"fp16": {"enabled": "auto"}}])
def test_a_format_without_a_section_is_turned_on_by_accelerate(
    tmp_path: Path, flag: str, compute: str, section: dict[str, Any]
) -> None:
    content = script(
        tmp_path, json.dumps({**section, **AUTO_BATCH, "zero_optimization": {"stage": 2}}), HALF.format(flag=flag)
    )
    result = frameworks.check(frameworks.detect_framework(content), content)
    assert result.recipe.precision.compute == compute
    assert not [one for one in result.findings if one.severity == "error"]


def test_offloaded_parameters_without_stage_3_are_not_said_to_be_estimated(tmp_path: Path) -> None:
    offload = {"stage": 2, "offload_param": {"device": "cpu"}}
    content = script(tmp_path, json.dumps({**AUTO_BATCH, "zero_optimization": offload}), HALF.format(flag="--bf16"))
    result = frameworks.check(frameworks.detect_framework(content), content, gpus="8xA100-80")
    assert not any("only parameters are offloaded" in note for note in result.notes)
    (low,) = (one for one in result.findings if one.rule == "deepspeed.stage-too-low")
    assert low.fix == ('"zero_optimization": {"stage": 3}',)


def test_config_is_found_in_a_parent_folder_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "conf" / "ds.json").write_text(VALID)
    script = tmp_path / "scripts" / "run.sh"
    script.write_text("deepspeed --include=localhost:0,1,2,3 train.py --deepspeed_config=conf/ds.json\n")
    result = frameworks.check(frameworks.framework("deepspeed"), frameworks.open_file(script))
    assert [(f.rule, Path(f.file).name, f.line) for f in result.findings] == [
        ("deepspeed.batch-arithmetic", "ds.json", 2)
    ]


def test_script_without_a_command_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo nothing\n")
    with pytest.raises(InputError, match="DeepSpeed config"):
        frameworks.check(frameworks.framework("deepspeed"), frameworks.open_file(tmp_path / "run.sh"))


def test_missing_config_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("deepspeed train.py --deepspeed_config none.json\n")
    found = frameworks.check(frameworks.framework("deepspeed"), frameworks.open_file(tmp_path / "run.sh"))
    assert [(one.rule, one.severity) for one in found.findings] == [("launch.missing-config", "warning")]


FIELDS = draws(
    layout__strategy=st.sampled_from(["fsdp2", "zero1"]),
    layout__reshard_after_forward=st.just(True),
    layout__tp=st.sampled_from([1, 2, 4]),
    layout__micro_batch_size=st.sampled_from([1, 2, 4]),
    layout__offload=st.sampled_from(["none", "optimizer"]),
    optimizer__name=st.sampled_from(["adamw", "lion"]),
    optimizer__lr=st.floats(1e-6, 1),
    optimizer__weight_decay=st.floats(0, 1),
    optimizer__beta1=st.floats(0, 0.999),
    optimizer__beta2=st.floats(0, 0.999),
    optimizer__eps=st.floats(1e-12, 1e-3),
    optimizer__clip_grad=st.floats(0, 10),
    schedule__warmup_steps=st.integers(2, 10**4),
    train__steps=st.integers(1, 10**6),
    train__global_batch_size=st.sampled_from([256, 512, 1024]),
    precision__compute=st.sampled_from(["bf16", "fp16"]),
    precision__grads=st.sampled_from(["bf16", "fp32"]),
    precision__reduce=st.sampled_from(["bf16", "fp32"]),
)
SHAPES = st.sampled_from(
    [
        {"schedule.name": "linear", "schedule.min_lr": 0.0},
        {"schedule.name": "constant", "schedule.min_lr": 0.0},
        {"schedule.name": "cosine", "schedule.min_lr": 1e-7},
    ]
)
# Nothing that ZeRO has no words for.
BLANK: dict[str, object] = {"layout.pp": 1, "layout.vp": 1, "layout.cp": 1, "layout.ep": 1, "layout.etp": 1}
BLANK |= {"layout.dp_replicate": 1, "layout.dp_shard": -1, "layout.strategy": "fsdp2", "layout.offload": "none"}
BLANK |= {
    "schedule.decay_steps": 0,
    "precision.matmul": "same",
    "precision.master": "fp32",
    "precision.moments": "fp32",
}
BLANK |= {"layout.stage_layers": (), "layout.pp_schedule": "1f1b", "layout.recompute": "none", "layout.sp": False}
PROGRAM = {"layout.recompute", "layout.sp", "data.seq_length"}
"""Fields set by the program, not the config."""


@settings(max_examples=20)
@given(FIELDS, SHAPES, st.sampled_from(["llama3_8b", "qwen3_30b_a3b"]))
def test_exports_round_trip(values: dict[str, object], shape: dict[str, object], model: str) -> None:
    base = pretrain(model, 64, global_batch_size=512)
    recipe = changed(base, {**BLANK, **shape, **values})
    without = {"train.steps"} if shape["schedule.name"] == "constant" else set()
    without |= {"optimizer.eps"} if recipe.optimizer.name == "lion" else set()
    lost = unmapped("deepspeed", recipe, model, "64xH100").keys() - PROGRAM
    written = frameworks.export(frameworks.framework("deepspeed"), recipe, find(model), cluster("64xH100"))
    listed = {one.field for one in written.unmapped} - without
    assert lost <= without
    assert not listed & values.keys()


def test_shipped_recipes_lose_only_the_listed_fields() -> None:
    theirs = frameworks.framework("deepspeed")
    said = {
        "layout.strategy",
        "layout.micro_batch_size",
        "train.global_batch_size",
        "optimizer.lr",
        "optimizer.clip_grad",
    }
    for name in index.names()[::40]:
        recipe = index.load(name)
        ranks = cluster(recipe.cluster).world // recipe.layout.tp * recipe.layout.micro_batch_size
        if recipe.layout.strategy == "megatron_fsdp" or recipe.train.global_batch_size % ranks:
            with pytest.raises(InputError):
                frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
            continue
        written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        assert not said & {one.field for one in written.unmapped}, name


def test_export_names_the_program() -> None:
    recipe = sft("llama3_8b", 8)
    written = frameworks.export(frameworks.framework("deepspeed"), recipe, find("llama3_8b"), cluster("8xH100"))
    assert written.program.argv == ("train.py", "--deepspeed", "ds_config.json")
    assert any("replace train.py with your program" in note for note in written.notes)
