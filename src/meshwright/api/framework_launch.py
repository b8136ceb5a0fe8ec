"""A launch request whose job runs another framework, and its export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from meshwright.api import run_requests as requests
from meshwright.api.exports import Exported, export_into
from meshwright.api.requests import Export
from meshwright.choices import Scheduler
from meshwright.launch import build_job, container_paths


class FrameworkLaunch(msgspec.Struct, frozen=True):
    """A launch request that another framework runs."""

    request: requests.Launch
    scheduler: Scheduler
    changes: tuple[str, ...]  # overrides, with the full paths of data and weights

    @property
    def framework(self) -> str:
        """The framework that runs the job."""
        return str(self.request.to)

    @property
    def local(self) -> bool:
        """Whether the job's machines see the files of this one."""
        return self.scheduler not in build_job.REMOTE_FILES

    @property
    def folder(self) -> str | None:
        """The folder on this machine in which the job runs."""
        return self.request.write if self.local else None

    @property
    def requeued(self) -> bool:
        """Whether SLURM starts the job again after preemption."""
        return self.scheduler == "slurm" and self.request.requeue

    def export(self, changes: Sequence[str]) -> tuple[Exported, Mapping[str, str]]:
        """Return the export with these overrides, and the data converted for it, by file name."""
        request = self.request
        wanted = Export(
            request.recipe,
            self.framework,
            gpus=request.gpus,
            goal=request.goal,
            model=request.model,
            framework=request.framework,
            overrides=tuple(changes),
        )
        elsewhere = self.place_of_rows if request.write and not self.local else None
        return export_into(wanted, self.folder, "--write FOLDER", anywhere=True, elsewhere=elsewhere)

    def place_of_rows(self, rows: Mapping[str, str]) -> str:
        """Return the folder of a machine elsewhere that has the converted rows; empty if they travel with the job."""
        return container_paths.place_of_rows(rows, self.request.mounts, self.scheduler)
