"""Command `lm_eval` with the model `raymega`: lm-eval's own command line, and one model more.

lm-eval has no plug-ins: a model is known to it when it has been registered in its process. So this console script
takes the place of lm-eval's own; all its other models and options stay.
"""

from __future__ import annotations

import sys

from raymega.errors import RaymegaError
from raymega.extras import import_extra

MODEL, TARGET = "raymega", "raymega.evaluate.harness.adapter:RaymegaLM"


def register() -> None:
    """Make the model known to lm-eval; twice is harmless.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    registry = import_extra("lm_eval.api.registry", extra="eval", purpose="lm_eval").model_registry
    import_extra("lm_eval.models", extra="eval", purpose="lm_eval")  # fills the registry
    if MODEL not in registry:
        registry.register(MODEL, target=TARGET)


def run() -> None:
    """Run lm-eval's command line; the entry point of the console script."""
    try:
        register()
        command = import_extra("lm_eval.__main__", extra="eval", purpose="lm_eval")
        command.cli_evaluate()
    except RaymegaError as error:
        for fault in error.faults:
            print(f"{type(error).__name__}: {fault}", file=sys.stderr)  # noqa: T201
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    run()
