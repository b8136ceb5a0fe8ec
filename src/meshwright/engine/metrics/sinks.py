"""Where metrics go: a file of JSON lines, TensorBoard, the console. Only rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.engine.metrics.jsonl import Lines, warn
from meshwright.engine.metrics.live import ConsoleSink
from meshwright.engine.metrics.meter import Constants
from meshwright.engine.metrics.record import StepRecord, header
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """A place that metrics go to."""

    def step(self, record: StepRecord) -> None:
        """Takes one step."""

    def close(self) -> None:
        """Brings everything out."""


class JsonlSink:
    """One line per step in `metrics.jsonl`, after a header line; a full disk costs lines, never the run."""

    def __init__(self, folder: Path, header: Mapping[str, Any], warn: Callable[[str], None] = warn) -> None:
        self.lines = Lines(Path(folder) / METRICS_FILE, warn)
        self.lines.write(header)

    def step(self, record: StepRecord) -> None:
        """Takes one step."""
        self.lines.write(record.to_dict())

    def close(self) -> None:
        """Closes the file."""
        self.lines.close()


class TensorBoardSink:
    """Every number of a step as a TensorBoard scalar."""

    def __init__(self, folder: Path, header: Mapping[str, Any], warn: Callable[[str], None] = warn) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard is not installed", field="tensorboard", fix=("pip install tensorboard",)
            ) from None
        self._warn, self._works = warn, True
        self._writer: Any = None
        self._try(lambda: self._open(SummaryWriter, folder, header))

    def _open(self, writer: Callable[..., Any], folder: Path, header: Mapping[str, Any]) -> None:
        self._writer = writer(log_dir=str(folder))
        self._writer.add_text("run", "  \n".join(f"{name}: {value}" for name, value in header.items()))

    def step(self, record: StepRecord) -> None:
        """Takes one step."""
        self._try(lambda: self._add(record))

    def _add(self, record: StepRecord) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Writes what is still waiting."""
        self._try(lambda: self._writer.close())

    def _try(self, write: Callable[[], None]) -> None:
        """A disk that refuses ends these metrics, with one warning, and not the training."""
        if not self._works:
            return
        try:
            write()
        except OSError as error:
            self._works = False
            self._warn(f"TensorBoard files cannot be written ({error.strerror or error}); training goes on without")


def open_sinks(
    process: Process,
    recipe: str,
    constants: Constants,
    folder: Path,
    first_step: int = 1,
    tensorboard: bool = False,
    log_every: int = 10,
    json: bool = False,
    told: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """The sinks of a run on this rank: file and console (and TensorBoard) on rank 0, none elsewhere."""
    if process.rank != 0:
        return []
    first = header(recipe, constants, first_step, told)
    sinks: list[Sink] = [JsonlSink(folder, first)]
    if tensorboard:
        sinks.append(TensorBoardSink(Path(folder) / "tensorboard", first))
    return [*sinks, ConsoleSink(constants, log_every, json)]


def scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    """The numbers of a step under the names TensorBoard groups them by."""
    values = record.to_dict()
    for name in ("loss", "lr", "grad_norm"):
        if values[name] is not None:
            yield f"train/{name}", values[name]
    for name in ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"):
        if values[name] is not None:
            yield f"speed/{name}", values[name]
    for group in ("parts_s", "memory_gib", "extra"):
        for name, value in values[group].items():
            yield f"{group}/{name}", value
