"""MLflow: scalars, parameters and tables of samples, in the store of MLFLOW_TRACKING_URI."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.folder import diff_settings
from torchtune_ext.telemetry.sinks.settings import SinkContext
from torchtune_ext.telemetry.sinks.tables import COLUMNS, TABLE_KEY, sample_rows

RUN_TAG, TABLES_TAG = "torchtune_ext.run_id", "mlflow.loggedArtifacts"
MAX_PARAMS, MAX_PARAM_CHARS, MAX_TABLES = 100, 6000, 64  # MLflow's limits: per request, per value, per tag
_FORBIDDEN = re.compile(r"[^/\w.\- :]")  # MLflow rejects these characters in names


class MLflow:
    """Logs to MLflow."""

    def __init__(self, context: SinkContext):
        # By default MLflow retries for minutes while its server is down, and blocks the run.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow import MlflowClient, entities

        self._client, self._entities, self._settings = MlflowClient(), entities, context.settings
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or context.settings.project
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        key = context.run.id if context.run else str(context.run_dir.resolve())
        earlier = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{key}'")
        run = earlier[0] if earlier else self._client.create_run(experiment, tags={RUN_TAG: key}, run_name=context.name)
        self._id, self._tables = run.info.run_id, json.loads(run.data.tags.get(TABLES_TAG, "[]"))
        self._client.update_run(self._id, "RUNNING")
        if context.run:
            config = {**context.run.config, "process": dict(context.run.process)}
            self._client.log_dict(self._id, config, "config.json")
            # MLflow's parameters cannot change, so a resumed run keeps the first values.
            texts = {_FORBIDDEN.sub("_", one.key): str(one.new)[:MAX_PARAM_CHARS] for one in diff_settings({}, config)}
            params = [entities.Param(*item) for item in texts.items() if item[0] not in run.data.params]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        self._client.log_batch(self._id, [metric(_FORBIDDEN.sub("_", k), v, now, step) for k, v in values.items()])

    def show(self, step: int, groups: Sequence[Group]) -> None:
        table = {"columns": COLUMNS, "data": sample_rows(step, groups, self._settings.samples)}
        entry = {"path": f"{TABLE_KEY.format(step)}.json", "type": "table"}
        self._client.log_dict(self._id, table, entry["path"])
        # MLflow's page shows the files that this tag names as tables.
        self._tables = [*(one for one in self._tables if one != entry), entry][-MAX_TABLES:]
        self._client.set_tag(self._id, TABLES_TAG, json.dumps(self._tables))

    def close(self, status: int) -> None:
        self._client.set_terminated(self._id, "KILLED" if status > 128 else "FAILED" if status else "FINISHED")
