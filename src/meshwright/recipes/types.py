"""The recipe and its sections. Every field is marked contract, layout or benchmark:

contract   affects the trained weights; changing it is a new experiment
layout     how the same training is executed; resizing for another cluster changes only these
benchmark  a shortcut that is only valid in throughput runs
"""

# Annotations are read at run time, so they are not strings: evaluating those would cost every command 20 ms.

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from meshwright.choices import ENGINES as ENGINES
from meshwright.choices import GOALS as GOALS
from meshwright.choices import Engine as Engine
from meshwright.choices import Goal as Goal
from meshwright.display import Readable, Row
from meshwright.recipes.adapter_targets import require_targets

FieldKind = Literal["contract", "layout", "benchmark"]
Documents = Literal["auto", "separator", "blank_line", "line", "file"]
Strategy = Literal["fsdp2", "ddp", "megatron_fsdp", "zero1"]


def contract(text: str, **limits: Any) -> Meta:
    """Mark a field that affects the trained weights."""
    return Meta(description=text, extra={"kind": "contract"}, **limits)


def layout(text: str, **limits: Any) -> Meta:
    """Mark a field that only affects how the training is executed."""
    return Meta(description=text, extra={"kind": "layout"}, **limits)


def benchmark(text: str, **limits: Any) -> Meta:
    """Mark a shortcut that is only valid in throughput runs."""
    return Meta(description=text, extra={"kind": "benchmark"}, **limits)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of recipe fields; unknown keys are rejected."""


class Architecture(Section, frozen=True):
    """Changes to the named model's shape and numbers; empty means the model as published."""

    layers: Annotated[int, contract("number of layers", ge=1)] | None = None
    hidden: Annotated[int, contract("width of the residual stream", ge=1)] | None = None
    ffn: Annotated[int, contract("width of the dense feed-forward block", ge=1)] | None = None
    heads: Annotated[int, contract("attention heads", ge=1)] | None = None
    kv_heads: Annotated[int, contract("key/value heads", ge=1)] | None = None
    head_dim: Annotated[int, contract("width of one attention head", ge=1)] | None = None
    vocab: Annotated[int, contract("vocabulary size", ge=1)] | None = None
    experts: Annotated[int, contract("routed experts per layer", ge=1)] | None = None
    topk: Annotated[int, contract("routed experts per token", ge=1)] | None = None
    rope_theta: Annotated[float, contract("base of the rotary positions", gt=0)] | None = None
    norm_eps: Annotated[float, contract("epsilon of the norms", gt=0, lt=1)] | None = None


class Data(Section, frozen=True):
    """The training data."""

    dataset: Annotated[str, contract("dataset name, file or folder; mock generates random data")] = "mock"
    tokenizer: Annotated[str, contract("tokenizer folder or id; empty means the model's")] = ""
    blend: Annotated[dict[str, float], contract("data sources and their weights; empty means one source")] = {}
    seq_length: Annotated[int, contract("tokens in one sample", ge=1)] = 4096
    packing: Annotated[bool, contract("pack several documents into one sample, masked from each other")] = False
    pad_to_max_length: Annotated[
        bool, layout("pad all samples to one static length, on engines that pad to the longest")
    ] = False
    images: Annotated[bool, contract("samples contain images or video")] = False
    columns: Annotated[
        dict[str, str],
        contract(
            "column names of the dataset by key (data.columns.prompt=question): messages; text; or prompt and response "
            "with context before the prompt, input after it; system, history, tools, images"
        ),
    ] = {}
    documents: Annotated[
        Documents,
        contract(
            "where documents of a .txt file end: separator (form feed or a line <|endoftext|>), blank_line, line, "
            "file; auto: separator if the file has one, else blank_line"
        ),
    ] = "auto"
    split: Annotated[str, contract("split of the dataset to train on, or rows of it: train[:100]")] = "train"
    validation: Annotated[str, contract("dataset or split for evaluation; empty means validation_part")] = ""
    validation_part: Annotated[float, contract("share of the samples held out for evaluation", ge=0, lt=1)] = 0.0
    train_on: Annotated[
        Literal["answers", "last_answer", "all"], contract("tokens of a conversation that count in the loss")
    ] = "answers"
    chat_template: Annotated[str, contract("chat template file; empty means the tokenizer's")] = ""
    merge_system: Annotated[
        bool, contract("put system messages in front of the next user message, for chat templates that refuse them")
    ] = False
    truncation: Annotated[
        Literal["end", "start", "drop", "refuse"], contract("how to handle samples longer than seq_length")
    ] = "end"
    group_by_length: Annotated[bool, contract("batch samples of similar length, padded to the longest of the step")] = (
        False
    )
    streaming: Annotated[bool, layout("stream the dataset instead of indexing it first")] = False
    temperature: Annotated[float, contract("sampling temperature of a blend; above 1 evens out the weights", gt=0)] = (
        1.0
    )
    anneal_blend: Annotated[dict[str, float], contract("weights of the sources in the last anneal_steps")] = {}
    anneal_steps: Annotated[int, contract("final steps that sample from anneal_blend", ge=0)] = 0
    prefetch: Annotated[int, layout("steps to prefetch; 0 turns it off", ge=0)] = 2
    workers: Annotated[int, layout("data loader threads per rank", ge=0)] = 4

    @property
    def is_mock(self) -> bool:
        """Return whether the data is random: nothing of its training is worth keeping."""
        return self.dataset == "mock" and not self.blend


class Train(Section, frozen=True):
    """Length of the training, batch size and loss."""

    global_batch_size: Annotated[int, contract("samples per optimizer step over all GPUs", ge=1)] = 512
    steps: Annotated[int, contract("optimizer steps", ge=1)] = 300_000
    epochs: Annotated[float, contract("passes over the training data, in place of steps; 0 means steps", ge=0)] = 0.0
    seed: Annotated[int, contract("seed of weights and data order", ge=0)] = 1234
    init_std: Annotated[
        float, contract("standard deviation of random initial weights; 0 means the model's own", ge=0, lt=1)
    ] = 0.0
    z_loss: Annotated[float, contract("weight of the squared log-partition term in the loss", ge=0)] = 0.0
    mtp_loss: Annotated[float, contract("weight of the multi-token-prediction loss; 0 turns it off", ge=0)] = 0.0
    per_token_loss: Annotated[bool, contract("average the loss over target tokens, not over samples")] = False
    eval_every: Annotated[int, layout("steps between validations, and one after the last; 0 turns them off", ge=0)] = 0
    eval_steps: Annotated[int, layout("batches per validation; 0 means the whole set, at most 256 batches", ge=0)] = 0
    early_stop_patience: Annotated[
        int, layout("validations without a lower loss after which training stops; 0 turns it off", ge=0)
    ] = 0
    early_stop_delta: Annotated[float, layout("decrease of the validation loss that counts as lower", ge=0)] = 0.0
    log_every: Annotated[int, layout("steps between log lines", ge=1)] = 10
    profile: Annotated[bool, layout("record a profiler trace of a few steps")] = False
    freeze: Annotated[
        tuple[Literal["language", "vision", "projector"], ...],
        contract("modules of a vision-language model that are not trained"),
    ] = ()
    check_nan: Annotated[bool, benchmark("check loss and gradients before every update; off saves a sync")] = True


class Optimizer(Section, frozen=True):
    """The optimizer."""

    name: Annotated[
        Literal["adamw", "adamw8bit", "muon", "lion", "schedule_free_adamw", "sgd"], contract("optimizer")
    ] = "adamw"
    lr: Annotated[float, contract("peak learning rate", gt=0)] = 3e-4
    weight_decay: Annotated[float, contract("decoupled weight decay", ge=0)] = 0.1
    beta1: Annotated[float, contract("decay of the first moment", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, contract("decay of the second moment", ge=0, lt=1)] = 0.95
    eps: Annotated[float, contract("epsilon in the denominator", gt=0)] = 1e-8
    clip_grad: Annotated[float, contract("maximum gradient norm; 0 turns clipping off", ge=0)] = 1.0
    muon_momentum: Annotated[float, contract("momentum of Muon", gt=0, lt=1)] = 0.95
    muon_ns_steps: Annotated[int, contract("Newton-Schulz iterations of Muon", ge=1)] = 5


WSD_DECAY_SHARE = 0.2
"""Share of the steps after the warm-up over which a wsd schedule decays, if it does not set its steps."""


class Schedule(Section, frozen=True):
    """The learning-rate schedule."""

    name: Annotated[
        Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt", "rex"], contract("shape of the decay")
    ] = "cosine"
    warmup_steps: Annotated[int, contract("steps of linear warmup", ge=0)] = 500
    decay_steps: Annotated[int, contract("step at which the decay ends; 0 means at the last step", ge=0)] = 0
    min_lr: Annotated[float, contract("learning rate at the end of the decay", ge=0)] = 3e-5
    wsd_decay_steps: Annotated[
        int, contract("steps of the wsd decay, after the stable phase; 0 means the last fifth after the warmup", ge=0)
    ] = 0
    wsd_decay_style: Annotated[
        Literal["minus_sqrt", "linear", "cosine", "exponential", "sqrt"],
        contract("shape of the wsd decay: 1 - sqrt(p), 1 - p, cosine, 2^(1 - p) - 1 or sqrt(1 - p)"),
    ] = "minus_sqrt"


class Precision(Section, frozen=True):
    """Number formats."""

    compute: Annotated[Literal["bf16", "fp16", "fp32"], contract("format of activations and matmuls")] = "bf16"
    matmul: Annotated[
        Literal["same", "fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"],
        contract("format in linear layers; same means the format of compute"),
    ] = "same"
    master: Annotated[Literal["fp32", "bf16"], contract("format of the weights that the optimizer updates")] = "fp32"
    frozen: Annotated[
        Literal["same", "fp32"], contract("format of weights that are not trained; same means the format of compute")
    ] = "same"
    moments: Annotated[Literal["fp32", "bf16"], contract("format of the optimizer's first moment")] = "fp32"
    grads: Annotated[Literal["fp32", "bf16"], contract("format of gradient accumulation")] = "fp32"
    reduce: Annotated[Literal["fp32", "bf16"], contract("format of the gradient reduction over ranks")] = "fp32"
    fp8_gather: Annotated[bool, layout("gather parameters in fp8 instead of bf16")] = False
    first_last_bf16: Annotated[bool, contract("keep the first and last layers out of fp8")] = False


class Peft(Section, frozen=True):
    """Adapters; used when the goal is peft."""

    method: Annotated[Literal["lora", "dora", "rslora", "qlora", "lora8bit"], contract("adapter method")] = "lora"
    rank: Annotated[int, contract("rank of the adapters", ge=1)] = 32
    alpha: Annotated[float, contract("scale of the adapters", gt=0)] = 32.0
    dropout: Annotated[float, contract("dropout in the adapters", ge=0, lt=1)] = 0.0
    targets: Annotated[
        tuple[str, ...],
        contract("linear layers with adapters: qkv, proj, fc1, fc2, mamba_in, mamba_out, or Hugging Face names"),
    ] = ("qkv", "proj", "fc1", "fc2")

    def __post_init__(self) -> None:
        require_targets(self.targets)


class Moe(Section, frozen=True):
    """Routing and dispatch of experts; unused by dense models."""

    balancing: Annotated[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "bias", "none"], contract("how expert load is balanced")
    ] = "aux_loss"
    aux_loss: Annotated[float, contract("weight of the balancing loss", ge=0)] = 1e-3
    router_z_loss: Annotated[float, contract("weight of the router's z-loss", ge=0)] = 0.0
    capacity_factor: Annotated[float, contract("expert capacity relative to the mean load; 0 is dropless", ge=0)] = 0.0
    router_dtype: Annotated[Literal["fp32", "bf16"], contract("format of the router")] = "fp32"
    dispatcher: Annotated[
        Literal["alltoall", "allgather", "deepep", "hybridep"], layout("how tokens are sent to experts")
    ] = "alltoall"
    grouped_gemm: Annotated[bool, layout("one grouped kernel for all experts of a rank")] = True
    shared_expert_overlap: Annotated[bool, layout("compute shared experts during the token dispatch")] = False
    ep_overlap: Annotated[bool, layout("overlap the expert all-to-all with compute of another micro batch")] = False
    force_balance: Annotated[bool, benchmark("send equal loads to all experts, ignoring the router")] = False


class Layout(Section, frozen=True):
    """How the training is distributed over the GPUs."""

    strategy: Annotated[Strategy, layout("how data-parallel ranks shard state")] = "fsdp2"
    tp: Annotated[int, layout("tensor-parallel ranks: each holds a shard of every matrix", ge=1)] = 1
    pp: Annotated[int, layout("pipeline stages: each holds consecutive layers", ge=1, le=1024)] = 1
    vp: Annotated[int, layout("chunks of layers per stage (interleaving); 1 means none", ge=1, le=128)] = 1
    cp: Annotated[int, layout("context-parallel ranks: each holds a part of the sequence", ge=1)] = 1
    ep: Annotated[int, layout("expert-parallel ranks: each holds a part of the experts", ge=1)] = 1
    etp: Annotated[int, layout("tensor-parallel ranks inside one expert", ge=1)] = 1
    dp_shard: Annotated[
        int, layout("data-parallel ranks that shard one replica; -1 means all that are left", ge=-1)
    ] = -1
    dp_replicate: Annotated[int, layout("replicas of that shard group (HSDP)", ge=1)] = 1
    sp: Annotated[bool, layout("sequence parallelism: norms and residuals sharded over the tp ranks too")] = False
    micro_batch_size: Annotated[int, layout("samples per rank in one forward pass", ge=1)] = 1
    recompute: Annotated[
        Literal["none", "selective", "full"], layout("activations to recompute in the backward pass to save memory")
    ] = "none"
    recompute_modules: Annotated[
        tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts", "ops"], ...],
        layout("modules for selective recompute, or ops for single operations; empty means the engine's default"),
    ] = ()
    recompute_layers: Annotated[int, layout("full recompute of this many layers per stage; 0 means all", ge=0)] = 0
    pp_schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v"],
        layout("order of forward and backward micro batches over the stages"),
    ] = "1f1b"
    pp_micro_batches: Annotated[
        int, layout("micro batches that one pass through the pipeline runs; 0 means all of the step", ge=0)
    ] = 0
    stage_layers: Annotated[tuple[int, ...], layout("layers per stage chunk if uneven; empty means even")] = ()
    embedding_as_layer: Annotated[bool, layout("count the embedding as one layer when splitting stages")] = False
    head_as_layer: Annotated[bool, layout("count the head as one layer when splitting stages")] = False
    cp_comm: Annotated[
        Literal["ring", "a2a", "allgather", "a2a+ring"], layout("how context-parallel ranks exchange keys and values")
    ] = "ring"
    cp_inner: Annotated[int, layout("ranks of the inner all-to-all group of a2a+ring", ge=1)] = 1
    offload: Annotated[
        Literal["none", "optimizer", "activations", "params"], layout("state to keep in host memory")
    ] = "none"
    reshard_after_forward: Annotated[bool, layout("free gathered parameters between forward and backward")] = True
    defer_grad_sync: Annotated[bool, layout("reduce gradients only after the last micro batch")] = True


class Kernels(Section, frozen=True):
    """Kernels, CUDA graphs and overlap."""

    attention: Annotated[
        Literal["auto", "flash", "te", "cudnn", "sdpa", "flex", "eager"], layout("attention kernel")
    ] = "auto"
    scan: Annotated[
        Literal["auto", "triton", "torch", "fla"],
        layout("kernels of Mamba-2 and gated-delta layers: our own (Triton or torch), or flash-linear-attention's"),
    ] = "auto"
    compile: Annotated[bool, layout("compile each block")] = False
    cuda_graphs: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"], layout("CUDA graph capture")
    ] = "none"
    cuda_graph_scope: Annotated[
        tuple[Literal["attn", "mlp", "mamba", "moe", "moe_router", "moe_preprocess", "full_iteration"], ...],
        layout("captured modules; empty means all the implementation supports"),
    ] = ()
    te_rng_tracker: Annotated[bool, layout("RNG states that CUDA graphs can replay")] = False
    overlap_grad_reduce: Annotated[bool, layout("reduce gradients while the backward pass runs")] = True
    overlap_param_gather: Annotated[bool, layout("gather parameters while the forward pass runs")] = True
    tp_comm_overlap: Annotated[bool, layout("overlap tensor-parallel collectives with matmuls")] = False
    loss: Annotated[
        Literal["vocab_parallel", "plain", "chunked", "fused_linear"], layout("how the cross-entropy is computed")
    ] = "vocab_parallel"
    deterministic: Annotated[bool, layout("bitwise deterministic kernels")] = False


RANDOM_WEIGHTS = "random"  # value of checkpoint.pretrained: fine-tune from random weights


class Checkpoint(Section, frozen=True):
    """Initial weights, checkpoints and export."""

    pretrained: Annotated[
        str, contract("folder or id of the initial weights for fine-tuning; empty means the model's id")
    ] = ""
    folder: Annotated[
        str, layout("folder of the run's checkpoints; train --out replaces it; empty means the framework's default")
    ] = ""
    save_every: Annotated[int, layout("steps between checkpoints; 0 saves only at the end", ge=0)] = 1000
    keep: Annotated[int, layout("number of checkpoints to keep", ge=1)] = 3
    keep_best: Annotated[bool, layout("also save and keep the checkpoint with the lowest validation loss")] = True
    milestone_every: Annotated[int, layout("steps between checkpoints that are never deleted; 0 means none", ge=0)] = 0
    async_save: Annotated[bool, layout("write checkpoints in the background")] = True
    resume: Annotated[bool, layout("resume from the last complete checkpoint in the run folder")] = True
    grace_s: Annotated[float, layout("seconds to save and exit after a stop signal", gt=0)] = 60.0
    export: Annotated[
        Literal["none", "sharded", "consolidated"], layout("Hugging Face export at the end of the run")
    ] = "sharded"


class Recipe(Readable, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete training configuration: its contract and a layout for a cluster."""

    name: str
    model: str  # catalogue name, or path of a config.json
    goal: Goal
    cluster: str  # reference cluster of the layout, e.g. 8xH100
    benchmark: bool = False  # upper-bound throughput on mock data; never a production setting
    engine: Engine = "meshwright"  # that the layout is for; every command uses it unless another is requested
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

    def summary(self) -> list[Row]:
        """Return name, model, goal and cluster, and by section the fields that differ from their defaults."""
        changed: dict[str, list[str]] = {}
        for key, info in recipe_fields().items():
            section, _, name = key.partition(".")
            value = field_value(self, key)
            if value != info.default:
                changed.setdefault(section, []).append(f"{name} {value}")
        head = ("name", "model", "goal", "cluster")
        rows = {name: str(getattr(self, name)) for name in head} | ({"benchmark": "yes"} if self.benchmark else {})
        rows |= {} if self.engine == ENGINES[0] else {"engine": self.engine}
        rows |= {section: ", ".join(values) for section, values in changed.items()}
        return [(title.capitalize(), text) for title, text in rows.items()]


class RecipeField(msgspec.Struct, frozen=True):
    """One field of a recipe: key, kind, description, type and default."""

    key: str  # section.name
    flat: str  # its name in rules and costs
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
    """Return the metadata of a field, also inside optional types."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            return next(m for m in part.__metadata__ if isinstance(m, Meta))
    raise TypeError(f"recipe field without contract, layout or benchmark: {hint}")


def _section_fields(section: str, struct: type[Section]) -> Iterator[tuple[str, Any, Meta, Any]]:
    hints = struct.__annotations__
    for info in msgspec.structs.fields(struct):
        default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()
        yield info.name, hints[info.name], _meta(hints[info.name]), default


def field_value(recipe: Recipe, key: str) -> Any:
    """Return the value of a recipe field by key, e.g. layout.tp."""
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


@lru_cache(maxsize=1)
def keys_by_flat_name() -> dict[str, str]:
    """Map every flat name to its recipe key, e.g. tp → layout.tp."""
    return {info.flat: key for key, info in recipe_fields().items()}


@lru_cache(maxsize=1)
def recipe_fields() -> dict[str, RecipeField]:
    """Return every recipe field by key, e.g. layout.tp; flat names used in two sections get the section as prefix."""
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
