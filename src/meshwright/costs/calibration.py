"""Calibration profiles: the rates that GPUs, engines and links reach in training, as data with sources.

`profiles/gpu_*.toml` describe one GPU architecture each, `profiles/engine_*.toml` one engine each, and
`profiles/shared.toml` the rest. benchmarks/fit_costs.py fits and writes them. A case may carry its own calibration,
which the fit and a user's machine profile use.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.case import Case

PROFILES = Path(__file__).with_name("profiles")


class _Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: str = ""  # where the numbers come from, and the command that fitted them


class GpuProfile(_Profile, frozen=True, kw_only=True):
    """Rates of one GPU architecture."""

    matmul: dict[str, float]  # share of the dense peak that large matmuls reach, by precision
    matmul_limit: float = 1.0  # share of the bf16 peak that no engine's matmuls exceed: that of large matmuls alone
    attention: dict[
        str, float
    ]  # share of the bf16 peak over the causal half, forward: flash1, flash2, cudnn, flash4, best
    softmax: dict[str, float] = {}  # matmuls per exponential over those of an A100, by GPU name or "usual"
    block: dict[str, float] = {}  # tokens its kernels waste at the diagonal, where they differ from Shared.block
    hbm: float  # share of the memory bandwidth that memory-bound kernels reach
    link: float  # share of the NVLink (or PCIe) rate that collectives reach
    pcie: float | None = None  # the same on cards of this architecture without NVLink; None: as link
    network: float  # share of the network rate that collectives reach
    all_to_all: float  # rate of an all-to-all inside a domain over that of a ring
    scan: float = 1.0  # rate of scans over what its memory bandwidth suggests
    clock: dict[str, float] = {}  # sustained clock over that of the architecture's reference, by GPU name


class EngineProfile(_Profile, frozen=True, kw_only=True):
    """How one engine executes a step."""

    attention: str  # kernel behind flash attention: flash1, flash2, cudnn or best
    matmul: float = 1.0  # rate of its matmuls over the GPU's usual: tuned libraries, no transposes in between
    traffic: float  # bytes moved by its memory-bound kernels over perfectly fused ones
    traffic_compiled: float  # the same under torch.compile
    launch_s: float  # CPU seconds to launch one layer's kernels, forward and backward
    launch_compiled: float = 0.6  # factor of launch_s under torch.compile
    sharpness: float = 5.0  # how launch and compute time combine: 1 adds them, large takes the maximum
    launch_tp: float = 0.0  # increase of launch_s per doubling of the tensor-parallel ranks
    launch_8bit: float = 1.0  # launch time with quantized matmuls over that without
    launch_moe_s: float = 0.0  # additional launch time of a layer with experts: routing, permutation
    launch_scan_s: dict[str, float] = {}  # additional launch time of a layer with a scan: mamba2, gated_delta
    launch_vision_s: float = 0.0  # launch time of one layer of a vision encoder
    sync_moe_s: float = 0.0  # seconds the GPU waits per MoE layer until the CPU has the token counts
    launch_expert_s: float = 0.0  # CPU seconds to launch one local expert's kernels, if each expert has its own
    step_s: float = 0.015  # fixed cost of a step: data, logging, final synchronization
    grouped: float = 0.8  # rate of grouped expert matmuls over separate ones
    moe_recompute: float = 1.0  # time of a MoE layer's full recompute over that of its forward pass
    scan: dict[str, float] = {}  # rate of its scans over the GPU's usual: mamba2, gated_delta
    wide_heads: float = 1.0  # time of attention with heads wider than 128 over that of its arithmetic
    adapters: float = 1.0  # bytes its adapters move over the usual, those of experts excepted
    quantize: float = 1.0  # bytes its quantization of operands moves over the usual
    weight_bytes: float = 0.0  # bytes that casting a trained weight and its gradient moves per micro batch
    update: float = 1.0  # bytes its optimizer moves over the usual
    dp_visible: float = 0.1  # exposed share of an overlapped data-parallel collective
    dp_rate: float = 1.0  # share of the link rate that its data-parallel collectives reach
    bucket_params: float = 40.0  # parameters per data-parallel collective, in millions
    bucket_per_rank: float = 0.0  # minimum per data-parallel rank, in millions
    imbalance: float = 1.2  # load of the fullest expert rank over the mean under natural routing
    pads_experts: bool = False  # every expert computes as many rows as the fullest one
    p2p_s: float = 0.0  # CPU seconds a pipeline stage spends on the sends and receives of one micro batch


class Shared(_Profile, frozen=True, kw_only=True):
    """Constants that depend on neither GPU nor engine."""

    matmul_traffic: float  # share of a matmul's reads and writes that its arithmetic does not hide
    attention_backward: float  # backward of flash attention over its forward
    head_width: float  # work per score that is independent of head width, in widths
    block: float  # tokens wasted per causal block at the diagonal
    score_passes: dict[str, float]  # passes over the scores, forward and backward: eager, fused_softmax
    scan: float  # FLOPs of chunked scans per byte of memory bandwidth, which limits them
    misaligned: float  # slowdown of a matmul whose width is not a multiple of 64
    quantize: dict[str, float]  # bytes per element of a linear's inputs and outputs for quantization, by matmul format
    loss_bytes: dict[str, float]  # bytes the loss moves per logit, forward and backward, by kind of loss
    latency_s: float  # latency of a collective
    hop_s: float  # additional latency per rank of a ring inside a domain
    far_hop_s: float  # additional latency per domain of a ring
    untrained_share: float  # share of tokens that an untrained router sends to each of its favourite experts
    dispatch: dict[str, float]  # speed of a token dispatcher over a plain all-to-all
    tp_overlap_visible: float  # exposed shares of overlapped communication
    ep_overlap_visible: float
    cp_visible: float
    p2p_visible: float
    selective_again: float  # op-level selective recompute: recomputed share of the forward
    jitter: float  # slowdown for every doubling of the nodes: stragglers
    adapter_bytes: float  # bytes per element of an adapted linear's input and output that an adapter moves
    expert_8bit: float  # launch time of one expert with quantized matmuls over that without
    graphs_left: dict[str, float]  # share of launch time left with CUDA graphs: dense, moe, sync
    host_gb_s: float  # host link rate of an architecture missing in host_link
    host_link: dict[str, float]  # GB/s of copies between one GPU and pinned host memory, by architecture or GPU
    host_update_gb_s: float  # GB/s of host memory that the update of offloaded weights reaches, per GPU
    eight_bit_bytes: float  # bytes per parameter that quantizing 8-bit moments adds to an update
    launch_nf4: float  # launch time with 4-bit base weights over that without
    clip_passes: float  # passes over the gradients for their norm
    bubble: dict[str, float]  # bubble of a schedule over that of 1F1B


P = TypeVar("P", bound=_Profile)


class Calibration(msgspec.Struct, frozen=True):
    """All profiles."""

    gpus: Mapping[str, GpuProfile]
    engines: Mapping[str, EngineProfile]
    shared: Shared
    machine: Any = None  # the MachineProfile that it contains, if any

    def gpu(self, case: Case) -> GpuProfile:
        """Return the profile of the case's GPU architecture."""
        return self.gpus[case.cluster.gpu.arch]

    def engine(self, case: Case) -> EngineProfile:
        """Return the profile that a case names, or that of its engine."""
        return self.engines[getattr(case, "speed_profile", "") or case.engine]


def calibration(case: Case) -> Calibration:
    """Return the calibration that a case carries, or the shipped one."""
    own: Calibration | None = getattr(case, "calibration", None)
    return own if own is not None else shipped()


@cache
def shipped() -> Calibration:
    """Return the profiles that come with Meshwright."""
    shared = _checked("shared", _parsed(PROFILES / "shared.toml"), Shared)
    return Calibration(_Shipped("gpu", GpuProfile), _Shipped("engine", EngineProfile), shared)


class _Shipped(Mapping[str, P]):
    """The shipped profiles of GPUs or engines by name, each read when it is asked for."""

    def __init__(self, kind: str, profile: type[P]) -> None:
        self._paths = {_kind(path.stem): path for path in sorted(PROFILES.glob(f"{kind}_*.toml"))}
        self._profile = profile
        self._read: dict[str, P] = {}

    def __getitem__(self, name: str) -> P:
        if name not in self._read:
            path = self._paths[name]
            self._read[name] = _checked(path.stem, _parsed(path), self._profile)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def read_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every profile file of a folder as a table, by file name without suffix."""
    return {path.stem: _parsed(path) for path in sorted(folder.glob("*.toml"))}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"not a profile: {error}", field="profile", value=str(path)) from None


def from_tables(tables: dict[str, dict[str, Any]]) -> Calibration:
    """Build a calibration from tables; unknown, missing or invalid values are errors."""
    gpus = {_kind(name): _checked(name, t, GpuProfile) for name, t in tables.items() if name.startswith("gpu_")}
    engines = {
        _kind(name): _checked(name, t, EngineProfile) for name, t in tables.items() if name.startswith("engine_")
    }
    if "shared" not in tables:
        raise InputError("not a calibration: 'shared'", field="profile")
    return Calibration(gpus, engines, _checked("shared", tables["shared"], Shared))


def _checked(name: str, table: dict[str, Any], profile: type[P]) -> P:
    """Return the profile of a table; unknown, missing or invalid values are errors."""
    try:
        made = msgspec.convert(table, profile)
    except msgspec.ValidationError as error:
        raise InputError(f"not a calibration: {error}", field="profile") from None
    _refuse_nonsense(name, table)
    return made


def _kind(name: str) -> str:
    return name.split("_", 1)[1]


def _refuse_nonsense(name: str, table: dict[str, Any]) -> None:
    """Raise if a number is not a finite, non-negative share, factor or time."""
    for key, value in table.items():
        for number in value.values() if isinstance(value, dict) else [value]:
            if isinstance(number, int | float) and not 0 <= number < 1e4:
                raise InputError("must be between 0 and 10,000", field=f"{name}.{key}", value=number)
