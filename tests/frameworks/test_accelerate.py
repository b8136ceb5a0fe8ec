"""Accelerate: findings in its configs, and recipes exported and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.export_recipe import write
from meshwright.models import find
from meshwright.recipes import index, pretrain

PATH = "config.yaml"
FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
num_machines: 1
num_processes: 8
machine_rank: 0
mixed_precision: bf16
rdzv_backend: static
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: true
  fsdp_activation_checkpointing: true
"""
FSDP1 = replaced(
    FSDP2,
    ("  fsdp_version: 2\n", "  fsdp_version: 1\n"),
    ("  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: FULL_SHARD\n"),
    (
        "  fsdp_activation_checkpointing: true\n",
        "  fsdp_sync_module_states: true\n  fsdp_backward_prefetch: BACKWARD_PRE\n",
    ),
)
ZERO = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 8
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: true
  offload_optimizer_device: none
  offload_param_device: none
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
"""
MESH = (
    FSDP2
    + """\
parallelism_config:
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
"""
)
MEGATRON = """\
distributed_type: MEGATRON_LM
num_processes: 8
mixed_precision: bf16
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_use_distributed_optimizer: true
  megatron_lm_num_micro_batches: 16
"""
PLAIN = "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: 'no'\n"


def broken(name: str, text: str, old: str, new: str, *expected: tuple[str, int], gpus: str | None = None) -> Case:
    return Case(name, replaced(text, (old, new)), expected, gpus)


SPREAD = """model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", device_map="auto")
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_steps=1000, max_length=2048, bf16=True)
"""
CASES = (
    Case("one model over all GPUs", SPREAD, [("accelerate.device-map", 1)], gpus="2xH100", path="train.py"),
    Case("valid FSDP2", FSDP2),
    Case("valid FSDP2 with a model", FSDP2, gpus="8xH100", model="llama3_8b"),
    Case("valid FSDP1", FSDP1, model="llama3_8b"),
    Case("valid DeepSpeed", ZERO, gpus="8xH100", model="llama3_8b"),
    Case("valid mesh", MESH, gpus="8xH100", model="llama3_8b"),
    Case("valid Megatron", MEGATRON, gpus="8xH100", model="llama3_8b"),
    Case("valid and replicated", PLAIN, model="llama32_1b"),
    Case("valid and small", "distributed_type: 'NO'\nfsdp_config: {}\ndeepspeed_config: {}\nmain_process_ip: null\n"),
    Case("valid, one process", "distributed_type: 'NO'\nnum_processes: 1\n"),
    Case(
        "an unused section is reported once",
        ZERO + "fsdp_config:\n  fsdp_state_dict_type: SHARDED\n  fsdp_min_num_params: 1e6\n",
        [("accelerate.unused-section", 14)],
    ),
    Case(
        "axes of one process",
        "distributed_type: 'NO'\nparallelism_config:\n  parallelism_config_dp_shard_size: 2\n",
        [("accelerate.unused-section", 3)],
    ),
    Case(
        "a compiler that DeepSpeed does not get",
        ZERO + "dynamo_config:\n  dynamo_backend: FAST\n",
        [("accelerate.unused-section", 14)],
    ),
    Case(
        "axes of a quoted number",
        replaced(MESH, ("num_processes: 8", "num_processes: '8'"), ("tp_size: 2", "tp_size: 4")),
        [("accelerate.mesh", 18)],
    ),
    broken("unknown key", FSDP2, "machine_rank: 0", "rank: 0", ("key.unknown", 6)),
    broken("unread key", FSDP2, "fsdp_offload_params: false", "fsdp_offload: false", ("key.unused", 13)),
    broken("nonexistent key", FSDP2, "fsdp_offload_params: false", "fsdp_cpu_offload: true", ("key.ignored", 13)),
    broken("unknown distributed type", FSDP2, "type: FSDP", "type: FDSP", ("value.invalid", 2)),
    broken("lower-case distributed type", FSDP2, "type: FSDP", "type: fsdp", ("value.invalid", 2)),
    broken(
        "no distributed type",
        PLAIN,
        "distributed_type: MULTI_GPU",
        "compute_environment: LOCAL_MACHINE",
        ("accelerate.no-distributed-type", 0),
    ),
    broken(
        "machines",
        FSDP2,
        "num_machines: 1",
        "num_machines: 3\nmain_process_ip: 10.0.0.1",
        ("accelerate.machines", 6),
    ),
    broken("rank", FSDP2, "machine_rank: 0", "machine_rank: 1", ("accelerate.machines", 6)),
    broken("no main process IP", FSDP2, "num_machines: 1", "num_machines: 2", ("accelerate.no-main-process-ip", 4)),
    broken("idle GPUs", FSDP2, "num_processes: 8", "num_processes: 4", ("accelerate.processes", 5), gpus="8xH100"),
    broken("too many", FSDP2, "num_processes: 8", "num_processes: 16", ("accelerate.processes", 5), gpus="8xH100"),
    broken("one process", PLAIN, "MULTI_GPU", "'NO'", ("accelerate.processes", 2)),
    broken("GPU ids", FSDP2, "num_machines: 1", "num_machines: 1\ngpu_ids: 0,1", ("accelerate.gpu-ids", 5)),
    broken("bare no", PLAIN, "'no'", "no", ("accelerate.unquoted-no", 3)),
    broken("string", PLAIN, "num_processes: 8", "num_processes: 8\nnum_machines: '1'", ("accelerate.quoted-value", 3)),
    broken("unknown precision", FSDP2, "bf16\nrdzv", "bf15\nrdzv", ("value.invalid", 7)),
    broken("fp8 backend", FSDP2, "mixed_precision: bf16", "mixed_precision: fp8", ("accelerate.fp8-backend-unset", 7)),
    Case("unused fp8_config", PLAIN + "fp8_config:\n  backend: TE\n", [("accelerate.unused-section", 5)]),
    broken("unknown rendezvous", FSDP2, "rdzv_backend: static", "rdzv_backend: sttic", ("value.invalid", 8)),
    broken("section of another type", FSDP2, "type: FSDP", "type: MULTI_GPU", ("accelerate.unused-section", 10)),
    Case("no section", "distributed_type: FSDP\nnum_processes: 8\n", [("accelerate.no-wrap-policy", 1)]),
    broken("no wrapping", FSDP2, "TRANSFORMER_BASED_WRAP", "NO_WRAP", ("accelerate.no-wrap-policy", 11)),
    broken("unknown policy", FSDP2, "TRANSFORMER_BASED_WRAP", "TRANSFORMER_WRAP", ("value.invalid", 11)),
    broken(
        "not a number",
        FSDP2,
        "TRANSFORMER_BASED_WRAP",
        "SIZE_BASED_WRAP\n  fsdp_min_num_params: 1e8",
        ("value.invalid", 12),
    ),
    broken(
        "key of another policy",
        FSDP2,
        "fsdp_offload_params: false",
        "fsdp_min_num_params: 2000",
        ("accelerate.wrap-policy-key", 13),
    ),
    broken(
        "sharding strategy of FSDP1",
        FSDP2,
        "fsdp_offload_params: false",
        "fsdp_sharding_strategy: SHARD_GRAD_OP",
        ("accelerate.fsdp1-key", 13),
    ),
    broken(
        "prefetch of FSDP1",
        FSDP2,
        "fsdp_offload_params: false",
        "fsdp_forward_prefetch: true",
        ("accelerate.fsdp1-key", 13),
    ),
    broken("harmless key of FSDP1", FSDP2, "fsdp_offload_params: false", "fsdp_use_orig_params: true"),
    broken("strategy name instead of a boolean", FSDP2, "forward: true", "forward: FULL_SHARD", ("value.invalid", 12)),
    broken(
        "a key of FSDP2",
        FSDP1,
        "fsdp_sharding_strategy: FULL_SHARD",
        "fsdp_reshard_after_forward: SHARD_GRAD_OP",
        ("accelerate.fsdp2-key", 12),
    ),
    broken("unknown sharding strategy", FSDP1, "FULL_SHARD", "FULLY_SHARD", ("value.invalid", 12)),
    broken("sharding strategy by number", FSDP1, "FULL_SHARD", "2"),
    broken("local state dict", FSDP2, "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", ("accelerate.fsdp-conflict", 14)),
    broken("unknown state dict type", FSDP2, "SHARDED_STATE_DICT", "SHARDED", ("value.invalid", 14)),
    broken(
        "RAM-efficient loading without sync",
        FSDP1,
        "fsdp_sync_module_states: true",
        "fsdp_sync_module_states: false",
        ("accelerate.fsdp-conflict", 16),
    ),
    broken("old name", FSDP1, "fsdp_backward_prefetch:", "fsdp_backward_prefetch_policy:", ("key.ignored", 17)),
    broken("unknown stage", ZERO, "zero_stage: 3", "zero_stage: 4", ("value.invalid", 7)),
    broken("flag of stage 3", ZERO, "zero_stage: 3", "zero_stage: 2", ("accelerate.stage-too-low", 8)),
    broken(
        "parameter offload without stage 3",
        replaced(ZERO, ("zero3_init_flag: true", "zero3_init_flag: false"), ("zero_stage: 3", "zero_stage: 2")),
        "offload_param_device: none",
        "offload_param_device: cpu",
        ("accelerate.stage-too-low", 10),
    ),
    broken(
        "no NVMe path",
        ZERO,
        "offload_param_device: none",
        "offload_param_device: nvme",
        ("accelerate.no-nvme-path", 10),
    ),
    broken("unknown device", ZERO, "offload_param_device: none", "offload_param_device: gpu", ("value.invalid", 10)),
    broken(
        "config file and other keys",
        ZERO,
        "zero3_init_flag: true",
        "deepspeed_config_file: ds.json",
        ("accelerate.config-file-conflict", 11),
    ),
    broken("mesh", MESH, "shard_size: 4", "shard_size: 2", ("accelerate.mesh", 18)),
    broken(
        "mesh of FSDP1",
        MESH,
        "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: true\n",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
        ("accelerate.mesh", 16),
    ),
    broken("nothing sharded", MESH, "dp_shard_size: 4", "dp_replicate_size: 4", ("accelerate.mesh", 18)),
    broken(
        "mesh without its prefix",
        MESH,
        "parallelism_config_tp_size: 2",
        "tp_size: 2",
        ("key.unused", 19),
        ("accelerate.mesh", 18),
    ),
    broken("degrees", MEGATRON, "pp_degree: 2", "pp_degree: 3", ("accelerate.degrees", 2)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert sorted(found(case, PATH, "accelerate")) == sorted(case.expected)


def test_every_rule_has_a_case() -> None:
    found_somewhere = {rule for case in CASES for rule, _ in case.expected}
    elsewhere = {"accelerate.trl-dataset-file", "accelerate.trl-no-test-split"}  # tests/frameworks/test_file_to_file.py
    elsewhere |= {"accelerate.argument-mismatch"}  # tests/first_hour/test_accelerate_deepspeed_keys.py
    elsewhere |= {"accelerate.wrapped-class"}  # tests/first_hour/test_trainer_dtypes.py
    elsewhere |= {"accelerate.unsloth-precision"}  # tests/first_hour/test_frozen_weights.py
    elsewhere |= {"accelerate.validation-memory"}  # tests/first_hour/test_one_consumer_card.py
    assert {rule.id for rule in frameworks.framework("accelerate").rules} <= found_somewhere | elsewhere


def test_finding_has_the_line_and_a_yaml_fix() -> None:
    content = frameworks.content_of(replaced(MESH, ("shard_size: 4", "shard_size: 2")), "config.yaml")
    (finding,) = frameworks.check(frameworks.framework("accelerate"), content).findings
    assert (finding.severity, finding.file, finding.line) == ("error", "config.yaml", 18)
    assert finding.fix == ("parallelism_config: {parallelism_config_dp_shard_size: 4}",)


@pytest.mark.parametrize(
    ("text", "strategy", "freed", "engine"),
    [
        (FSDP2, "fsdp2", True, "fsdp1"),
        (replaced(FSDP1, ("FULL_SHARD", "SHARD_GRAD_OP")), "fsdp2", False, "fsdp1"),
        (replaced(FSDP1, ("FULL_SHARD", "NO_SHARD")), "ddp", True, "fsdp1"),
        (ZERO, "fsdp2", True, "deepspeed"),
        (MESH, "fsdp2", True, "automodel"),
        (MEGATRON, "zero1", True, "megatron"),
        (PLAIN, "ddp", True, "fsdp1"),
    ],
)
def test_distributed_types_map_to_strategies(text: str, strategy: str, freed: bool, engine: str) -> None:
    result = frameworks.check(frameworks.framework("accelerate"), frameworks.content_of(text, "config.yaml"))
    layout = result.recipe.layout
    assert (layout.strategy, layout.reshard_after_forward, result.engine) == (strategy, freed, engine)


def test_hybrid_sharding_replicates_over_machines() -> None:
    text = replaced(FSDP1, ("FULL_SHARD", "HYBRID_SHARD"), ("num_processes: 8", "num_processes: 32"),
                    ("num_machines: 1", "num_machines: 4\nmain_process_ip: 10.0.0.1"))  # fmt: skip
    result = frameworks.check(
        frameworks.framework("accelerate"), frameworks.content_of(text, "c.yaml"), gpus="4x8xH100"
    )
    assert (result.findings, result.recipe.layout.dp_replicate) == ((), 4)


def script(folder: Path, config: str, command: str) -> frameworks.Content:
    (folder / "config.yaml").write_text(config)
    (folder / "run.sh").write_text(command)
    return frameworks.open_file(folder / "run.sh")


def test_command_overrides_its_config(tmp_path: Path) -> None:
    command = (
        "accelerate launch --config_file config.yaml --num_processes 16 --num_machines 2 \\\n"
        "  --main_process_ip $HOST --machine_rank 0 train.py \\\n"
        "  --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 2\n"
    )
    content = script(tmp_path, FSDP2, command)
    result = frameworks.check(frameworks.detect_framework(content), content, gpus="2x8xH100")
    assert result.findings == ()
    assert (result.recipe.layout.micro_batch_size, result.recipe.train.global_batch_size) == (2, 32)
    assert result.model is not None
    assert result.model.name == find("llama3_8b").name


def test_double_checkpointing_is_reported(tmp_path: Path) -> None:
    content = script(tmp_path, FSDP2, "accelerate launch --config_file config.yaml train.py --gradient_checkpointing\n")
    result = frameworks.check(frameworks.detect_framework(content), content)
    found = [(f.rule, Path(f.file).name, f.line) for f in result.findings]
    assert found == [("accelerate.double-checkpointing", "config.yaml", 16)]


def test_referenced_deepspeed_config_is_checked(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": "auto",\n"zero_optimization": {"stage": 2, "stag": 1}}'
    )
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    (tmp_path / "config.yaml").write_text(text)
    result = frameworks.check(frameworks.framework("accelerate"), frameworks.open_file(tmp_path / "config.yaml"))
    assert [(f.rule, Path(f.file).name, f.line) for f in result.findings] == [("key.unknown", "ds.json", 2)]
    assert (result.recipe.layout.strategy, result.recipe.layout.reshard_after_forward) == ("fsdp2", False)


def test_referenced_deepspeed_config_must_be_json(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text(ZERO)
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "run.sh"
    script.write_text(
        "accelerate launch --use_deepspeed --deepspeed_config_file zero3.yaml --num_processes 8 train.py\n"
    )
    result = frameworks.check(frameworks.framework("accelerate"), frameworks.open_file(script))
    assert [(f.rule, f.line) for f in result.findings] == [("accelerate.not-json", 1)]


def test_missing_config_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("accelerate launch --config_file none.yaml train.py\n")
    found = frameworks.check(frameworks.framework("accelerate"), frameworks.open_file(tmp_path / "run.sh"))
    assert [(one.rule, one.severity) for one in found.findings] == [("launch.missing-config", "warning")]


BLANK: dict[str, object] = {"layout.pp": 1, "layout.vp": 1, "layout.ep": 1, "layout.etp": 1, "layout.sp": False}
BLANK |= {"layout.dp_shard": -1, "layout.stage_layers": (), "layout.pp_schedule": "1f1b", "layout.recompute": "none"}
BLANK |= {"layout.offload": "none", "precision.reduce": "bf16", "precision.grads": "fp32", "layout.dp_replicate": 1}
BLANK |= {"layout.cp": 1, "layout.tp": 1, "layout.strategy": "fsdp2", "precision.master": "fp32"}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_typed_setting_of_the_program_is_no_key_of_the_file(recompute: str) -> None:
    content = frameworks.content_of(ZERO.replace("num_machines: 1", "num_machines: 2"), PATH)
    typed = ["layout.micro_batch_size=1", "data.seq_length=2048", f"layout.recompute={recompute}"]
    accelerate, model = frameworks.framework("accelerate"), find("llama3-8b")
    result = frameworks.check(accelerate, content, gpus="8xH100", model=model, overrides=typed)
    untyped = frameworks.check(accelerate, content, gpus="8xH100", model=model)
    assert result.recipe.layout.recompute == recompute
    assert {(one.rule, one.severity) for one in result.findings} <= {
        (one.rule, one.severity) for one in untyped.findings
    }


FIELDS = draws(
    layout__reshard_after_forward=st.booleans(),
    layout__tp=st.sampled_from([1, 2, 4]),
    layout__dp_replicate=st.sampled_from([1, 2]),
    layout__offload=st.sampled_from(["none", "params"]),
    layout__recompute=st.sampled_from(["none", "full"]),
    precision__compute=st.sampled_from(["bf16", "fp16"]),
    precision__matmul=st.sampled_from(["same"]),
    kernels__compile=st.booleans(),
)
CONTEXT = st.sampled_from(
    [{}, {"layout.cp": 2, "layout.cp_comm": "allgather"}, {"layout.cp": 4, "layout.cp_comm": "ring"}]
)
PROGRAM = {"layout.micro_batch_size", "train.global_batch_size"}


@settings(max_examples=20)
@given(FIELDS, CONTEXT, st.sampled_from(["llama3_8b", "qwen3_30b_a3b"]))
def test_exports_round_trip(values: dict[str, object], context: dict[str, object], model: str) -> None:
    recipe = changed(pretrain(model, 64, global_batch_size=512), {**BLANK, **context, **values})
    lost = unmapped("accelerate", recipe, model, "8x8xH100")
    written = write(frameworks.framework("accelerate"), recipe, find(model), cluster("8x8xH100"))
    listed = {one.field for one in written.unmapped}
    assert not lost.keys() & ({*values, *context, "layout.strategy", "layout.dp_shard"} - PROGRAM)
    assert not listed & {*values, *context}


@pytest.mark.parametrize(
    "values",
    [
        {"layout.strategy": "ddp", "precision.reduce": "fp32", "precision.compute": "fp32"},
        {"layout.strategy": "zero1", "precision.grads": "bf16", "layout.offload": "optimizer"},
        {"precision.matmul": "fp8_tensor"},
        {"precision.matmul": "fp8_delayed"},
    ],
)
def test_other_distributed_types_round_trip(values: dict[str, object]) -> None:
    recipe = changed(pretrain("llama3_8b", 8, global_batch_size=64), {**BLANK, **values})
    written = frameworks.export(frameworks.framework("accelerate"), recipe, find("llama3_8b"), cluster("8xH100"))
    assert not {*values} & {one.field for one in written.unmapped}


def test_program_gets_the_launcher_environment() -> None:
    values = {"layout.tp": 2, "layout.recompute": "full"}
    recipe = changed(pretrain("llama3_8b", 8, global_batch_size=64), {**BLANK, **values})
    program = frameworks.export(
        frameworks.framework("accelerate"), recipe, find("llama3_8b"), cluster("8xH100")
    ).program
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
    }
    assert expected.items() <= program.env.items()
    assert program.argv[0] == "train.py"


def test_command_options_do_not_conflict_with_a_deepspeed_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}')
    command = (
        "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --mixed_precision bf16 \\\n"
        "  --num_machines 1 --num_processes 8 train.py --learning_rate 2e-5 --use_lora\n"
    )
    (tmp_path / "run.sh").write_text(command)
    content = frameworks.open_file(tmp_path / "run.sh")
    result = frameworks.check(frameworks.detect_framework(content), content)
    assert (result.findings, result.engine, result.recipe.goal) == ((), "deepspeed", "peft")
    assert (result.recipe.layout.strategy, result.recipe.optimizer.lr) == ("zero1", 2e-5)


def test_shipped_recipes_lose_only_the_listed_fields() -> None:
    theirs = frameworks.framework("accelerate")
    for name in index.names()[::40]:
        recipe = index.load(name)
        layout = recipe.layout
        if layout.strategy == "megatron_fsdp" or layout.pp * layout.ep > 1:
            with pytest.raises(InputError):
                frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
            continue
        written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        assert "layout.strategy" not in {one.field for one in written.unmapped}, name
