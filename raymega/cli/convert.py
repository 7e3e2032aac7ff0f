"""`raymega convert`: models from and to Hugging Face; no logic of its own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from raymega.convert.hf_export import DTYPES, MAX_FILE_BYTES, hf_export
from raymega.convert.hf_import import hf_import, model_yaml

convert_app = typer.Typer(help="Bring models in and out.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@convert_app.command("hf-import")
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with config.json and safetensors files.")
    ],
    out: Annotated[str, typer.Option(help="Folder or s3://bucket/prefix for the checkpoint.")],
    vocab_multiple: Annotated[
        int | None, typer.Option(min=1, help="Pad the vocabulary to a multiple of this.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a Hugging Face model (gpt2, llama, qwen2, qwen3) into a checkpoint to start from.

    Prints the model section of a job file, and how a job starts from the weights.

    Example: raymega convert hf-import Llama-3.2-1B/ --out llama-1b
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    done = hf_import(folder, out, created=created, vocab_multiple=vocab_multiple)
    model = done.model.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        result = {
            "output": done.uri, "manifest": done.key, "dtype": done.dtype, "model": model,
            "num_parameters": done.num_parameters, "carried": done.carried,
        }  # fmt: skip
        print(json.dumps(result))
        return
    print(f"# {done.num_parameters:,} parameters in {done.dtype}, with {', '.join(done.carried)}")
    print("# in a job file:")
    print(model_yaml(done.model), end="")
    print(f"checkpoint:\n  start_from: {json.dumps(done.uri)}")


@convert_app.command("hf-export")
def export(
    uri: Annotated[
        str, typer.Argument(help="A run's folder, one of its checkpoints/step-... or a manifest.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help=f"Format: {', '.join(DTYPES)}.")] = "saved",
    max_file_bytes: Annotated[
        int, typer.Option(min=1, help="Longest weight file, unless one tensor is longer.")
    ] = MAX_FILE_BYTES,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint, of a run the newest one, into a folder that transformers loads.

    Example: raymega convert hf-export ~/.raymega/runs/verify --out verify-hf --dtype bfloat16
    """
    done = hf_export(uri, out, dtype=dtype, max_file_bytes=max_file_bytes)
    if as_json:
        result = {
            "output": str(done.folder), "manifest": done.key, "step": done.step,
            "dtype": done.dtype, "num_parameters": done.num_parameters, "files": done.files,
        }  # fmt: skip
        print(json.dumps(result))
        return
    print(f"{done.folder}: step {done.step}, {done.num_parameters:,} parameters in {done.dtype}")
    print("\n".join(done.files))
