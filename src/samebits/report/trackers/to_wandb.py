"""Weights & Biases. Offline unless the user is logged in or sets WANDB_MODE."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from samebits.report.trackers.tracker import Outcome, TrackedRun, Tracker


class WandbTracker(Tracker):
    """Logs to a W&B run whose id is that of the tracked run. Files: `trackers/wandb/wandb/` in the run folder."""

    def start(self, run: TrackedRun) -> None:
        """Open or continue the run."""
        # Without a login, `online` would ask for a key on a terminal that this process does not have.
        os.environ.setdefault("WANDB_MODE", "online" if _has_login() else "offline")
        if os.environ["WANDB_MODE"] != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or run.recipe,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config={**run.settings},
            # A resume may change settings such as loader.num_workers.
            allow_val_change=True,
            # This process's console and load are not the training's.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a record to the run's history."""
        self._run.log({**values}, step=step)

    def finish(self, outcome: Outcome, result: Mapping[str, Any]) -> None:
        """Write the summary, and wait for the upload if the run is online."""
        for name in ("weights_sha256", "root"):
            if name in result:
                self._run.summary[name] = result[name]
        self._run.summary["outcome"] = outcome
        # Any code but 0 marks the run as failed on W&B's page.
        self._run.finish(exit_code=int(outcome == "failed"))


def _has_login() -> bool:
    """Return whether the user has a key for W&B's server, in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        path = os.environ.get("NETRC") or Path.home() / ".netrc"
        return host in netrc.netrc(path).hosts
    # RuntimeError: `Path.home` raises it where the user has no home folder.
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False
