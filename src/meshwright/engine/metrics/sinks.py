"""Metric sinks: metrics.jsonl, TensorBoard, trackers and the console. Only rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.engine.metrics.jsonl import Lines, warn
from meshwright.engine.metrics.live import ConsoleSink
from meshwright.engine.metrics.meter import Constants
from meshwright.engine.metrics.record import EndRecord, StepRecord, ValidationRecord, header, scalars
from meshwright.engine.metrics.trackers import TrackerSink
from meshwright.engine.rank_env import Process
from meshwright.extras import not_installed

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """A destination of metrics."""

    def step(self, record: StepRecord) -> None:
        """Write one step."""

    def validation(self, record: ValidationRecord) -> None:
        """Write the result of a validation."""

    def close(self) -> None:
        """Flush and close."""


class JsonlSink:
    """Writes `metrics.jsonl`: a header, then a line per step or validation. A full disk loses lines, never the run."""

    def __init__(self, folder: Path, header: Mapping[str, Any], warn: Callable[[str], None] = warn) -> None:
        self.lines = Lines(Path(folder) / METRICS_FILE, warn)
        self.lines.write(header)

    def step(self, record: StepRecord) -> None:
        """Write one step."""
        self.lines.write(record.to_dict())

    def validation(self, record: ValidationRecord) -> None:
        """Write the result of a validation."""
        self.lines.write(record.to_dict())

    def close(self) -> None:
        """Close the file."""
        self.lines.close()


class TensorBoardSink:
    """Writes every number of a step as a TensorBoard scalar."""

    def __init__(self, folder: Path, header: Mapping[str, Any], warn: Callable[[str], None] = warn) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise not_installed("TensorBoard", "tensorboard", "tensorboard") from None
        self._warn, self._works = warn, True
        self._writer: Any = None
        self._try(lambda: self._open(SummaryWriter, folder, header))

    def _open(self, writer: Callable[..., Any], folder: Path, header: Mapping[str, Any]) -> None:
        self._writer = writer(log_dir=str(folder))
        self._writer.add_text("run", "  \n".join(f"{name}: {value}" for name, value in header.items()))

    def step(self, record: StepRecord) -> None:
        """Write one step."""
        self._try(lambda: self._add(record))

    def _add(self, record: StepRecord) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def validation(self, record: ValidationRecord) -> None:
        """Write the result of a validation."""
        self._try(lambda: self._add_validation(record))

    def _add_validation(self, record: ValidationRecord) -> None:
        self._writer.add_scalar("validation/loss", record.loss, record.step)
        if record.perplexity is not None:
            self._writer.add_scalar("validation/perplexity", record.perplexity, record.step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the writer."""
        self._try(lambda: self._writer.close())

    def _try(self, write: Callable[[], None]) -> None:
        """Run `write`; after the first disk error, warn once and write no more."""
        if not self._works:
            return
        try:
            write()
        except OSError as error:
            self._works = False
            self._warn(
                f"TensorBoard files cannot be written ({error.strerror or error}); training continues without them"
            )


def write_end(process: Process, folder: Path, end: EndRecord) -> None:
    """Append to the metrics file why the run ended before its last step."""
    if process.rank == 0:
        lines = Lines(Path(folder) / METRICS_FILE)
        lines.write(end.to_dict())
        lines.close()


def open_sinks(
    process: Process,
    recipe: str,
    constants: Constants,
    folder: Path,
    first_step: int = 1,
    tensorboard: bool = False,
    trackers: Sequence[str] = (),
    log_every: int = 10,
    json: bool = False,
    details: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """Open the sinks of this rank: file, console and those asked for on rank 0, none elsewhere."""
    if process.rank != 0:
        return []
    first = header(recipe, constants, first_step, details)
    sinks: list[Sink] = [JsonlSink(folder, first)]
    if tensorboard:
        sinks.append(TensorBoardSink(Path(folder) / "tensorboard", first))
    sinks += [TrackerSink(name, folder, first) for name in trackers]
    return [*sinks, ConsoleSink(constants, log_every, json)]
