"""`raymega convert`: from and to Hugging Face and torch checkpoints; no logic of its own."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from raymega.cli.options import AsJson, Uri, add_command
from raymega.cli.output import json_object, print_json
from raymega.config.load import parse_job
from raymega.convert.huggingface.exporter import DTYPES, MAX_FILE_BYTES, hf_export
from raymega.convert.huggingface.importer import hf_import, model_yaml
from raymega.convert.output_folder import folder_at
from raymega.convert.torch_dcp.exporter import dcp_export
from raymega.convert.torch_dcp.importer import Reading, dcp_import
from raymega.convert.torch_dcp.names import DIALECTS

convert_app = typer.Typer(
    help="Bring models in and out.\n\nExample: raymega convert hf-import Llama-3.2-1B/ --out llama-1b",
    no_args_is_help=True,
)
_DIALECTS = ", ".join(DIALECTS)


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: str,
    make_vocab_size_divisible_by: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a Hugging Face model (gpt2, llama, qwen2, qwen3) into a checkpoint to start from.

    Prints the model section of a job file, and how a job starts from the weights.

    Options:
        folder: Folder with config.json and safetensors files.
        out: Folder or s3://bucket/prefix for the checkpoint.
        make_vocab_size_divisible_by: Pad the vocabulary to a multiple of this.

    Example: raymega convert hf-import Llama-3.2-1B/ --out llama-1b
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    done = hf_import(
        folder, out, created=created, make_vocab_size_divisible_by=make_vocab_size_divisible_by
    )
    if as_json:
        print_json(json_object(done, uri="output", key="manifest"))
        return
    print(f"# {done.num_parameters:,} parameters in {done.dtype}, with {', '.join(done.carried)}")
    print("# in a job file:")
    print(model_yaml(done.model), end="")
    print(f"checkpoint:\n  init_from: {json.dumps(done.uri)}")


def export(
    uri: Uri,
    out: Annotated[str, typer.Option(metavar="DIR")],
    dtype: Annotated[str, typer.Option(help=f"Format: {', '.join(DTYPES)}.")] = "saved",
    max_file_bytes: Annotated[int, typer.Option(min=1)] = MAX_FILE_BYTES,
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint, of a run the newest one, into a folder that transformers loads.

    Options:
        out: Folder to make.
        max_file_bytes: Longest weight file, unless one tensor is longer.

    Example: raymega convert hf-export ~/.raymega/runs/verify --out verify-hf --dtype bfloat16
    """
    done = hf_export(uri, folder_at(out), dtype=dtype, max_file_bytes=max_file_bytes)
    if as_json:
        print_json(json_object(done, folder="output", key="manifest"))
        return
    print(f"{done.folder}: step {done.step}, {done.num_parameters:,} parameters in {done.dtype}")
    print("\n".join((*done.files, *done.notes)))


def import_dcp(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: str,
    job: Annotated[Path | None, typer.Option(metavar="JOB.yaml")] = None,
    names: Annotated[str, typer.Option(help=f"Whose names it has: {_DIALECTS}.")] = "raymega",
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="PATTERN")] = None,
    step: Annotated[int | None, typer.Option(min=0)] = None,
    samples: Annotated[int | None, typer.Option(min=0)] = None,
    tokens: Annotated[int | None, typer.Option(min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a torch.distributed.checkpoint folder into a checkpoint, optimizer state included.

    Nothing in the folder is run: only names of torch's own metadata are read, others are refused.

    Options:
        folder: Folder that torch.distributed.checkpoint wrote.
        out: Folder or s3://bucket/prefix for the checkpoint.
        job: Job whose model it must be.
        rename: Weights' names; may be repeated.
        ignore: Entries that are left behind.
        step: Completed steps.
        samples: Consumed samples.
        tokens: Consumed tokens.

    Example: raymega convert dcp-import outputs/step-1000 --names torchtitan --job job.yaml --out runs/mine
    """
    told = {"step": step, "samples": samples, "tokens": tokens}
    reading = Reading(
        names=names,
        rename=tuple(rename or ()),
        ignore=tuple(ignore or ()),
        model=parse_job(job).job().model if job else None,
        position={name: value for name, value in told.items() if value is not None},
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    done = dcp_import(folder, out, reading, created=created)
    if as_json:
        print_json(json_object(done, uri="output", key="manifest"))
        return
    print(f"{done.uri}/{done.key}: {done.num_parameters:,} parameters, {', '.join(done.kinds)}")
    print("position: " + ", ".join(f"{name}={value}" for name, value in done.state.items()))
    for name in done.left_out:
        print(f"left behind: {name}")


def export_dcp(
    uri: Uri,
    out: Annotated[str, typer.Option(metavar="DIR")],
    names: Annotated[str, typer.Option(help=f"Whose names to give: {_DIALECTS}.")] = "raymega",
    as_json: AsJson = False,
) -> None:
    """Turn a checkpoint, of a run the newest one, into a folder for torch.distributed.checkpoint.

    Options:
        out: Folder to make.

    Example: raymega convert dcp-export ~/.raymega/runs/verify --out verify-dcp
    """
    done = dcp_export(uri, folder_at(out), names=names)
    if as_json:
        print_json(json_object(done, folder="output", key="manifest"))
        return
    print(f"{done.folder}: step {done.step}, {done.num_parameters:,} parameters")
    print("\n".join(done.files))


add_command(convert_app, import_, "hf-import")
add_command(convert_app, export, "hf-export")
add_command(convert_app, import_dcp, "dcp-import")
add_command(convert_app, export_dcp, "dcp-export")
