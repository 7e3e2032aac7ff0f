"""MLflow's address and its limits; `tracking/mlflow_recorder.py` writes the records."""

from __future__ import annotations

from pathlib import Path

from raymega.tracking.queued_sink import Recorder

# Limits. mlflow's own retries are off: the queue retries with growing waits.
HTTP_TIMEOUT_S = 10
HTTP_MAX_RETRIES = 0


def tracking_uri(setting: str, folder: Path) -> str:
    """Return the URI that ``tracking.mlflow_uri`` means; ``run`` is a sqlite file in ``folder``."""
    if setting != "run":
        return setting
    return f"sqlite:///{folder.expanduser().resolve() / 'mlflow.db'}"


def open_recorder(*, uri: str, experiment: str) -> Recorder:
    """Return the recorder of one MLflow server or database; the import takes seconds.

    Raises:
        ConnectionError: The server is unavailable.
    """
    from raymega.tracking import mlflow_recorder

    mlflow_recorder.limit_client(timeout_s=HTTP_TIMEOUT_S, max_retries=HTTP_MAX_RETRIES)
    try:
        return mlflow_recorder.Recorder(uri=uri, experiment=experiment)
    except Exception as error:
        if mlflow_recorder.is_refusal(error):
            raise
        raise ConnectionError(str(error)) from error
