"""The rates that a case's GPU, links and engine reach, computed once per estimate."""

from __future__ import annotations

import msgspec

from meshwright.clusters import Gpu
from meshwright.costs.calibration import EngineProfile, GpuProfile, Shared, calibration
from meshwright.recipes.case import Case

LINEAR_PRECISION = {
    "same": "",
    "fp8_delayed": "fp8",
    "fp8_tensor": "fp8",
    "fp8_row": "fp8",
    "fp8_block": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}
OPERAND_BYTES = {
    "fp32": 4.0,
    "tf32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp4": 0.5625,
}  # fp4: one scale per 16 values
MATMUL_ELSE = 0.5  # share of the peak for a precision missing in a profile


def linear_precision(case: Case) -> str:
    """Return the precision of linear layers, by the name in the GPU's peaks."""
    peaks = case.cluster.gpu.peak_tflops
    wide = ("tf32", "fp32") if case.compute == "fp32" else ()
    wanted = (LINEAR_PRECISION[case.matmul], *wide)
    return next((precision for precision in wanted if precision in peaks), sixteen_bit(case.cluster.gpu))


def sixteen_bit(gpu: Gpu) -> str:
    """Return the 16-bit precision of a GPU: bf16, or fp16 before Ampere."""
    return "fp16" if "fp16" in gpu.peak_tflops and "bf16" not in gpu.peak_tflops else "bf16"


def peak_flops(case: Case, precision: str) -> float:
    """Return the dense peak in FLOP/s."""
    peaks = case.cluster.gpu.peak_tflops
    return peaks.get(precision, peaks.get("bf16", max(peaks.values()))) * 1e12


class Speeds(msgspec.Struct, frozen=True):
    """FLOP/s and bytes/s that are reached, and the profiles they come from."""

    gpu: Gpu
    chip: GpuProfile
    engine: EngineProfile
    shared: Shared
    precision: str  # of the linear layers
    linear: float  # FLOP/s of large matmuls in that precision
    linear_experts: float  # of the experts' matmuls
    linear_bf16: float  # in bf16, or in fp16 on a GPU without it
    core: float  # FLOP/s of attention over the causal half, forward
    block: float  # tokens that the attention kernel wastes at the diagonal
    softmax: float  # head width whose matmuls take as long as the exponentials of the scores
    scan: float
    hbm: float  # bytes/s
    link: float  # bytes/s inside an NVLink domain
    pcie: float  # bytes/s between the domains of a node
    network: float  # bytes/s between nodes
    traffic: float  # bytes moved by memory-bound kernels over perfectly fused ones


def speeds(case: Case) -> Speeds:
    """Return the rates of a case."""
    profiles = calibration(case)
    chip, engine, gpu = profiles.gpu(case), profiles.engine(case), case.cluster.gpu
    clock, precision = chip.clock.get(gpu.name, 1.0), linear_precision(case)
    half = sixteen_bit(gpu)
    peak, share = peak_flops(case, half), min(chip.matmul[half] * engine.matmul, chip.matmul_limit)
    tuned = clock * share / chip.matmul[half]
    hbm = gpu.hbm_gb_s * 1e9 * chip.hbm
    network = gpu.network_gb_s * 1e9 * chip.network
    pcie = gpu.pcie_gb_s * 1e9 * (chip.link if chip.pcie is None else chip.pcie)
    pcie = pcie if gpu.gpus_per_node > 1 else network  # PCIe of a superchip has no other GPU
    kernel = getattr(case, "attention_kernel", "") or engine.attention
    return Speeds(
        gpu=gpu,
        chip=chip,
        engine=engine,
        shared=profiles.shared,
        precision=precision,
        linear=_matmul_rate(case, chip, precision) * tuned,
        linear_experts=_matmul_rate(case, chip, "fp8" if precision == "fp4" else precision) * tuned,
        linear_bf16=peak * clock * share,
        core=peak * chip.attention.get(kernel, chip.attention["best"]) * clock,
        block=chip.block.get(kernel if kernel in chip.attention else "best", profiles.shared.block),
        softmax=profiles.shared.head_width * chip.softmax.get(gpu.name, chip.softmax.get("usual", 1.0)),
        scan=hbm * profiles.shared.scan * chip.scan,
        hbm=hbm,
        link=pcie if gpu.link == "pcie" else gpu.nvlink_gb_s * 1e9 * chip.link,
        pcie=pcie,
        network=network,
        traffic=engine.traffic_compiled if case.compile else engine.traffic,
    )


def _matmul_rate(case: Case, chip: GpuProfile, precision: str) -> float:
    """Return the FLOP/s of large matmuls; experts in NVFP4 run as in FP8: 9,900 tokens/s instead of 9,856 (GB300)."""
    return peak_flops(case, precision) * chip.matmul.get(precision, MATMUL_ELSE)
