"""CUDA graphs: what can be captured, and under which conditions."""

from __future__ import annotations

from meshwright.recipes.capabilities import engines_with
from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_GRAPHS, not_, one_of, without

CAPTURING = engines_with("cuda_graphs", "full_iteration")
CAPTURING_MODULES = engines_with("cuda_graphs", "transformer_engine")
SYNCING = ("alltoall", "allgather")
FULL_ITERATION: Fix = {"cuda_graphs": ["full_iteration"], "cuda_graph_scope": [()], "check_nan": [False]}


def captured(c: Case) -> Column:
    """Return whether anything is captured."""
    return c.cuda_graphs != "none"


def is_full_iteration(c: Case) -> Column:
    """Return whether the complete forward and backward pass is one graph."""
    return (c.cuda_graphs == "full_iteration") | ((c.cuda_graphs == "local") & ("full_iteration" in c.cuda_graph_scope))


def per_layer(c: Case) -> Column:
    """Return whether layers or modules of layers are captured one by one."""
    return captured(c) & not_(is_full_iteration(c))


def scopes_outside_experts(c: Case) -> list[tuple[str, ...]]:
    """Return the scopes that capture what has fixed shapes in layers with dropless experts, most first."""
    own = ("attn", *(("mamba",) if c.mamba_heads else ()))
    return [(*own, "moe_router", "moe_preprocess"), (*own, "moe_router"), own]


def recomputes_experts(c: Case) -> Column:
    """Return whether layers of experts are recomputed as one module."""
    return (c.recompute == "selective") & ("moe" in c.recompute_modules)


def _scopes_without_experts(c: Case) -> list[tuple[str, ...]]:
    """Return the scope with the router in place of its experts; for whole layers, the scopes outside of experts."""
    if not c.cuda_graph_scope:
        return scopes_outside_experts(c)
    return [tuple("moe_router" if one == "moe" else one for one in c.cuda_graph_scope)]


def _missing_scopes(c: Case) -> tuple[str, ...]:
    """Return the scopes whose modules the model does not have."""
    experts = () if c.is_moe else ("moe", "moe_router", "moe_preprocess")
    return (*experts, *(() if c.mamba_heads else ("mamba",)))


@rule(
    "graphs.random-states",
    "error",
    "te_rng_tracker",
    engines=("megatron",),
    message="cuda_graphs={cuda_graphs} needs te_rng_tracker=true",
    symptom="assertion that CUDA graphs need the TE RNG tracker, when the model is built",
    cause="the default tracker changes RNG states outside the graph, so every replay would draw the same numbers",
    fixes=({"te_rng_tracker": [True]}, NO_GRAPHS),
    pitfall="use_te_rng_tracker not set",
)
def graphs_without_te_rng(c: Case) -> Column:
    return captured(c) & not_(c.te_rng_tracker)


@rule(
    "graphs.packing",
    "error",
    "cuda_graphs",
    engines=CAPTURING,
    message="cuda_graphs={cuda_graphs} does not support packed samples of varying shape",
    symptom="CUDA graphs accept only tensor inputs; or a replay uses the wrong document boundaries",
    cause="a graph replays fixed shapes, but packed samples carry document lists of varying length",
    fixes=({"pad_to_max_length": [True]}, {"packing": [False]}, NO_GRAPHS),
    pitfall="CUDA graphs + packed sequences",
)
def graphs_with_dynamic_packing(c: Case) -> Column:
    return captured(c) & c.packing & not_(c.pad_to_max_length)


@rule(
    "graphs.full-recompute",
    "error",
    "recompute",
    engines=CAPTURING,
    message="full recompute does not work with cuda_graphs={cuda_graphs} of single modules",
    symptom="full recompute is only supported with full-iteration CUDA graphs",
    cause="the recomputed layer would be captured once but run twice",
    fixes=({"recompute": ["selective", "none"], "recompute_layers": [0]}, FULL_ITERATION, NO_GRAPHS),
    pitfall="CUDA graphs + full recompute",
)
def graphs_with_full_recompute(c: Case) -> Column:
    return captured(c) & (c.recompute == "full") & not_(is_full_iteration(c))


@rule(
    "graphs.local-scope",
    "warning",
    "cuda_graph_scope",
    engines=("megatron",),
    message="cuda_graphs=local captures {cuda_graph_scope} since Megatron-Core 0.18 only",
    symptom="earlier releases: the local implementation is only supported with the full_iteration scope",
    cause="earlier releases capture single modules with the transformer_engine implementation only",
    fixes=(
        {"cuda_graphs": ["transformer_engine"]},
        {"cuda_graph_scope": [("full_iteration",)], "check_nan": [False]},
        NO_GRAPHS,
    ),
)
def local_graphs_of_modules(c: Case) -> Column:
    return (c.cuda_graphs == "local") & (tuple(c.cuda_graph_scope) not in ((), ("full_iteration",)))


@rule(
    "graphs.full-iteration-scope",
    "error",
    "cuda_graph_scope",
    engines=CAPTURING,
    message="cuda_graph_scope={cuda_graph_scope} does not match cuda_graphs={cuda_graphs}",
    symptom="full-iteration graphs accept no module scopes, module graphs no full_iteration scope",
    cause="either the iteration is one graph, or modules are captured one by one",
    fixes=({"cuda_graph_scope": [()]}, NO_GRAPHS),
)
def scope_contradicts_implementation(c: Case) -> Column:
    full_with_modules = (c.cuda_graphs == "full_iteration") & (
        tuple(c.cuda_graph_scope) not in ((), ("full_iteration",))
    )
    modules_with_full = (c.cuda_graphs == "transformer_engine") & ("full_iteration" in c.cuda_graph_scope)
    return full_with_modules | modules_with_full


@rule(
    "graphs.nan-check",
    "error",
    "check_nan",
    engines=("megatron",),
    message="full-iteration CUDA graphs need check_nan=false",
    symptom="full-iteration graphs need the NaN check in loss and gradients to be off",
    cause="the check reads a value back to the host in the middle of the iteration",
    fixes=({"check_nan": [False]}, NO_GRAPHS),
)
def nan_check_in_full_iteration(c: Case) -> Column:
    return is_full_iteration(c) & c.check_nan


@rule(
    "graphs.experts-or-router",
    "error",
    "cuda_graph_scope",
    engines=CAPTURING_MODULES,
    message="cuda_graph_scope contains both moe and moe_router",
    symptom="the scopes moe and moe_router are mutually exclusive",
    cause="the router is part of the moe scope",
    fixes=({"cuda_graph_scope": without("cuda_graph_scope", lambda c: ("moe",))},),
)
def moe_and_router_captured(c: Case) -> Column:
    return captured(c) & ({"moe", "moe_router"} <= set(c.cuda_graph_scope))


@rule(
    "graphs.preprocess-needs-router",
    "error",
    "cuda_graph_scope",
    engines=CAPTURING_MODULES,
    message="cuda_graph_scope contains moe_preprocess without moe_router",
    symptom="moe_preprocess needs the moe_router scope",
    cause="moe_preprocess continues the router's graph",
    fixes=(
        {"cuda_graph_scope": lambda c: [(*c.cuda_graph_scope, "moe_router")]},
        {"cuda_graph_scope": without("cuda_graph_scope", lambda c: ("moe_preprocess",))},
        {"cuda_graph_scope": without("cuda_graph_scope", lambda c: ("moe_preprocess", "moe"))},
    ),
)
def preprocess_without_router(c: Case) -> Column:
    return captured(c) & ("moe_preprocess" in c.cuda_graph_scope) & ("moe_router" not in c.cuda_graph_scope)


@rule(
    "graphs.experts-need-capacity",
    "error",
    "cuda_graphs",
    engines=CAPTURING_MODULES,
    message="cuda_graphs={cuda_graphs} captures the experts too, which needs a capacity_factor above 0",
    symptom="moe cuda graph is only supported with drop-padding MoE; earlier releases: the capture fails at a sync",
    cause="without a capacity, the number of tokens per expert changes every step; an empty scope is the whole layer",
    fixes=(
        {"cuda_graphs": ["transformer_engine"], "cuda_graph_scope": _scopes_without_experts},
        {"cuda_graph_scope": without("cuda_graph_scope", lambda c: ("moe",))},
        {"capacity_factor": [1.0]},
        NO_GRAPHS,
    ),
)
def captured_experts_without_capacity(c: Case) -> Column:
    scope = tuple(c.cuda_graph_scope)
    return per_layer(c) & c.is_moe & ((not scope) | ("moe" in scope)) & (c.capacity_factor == 0)


@rule(
    "graphs.router-recompute",
    "error",
    "recompute_modules",
    engines=("megatron",),
    message="recompute of moe does not work with a captured moe_router (cuda_graphs=transformer_engine)",
    symptom="moe recompute is not supported with moe_router CUDA graph",
    cause="the recomputed module would contain a graph, which is captured once but would run twice",
    fixes=(
        {"cuda_graph_scope": without("cuda_graph_scope", lambda c: ("moe_router", "moe_preprocess"))},
        {"recompute_modules": without("recompute_modules", lambda c: ("moe",))},
        {"recompute": ["none"], "recompute_modules": [()]},
        NO_GRAPHS,
    ),
)
def captured_router_recomputed(c: Case) -> Column:
    return recomputes_experts(c) & (c.cuda_graphs == "transformer_engine") & ("moe_router" in c.cuda_graph_scope)


@rule(
    "graphs.modules-of-the-model",
    "error",
    "cuda_graph_scope",
    engines=CAPTURING,
    message="cuda_graph_scope={cuda_graph_scope} names modules that this model does not have",
    symptom="assertion on the scope, or nothing is captured",
    cause="only modules of the model can be captured",
    fixes=({"cuda_graph_scope": without("cuda_graph_scope", _missing_scopes)}, NO_GRAPHS),
)
def captured_modules_missing(c: Case) -> Column:
    return captured(c) & bool(set(_missing_scopes(c)) & set(c.cuda_graph_scope))


@rule(
    "graphs.scope-unused",
    "advice",
    "cuda_graph_scope",
    message="cuda_graph_scope is set, but cuda_graphs=none captures nothing",
    symptom="no speedup",
    cause="the implementation must be selected too",
    fixes=({"cuda_graph_scope": [()]},),
)
def scope_without_graphs(c: Case) -> Column:
    return (c.cuda_graphs == "none") & (len(c.cuda_graph_scope) > 0)


@rule(
    "graphs.pipeline",
    "error",
    "cuda_graphs",
    engines=("torchtitan",),
    message="{engine} does not support CUDA graphs with pp={pp}",
    symptom="CUDA graphs are rejected with pipeline parallelism",
    cause="the host drives its pipeline stages",
    fixes=(NO_GRAPHS,),
)
def graphs_with_pipeline(c: Case) -> Column:
    return captured(c) & (c.pp > 1)


@rule(
    "graphs.syncing-dispatch",
    "error",
    "dispatcher",
    engines=("torchtitan", "megatron"),
    message="the {dispatcher} dispatcher at ep={ep} synchronizes with the host inside the captured region",
    symptom="operation not permitted when stream is capturing; or the combination is rejected",
    cause="it reads the number of tokens per rank back to size its buffers",
    fixes=({"dispatcher": ["hybridep", "deepep"]}, {"capacity_factor": [1.0]}, NO_GRAPHS),
)
def captured_dispatch_syncs(c: Case) -> Column:
    syncs = c.is_moe & (c.ep > 1) & one_of(c.dispatcher, SYNCING) & (c.capacity_factor == 0)
    return syncs & (is_full_iteration(c) | (captured(c) & (c.engine == "torchtitan")))
