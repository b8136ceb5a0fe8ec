"""The recipe and its sections. Every field is marked contract, layout or benchmark:

contract   it helps to determine the trained weights; changing it is a new experiment
layout     how the same training is executed; resizing for another cluster changes only these
benchmark  a shortcut that is only fit for throughput runs
"""

# Annotations are read at run time here, so they stay real objects: evaluating strings would cost every command 20 ms.

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

FieldKind = Literal["contract", "layout", "benchmark"]
Goal = Literal["pretrain", "sft", "peft"]
Strategy = Literal["fsdp2", "ddp", "megatron_fsdp", "zero1"]
Engine = Literal["meshwright", "megatron", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"]
GOALS: tuple[Goal, ...] = get_args(Goal)
ENGINES: tuple[Engine, ...] = get_args(Engine)


def contract(text: str, **limits: Any) -> Meta:
    """Marks a field that helps to determine the trained weights."""
    return Meta(description=text, extra={"kind": "contract"}, **limits)


def layout(text: str, **limits: Any) -> Meta:
    """Marks a field that only says how the training is executed."""
    return Meta(description=text, extra={"kind": "layout"}, **limits)


def benchmark(text: str, **limits: Any) -> Meta:
    """Marks a shortcut that is only fit for throughput runs."""
    return Meta(description=text, extra={"kind": "benchmark"}, **limits)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of recipe fields; unknown keys are refused."""


class Architecture(Section, frozen=True):
    """Changes to the named model's shape; empty means the model as published."""

    layers: Annotated[int, contract("number of layers", ge=1)] | None = None
    hidden: Annotated[int, contract("width of the residual stream", ge=1)] | None = None
    ffn: Annotated[int, contract("width of the dense feed-forward block", ge=1)] | None = None
    heads: Annotated[int, contract("attention heads", ge=1)] | None = None
    kv_heads: Annotated[int, contract("key/value heads", ge=1)] | None = None
    head_dim: Annotated[int, contract("width of one attention head", ge=1)] | None = None
    vocab: Annotated[int, contract("vocabulary size", ge=1)] | None = None
    experts: Annotated[int, contract("routed experts per layer", ge=1)] | None = None
    topk: Annotated[int, contract("experts that see one token", ge=1)] | None = None


class Data(Section, frozen=True):
    """What is trained on."""

    dataset: Annotated[str, contract("data set name, file or folder; mock makes random data")] = "mock"
    tokenizer: Annotated[str, contract("tokenizer folder or id; empty takes the model's own")] = ""
    blend: Annotated[dict[str, float], contract("data sources and their weights; empty means one source")] = {}
    seq_length: Annotated[int, contract("tokens in one sample", ge=1)] = 4096
    packing: Annotated[bool, contract("several documents in one sample, kept apart by masks")] = False
    pad_to_max_length: Annotated[bool, layout("pad packed samples to one static length")] = False
    images: Annotated[bool, contract("samples carry images or video")] = False
    columns: Annotated[
        dict[str, str], contract("what the data set calls a sample's parts: messages, prompt, response, text, images")
    ] = {}
    split: Annotated[str, contract("part of the data set that is trained on")] = "train"
    validation: Annotated[str, contract("data set or split that is only evaluated on; empty: validation_part")] = ""
    validation_part: Annotated[float, contract("share of the samples held out for evaluation", ge=0, lt=1)] = 0.0
    train_on: Annotated[
        Literal["answers", "last_answer", "all"], contract("tokens of a conversation whose predictions count")
    ] = "answers"
    chat_template: Annotated[str, contract("file of the chat template; empty takes the tokenizer's own")] = ""
    truncation: Annotated[
        Literal["end", "start", "drop", "refuse"], contract("what is done with samples longer than seq_length")
    ] = "end"
    group_by_length: Annotated[bool, contract("samples of like length in one step, padded to its longest")] = False
    streaming: Annotated[bool, layout("read the data set as it comes instead of indexing it first")] = False
    temperature: Annotated[float, contract("above 1 evens out the weights of a blend", gt=0)] = 1.0
    anneal_blend: Annotated[dict[str, float], contract("weights of the sources in the last anneal_steps")] = {}
    anneal_steps: Annotated[int, contract("steps at the end that draw from anneal_blend", ge=0)] = 0
    prefetch: Annotated[int, layout("steps whose samples are prepared ahead; 0 prepares none", ge=0)] = 2
    workers: Annotated[int, layout("threads that read samples ahead on each rank", ge=0)] = 4


class Train(Section, frozen=True):
    """How long, how much per step, and the loss."""

    global_batch_size: Annotated[int, contract("samples per optimizer step over all GPUs", ge=1)] = 512
    steps: Annotated[int, contract("optimizer steps", ge=1)] = 300_000
    seed: Annotated[int, contract("seed of weights and data order", ge=0)] = 1234
    z_loss: Annotated[float, contract("weight of the squared log-partition term in the loss", ge=0)] = 0.0
    mtp_loss: Annotated[float, contract("weight of the multi-token-prediction loss; 0 trains without", ge=0)] = 0.0
    per_token_loss: Annotated[bool, contract("average the loss over answer tokens, not over samples")] = False
    eval_every: Annotated[int, layout("steps between evaluations; 0 turns them off", ge=0)] = 0
    eval_steps: Annotated[int, layout("batches per evaluation", ge=1)] = 32
    log_every: Annotated[int, layout("steps between log lines", ge=1)] = 10
    profile: Annotated[bool, layout("record a profiler trace of a few steps")] = False
    freeze: Annotated[
        tuple[Literal["language", "vision", "projector"], ...],
        contract("parts of a vision-language model that are not trained"),
    ] = ()
    check_nan: Annotated[bool, benchmark("stop or skip on a loss that is not a number; off saves a sync")] = True


class Optimizer(Section, frozen=True):
    """The update rule."""

    name: Annotated[Literal["adamw", "muon", "lion", "schedule_free_adamw", "sgd"], contract("update rule")] = "adamw"
    lr: Annotated[float, contract("peak learning rate", gt=0)] = 3e-4
    weight_decay: Annotated[float, contract("decoupled weight decay", ge=0)] = 0.1
    beta1: Annotated[float, contract("decay of the first moment", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, contract("decay of the second moment", ge=0, lt=1)] = 0.95
    eps: Annotated[float, contract("added to the denominator", gt=0)] = 1e-8
    clip_grad: Annotated[float, contract("largest gradient norm; 0 does not clip", ge=0)] = 1.0
    muon_momentum: Annotated[float, contract("momentum of Muon", gt=0, lt=1)] = 0.95
    muon_ns_steps: Annotated[int, contract("Newton-Schulz iterations of Muon", ge=1)] = 5


class Schedule(Section, frozen=True):
    """How the learning rate moves."""

    name: Annotated[
        Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt", "rex"], contract("shape of the decay")
    ] = "cosine"
    warmup_steps: Annotated[int, contract("steps of linear warm-up", ge=0)] = 500
    decay_steps: Annotated[int, contract("step at which the decay ends; 0 means at the last step", ge=0)] = 0
    min_lr: Annotated[float, contract("learning rate at the end of the decay", ge=0)] = 3e-5


class Precision(Section, frozen=True):
    """Number formats."""

    compute: Annotated[Literal["bf16", "fp16", "fp32"], contract("format of activations and matmuls")] = "bf16"
    matmul: Annotated[
        Literal["same", "fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"],
        contract("format inside linear layers; same means that of compute"),
    ] = "same"
    master: Annotated[Literal["fp32", "bf16"], contract("format the optimizer updates")] = "fp32"
    moments: Annotated[Literal["fp32", "bf16"], contract("format of the optimizer's first moment")] = "fp32"
    grads: Annotated[Literal["fp32", "bf16"], contract("format in which gradients accumulate")] = "fp32"
    reduce: Annotated[Literal["fp32", "bf16"], contract("format in which gradients are summed over ranks")] = "fp32"
    fp8_gather: Annotated[bool, layout("gather parameters in fp8 instead of bf16")] = False
    first_last_bf16: Annotated[bool, contract("keep the first and last layers out of fp8")] = False


class Peft(Section, frozen=True):
    """Adapters; used when the goal is peft."""

    method: Annotated[Literal["lora", "dora", "rslora", "qlora"], contract("kind of adapter")] = "lora"
    rank: Annotated[int, contract("rank of the adapters", ge=1)] = 32
    alpha: Annotated[float, contract("scale of the adapters", gt=0)] = 32.0
    dropout: Annotated[float, contract("dropout in the adapters", ge=0, lt=1)] = 0.0
    targets: Annotated[
        tuple[Literal["qkv", "proj", "fc1", "fc2", "mamba_in", "mamba_out"], ...],
        contract("which linears get adapters"),
    ] = ("qkv", "proj", "fc1", "fc2")


class Moe(Section, frozen=True):
    """Routing and dispatch of experts; unused by dense models."""

    balancing: Annotated[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "bias", "none"], contract("how load is balanced")
    ] = "aux_loss"
    aux_loss: Annotated[float, contract("weight of the balancing loss", ge=0)] = 1e-3
    router_z_loss: Annotated[float, contract("weight of the router's z-loss", ge=0)] = 0.0
    capacity_factor: Annotated[float, contract("expert capacity over the mean; 0 drops nothing", ge=0)] = 0.0
    router_dtype: Annotated[Literal["fp32", "bf16"], contract("format of the router")] = "fp32"
    dispatcher: Annotated[
        Literal["alltoall", "allgather", "deepep", "hybridep"], layout("how tokens travel to experts")
    ] = "alltoall"
    grouped_gemm: Annotated[bool, layout("one kernel for all experts of a rank")] = True
    shared_expert_overlap: Annotated[bool, layout("compute shared experts while tokens travel")] = False
    ep_overlap: Annotated[bool, layout("overlap the expert all-to-all with compute of another micro batch")] = False
    force_balance: Annotated[bool, benchmark("send equal loads to all experts, ignoring the router")] = False


class Layout(Section, frozen=True):
    """How the training is cut over the GPUs."""

    strategy: Annotated[Strategy, layout("how data-parallel ranks share state")] = "fsdp2"
    tp: Annotated[int, layout("tensor-parallel ranks: each holds a slice of every matrix", ge=1)] = 1
    pp: Annotated[int, layout("pipeline stages: each holds a run of layers", ge=1)] = 1
    vp: Annotated[int, layout("chunks of layers per stage (interleaving); 1 is none", ge=1)] = 1
    cp: Annotated[int, layout("context-parallel ranks: each holds a part of the sequence", ge=1)] = 1
    ep: Annotated[int, layout("expert-parallel ranks: each holds a share of the experts", ge=1)] = 1
    etp: Annotated[int, layout("tensor-parallel ranks inside one expert", ge=1)] = 1
    dp_shard: Annotated[int, layout("data-parallel ranks that share one copy; -1 fills", ge=-1)] = -1
    dp_replicate: Annotated[int, layout("full copies of that (HSDP)", ge=1)] = 1
    sp: Annotated[bool, layout("sequence parallel: norms and residuals cut over the tp ranks too")] = False
    micro_batch_size: Annotated[int, layout("samples per rank in one forward", ge=1)] = 1
    recompute: Annotated[
        Literal["none", "selective", "full"], layout("what is computed again in the backward pass to save memory")
    ] = "none"
    recompute_modules: Annotated[
        tuple[
            Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts", "ops"],
            ...,
        ],
        layout("modules for selective recompute, or ops: single operations; empty means the engine's own choice"),
    ] = ()
    recompute_layers: Annotated[int, layout("full recompute of this many layers per stage; 0 means all", ge=0)] = 0
    pp_schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v"],
        layout("order of forward and backward micro batches over the stages"),
    ] = "1f1b"
    stage_layers: Annotated[
        tuple[int, ...], layout("layers per stage chunk when they are uneven; empty means even")
    ] = ()
    embedding_as_layer: Annotated[bool, layout("count the embedding as one layer when splitting stages")] = False
    head_as_layer: Annotated[bool, layout("count the head as one layer when splitting stages")] = False
    cp_comm: Annotated[
        Literal["ring", "a2a", "allgather", "a2a+ring"], layout("how context-parallel ranks exchange keys and values")
    ] = "ring"
    cp_inner: Annotated[int, layout("ranks of the inner all-to-all group of a2a+ring", ge=1)] = 1
    offload: Annotated[Literal["none", "optimizer", "activations", "params"], layout("what is kept in host memory")] = (
        "none"
    )
    reshard_after_forward: Annotated[bool, layout("free gathered parameters between forward and backward")] = True
    defer_grad_sync: Annotated[bool, layout("reduce gradients only after the last micro batch")] = True


class Kernels(Section, frozen=True):
    """How kernels are chosen, captured and overlapped."""

    attention: Annotated[
        Literal["auto", "flash", "te", "cudnn", "sdpa", "flex", "eager"], layout("attention kernel")
    ] = "auto"
    compile: Annotated[bool, layout("compile each block")] = False
    cuda_graphs: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"], layout("what is captured as CUDA graphs")
    ] = "none"
    cuda_graph_scope: Annotated[
        tuple[Literal["attn", "mlp", "mamba", "moe", "moe_router", "moe_preprocess", "full_iteration"], ...],
        layout("modules captured; empty means all the implementation allows"),
    ] = ()
    te_rng_tracker: Annotated[bool, layout("random states that CUDA graphs can replay")] = False
    overlap_grad_reduce: Annotated[bool, layout("reduce gradients while the backward pass runs")] = True
    overlap_param_gather: Annotated[bool, layout("gather parameters while the forward pass runs")] = True
    tp_comm_overlap: Annotated[bool, layout("overlap tensor-parallel collectives with matmuls")] = False
    loss: Annotated[
        Literal["vocab_parallel", "plain", "chunked", "fused_linear"], layout("how the cross-entropy is computed")
    ] = "vocab_parallel"
    deterministic: Annotated[bool, layout("bitwise repeatable kernels")] = False


class Checkpoint(Section, frozen=True):
    """Where training starts from and what it leaves behind."""

    pretrained: Annotated[
        str, contract("folder or id of the weights fine-tuning starts from; empty: the model's id")
    ] = ""
    save_every: Annotated[int, layout("steps between checkpoints; 0 saves only at the end", ge=0)] = 1000
    keep: Annotated[int, layout("checkpoints kept", ge=1)] = 3
    milestone_every: Annotated[int, layout("checkpoints of every so many steps are kept for good; 0 none", ge=0)] = 0
    async_save: Annotated[bool, layout("write checkpoints while training goes on")] = True
    resume: Annotated[bool, layout("go on from the last good checkpoint of the run's folder")] = True
    grace_s: Annotated[float, layout("seconds in which a run that is told to end saves and leaves", gt=0)] = 60.0
    export: Annotated[
        Literal["none", "sharded", "consolidated"], layout("Hugging Face folder written when the run ends")
    ] = "sharded"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete named starting point: the contract of a training and a layout for a cluster."""

    name: str
    model: str  # catalogue name, or path of a config.json
    goal: Goal
    cluster: str  # what the layout was made for, e.g. 8xH100
    benchmark: bool = False  # upper-bound throughput on mock data; never a production setting
    architecture: Architecture = Architecture()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    peft: Peft = Peft()
    moe: Moe = Moe()
    layout: Layout = Layout()
    kernels: Kernels = Kernels()
    checkpoint: Checkpoint = Checkpoint()


class RecipeField(msgspec.Struct, frozen=True):
    """One field of a recipe: where it is, what kind it is, what it means."""

    key: str  # section.name
    flat: str  # the name rules and costs know it by
    kind: FieldKind
    text: str
    type: Any
    default: Any


SECTIONS: dict[str, type[Section]] = {
    "architecture": Architecture,
    "data": Data,
    "train": Train,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "precision": Precision,
    "peft": Peft,
    "moe": Moe,
    "layout": Layout,
    "kernels": Kernels,
    "checkpoint": Checkpoint,
}


def _meta(hint: Any) -> Meta:
    """The mark of a field, found inside optional types too."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            return next(m for m in part.__metadata__ if isinstance(m, Meta))
    raise TypeError(f"recipe field without a mark: {hint}")


def _section_fields(section: str, struct: type[Section]) -> Iterator[tuple[str, Any, Meta, Any]]:
    hints = struct.__annotations__
    for info in msgspec.structs.fields(struct):
        default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
        yield info.name, hints[info.name], _meta(hints[info.name]), default


@lru_cache(maxsize=1)
def recipe_fields() -> dict[str, RecipeField]:
    """Every field of a recipe by its key, e.g. layout.tp; a name used in two sections gets its section in front."""
    rows = [(s, *row) for s, struct in SECTIONS.items() for row in _section_fields(s, struct)]
    names = [name for _, name, *_ in rows]
    return {
        f"{section}.{name}": RecipeField(
            key=f"{section}.{name}",
            flat=name if names.count(name) == 1 else f"{section}_{name}",
            kind=(meta.extra or {})["kind"],
            text=meta.description or "",
            type=hint,
            default=default,
        )
        for section, name, hint, meta, default in rows
    }
