"""NeMo AutoModel: findings in its configs and commands, and recipes exported and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.mapping import to_settings
from meshwright.frameworks.to_recipe import import_recipe
from meshwright.models import find
from meshwright.recipes import index, load, peft, pretrain, sft
from meshwright.recipes.case import model_of

FOLDER = Path(__file__).parent / "automodel"
SFT, EXPERTS, STAGES, LORA, TOKENS, UNKNOWN, DRAFTER = (
    (FOLDER / f"{name}.yaml").read_text()
    for name in ("sft", "experts", "stages", "lora", "tokens_tp1cp2", "unknown_model", "drafter")
)
PATH = "run.yaml"


def line(text: str, part: str) -> int:
    """Return the 1-based line of a part that occurs once."""
    assert text.count(part) == 1, part
    return text[: text.index(part)].count("\n") + 1


def broken(
    name: str, text: str, pairs: list[tuple[str, str]], expected: list[tuple[str, str]], gpus: str | None = None
) -> Case:
    """Return a config with one mistake; the lines of its findings are given by their text."""
    changed_text = replaced(text, *pairs)
    places = [(rule, line(changed_text, part) if part else 0) for rule, part in expected]
    return Case(name, changed_text, places, gpus)


CASES = (
    Case("valid fine-tuning", SFT, gpus="8xH100"),
    Case("valid without GPUs", SFT),
    Case("valid experts", EXPERTS, gpus="8xH200"),
    Case("valid stages", STAGES, gpus="8x8xH100"),
    Case("valid adapters", LORA, gpus="8xH100"),
    Case("valid token files with Megatron-FSDP", TOKENS, gpus="2x8xH100", path="tokens_tp1cp2.yaml"),
    Case("valid unknown model", UNKNOWN, gpus="8xH100"),
    Case("valid other recipe", DRAFTER, gpus="8xH100"),
    Case(
        "valid encoder that names no recipe",
        replaced(
            SFT,
            ("recipe: TrainFinetuneRecipeForNextTokenPrediction\n", "temperature: 0.02\n"),
            ("NeMoAutoModelForCausalLM", "NeMoAutoModelBiEncoder"),
        ),
        gpus="8xH100",
    ),
    Case(
        "valid keys that came later",
        replaced(
            SFT,
            ("save_consolidated: final", "save_consolidated: final\n  cpu_offload: true\n  trainable_only: false"),
            ("packed_sequence_size: 0", "packed_sequence_size: 0\n  pad_to_multiple_of: 2"),
        ),
        gpus="8xH100",
    ),
    Case(
        "valid, with the words of YAML 1.1", replaced(SFT, ("checkpointing: true", "checkpointing: on")), gpus="8xH100"
    ),
    Case("valid rowwise fp8", SFT + "\nfp8:\n  enabled: true\n  recipe_name: rowwise\n", gpus="8xH100"),
    # the strategy
    broken(
        "unknown strategy",
        SFT,
        [("strategy: fsdp2", "strategy: fsdp")],
        [("automodel.strategy-unknown", "strategy: fsdp")],
        "8xH100",
    ),
    broken(
        "option of another strategy, set to false",
        SFT,
        [("strategy: fsdp2", "strategy: megatron_fsdp"), ("activation_checkpointing: true", "tp_plan: null")],
        [("automodel.strategy-option", "sequence_parallel: false"), ("automodel.strategy-option", "tp_plan: null")],
        "8xH200",
    ),
    broken(
        "DDP with tensor parallelism",
        LORA,
        [("strategy: ddp", "strategy: ddp\n  tp_size: 2")],
        [("automodel.strategy-conflict", "strategy: ddp")],
        "8xH100",
    ),
    broken(
        "Megatron-FSDP ignores checkpointing",
        TOKENS,
        [("zero_dp_strategy: 3", "activation_checkpointing: true")],
        [("automodel.checkpointing-ignored", "activation_checkpointing: true")],
        "2x8xH100",
    ),
    broken(
        "Megatron-FSDP with selective checkpointing",
        TOKENS,
        [("zero_dp_strategy: 3", "activation_checkpointing: selective")],
        [("automodel.strategy-conflict", "activation_checkpointing: selective")],
        "2x8xH100",
    ),
    broken(
        "parameters are not sharded",
        TOKENS,
        [("zero_dp_strategy: 3", "zero_dp_strategy: 1")],
        [("automodel.not-sharded", "zero_dp_strategy: 1")],
        "2x8xH100",
    ),
    broken(
        "removed NaN check",
        TOKENS,
        [("zero_dp_strategy: 3", "check_for_nan_in_grad: true")],
        [("automodel.nan-check", "check_for_nan_in_grad: true")],
        "2x8xH100",
    ),
    broken(
        "unknown option", SFT, [("tp_size: 1", "tensor_parallel: 1")], [("key.unknown", "tensor_parallel: 1")], "8xH100"
    ),
    broken(
        "unknown checkpointing value",
        SFT,
        [("activation_checkpointing: true", "activation_checkpointing: maybe")],
        [("value.invalid", "activation_checkpointing: maybe")],
        "8xH200",
    ),
    broken(
        "conflicting scopes",
        SFT,
        [("sequence_parallel: false", "activation_checkpointing_scope: [all, vision]")],
        [("automodel.checkpointing-scope", "activation_checkpointing_scope")],
        "8xH100",
    ),
    # the mesh
    broken(
        "sizes below one", SFT, [("cp_size: 1", "cp_size: 0")], [("automodel.size-below-one", "cp_size: 0")], "8xH100"
    ),
    broken("GPUs left out", SFT, [("dp_size: none", "dp_size: 4")], [("automodel.mesh", "dp_size: 4")], "8xH100"),
    broken("mesh does not fit", SFT, [("cp_size: 1", "cp_size: 3")], [("automodel.mesh", "tp_size: 1")], "8xH100"),
    broken(
        "replicas without sharding",
        SFT,
        [("dp_size: none", "dp_replicate_size: 8")],
        [("automodel.replicas", "dp_replicate_size: 8")],
        "8xB300",
    ),
    broken(
        "more expert ranks than ranks",
        EXPERTS,
        [("ep_size: 8", "ep_size: 32")],
        [("automodel.expert-mesh", "ep_size: 32")],
        "16xH200",
    ),
    broken(
        "experts not divisible",
        replaced(EXPERTS, ("global_batch_size: 64", "global_batch_size: 72")),
        [("ep_size: 8", "ep_size: 24")],
        [("moe.experts-divide", "ep_size: 24")],
        "3x8xH200",
    ),
    broken(
        "batch", SFT, [("local_batch_size: 1", "local_batch_size: 3")], [("automodel.batch", "local_batch_size: 3")]
    ),
    broken(
        "more ranks than samples",
        UNKNOWN,
        [("global_batch_size: 32", "global_batch_size: 8")],
        [("automodel.batch", "local_batch_size: 4")],
        "2x8xH100",
    ),
    # stages
    broken(
        "no pipeline block",
        UNKNOWN,
        [("  pipeline: {}\n", "")],
        [("automodel.pipeline-missing", "pp_size: 2")],
        "8xH100",
    ),
    broken(
        "unused pipeline block",
        UNKNOWN,
        [("pp_size: 2\n  pipeline: {}", "pp_size: 1\n  pipeline: {pp_schedule: gpipe, pp_microbatch_size: 3}")],
        [("automodel.pipeline-ignored", "pp_schedule: gpipe")],
        "8xH100",
    ),
    broken(
        "schedule from the guides",
        STAGES,
        [("pp_schedule: interleaved1f1b", "pp_schedule: v_schedule"), ("    layers_per_stage: 4\n", "")],
        [("automodel.schedule-unknown", "pp_schedule: v_schedule"), ("memory.tight", "local_batch_size: 16")],
        "8x8xH100",
    ),
    broken(
        "schedule with underscores",
        UNKNOWN,
        [("pipeline: {}", "pipeline: {pp_schedule: interleaved_1f1b}")],
        [("automodel.schedule-unknown", "pp_schedule: interleaved_1f1b")],
    ),
    broken(
        "CSV schedule without a name",
        UNKNOWN,
        [("pipeline: {}", "pipeline:\n    pp_schedule_csv: order.csv\n    pp_schedule: null")],
        [("automodel.schedule-unknown", "pp_schedule: null")],
    ),
    broken(
        "too few micro batches for the stages",
        STAGES,
        [("local_batch_size: 16", "local_batch_size: 2")],
        [("automodel.too-few-micro-batches", "local_batch_size: 2")],
        "8x8xH100",
    ),
    broken(
        "micro batches in unequal rounds",
        STAGES,
        [("local_batch_size: 16", "local_batch_size: 14"), ("global_batch_size: 128", "global_batch_size: 112")],
        [("automodel.micro-batch-rounds", "local_batch_size: 14")],
        "8x8xH100",
    ),
    broken(
        "micro batches not divisible",
        UNKNOWN,
        [("pipeline: {}", "pipeline: {pp_microbatch_size: 3}")],
        [("automodel.too-few-micro-batches", "local_batch_size: 4"), ("value.invalid", "local_batch_size: 4")],
    ),
    broken(
        "stages not divisible",
        STAGES,
        [("layers_per_stage: 4", "layers_per_stage: 3")],
        [("automodel.stages-uneven", "layers_per_stage: 3")],
        "8x8xH100",
    ),
    broken(
        "stage dtype",
        STAGES,
        [("layers_per_stage: 4", "layers_per_stage: 4\n    dtype: float32")],
        [("automodel.stage-dtype", "dtype: float32\n\nloss_fn")],
        "8x8xH100",
    ),
    broken(
        "one virtual stage in an interleaved schedule",
        STAGES,
        [("layers_per_stage: 4", "layers_per_stage: 20")],
        [
            ("schedule.several-chunks", "pp_schedule: interleaved1f1b"),
            ("schedule.no-interleaving", "pp_schedule: interleaved1f1b"),
        ],
        "8x8xH100",
    ),
    # values that nothing reads
    broken(
        "top-level compile block",
        SFT,
        [("loss_fn:", "compile:\n  enabled: true\n\nloss_fn:")],
        [("automodel.compile-ignored", "enabled: true\n\nloss_fn")],
        "8xH100",
    ),
    broken(
        "names of PEFT",
        LORA,
        [("  dim: ", "  lora_rank: "), ("  alpha: ", "  lora_alpha: ")],
        [("automodel.target-keyword", "lora_rank"), ("automodel.target-keyword", "lora_alpha")],
        "8xH100",
    ),
    Case("the default seed in a block that is not read", replaced(SFT, ("seed: 7", "rng:\n  seed: 42")), gpus="8xH100"),
    broken("ignored seed", SFT, [("seed: 7", "rng:\n  seed: 7")], [("automodel.rng-ignored", "seed: 7")], "8xH100"),
    broken(
        "Slurm block",
        SFT,
        [("seed: 7", "seed: 7\nslurm:\n  nodes: 2\n  time: 01:00:00")],
        [("automodel.block-ignored", "nodes: 2")],
        "8xH100",
    ),
    broken(
        "misspelled block",
        SFT,
        [("lr_scheduler:", "lr_schedule:")],
        [("automodel.block-ignored", "lr_decay_style")],
        "8xH100",
    ),
    broken(
        "checkpoint interval from the guides",
        SFT,
        [("ckpt_every_steps: 100", "checkpoint_interval: 100")],
        [("key.removed", "checkpoint_interval: 100")],
        "8xH100",
    ),
    broken(
        "moe block without expert parallelism",
        EXPERTS,
        [("ep_size: 8", "ep_size: 1")],
        [("automodel.moe-ignored", "reshard_after_forward: true")],
        "8xB300",
    ),
    # the model
    broken(
        "async tensor parallelism without sequence parallelism",
        SFT,
        [("tp_size: 1", "tp_size: 2"), ("sequence_parallel: false", "enable_async_tensor_parallel: true")],
        [("automodel.async-tensor-parallel", "enable_async_tensor_parallel: true")],
        "8xH100",
    ),
    broken(
        "recomputed router",
        EXPERTS,
        [("ignore_router_for_ac: true", "ignore_router_for_ac: false")],
        [("automodel.router-recomputed", "ignore_router_for_ac: false")],
        "8xH200",
    ),
    broken(
        "tensor parallelism of an MoE model from config",
        EXPERTS,
        [("from_pretrained\n  pretrained", "from_config\n  pretrained"), ("tp_size: 1", "tp_size: 2")],
        [("automodel.expert-plan", "tp_size: 2"), ("automodel.experts-with-tensor-parallelism", "tp_size: 2")],
        "8xH200",
    ),
    broken(
        "sequence parallelism of an MoE model",
        EXPERTS,
        [("tp_size: 1", "tp_size: 2\n  sequence_parallel: true")],
        [
            ("automodel.experts-with-tensor-parallelism", "tp_size: 2"),
            ("sequence_parallel.unsupported-by-moe", "sequence_parallel: true"),
        ],
        "8xH200",
    ),
    broken(
        "packing with context parallelism",
        SFT,
        [("cp_size: 1", "cp_size: 2"), ("packed_sequence_size: 0", "packed_sequence_size: 2048")],
        [("automodel.cp-packing", "packed_sequence_size: 2048")],
        "8xH100",
    ),
    broken(
        "MoE attention with context parallelism",
        EXPERTS,
        [("attn: te", "attn: sdpa"), ("cp_size: 1", "cp_size: 2"), ("  packed_sequence_size: 4096", "  pack_size: 0")],
        [("automodel.cp-attention", "attn: sdpa")],
        "16xH200",
    ),
    broken(
        "flash attention with context parallelism",
        SFT,
        [("cp_size: 1", "cp_size: 2"), ("torch_dtype: float32", "attn_implementation: flash_attention_2")],
        [("automodel.cp-attention", "attn_implementation: flash_attention_2")],
        "8xH100",
    ),
    broken(
        "disabled packing",
        SFT,
        [("torch_dtype: float32", "force_hf: true"), ("packed_sequence_size: 0", "packed_sequence_size: 2048")],
        [("automodel.packing-disabled", "packed_sequence_size: 2048")],
        "8xH100",
    ),
    broken(
        "disabled kernels",
        SFT,
        [("torch_dtype: float32", "use_liger_kernel: true"), ("cp_size: 1", "cp_size: 2")],
        [("automodel.kernel-disabled", "use_liger_kernel: true")],
        "8xH100",
    ),
    broken(
        "torch_save is not consolidated",
        SFT,
        [("model_save_format: safetensors", "model_save_format: torch_save")],
        [("automodel.not-consolidated", "save_consolidated: final")],
        "8xH100",
    ),
    broken(
        "undetected packing",
        EXPERTS,
        [("pp_size: 1", "patch_is_packed_sequence: true")],
        [("automodel.packing-undetected", "patch_is_packed_sequence: true")],
        "8xH200",
    ),
    broken(
        "expert kernels without their dispatcher",
        EXPERTS,
        [("experts: torch_mm", "experts: te"), ("dispatcher: deepep", "dispatcher: torch")],
        [("automodel.experts-replaced", "experts: te")],
        "8xH200",
    ),
    broken(
        "te_fp8 without te layers",
        EXPERTS,
        [("linear: te", "linear: torch\n    te_fp8: {recipe: current}")],
        [("automodel.te-fp8", "te_fp8: {recipe: current}")],
        "8xH200",
    ),
    broken(
        "bf16 moments",
        SFT,
        [("torch_dtype: float32", "torch_dtype: bfloat16")],
        [("automodel.bf16-moments", "torch_dtype: bfloat16")],
        "8xH100",
    ),
    broken(
        "unknown optimizer argument",
        SFT,
        [("betas: [0.9, 0.95]", "min_lr: 1.0e-7")],
        [("automodel.optimizer-argument", "min_lr: 1.0e-7")],
        "8xH100",
    ),
    broken(
        "warmup too long",
        SFT,
        [("lr_warmup_steps: 50", "lr_warmup_steps: 500")],
        [("automodel.learning-rate", "lr_warmup_steps: 500")],
        "8xH100",
    ),
    broken(
        "WSD without decay steps",
        TOKENS,
        [("  wsd_decay_steps: 2000\n", "")],
        [("automodel.learning-rate", "lr_decay_style: WSD")],
        "2x8xH100",
    ),
    broken("unresolved value", SFT, [("global_batch_size: 64", "global_batch_size: ${BATCH}")], [], "8xH100"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert sorted(found(case, PATH, "automodel")) == sorted(case.expected)


def test_file_name_with_another_layout_is_reported() -> None:
    case = Case("name", SFT, gpus="8xH100", path="llama_8b_tp2_pp1.yaml")
    assert found(case, PATH, "automodel") == [("automodel.name-mismatch", line(SFT, "tp_size: 1"))]


SCRIPTS = {"start.sh": [], "start_torchrun.sh": [("automodel.mesh", 4)], "start_old.sh": [("automodel.old-command", 2)]}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_checked_with_their_configs(name: str) -> None:
    case = Case(name, (FOLDER / name).read_text())
    assert found(case, str(FOLDER / name), "automodel", FOLDER) == SCRIPTS[name]


def test_command_overrides_have_their_own_lines() -> None:
    content = frameworks.open_file(FOLDER / "start.sh")
    reading = import_recipe(frameworks.framework("automodel"), content)
    assert (reading.recipe.layout.tp, reading.recipe.layout.micro_batch_size, reading.recipe.train.seed) == (2, 2, 3)
    assert reading.parsed.settings["distributed.tp_size"].location == f"{FOLDER / 'start.sh'}:8"
    assert reading.parsed.settings["optimizer.lr"].file == str(FOLDER / "sft.yaml")
    assert reading.parsed.gpu_request.count == 8


def test_command_requires_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text(replaced(SFT, ("recipe: TrainFinetuneRecipeForNextTokenPrediction\n", "")))
    case = Case("no recipe", "automodel plain.yaml --nproc-per-node 8\n")
    assert found(case, str(tmp_path / "run.sh"), "automodel", tmp_path) == [("automodel.no-recipe", 0)]


def test_script_without_its_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        found(Case("missing", "automodel missing.yaml\n"), str(tmp_path / "run.sh"), "automodel", tmp_path)


def test_values_match_the_loader() -> None:
    content = frameworks.content_of(replaced(SFT, ("seed: 7", "seed: 0o10")), PATH)
    parsed = frameworks.framework("automodel").parse(content)
    assert parsed.settings["optimizer.lr"].value == 1e-5  # a string in YAML 1.1, a number in AutoModel
    assert parsed.settings["dataset.path_or_dataset_id"].value == "data/chat.jsonl"
    assert parsed.settings["checkpoint.checkpoint_dir"].unresolved == ""
    assert parsed.settings["distributed.dp_size"].value is None


def test_unresolved_values_are_reported() -> None:
    case = CASES[-1]
    result = frameworks.check(frameworks.framework("automodel"), frameworks.content_of(case.text, PATH), gpus="8xH100")
    assert [(one.key, one.line) for one in result.unresolved] == [("step_scheduler.global_batch_size", 6)]
    assert result.estimate is None


@pytest.mark.parametrize(
    ("text", "goal", "model"),
    [
        (SFT, "sft", "llama31_8b"),
        (LORA, "peft", "qwen3_8b"),
        (TOKENS, "pretrain", "llama32_3b"),
        (UNKNOWN, "sft", None),
    ],
)
def test_goal_and_model(text: str, goal: str, model: str | None) -> None:
    parsed = frameworks.framework("automodel").parse(frameworks.content_of(text, PATH))
    assert (parsed.goal, parsed.model and parsed.model.name) == (goal, model)


def test_virtual_stages_are_derived_from_layers_per_stage() -> None:
    reading = import_recipe(frameworks.framework("automodel"), frameworks.content_of(STAGES, PATH))
    assert (reading.recipe.layout.vp, reading.recipe.layout.pp_schedule) == (5, "interleaved_1f1b")


def test_lora_targets_are_matched_by_module_name() -> None:
    reading = import_recipe(frameworks.framework("automodel"), frameworks.content_of(LORA, PATH))
    assert reading.recipe.peft.targets == ("qkv", "proj")


BASES = {
    "llama31_8b": (pretrain("llama31_8b", 8), sft("llama31_8b", 8), peft("llama31_8b", 8)),
    "qwen3_30b_a3b": (pretrain("qwen3_30b_a3b", 16), sft("qwen3_30b_a3b", 16), peft("qwen3_30b_a3b", 8)),
}
PLAIN = draws(
    train__seed=st.integers(0, 2**31),
    train__steps=st.integers(1000, 10**6),
    train__eval_every=st.sampled_from([0, 10, 500]),
    optimizer__lr=st.floats(1e-7, 1e-2),
    optimizer__weight_decay=st.floats(0, 0.3),
    optimizer__beta2=st.floats(0.9, 0.999),
    optimizer__eps=st.sampled_from([1e-8, 1e-5]),
    optimizer__clip_grad=st.sampled_from([0.5, 1.0, 2.0]),
    schedule__name=st.sampled_from(["cosine", "linear", "constant", "wsd", "inverse_sqrt"]),
    schedule__warmup_steps=st.integers(0, 900),
    schedule__decay_steps=st.sampled_from([0, 950]),
    schedule__min_lr=st.floats(0, 1e-4),
    data__seq_length=st.sampled_from([512, 4096]),
    data__packing=st.booleans(),
    data__workers=st.integers(0, 8),
    data__train_on=st.sampled_from(["answers", "last_answer"]),
    data__split=st.sampled_from(["train", "train_sft"]),
    data__group_by_length=st.booleans(),
    precision__master=st.sampled_from(["fp32", "bf16"]),
    precision__reduce=st.sampled_from(["fp32", "bf16"]),
    precision__matmul=st.sampled_from(["same", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8"]),
    layout__recompute=st.sampled_from(["none", "selective", "full"]),
    layout__defer_grad_sync=st.booleans(),
    layout__reshard_after_forward=st.booleans(),
    layout__offload=st.sampled_from(["none", "params"]),
    layout__tp=st.sampled_from([1, 2]),
    layout__cp=st.sampled_from([1, 2]),
    kernels__attention=st.sampled_from(["auto", "flash", "te", "cudnn", "sdpa", "flex", "eager"]),
    kernels__compile=st.booleans(),
    kernels__loss=st.sampled_from(["vocab_parallel", "plain", "chunked", "fused_linear"]),
    checkpoint__save_every=st.sampled_from([0, 10, 1000]),
    checkpoint__keep=st.integers(1, 9),
    checkpoint__async_save=st.booleans(),
    checkpoint__export=st.sampled_from(["none", "sharded", "consolidated"]),
    peft__rank=st.integers(1, 256),
    peft__alpha=st.sampled_from([8.0, 32.0]),
    peft__method=st.sampled_from(["lora", "dora", "qlora"]),
    peft__targets=st.sampled_from([("qkv",), ("qkv", "proj"), ("fc1", "fc2"), ("qkv", "proj", "fc1", "fc2")]),
    moe__dispatcher=st.sampled_from(["allgather", "deepep", "hybridep"]),
    moe__router_dtype=st.sampled_from(["fp32", "bf16"]),
    moe__grouped_gemm=st.booleans(),
)
STAGED = st.sampled_from(
    [
        {},
        {"layout.pp": 2, "layout.pp_schedule": "gpipe"},
        {"layout.pp": 2, "layout.vp": 2, "layout.pp_schedule": "interleaved_1f1b"},
        {"layout.pp": 2, "layout.vp": 4, "layout.pp_schedule": "interleaved_1f1b"},
        {"layout.pp": 2, "layout.vp": 2, "layout.pp_schedule": "zbv"},
    ]
)


@settings(max_examples=30)
@given(st.sampled_from(sorted(BASES)), st.integers(0, 2), PLAIN, STAGED)
def test_exports_round_trip(model: str, goal: int, values: dict[str, object], staged: dict[str, object]) -> None:
    base = BASES[model][goal]
    whole = {"train.global_batch_size": 256, "layout.micro_batch_size": 2, "layout.dp_shard": -1}
    recipe = changed(base, {**whole, **values, **staged})
    assert unmapped("automodel", recipe, model, "8x8xH100") == {}


def test_shipped_recipes_round_trip_or_list_lost_fields() -> None:
    refused = set()
    for name in sorted(index.names())[::10]:
        recipe = load(name)
        try:
            lost = unmapped("automodel", recipe, recipe.model, recipe.cluster)
        except InputError as error:
            refused.add(error.reason)
            continue
        assert lost == {}, name
    assert refused <= {"AutoModel builds a model by its Hugging Face id or folder, and this shape has neither"}


def test_exports_have_no_findings() -> None:
    recipe = pretrain("llama31_8b", 8)
    theirs, on = frameworks.framework("automodel"), cluster("8xH100")
    written = frameworks.export(theirs, recipe, model_of(recipe), on)
    ((name, text),) = written.files.items()
    assert text.startswith(f"# {recipe.name} (pretraining) for NeMo AutoModel (commit 36044ad")
    assert [part.split(":")[0] for part in text.splitlines() if part and not part.startswith((" ", "#"))][:4] == [
        "recipe",
        "step_scheduler",
        "dist_env",
        "seed",
    ]
    assert written.program.argv == ("-m", "nemo_automodel.cli.app", name)
    result = frameworks.check(theirs, frameworks.content_of(text, name), gpus="8xH100")
    assert [finding for finding in result.findings if finding.rule.startswith(("automodel.", "key.", "value."))] == []


def test_pipeline_local_batch_holds_the_whole_step() -> None:
    recipe = changed(
        sft("llama31_8b", 8), {"layout.pp": 2, "train.global_batch_size": 64, "layout.micro_batch_size": 2}
    )
    written = frameworks.export(frameworks.framework("automodel"), recipe, find("llama31_8b"), cluster("8xH100"))
    text = next(iter(written.files.values()))
    assert "local_batch_size: 16" in text
    assert "pp_microbatch_size: 2" in text


def test_mp_policy_is_written_in_full() -> None:
    recipe = changed(sft("llama31_8b", 8), {"precision.reduce": "bf16"})
    written = frameworks.export(frameworks.framework("automodel"), recipe, find("llama31_8b"), cluster("8xH100"))
    text = next(iter(written.files.values()))
    assert "param_dtype: bfloat16\n    reduce_dtype: bfloat16\n    output_dtype: bfloat16" in text


def test_unset_reduce_dtype_follows_param_dtype() -> None:
    text = replaced(SFT, ("sequence_parallel: false", "mp_policy: {param_dtype: bfloat16}"))
    assert (
        import_recipe(frameworks.framework("automodel"), frameworks.content_of(text, PATH)).recipe.precision.reduce
        == "bf16"
    )


def test_strategies_get_only_their_own_options() -> None:
    recipe = changed(sft("llama31_8b", 8), {"layout.strategy": "ddp", "precision.reduce": "fp32"})
    written = frameworks.export(frameworks.framework("automodel"), recipe, find("llama31_8b"), cluster("8xB200"))
    text = next(iter(written.files.values()))
    assert "sequence_parallel" not in text
    assert "mp_policy" not in text


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("ep", [1, 8])
def test_resharding_is_read_as_it_is_written(ep: int, reshards: bool) -> None:
    recipe = changed(load("qwen3_30b_a3b_sft_config"), {"layout.ep": ep, "layout.reshard_after_forward": reshards})
    automodel, field = frameworks.framework("automodel"), "layout.reshard_after_forward"
    settings, _ = to_settings(automodel, recipe, [field])
    text = f"distributed:\n  ep_size: {ep}\n  reshard_after_forward: {str(*settings.values()).lower()}\n"
    read = import_recipe(automodel, frameworks.content_of(text, "config.yaml"), model_of(recipe)).recipe
    assert read.layout.reshard_after_forward is reshards


def test_a_file_without_a_recipe_and_with_a_vision_language_model() -> None:
    text = """
step_scheduler: {global_batch_size: 8, local_batch_size: 1}
model:
  _target_: nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained
  pretrained_model_name_or_path: google/gemma-3-4b-it
distributed: {_target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager, tp_size: 1}
dataset:
  _target_: nemo_automodel.components.datasets.vlm.datasets.make_medpix_dataset
  path_or_dataset: mmoukouba/MedPix-VQA
optimizer: {_target_: torch.optim.AdamW, lr: 1e-5}
freeze_config: {freeze_vision_tower: true, freeze_language_model: false}
"""
    found = frameworks.check(frameworks.framework("automodel"), frameworks.content_of(text, "vlm.yaml"))
    assert found.recipe.data.images
    assert "vision.freeze-without-images" not in {one.rule for one in found.findings}
    assert any("a VLM recipe" in one for one in found.notes)
