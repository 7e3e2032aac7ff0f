"""Ray Serve application that answers prompts by an exported model with transformers, on CPUs or a GPU.

`cluster/serve.yaml` deploys it. For GPUs with much traffic `cluster/serve-vllm.yaml` has Ray's own vLLM application.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import JSONResponse

from raymega.errors import ConfigError, raise_faults
from raymega.generate.prompts import Prompt
from raymega.generate.run import make_task
from raymega.generate.with_transformers import Engine
from raymega.plan.sampling import FIELDS, sampling_faults, sampling_of


class Model:
    """Exported model that answers requests; a deployment is one or more of them.

    Args:
        folder: Folder of `raymega generate --serve` or `raymega convert hf-export`.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
    """

    def __init__(self, folder: str, device: str = "auto") -> None:
        self._engine = Engine(Path(folder), device=device)
        self._files = {
            path.name: path.read_bytes()
            for path in Path(folder).iterdir()
            if path.suffix in (".json", ".jinja") and "index" not in path.name
        }

    def answer(self, request: Any) -> dict[str, Any]:
        """Return prompt, text, tokens and finish_reason for ``{"prompt": text, "max_tokens": 64, ...}``.

        Raises:
            ConfigError: The request is wrong.
        """
        request = request if isinstance(request, Mapping) else {}
        unknown = request.keys() - FIELDS.keys() - {"prompt"}
        prompt = request.get("prompt")
        if unknown or not isinstance(prompt, str) or not prompt:
            raise ConfigError(
                fact=f"the request has {', '.join(sorted(map(str, request))) or 'nothing'}",
                rule=f"it is an object with prompt, a text, and any of {', '.join(sorted(FIELDS))}",
                remedy='send {"prompt": "Once upon a time"}',
            )
        sampling = sampling_of(request)
        raise_faults(ConfigError, list(sampling_faults(sampling)))
        config = self._engine.model.config.get_text_config()
        # T5 has no positions of its own, and the length that it was trained with
        most = getattr(config, "max_position_embeddings", None) or config.n_positions
        is_continued = not config.is_encoder_decoder
        task = make_task(
            self._files, [Prompt(prompt)], sampling, most=most, is_continued=is_continued
        )
        (tokens,) = self._engine.generate(task, batch_size=1)
        text, reason = task.answer(task.codec(), 0, tokens)
        return {"prompt": prompt, "text": text, "tokens": tokens, "finish_reason": reason}

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer an HTTP request; 400 with the reasons for a wrong one."""
        try:
            return JSONResponse(self.answer(await request.json()))
        except (ConfigError, ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)


def build(args: dict[str, str]) -> Application:
    """Return the application for ``folder=DIR`` and, if given, ``device=cuda``."""
    deployment: Any = serve.deployment(Model)  # ray declares the decorator's form alone
    return cast(Application, deployment.bind(**args))
