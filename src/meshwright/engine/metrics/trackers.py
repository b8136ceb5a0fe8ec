"""Experiment trackers: Weights & Biases and MLflow, configured by their own environment variables.

A resumed run continues the same run of the tracker, whose id is kept in the run folder. A tracker that fails while the
run trains is warned about once and left out; it never ends the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.metrics.record import StepRecord, ValidationRecord, scalars
from meshwright.errors import InputError, first_line
from meshwright.extras import require

IDS_FILE = "trackers.json"
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""The package of each tracker."""
MAX_BATCH = 100  # parameters in one request to MLflow
MAX_PARAMETER = 250  # characters of a value that MLflow's servers accept in every version


class Client(Protocol):
    """What a tracker does; each method may raise anything."""

    id: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""

    def close(self) -> None:
        """Send what is left."""


class WandbClient:
    """A run of Weights & Biases: WANDB_PROJECT, WANDB_MODE=offline, WANDB_API_KEY and the like are wandb's own."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], id: str | None) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT") or "meshwright"
        kept: dict[str, Any] = {} if id is None else {"id": id, "resume": "allow"}
        self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(config), **kept)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a resumed run may repeat steps after its checkpoint
        self.id = str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class MlflowClient:
    """A run of MLflow: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the like are MLflow's own."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], id: str | None) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        if id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "meshwright"
            found = self._client.get_experiment_by_name(experiment)
            owner = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            id = self._client.create_run(owner, run_name=name).info.run_id
            params = [Param(key, str(value)[:MAX_PARAMETER]) for key, value in _flat(config)]
            for first in range(0, len(params), MAX_BATCH):
                self._client.log_batch(id, params=params[first : first + MAX_BATCH])
        else:
            self._client.update_run(id, status="RUNNING")
        self.id = id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self.id, [Metric(key, value, now, step) for key, value in values.items()])

    def close(self) -> None:
        """Mark the run as finished; a resumed run opens it again."""
        self._client.set_terminated(self.id)


CLIENTS: dict[str, Callable[[str, Path, Mapping[str, Any], str | None], Client]] = {
    "wandb": WandbClient,
    "mlflow": MlflowClient,
}


class TrackerSink:
    """Sends every number of a step and of a validation to a tracker."""

    def __init__(
        self, tracker: str, folder: Path, header: Mapping[str, Any], warn: Callable[[str], None] = warn
    ) -> None:
        self.tracker, self._warn = tracker, warn
        ids = _read_ids(folder)
        name = f"{header['recipe']}-{Path(folder).resolve().name}"
        try:
            client = CLIENTS[tracker](name, Path(folder), header.get("settings", {}), ids.get(tracker))
        except Exception as error:  # of the tracker's own: no login, no such server
            raise InputError(
                f"cannot be used: {first_line(error)}", field=tracker, fix=(f"without --{tracker}", OFFLINE[tracker])
            ) from None
        self._client: Client | None = client
        _write_ids(folder, {**ids, tracker: client.id})

    def step(self, record: StepRecord) -> None:
        """Send one step."""
        self._send(dict(scalars(record)), record.step)

    def validation(self, record: ValidationRecord) -> None:
        """Send the result of a validation."""
        values = {"validation/loss": record.loss}
        if record.perplexity is not None:
            values["validation/perplexity"] = record.perplexity
        self._send(values, record.step)

    def _send(self, values: dict[str, float], step: int) -> None:
        self._try(lambda client: client.log(values, step))

    def close(self) -> None:
        """Send what is left and end the tracker's run."""
        self._try(lambda client: client.close())
        self._client = None

    def _try(self, use: Callable[[Client], None]) -> None:
        if self._client is None:
            return
        try:
            use(self._client)
        except Exception as error:  # of the tracker's own
            self._client = None
            self._warn(f"{self.tracker} stopped working ({first_line(error)}); training continues without it")


OFFLINE = {
    "wandb": "WANDB_MODE=offline in the environment, then wandb sync",
    "mlflow": "MLFLOW_TRACKING_URI of a server in the environment",
}


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise before a run starts if a tracker's package is not installed."""
    for name in names:
        require(name, PACKAGES[name])


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((Path(folder) / IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _write_ids(folder: Path, ids: Mapping[str, str]) -> None:
    try:
        (Path(folder) / IDS_FILE).write_text(json.dumps(dict(ids)) + "\n", encoding="utf-8")
    except OSError as error:  # a full disk must not end the run
        warn(f"{IDS_FILE} cannot be written ({error.strerror}); a resumed run will be a new one of the tracker")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings under dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
