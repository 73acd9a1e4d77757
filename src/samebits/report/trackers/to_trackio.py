"""Trackio: a local store in the run folder, or the one in TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from samebits.report.trackers.tracker import Outcome, TrackedRun, Tracker


class TrackioTracker(Tracker):
    """Logs to a Trackio run, which is found again by its name. Default store: `trackers/trackio/`."""

    def start(self, run: TrackedRun) -> None:
        """Open or continue the run."""
        if not any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        import trackio

        self._step = 0
        self._run: Any = trackio.init(
            project=run.project or os.environ.get("TRACKIO_PROJECT") or run.recipe,
            name=f"{run.name}-{run.id}",  # the id separates folders of one name in a store that runs share
            config={**run.settings},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a record to the run."""
        self._step = step
        self._run.log({**values}, step=step)

    def finish(self, outcome: Outcome, result: Mapping[str, Any]) -> None:
        """Write the hashes as a last record, and wait until everything is stored."""
        hashes = {f"result/{name}": result[name] for name in ("weights_sha256", "root") if name in result}
        if hashes:
            self._run.log({**hashes, "result/outcome": outcome}, step=self._step)
        self._run.finish()
