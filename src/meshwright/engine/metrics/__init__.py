"""What a run tells while it runs: throughput, memory, and where both go."""

from meshwright.engine.metrics.clock import PARTS, Clock, StepTime
from meshwright.engine.metrics.live import ConsoleSink
from meshwright.engine.metrics.memory import MemoryParts, beside_estimate, memory_parts, optimizer_tensors
from meshwright.engine.metrics.meter import Constants, Meter, Speed, constants
from meshwright.engine.metrics.record import StepRecord, header
from meshwright.engine.metrics.reporter import Reporter
from meshwright.engine.metrics.sinks import JsonlSink, Sink, TensorBoardSink, open_sinks

__all__ = [
    "PARTS",
    "Clock",
    "ConsoleSink",
    "Constants",
    "JsonlSink",
    "MemoryParts",
    "Meter",
    "Reporter",
    "Sink",
    "Speed",
    "StepRecord",
    "StepTime",
    "TensorBoardSink",
    "beside_estimate",
    "constants",
    "header",
    "memory_parts",
    "open_sinks",
    "optimizer_tensors",
]
