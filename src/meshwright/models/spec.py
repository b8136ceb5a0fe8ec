"""Model specs: groups of equal layers, and the exact parameter counts derived from them."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from meshwright.display import Entry, Row, parameter_count

from .quantization import Quantization

ModelKind = Literal["causal_lm", "vision_language", "diffusion"]


class Compressor(msgspec.Struct, frozen=True):
    """Further keys of an attention with a window: one for every few earlier tokens (DeepSeek-V4)."""

    rate: int  # tokens of one compressed key
    topk: int | None = None  # compressed keys that an indexer selects for a query; all if None
    index_heads: int = 0
    index_dim: int = 0

    @property
    def overlap(self) -> int:
        """How often a token enters a compressed key: selected keys overlap with their neighbours."""
        return 1 if self.topk is None else 2

    def matmul_params(self, hidden: int, head_dim: int, q_lora: int) -> int:
        """Return the linears to keys and their gates, and those of the indexer."""
        widths = head_dim + self.index_dim
        index = q_lora * self.index_heads * self.index_dim + hidden * self.index_heads
        return 2 * self.overlap * hidden * widths + index

    def vector_params(self, head_dim: int) -> int:
        return (self.rate * self.overlap + 1) * (head_dim + self.index_dim)  # position biases, norms


class Attention(msgspec.Struct, frozen=True):
    """Softmax attention; grouped-query if kv_heads < heads, sliding if it has a window."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    # "head": one head_dim vector each for q and k; "head_bias": and a bias each; "full": the full width each
    qk_norm: Literal["none", "head", "head_bias", "full"] = "none"
    output_gate: bool = False  # q projection is twice as wide, the second half gates the output (Qwen3-Next)
    sinks: bool = False  # one learned logit per head (gpt-oss)
    shared_kv: bool = False  # key and value are one projection (Gemma 4 global layers)
    context_width: int | None = (
        None  # keys and values come from another stream of this width (diffusion cross-attention)
    )
    chunked: bool = False  # the window is a chunk: a token sees its own chunk only (Llama 4)
    v_dim: int | None = None  # width of a value head, if it is not head_dim (MiMo)
    head_gate: bool = False  # one gate per head (Laguna)
    differential: bool = False  # the difference of two attentions, both computed over all heads (DiffLlama)
    reused_kv: bool = False  # keys and values are those of an earlier layer (Gemma 3n, Gemma 4)
    q_lora: int | None = None  # queries pass through a projection of this rank, with a norm (DeepSeek-V4)
    out_lora: int = 0  # the output of every group of heads is projected to this rank first
    out_groups: int = 1
    compressor: Compressor | None = None
    topk: int | None = None  # keys of the blocks that an indexer selects for a query (MiniMax-M3)
    index_heads: int = 0
    index_dim: int = 0

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        """Width of the values of all key/value heads."""
        return self.kv_heads * (self.v_dim or self.head_dim)

    @property
    def out_width(self) -> int:
        """Width of attention's output before its last projection."""
        return self.heads * (self.v_dim or self.head_dim)

    @property
    def kv_out_width(self) -> int:
        """Width of what the key and value projections return."""
        return 0 if self.reused_kv else self.kv_width + (0 if self.shared_kv else self.v_width)

    def matmul_params(self, hidden: int) -> int:
        source = self.context_width or hidden
        queries, into = self.q_width * (2 if self.output_gate else 1), self.q_lora or hidden
        q = into * queries + hidden * ((self.q_lora or 0) + (self.heads if self.head_gate else 0))
        out = self.out_width * hidden
        if self.out_lora:
            out = self.out_lora * (self.out_width + self.out_groups * hidden)
        extra = self.compressor.matmul_params(hidden, self.head_dim, into) if self.compressor else 0
        indexer = hidden * self.index_dim * (self.index_heads + 1) if self.index_heads else 0
        return q + source * self.kv_out_width + out + extra + indexer

    def vector_params(self, hidden: int) -> int:
        count = 0
        if self.qkv_bias:
            count += self.q_width * (2 if self.output_gate else 1) + self.kv_out_width
        if self.out_bias:
            count += hidden
        if self.qk_norm in ("head", "head_bias"):
            vectors = 1 if self.reused_kv else 2
            count += vectors * self.head_dim * (2 if self.qk_norm == "head_bias" else 1)
        elif self.qk_norm == "full":
            count += self.q_width + self.kv_width
        if self.sinks:
            count += self.heads
        if self.q_lora:
            count += self.q_lora + self.head_dim  # norms of the latent queries and of the one key
        if self.compressor:
            count += self.compressor.vector_params(self.head_dim)
        if self.index_heads:
            count += 2 * self.index_dim
        return count


class MLA(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek): queries and keys/values pass through low-rank projections."""

    heads: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    q_lora: int | None = None
    bias: bool = False  # of the two down projections and the output
    topk: int | None = None  # keys that an indexer selects for a query (DeepSeek sparse attention)
    index_heads: int = 0  # of this layer's own indexer; 0 if it has none or shares an earlier layer's
    index_dim: int = 0

    @property
    def qk_head(self) -> int:
        return self.qk_nope + self.qk_rope

    def matmul_params(self, hidden: int) -> int:
        q_width = self.heads * self.qk_head
        q = hidden * q_width if self.q_lora is None else hidden * self.q_lora + self.q_lora * q_width
        kv_down = hidden * (self.kv_lora + self.qk_rope)
        kv_up = self.kv_lora * self.heads * (self.qk_nope + self.v_head)
        return q + kv_down + kv_up + self.heads * self.v_head * hidden + self.index_params(hidden)

    def index_params(self, hidden: int) -> int:
        """Matmul parameters of the indexer: queries from the latent, one key, one weight for each head."""
        width = self.index_heads * self.index_dim
        return (self.q_lora or hidden) * width + (hidden * (self.index_dim + self.index_heads) if width else 0)

    def vector_params(self, hidden: int) -> int:
        norms = self.kv_lora + (self.q_lora or 0)
        return (
            norms
            + (2 * self.index_dim if self.index_heads else 0)
            + (norms + self.qk_rope + hidden if self.bias else 0)
        )


class Mamba2(msgspec.Struct, frozen=True):
    """State-space mixer (Mamba-2)."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    gated_norm: bool = True

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def matmul_params(self, hidden: int) -> int:
        return hidden * (self.inner + self.conv_width + self.heads) + self.inner * hidden

    def vector_params(self, hidden: int) -> int:
        conv = self.conv_width * self.conv + (self.conv_width if self.conv_bias else 0)
        bias = (self.inner + self.conv_width + self.heads + hidden) if self.proj_bias else 0
        norm = self.inner if self.gated_norm else 0
        return conv + 3 * self.heads + norm + bias  # A_log, D, dt_bias; gated norm


class GatedDelta(msgspec.Struct, frozen=True):
    """Linear attention with a gated delta rule (Qwen3-Next, Qwen3.5)."""

    k_heads: int
    v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv: int = 4

    @property
    def k_width(self) -> int:
        return self.k_heads * self.k_head_dim

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_head_dim

    def matmul_params(self, hidden: int) -> int:
        qkvz = hidden * (2 * self.k_width + 2 * self.v_width)
        return qkvz + hidden * 2 * self.v_heads + self.v_width * hidden

    def vector_params(self, hidden: int) -> int:
        return (2 * self.k_width + self.v_width) * self.conv + 2 * self.v_heads + self.v_head_dim


class LinearMixer(msgspec.Struct, frozen=True):
    """A mixer whose work grows with the tokens only: a scan, a short convolution or linear attention, by its counts."""

    kind: str  # such as "mamba", "short_conv", "lightning", "kda"
    into: int  # outputs of the linears that read the layer's input
    out: int  # inputs of the last linear
    between: int = 0  # parameters of the linears between them
    vectors: int = 0  # parameters of convolutions, norms, biases and states
    heads: int = 1  # tensor parallelism divides them
    core: float = 0.0  # forward FLOPs per token beside the linears
    kept: int = 0  # elements that the core saves per token
    state: int = 0  # elements of the state of one sequence
    per_key: float = 0.0  # forward FLOPs per token and key: attention whose projections are not the usual ones

    def matmul_params(self, hidden: int) -> int:
        return hidden * self.into + self.between + self.out * hidden

    def vector_params(self, hidden: int) -> int:
        return self.vectors


class Dense(msgspec.Struct, frozen=True):
    """A feed-forward block: gated (three matrices) or plain (two)."""

    width: int
    gated: bool = True
    bias: bool = False

    def matmul_params(self, hidden: int) -> int:
        return (3 if self.gated else 2) * hidden * self.width

    def vector_params(self, hidden: int) -> int:
        return ((2 if self.gated else 1) * self.width + hidden) if self.bias else 0

    def active_params(self, hidden: int) -> int:
        return self.matmul_params(hidden) + self.vector_params(hidden)


class MoE(msgspec.Struct, frozen=True):
    """Routed experts (top-k per token), and the shared experts or dense block that process every token."""

    experts: int
    topk: int
    width: int
    shared_width: int = 0  # all shared experts together
    gated: bool = True
    bias: bool = False  # biases inside the experts (gpt-oss)
    router_bias: bool = False  # a trained bias of the router
    balance_bias: bool = False  # balanced by a bias that no gradient trains (a buffer: not counted as parameters)
    dense_bias: bool = False  # biases of the shared expert and of the latent projections
    shared_gate: bool = False  # a one-output gate on the shared expert (Qwen)
    latent: int | None = None  # experts work at this width, with a projection down and up (Nemotron 3 Super)
    parallel: Dense | None = None  # a dense block parallel to the experts (Gemma 4)
    idle: int = 0  # routed parameters that no token uses

    def one_expert(self, hidden: int) -> Dense:
        return Dense(self.width, self.gated, self.bias)

    def expert_params(self, hidden: int) -> int:
        """Parameters of one routed expert."""
        block = self.one_expert(hidden)
        inner = self.latent or hidden
        return block.matmul_params(inner) + block.vector_params(inner)

    def routed_params(self, hidden: int) -> int:
        """Parameters of all routed experts, which expert parallelism divides."""
        return self.experts * self.expert_params(hidden) + self.idle

    def always_on_params(self, hidden: int) -> int:
        """Router, shared experts and latent projections: used by every token, replicated over ep ranks."""
        count = hidden * self.experts
        count += self.experts if self.router_bias else 0
        if self.shared_width:
            shared = Dense(self.shared_width, self.gated, self.dense_bias)
            count += shared.matmul_params(hidden) + shared.vector_params(hidden)
        count += hidden if self.shared_gate else 0
        if self.latent:
            count += 2 * hidden * self.latent + (hidden + self.latent if self.dense_bias else 0)
        if self.parallel is not None:
            count += self.parallel.matmul_params(hidden) + self.parallel.vector_params(hidden)
        return count

    def active_params(self, hidden: int) -> int:
        return self.always_on_params(hidden) + self.topk * self.expert_params(hidden)


Mixer = Attention | MLA | Mamba2 | GatedDelta | LinearMixer
Ffn = Dense | MoE


def is_scan(mixer: Mixer | None) -> bool:
    """Return whether a mixer is a state-space scan (Mamba of either version), whose linears adapters name mamba_*."""
    return isinstance(mixer, Mamba2) or (isinstance(mixer, LinearMixer) and mixer.kind == "mamba")


class Layer(msgspec.Struct, frozen=True):
    """One block: a token mixer, a feed-forward block, or both (hybrids have layers with only one of them)."""

    mixer: Mixer | None
    ffn: Ffn | None
    # a second attention: over text (diffusion), parallel to a scan (Falcon-H1), or after the first (LongCat)
    cross: Attention | MLA | None = None
    norm_params: int = 0  # norm weights and biases of the layer
    extra_params: int = 0  # modulation tables and other vectors of the layer
    streams: int = 1  # copies of the weights for parallel token streams (FLUX joint blocks: image and text)
    extra_matmul: int = 0  # parameters of further linears that every token uses
    residuals: int = 1  # parallel residual streams between layers (hyper-connections)
    extra_flops: float = 0.0  # forward FLOPs per token of weights that are used several times

    def params(self, hidden: int) -> int:
        """All parameters of the layer."""
        return self.dense_params(hidden) + self.routed_params(hidden)

    def routed_params(self, hidden: int) -> int:
        """Parameters that expert parallelism divides."""
        return self.ffn.routed_params(hidden) if isinstance(self.ffn, MoE) else 0

    def dense_params(self, hidden: int) -> int:
        """Parameters that expert parallelism does not divide."""
        count = self.norm_params + self.extra_params + self.extra_matmul
        for part in (self.mixer, self.cross):
            if part is not None:
                count += self.streams * (part.matmul_params(hidden) + part.vector_params(hidden))
        if isinstance(self.ffn, MoE):
            count += self.ffn.always_on_params(hidden)
        elif self.ffn is not None:
            count += self.streams * (self.ffn.matmul_params(hidden) + self.ffn.vector_params(hidden))
        return count

    def active_params(self, hidden: int) -> int:
        """Parameters one token uses."""
        if not isinstance(self.ffn, MoE):
            return self.params(hidden)
        return self.dense_params(hidden) + self.ffn.topk * self.ffn.expert_params(hidden)


class Group(msgspec.Struct, frozen=True):
    """Equal layers and their indices in the model."""

    layer: Layer
    places: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.places)


class Vision(msgspec.Struct, frozen=True):
    """A vision encoder and its connector to the language model."""

    depth: int
    hidden: int
    width: int  # of its feed-forward block
    heads: int
    patch: int
    layer_params: int  # parameters of one of its layers
    stem_params: int  # patch and position embeddings, final norms
    connector_params: int  # merger or projector into the language model
    merge: int = 1  # patches merged into one language token
    image_tokens: int = 0  # language tokens of every image, if images are scaled to one size

    @property
    def params(self) -> int:
        return self.depth * self.layer_params + self.stem_params + self.connector_params


class ParamCount(msgspec.Struct, frozen=True):
    """Parameters of a model, total and by part that is sharded differently."""

    total: int
    active: int  # used by one token, embeddings and head included
    embedding: int  # input embedding (and learned positions)
    head: int  # output projection; 0 when tied to the embedding
    routed: int  # routed experts of the main layers
    vision: int
    mtp: int  # multi-token-prediction modules; not part of total


class ModelSpec(Entry, msgspec.Struct, frozen=True, dict=True):
    """The architecture of one model; all counts and costs are derived from it."""

    name: str
    family: str
    kind: ModelKind
    hidden: int
    groups: tuple[Group, ...]
    vocab: int = 0
    tied: bool = False
    max_seq_length: int = 0
    final_norm_params: int = 0
    learned_positions: int = 0  # rows of a learned position table (GPT)
    extra_params: int = 0  # embedders and heads that are not a vocabulary (diffusion), per-layer embeddings
    head_bias: bool = False
    mtp_layers: int = 0
    mtp_layer: Layer | None = None
    vision: Vision | None = None
    hf_id: str = ""
    model_type: str = ""
    hf_class: str = ""  # class name in transformers or diffusers
    activation: str = "silu"
    source: str = ""
    quantization: Quantization | None = None  # of the weights in its folder
    published_total: float | None = None
    published_active: float | None = None
    aliases: tuple[str, ...] = ()
    inspected_by: str = ""  # the transformers version and class that built it, if no reader knows its type
    assumed: tuple[str, ...] = ()  # what the inspection took for granted

    def summary(self) -> list[Row]:
        """Return name, size, shape and origin."""
        size = f"{parameter_count(self.params.total, 3)} parameters"
        if self.params.active < self.params.total:
            size += f", {parameter_count(self.params.active, 3)} active"
        shape = f"{self.num_layers} layers of {self.hidden:,}, vocabulary {self.vocab:,}"
        longest = f"{self.max_seq_length:,} tokens" if self.max_seq_length else ""
        origin = self.hf_id or self.source
        rows = [("Model", f"{self.name} ({self.family})"), ("Size", size), ("Shape", shape)]
        return [*rows, *((title, text) for title, text in (("Longest", longest), ("From", origin)) if text)]

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.groups)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer in order."""
        at = {place: group.layer for group in self.groups for place in group.places}
        return tuple(at[place] for place in range(len(at)))

    @cached_property
    def params(self) -> ParamCount:
        """Exact parameter counts; total excludes the multi-token-prediction modules."""
        embedding = self.vocab * self.hidden + self.learned_positions * self.hidden
        head = 0 if self.tied or not self.vocab else self.vocab * self.hidden
        head += self.vocab if self.head_bias else 0
        vision = self.vision.params if self.vision else 0
        rest = embedding + head + vision + self.final_norm_params + self.extra_params
        return ParamCount(
            total=rest + sum(g.count * g.layer.params(self.hidden) for g in self.groups),
            active=rest + sum(g.count * g.layer.active_params(self.hidden) for g in self.groups),
            embedding=embedding,
            head=head,
            routed=sum(g.count * g.layer.routed_params(self.hidden) for g in self.groups),
            vision=vision,
            mtp=self.mtp_layers * self._mtp_module_params(),
        )

    def _mtp_module_params(self) -> int:
        """Return the size of one module: a layer, the [hidden, embedding] projection and three norms."""
        if self.mtp_layer is None:
            return 0
        return self.mtp_layer.params(self.hidden) + 2 * self.hidden * self.hidden + 3 * self.hidden

    def mixers(self, kind: type[Mixer]) -> list[tuple[Mixer, int]]:
        """Return the distinct mixers of one type with their number of layers."""
        found = [(g.layer.mixer, g.count) for g in self.groups if isinstance(g.layer.mixer, kind)]
        return [(mixer, count) for mixer, count in found if mixer is not None]

    @property
    def moe(self) -> MoE | None:
        """The mixture-of-experts block, or None for a dense model."""
        return next((g.layer.ffn for g in self.groups if isinstance(g.layer.ffn, MoE)), None)
