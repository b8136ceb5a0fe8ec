"""key=value overrides: every form of a key, typed values, and errors with fixes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from meshwright.errors import InputError
from meshwright.recipes import Recipe, apply, apply_with_log, load, pretrain, recipe_fields, sft
from meshwright.recipes.key_maps import (
    OVERRIDE_FRAMEWORKS,
    REMOVED_KEYS,
    composite_keys,
    config_keys,
    framework_key,
    override_composite_keys,
    override_keys,
    to_framework,
)
from meshwright.recipes.key_maps.shared_composite_keys import dispatcher_keys, recompute_keys
from meshwright.recipes.key_maps.value_maps import PRECISION_NAMES
from meshwright.recipes.overrides import native_key

BASE = pretrain("llama3_8b", 8)


def read(recipe: Recipe, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(recipe, section), field)


def follows(values: dict[str, Any]) -> dict[str, Any]:
    """Return what follows typed values: the minimum of the learning rate keeps its share of it."""
    if "optimizer.lr" not in values:
        return {}
    share = BASE.schedule.min_lr / BASE.optimizer.lr
    return {"schedule.min_lr": pytest.approx(share * values["optimizer.lr"])}


SPELLINGS = [
    # examples people paste
    ("model.tensor_model_parallel_size=2", {"layout.tp": 2}),
    ("training.global_batch_size=64", {"train.global_batch_size": 64}),
    ("model.expert_model_parallel_size=4", {"layout.ep": 4}),
    ("model.seq_length=32768", {"data.seq_length": 32768}),
    ("model.context_parallel_size=4", {"layout.cp": 4}),
    ("model.cuda_graph_impl=transformer_engine", {"kernels.cuda_graphs": "transformer_engine"}),
    (
        "model.cuda_graph_scope=[attn,moe_router,moe_preprocess]",
        {"kernels.cuda_graph_scope": ("attn", "moe_router", "moe_preprocess")},
    ),
    ("model.use_te_rng_tracker=True", {"kernels.te_rng_tracker": True}),
    ("rng.te_rng_tracker=True", {"kernels.te_rng_tracker": True}),
    # our own
    ("layout.tp=4", {"layout.tp": 4}),
    ("tp=4", {"layout.tp": 4}),
    ("optimizer_name=muon", {"optimizer.name": "muon"}),
    ("lr=1e-4", {"optimizer.lr": 1e-4}),
    ("steps=1_000", {"train.steps": 1000}),
    ("dp_shard=-1", {"layout.dp_shard": -1}),
    ("architecture.layers=12", {"architecture.layers": 12}),
    ("architecture.layers=null", {"architecture.layers": None}),
    ('data.blend={"a":0.7,"b":0.3}', {"data.blend": {"a": 0.7, "b": 0.3}}),
    ("data.blend={a:0.7,b:0.3}", {"data.blend": {"a": 0.7, "b": 0.3}}),
    ("data.blend=s3://x:0.7,b:3", {"data.blend": {"s3://x": 0.7, "b": 3.0}}),
    ("data.columns.prompt=question", {"data.columns": {"prompt": "question"}}),
    ("data.blend.my-file.jsonl=2", {"data.blend": {"my-file.jsonl": 2.0}}),
    ("stage_layers=8,8,8,8", {"layout.stage_layers": (8, 8, 8, 8)}),
    ("stage_layers=[]", {"layout.stage_layers": ()}),
    ('targets=["qkv","proj"]', {"peft.targets": ("qkv", "proj")}),
    ('data.dataset="my data=1"', {"data.dataset": "my data=1"}),
    # Megatron-Bridge
    ("model.pipeline_model_parallel_size=2", {"layout.pp": 2}),
    ("model.virtual_pipeline_model_parallel_size=null", {"layout.vp": 1}),
    ("model.virtual_pipeline_model_parallel_size=4", {"layout.vp": 4, "layout.pp_schedule": "interleaved_1f1b"}),
    ("model.expert_tensor_parallel_size=null", {"layout.etp": 1}),
    ("model.sequence_parallel=false", {"layout.sp": False}),
    ("dataset.seq_length=8192", {"data.seq_length": 8192}),
    ("train.micro_batch_size=2", {"layout.micro_batch_size": 2}),
    ("training.micro_batch_size=2", {"layout.micro_batch_size": 2}),
    ("training.train_iters=10", {"train.steps": 10}),
    ("optimizer.min_lr=1e-6", {"schedule.min_lr": 1e-6}),
    ("optimizer.adam_beta2=0.98", {"optimizer.beta2": 0.98}),
    ("scheduler.lr_decay_style=WSD", {"schedule.name": "wsd"}),
    ("scheduler.lr_warmup_iters=7", {"schedule.warmup_steps": 7}),
    ("model.recompute_granularity=null", {"layout.recompute": "none"}),
    ("model.recompute_modules=[mla_up_proj,mlp]", {"layout.recompute_modules": ("mla_up_proj", "mlp")}),
    ("ddp.overlap_grad_reduce=false", {"kernels.overlap_grad_reduce": False}),
    ("ddp.grad_reduce_in_fp32=false", {"precision.reduce": "bf16"}),
    ("comm_overlap.tp_comm_overlap=true", {"kernels.tp_comm_overlap": True}),
    ("model.cp_comm_type=p2p", {"layout.cp_comm": "ring"}),
    ("model.cp_comm_type=a2a+p2p", {"layout.cp_comm": "a2a+ring"}),
    ("model.moe_token_dispatcher_type=flex", {"moe.dispatcher": "deepep"}),
    ("model.moe_token_dispatcher_type=alltoall", {"moe.dispatcher": "alltoall"}),
    ("model.num_query_groups=4", {"architecture.kv_heads": 4}),
    ("checkpoint.pretrained_checkpoint=/a/b", {"checkpoint.pretrained": "/a/b"}),
    ("peft.dim=8", {"peft.rank": 8}),
    ("peft.target_modules=[linear_qkv,linear_proj]", {"peft.targets": ("qkv", "proj")}),
    ("dist.use_megatron_fsdp=true", {"layout.strategy": "megatron_fsdp"}),
    ("optimizer.optimizer=adam", {"optimizer.name": "adamw"}),
    ("optimizer.optimizer_cpu_offload=true", {"layout.offload": "optimizer"}),
    ("mixed_precision=bf16_with_mxfp8_mixed", {"precision.compute": "bf16", "precision.matmul": "mxfp8"}),
    # Megatron-LM
    ("tensor-model-parallel-size=8", {"layout.tp": 8}),
    ("micro-batch-size=2", {"layout.micro_batch_size": 2}),
    ("num_layers=2", {"architecture.layers": 2}),
    # AutoModel
    ("distributed.strategy=mfsdp", {"layout.strategy": "megatron_fsdp"}),
    ("distributed.tp_size=2", {"layout.tp": 2}),
    ("distributed.dp_replicate_size=2", {"layout.dp_replicate": 2}),
    ("distributed.dp_size=4", {"layout.dp_shard": 4}),
    ("distributed.dp_size=none", {"layout.dp_shard": -1}),
    ("distributed.activation_checkpointing=true", {"layout.recompute": "full"}),
    ("distributed.activation_checkpointing=selective", {"layout.recompute": "selective"}),
    ("distributed.defer_fsdp_grad_sync=false", {"layout.defer_grad_sync": False}),
    ("distributed.pipeline.pp_schedule=Interleaved1F1B", {"layout.pp_schedule": "interleaved_1f1b"}),
    ("distributed.pipeline.pp_microbatch_size=2", {"layout.micro_batch_size": 2}),
    ("step_scheduler.local_batch_size=2", {"layout.micro_batch_size": 2}),
    ("step_scheduler.global_batch_size=48", {"train.global_batch_size": 48}),
    ("packed_sequence.packed_sequence_size=2048", {"data.packing": True, "data.seq_length": 2048}),
    ("distributed.enable_compile=true", {"kernels.compile": True}),
    # torchtitan
    ("parallelism.tensor_parallel_degree=2", {"layout.tp": 2}),
    ("parallelism.pipeline_parallel_schedule=ZBVZeroBubble", {"layout.pp_schedule": "zbv"}),
    # KempnerForge
    ("distributed.tp=4", {"layout.tp": 4}),
    ("distributed.dp_shard=-1", {"layout.dp_shard": -1}),
    ("train.batch_size=8", {"layout.micro_batch_size": 8}),
    ("train.seq_len=512", {"data.seq_length": 512}),
    ("train.max_steps=9", {"train.steps": 9}),
    ("train.activation_checkpointing=full", {"layout.recompute": "full"}),
    ("train.mixed_precision=fp8", {"precision.compute": "bf16", "precision.matmul": "fp8_tensor"}),
    ("train.compile_model=true", {"kernels.compile": True}),
    ("train.loss_fn=chunked_cross_entropy", {"kernels.loss": "chunked"}),
    ("train.z_loss_weight=1e-4", {"train.z_loss": 1e-4}),
    ("train.grad_clip_norm=0.5", {"optimizer.clip_grad": 0.5}),
    ("optimizer.betas=[0.9,0.99]", {"optimizer.beta1": 0.9, "optimizer.beta2": 0.99}),
    ("scheduler.name=none", {"schedule.name": "constant"}),
    ("eval.enabled=true", {"train.eval_every": 1000}),
    ("checkpoint.async_mode=disabled", {"checkpoint.async_save": False}),
    ("model.n_layers=2", {"architecture.layers": 2}),
]


@each(("override", "wanted"), SPELLINGS)
def test_an_override_sets_its_field_and_nothing_else(override: str, wanted: dict[str, Any]) -> None:
    made, log = apply_with_log(BASE, [override])
    wanted = wanted | follows(wanted)
    for key in recipe_fields():
        assert read(made, key) == wanted.get(key, read(BASE, key))
    assert {change.key for change in log} <= set(wanted)
    assert all(change.kind == recipe_fields()[change.key].kind for change in log)


TOGETHER = [
    (["rng.te_rng_tracker=True", "model.use_te_rng_tracker=true"], {"kernels.te_rng_tracker": True}),
    (["tp=2", "layout.tp=2", "model.tensor_model_parallel_size=2"], {"layout.tp": 2}),
    (
        ["model.moe_token_dispatcher_type=flex", "model.moe_flex_dispatcher_backend=hybridep"],
        {"moe.dispatcher": "hybridep"},
    ),
    (
        ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"],
        {"layout.recompute": "full"},
    ),
    (
        ["model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=5"],
        {"layout.recompute": "full", "layout.recompute_layers": 5},
    ),
    (
        ["model.virtual_pipeline_model_parallel_size=2", "layout.pp_schedule=looped_bfs"],
        {"layout.vp": 2, "layout.pp_schedule": "looped_bfs"},
    ),
    (
        ["step_scheduler.local_batch_size=8", "distributed.pipeline.pp_microbatch_size=2"],
        {"layout.micro_batch_size": 2},
    ),
    (["model.cpu_offloading=true", "optimizer.optimizer_cpu_offload=false"], {"layout.offload": "activations"}),
    (["eval.enabled=true", "eval.interval=50", "eval.steps=3"], {"train.eval_every": 50, "train.eval_steps": 3}),
    (["eval.enabled=false", "eval.interval=50"], {"train.eval_every": 0}),
]


@pytest.mark.parametrize(("overrides", "wanted"), TOGETHER)
def test_keys_that_are_read_together(overrides: list[str], wanted: dict[str, Any]) -> None:
    made = apply(BASE, overrides)
    for key in recipe_fields():
        assert read(made, key) == wanted.get(key, read(BASE, key))


BAD = [
    (["tp"], "key=value"),
    (["tp=x"], "an integer"),
    (["tp=2.0"], "an integer"),
    (["steps=1e4"], "an integer"),
    (["tp=0"], ">= 1"),
    (["beta1=1"], "< 1"),
    (["lr=fast"], "number"),
    (["lr=nan"], "number"),
    (["lr=inf"], "number"),
    (["lr=0"], "> 0"),
    (["sp=1"], "true or false"),
    (["sp=yes"], "true or false"),
    (["recompute=ful"], "did you mean full"),
    (["cuda_graph_scope=[attn,mpl]"], "did you mean mlp"),
    (["stage_layers=[8,x]"], "an integer"),
    (["data.blend=a"], "weights"),
    (["data.blend=a:0"], "weights"),
    (["data.blend={a:b}"], "weights"),
    (["moe.balancing=loss_free"], "did you mean bias"),
    (["data.blend.a=-1"], "weights"),
    (["data.colums.prompt=a"], "did you mean data.columns"),
    (["tp=null"], "an integer"),
    (["layout.tpp=4"], "did you mean layout.tp"),
    (["model.tensor_parallel_size=4"], "did you mean"),
    (["zzzzqqqq=4"], "unknown key"),
    (["+model.foo=3"], "prefix"),
    (["++tp=3"], "prefix"),
    (["~tp"], "prefix"),
    (["--tp=3"], "prefix"),
    (["tp=2", "tp=4"], "twice"),
    (["tp=2", "model.tensor_model_parallel_size=4"], "both set layout.tp"),
    (["rng.te_rng_tracker=True", "model.use_te_rng_tracker=False"], "both set"),
    (["train.grad_accum_steps=4"], "train.global_batch_size"),
    (["scheduler.min_lr_ratio=0.1"], "schedule.min_lr"),
    (["model.fp8_hybrid=true"], "precision.matmul"),
    (["cluster=8xH100"], "--gpus"),
    (["distributed.pipeline.pp_schedule=zero_bubble"], "allowed"),
    (["distributed.activation_checkpointing=maybe"], "allowed"),
    (["model.moe_token_dispatcher_type=alltoall", "model.moe_flex_dispatcher_backend=deepep"], "flex"),
    (["model.moe_token_dispatcher_type=pigeon"], "unknown"),
    (["model.recompute_num_layers=3"], "recompute_method"),
    (["model.recompute_method=uniform", "model.recompute_num_layers=3"], "block"),
    (["model.recompute_method=odd"], "unknown"),
    (["model.recompute_method=block"], "at least 1"),
    (["step_scheduler.local_batch_size=7", "distributed.pipeline.pp_microbatch_size=2"], "multiple"),
    (["mixed_precision=fp7"], "unknown"),
    (["model.cpu_offloading=true", "optimizer.optimizer_cpu_offload=true"], "both"),
    (["model.cpu_offloading=1"], "true or false"),
    (["optimizer.betas=0.9"], "two numbers"),
    (["distributed.dp_size=-2"], "at least 1"),
    (["distributed.dp_size=x"], "at least 1"),
]


@each(("overrides", "words"), BAD)
def test_a_mistake_is_an_error_with_a_fix(overrides: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words.replace("+", r"\+")):
        apply(BASE, overrides)


def test_a_removed_key_is_not_known_otherwise() -> None:
    for key in REMOVED_KEYS:
        assert native_key(key) is None or key == "eval_steps"  # a short name that has another meaning elsewhere
        assert key not in override_keys()
        assert key not in override_composite_keys()


def test_every_row_points_at_a_field_and_never_contradicts_our_own_keys() -> None:
    for word in override_keys().values():
        assert word.field in recipe_fields(), word
        if native_key(word.key):
            assert native_key(word.key) == word.field
            assert not word.values


def test_a_key_that_frameworks_share_means_the_same_in_each() -> None:
    for framework in OVERRIDE_FRAMEWORKS:
        for key, word in config_keys(framework).items():
            known = override_keys().get(key)
            if known and word.field and word.status != "removed":
                assert known.field == word.field, key
                assert all(known.values[theirs] == ours for theirs, ours in word.values.items()), key


def test_keys_that_frameworks_read_together_mean_the_same_in_each() -> None:
    for framework in OVERRIDE_FRAMEWORKS:
        for joint in composite_keys(framework):
            assert all(
                override_composite_keys()[key].keys == joint.keys for key in joint.keys if key not in REMOVED_KEYS
            ), joint.keys


def examples(key: str) -> list[Any]:
    """Return values of a field, each with its text."""
    from typing import Literal, get_args, get_origin

    from meshwright.recipes.values import bare_type

    if key == "peft.targets":  # names that are checked
        return [("qkv", "proj")]
    kind, _ = bare_type(recipe_fields()[key].type)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return [(), tuple(get_args(inner)[:2]) if get_origin(inner) is Literal else (3, 2)]
    if get_origin(kind) is dict:
        return [{}, {"a": 0.5, "b c": 2.0} if get_args(kind)[1] is float else {"a": "b", "c d": "e f"}]
    return {bool: [True, False], int: [1, 2, 77], float: [0.125, 0.5], str: ["", "a b", "x/y"]}[kind]


def format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f'"{name}":{weight}' for name, weight in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return value if isinstance(value, str) else repr(value)


@each("key", recipe_fields())
def test_a_set_value_is_read_back_and_the_rest_stays(key: str) -> None:
    for value in examples(key):
        for name in {key, recipe_fields()[key].flat} - {*REMOVED_KEYS}:
            made = apply(BASE, [f"{name}={format_value(value)}"])
            assert read(made, key) == value
            rest = follows({key: value})
            assert all(
                read(made, other) == rest.get(other, read(BASE, other)) for other in recipe_fields() if other != key
            )


@pytest.mark.parametrize("framework", OVERRIDE_FRAMEWORKS)
def test_a_value_written_in_a_framework_is_read_back(framework: str) -> None:
    for key in recipe_fields():
        if framework_key(key, framework) is None:
            continue
        for value in examples(key):
            if key == "layout.strategy" and value in ("ddp", "zero1") and framework == "megatron_bridge":
                continue  # one flag cannot express these
            if (key, value) == ("data.dataset", ""):
                continue  # no dataset: in other frameworks an empty path means random tokens
            foreign, theirs = to_framework(key, value, framework)
            text = format_value(tuple(theirs) if isinstance(theirs, list) else theirs)
            if foreign not in override_composite_keys():
                assert read(apply(BASE, [f"{foreign}={text}"]), key) == value, (foreign, text)


WRITTEN = [
    ("megatron_bridge", "schedule.name", "wsd", ("scheduler.lr_decay_style", "WSD")),
    ("megatron_bridge", "schedule.name", "constant", ("scheduler.lr_decay_style", "constant")),
    ("megatron_bridge", "layout.vp", 1, ("model.virtual_pipeline_model_parallel_size", None)),
    ("megatron_bridge", "layout.etp", 1, ("model.expert_tensor_parallel_size", 1)),
    ("megatron_bridge", "layout.cp_comm", "ring", ("model.cp_comm_type", "p2p")),
    ("megatron_bridge", "precision.reduce", "fp32", ("ddp.grad_reduce_in_fp32", True)),
    ("megatron_bridge", "peft.targets", ("qkv", "fc1"), ("peft.target_modules", ["linear_qkv", "linear_fc1"])),
    ("automodel", "layout.recompute", "full", ("distributed.activation_checkpointing", True)),
    ("automodel", "layout.recompute", "selective", ("distributed.activation_checkpointing", "selective")),
    ("automodel", "layout.strategy", "megatron_fsdp", ("distributed.strategy", "megatron_fsdp")),
    ("automodel", "layout.pp_schedule", "interleaved_1f1b", ("distributed.pipeline.pp_schedule", "Interleaved1F1B")),
    ("kempnerforge", "layout.recompute", "full", ("train.activation_checkpointing", "full")),
    ("kempnerforge", "checkpoint.async_save", True, ("checkpoint.async_mode", "async")),
    ("kempnerforge", "schedule.name", "constant", ("scheduler.name", "constant")),
]


@pytest.mark.parametrize(("framework", "key", "value", "wanted"), WRITTEN)
def test_a_setting_in_framework_keys(framework: str, key: str, value: Any, wanted: tuple[str, Any]) -> None:
    assert to_framework(key, value, framework) == wanted


def test_a_field_without_a_framework_key_is_an_error() -> None:
    assert framework_key("layout.etp", "kempnerforge") is None
    with pytest.raises(InputError, match="no single key"):
        to_framework("layout.etp", 1, "kempnerforge")
    with pytest.raises(InputError, match="no equivalent"):
        to_framework("layout.strategy", "zero1", "megatron_bridge")
    with pytest.raises(InputError, match="did you mean"):
        framework_key("layout.tp", "megatron_brigde")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_the_two_dispatcher_keys_are_read_back(dispatcher: str) -> None:
    keys = [f"model.{key}={value}" for key, value in dispatcher_keys(dispatcher).items()]
    assert apply(BASE, keys).moe.dispatcher == dispatcher


@pytest.mark.parametrize("setting", ["none", "selective", "full"])
@pytest.mark.parametrize("layers", [0, 3])
def test_the_recompute_keys_are_read_back(setting: str, layers: int) -> None:
    made = apply(BASE, [f"recompute={setting}", f"recompute_layers={layers if setting == 'full' else 0}"])
    keys = [f"model.{key}={value}" for key, value in recompute_keys(made).items()]
    assert apply(BASE, keys).layout == made.layout


def test_the_precision_names_are_read_back() -> None:
    for framework, key in (("megatron_bridge", "mixed_precision"), ("kempnerforge", "train.mixed_precision")):
        for (compute, matmul), name in PRECISION_NAMES[framework].items():
            made = apply(BASE, [f"{key}={name}"])
            assert (made.precision.compute, made.precision.matmul) == (compute, matmul)


@given(tp=st.integers(1, 64), lr=st.floats(1e-8, 1.0), batch=st.integers(1, 10**6), packing=st.booleans())
def test_any_legal_value_is_kept_exactly(tp: int, lr: float, batch: int, packing: bool) -> None:
    made = apply(BASE, [f"tp={tp}", f"lr={lr!r}", f"train.global_batch_size={batch}", f"packing={packing}"])
    assert (made.layout.tp, made.optimizer.lr, made.train.global_batch_size, made.data.packing) == (
        tp,
        lr,
        batch,
        packing,
    )


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_crashes_the_parser(key: str, value: str) -> None:
    with suppress(InputError):
        made, log = apply_with_log(BASE, [f"{key}={value}"])
        assert log or made == BASE


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"layout.tp={'9' * 25}", "from -9007199254740992 to 9007199254740992"),
        (f"layout.tp={'9' * 5000}", r"… \(5000 characters\): must be an integer from"),
        (f"train.seed={2**53 + 1}", "to 9007199254740992"),
        ("layout.tp=²", "an integer"),
        ("layout.tp=٣", "an integer"),
        ("model.virtual_pipeline_model_parallel_size=²", "an integer"),
        ("model.recompute_num_layers=" + "9" * 5000, "without model.recompute_method"),
        ("lr=1e999", "a finite number, at most 1.7e308"),
        ("lr=" + "9" * 400, "a finite number"),
        ("lr=nan", "a finite number"),
        ("lr=-inf", "a finite number"),
        ("lr=1e-٣", "a number"),
        ('data.blend={"a":' + "9" * 5000 + "}", "sources with weights"),
        ("data.blend=a:1e999", "sources with weights"),
    ],
)
def test_numbers_that_no_field_accepts(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        apply(BASE, [override])
    assert len(str(refused.value)) < 600


def test_the_largest_integer_is_kept() -> None:
    assert apply(BASE, [f"train.seed={2**53}"]).train.seed == 2**53
    assert apply(BASE, ["train.seed=000_" + "0" * 30 + "7"]).train.seed == 7


@pytest.mark.parametrize("key", ["cluster", "gpus"])
def test_gpus_among_the_overrides_are_repeated_as_the_option(key: str) -> None:
    with pytest.raises(InputError, match="--gpus 16xA100-80") as refused:
        apply(BASE, [f"{key}=16xA100-80"])
    assert list(refused.value.fix) == ["--gpus 16xA100-80"]


def test_nothing_changes_without_overrides() -> None:
    recipe = load("llama3_8b_sft")
    assert apply_with_log(recipe, []) == (recipe, [])
    assert apply_with_log(recipe, [f"seq_length={recipe.data.seq_length}"]) == (recipe, [])


def test_builders_reject_unknown_fields() -> None:
    with pytest.raises(InputError, match="did you mean"):
        pretrain("llama3_8b", 8, tpp=2)
    with pytest.raises(InputError, match="int"):
        sft("llama3_8b", 8, tp="2")
    with pytest.raises(InputError, match=">= 1"):
        sft("llama3_8b", 8, tp=0)


def test_derived_fields_can_be_overridden() -> None:
    assert pretrain("llama3_8b", 8, tp=2).layout.sp
    assert not pretrain("llama3_8b", 8, tp=2, sp=False).layout.sp
    assert not pretrain("llama3_8b", 8, tp=2, strategy="megatron_fsdp").layout.sp
    assert pretrain("llama3_8b", 8, pp=2, vp=2).layout.pp_schedule == "interleaved_1f1b"
    assert pretrain("llama3_8b", 8, pp=2, vp=2, pp_schedule="looped_bfs").layout.pp_schedule == "looped_bfs"
    assert pretrain("llama3_8b", 8, cuda_graphs="local").kernels.te_rng_tracker
    assert not sft("qwen3_vl_8b", 8, images=True).data.packing
