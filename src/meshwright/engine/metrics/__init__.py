"""Metrics of a running training: throughput, memory, and the sinks they are written to."""

from meshwright.engine.metrics.clock import PARTS, Clock, StepTime
from meshwright.engine.metrics.live import ConsoleSink
from meshwright.engine.metrics.memory import (
    MemoryParts,
    compare_with_estimate,
    memory_parts,
    optimizer_tensors,
    with_peak,
)
from meshwright.engine.metrics.meter import Constants, Meter, Speed, constants
from meshwright.engine.metrics.record import EndRecord, StepRecord, ValidationRecord, header
from meshwright.engine.metrics.reporter import Reporter
from meshwright.engine.metrics.sinks import JsonlSink, Sink, TensorBoardSink, open_sinks, write_end
from meshwright.engine.metrics.status import Status

__all__ = [
    "PARTS",
    "Clock",
    "ConsoleSink",
    "Constants",
    "EndRecord",
    "JsonlSink",
    "MemoryParts",
    "Meter",
    "Reporter",
    "Sink",
    "Speed",
    "Status",
    "StepRecord",
    "StepTime",
    "TensorBoardSink",
    "ValidationRecord",
    "compare_with_estimate",
    "constants",
    "header",
    "memory_parts",
    "open_sinks",
    "optimizer_tensors",
    "with_peak",
    "write_end",
]
