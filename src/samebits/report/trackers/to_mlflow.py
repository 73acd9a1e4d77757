"""MLflow: the server or store in MLFLOW_TRACKING_URI, or else a SQLite file in the run folder."""

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from samebits.config.given import flat
from samebits.report.trackers.tracker import Outcome, TrackedRun, Tracker

# Limits of one request to MLflow.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_VALUE_CHARS = 6000
_TAG = "samebits.id"
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """Logs to an MLflow run, which is found again by a tag. Default store: `trackers/mlflow/mlflow.db`."""

    def start(self, run: TrackedRun) -> None:
        """Open or continue the run."""
        # `setdefault`: the user's own value stays.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        import mlflow

        own = f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or own
        )
        self._metrics: list[Any] = []
        project = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.recipe
        experiment = self._client.get_experiment_by_name(project)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            # Otherwise MLflow puts the folder of artifacts into the current folder.
            place = (
                None
                if os.environ.get("MLFLOW_TRACKING_URI")
                else (run.folder / "artifacts").as_uri()
            )
            number = self._client.create_experiment(project, artifact_location=place)
        found = self._client.search_runs(
            [number], filter_string=f"tags.`{_TAG}` = '{run.id}'", max_results=1
        )
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(
                number, run_name=run.name, tags={_TAG: run.id}
            ).info.run_id
        known = found[0].data.params if found else {}
        # MLflow refuses another value for a parameter that is logged already, and a resume may change some.
        params = [
            mlflow.entities.Param(
                name, (value if isinstance(value, str) else json.dumps(value))[:_MAX_VALUE_CHARS]
            )
            for name, value in flat(run.settings).items()
            if name not in known
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Collect a record."""
        from mlflow.entities import Metric

        # Milliseconds, as MLflow's API has them.
        now = round(time.time() * 1000)
        # MLflow does not allow all characters in names, such as those of a class name.
        allowed = {name: re.sub(r"[^\w\-. :/]", "_", name) for name in values}
        self._metrics += [Metric(allowed[name], value, now, step) for name, value in values.items()]
        if len(self._metrics) > _MAX_METRICS:
            self.flush()

    def flush(self) -> None:
        """Send the collected records."""
        while self._metrics:
            batch = self._metrics[:_MAX_METRICS]
            self._metrics = self._metrics[_MAX_METRICS:]
            self._client.log_batch(self._id, metrics=batch)

    def finish(self, outcome: Outcome, result: Mapping[str, Any]) -> None:
        """Write the hashes as tags, and the status."""
        for name in ("weights_sha256", "root"):
            if name in result:
                self._client.set_tag(self._id, name, str(result[name]))
        self._client.set_terminated(self._id, _STATUS[outcome])
