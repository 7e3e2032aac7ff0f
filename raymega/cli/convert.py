"""Command `raymega convert`: options and output of the converters in `raymega/convert`."""

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
from raymega.convert.huggingface.importer import DTYPES as IMPORT_DTYPES
from raymega.convert.huggingface.importer import SAVED, hf_import, model_yaml
from raymega.convert.output_folder import folder_at
from raymega.convert.torch_dcp.exporter import dcp_export
from raymega.convert.torch_dcp.importer import Reading, dcp_import
from raymega.convert.torch_dcp.names import DIALECTS
from raymega.convert.tuned.peft_export import peft_export
from raymega.convert.tuned.peft_import import peft_import
from raymega.errors import counted

convert_app = typer.Typer(
    help="Import and export Hugging Face, torch.distributed.checkpoint and PEFT models.\n\nExample: raymega convert hf-import Llama-3.2-1B/ --out llama-1b",
    no_args_is_help=True,
)
_DIALECTS = ", ".join(DIALECTS)


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: str,
    make_vocab_size_divisible_by: Annotated[int | None, typer.Option(min=1)] = None,
    dtype: Annotated[
        str, typer.Option(help=f"Number format of the checkpoint: {', '.join(IMPORT_DTYPES)}.")
    ] = SAVED,
    plugins: Annotated[list[str] | None, typer.Option(metavar="MODULE")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a Hugging Face model of a family in docs/families.md to a checkpoint to start from.

    Prints the model section of a job file, and the setting that starts from the weights.

    Options:
        folder: Folder that holds config.json and safetensors files.
        out: Output folder or s3://bucket/prefix.
        make_vocab_size_divisible_by: Pad the vocabulary size to a multiple of this.
        plugins: Module of plug-ins, as in a job file's plugins; repeat for several.

    Example: raymega convert hf-import Llama-3.2-1B/ --out llama-1b
    """
    # The clock is read here, so that the converters stay pure.
    created = datetime.now(UTC).isoformat(timespec="seconds")
    done = hf_import(
        folder,
        out,
        created=created,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        dtype=dtype,
        plugins=plugins or (),
    )
    if as_json:
        print_json(json_object(done, uri="output", key="manifest"))
        return
    # The output is a valid part of a job file: facts are YAML comments.
    print(f"# {done.num_parameters:,} parameters in {done.dtype}, with {', '.join(done.carried)}")
    print("# in a job file:")
    print(model_yaml(done.model), end="")
    if plugins:
        print(f"plugins: [{', '.join(plugins)}]")
    print(f"checkpoint:\n  init_from: {json.dumps(done.uri)}")


def export(
    uri: Uri,
    out: Annotated[str, typer.Option(metavar="DIR")],
    dtype: Annotated[
        str, typer.Option(help=f"Number format of the weights: {', '.join(DTYPES)}.")
    ] = "saved",
    max_file_bytes: Annotated[int, typer.Option(min=1)] = MAX_FILE_BYTES,
    tokenizer: Annotated[str, typer.Option(metavar="DATASET")] = "",
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint (for a run, its newest) to a folder that transformers loads.

    Options:
        out: Output folder, which is created.
        max_file_bytes: Maximum size of a weight file in bytes; a larger tensor gets a file of its own.
        tokenizer: Dataset whose tokenizer is exported; default: that of the run.

    Example: raymega convert hf-export ~/.raymega/runs/verify --out verify-hf --dtype bfloat16
    """
    done = hf_export(
        uri, folder_at(out), dtype=dtype, max_file_bytes=max_file_bytes, tokenizer=tokenizer
    )
    if as_json:
        print_json(json_object(done, folder="output", key="manifest"))
        return
    print(f"{done.folder}: step {done.step}, {done.num_parameters:,} parameters in {done.dtype}")
    print("\n".join((*done.files, *done.notes)))


def import_dcp(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: str,
    job: Annotated[Path | None, typer.Option(metavar="JOB.yaml")] = None,
    names: Annotated[
        str, typer.Option(help=f"Naming scheme of the folder's tensors: {_DIALECTS}.")
    ] = "raymega",
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="PATTERN")] = None,
    step: Annotated[int | None, typer.Option(min=0)] = None,
    samples: Annotated[int | None, typer.Option(min=0)] = None,
    tokens: Annotated[int | None, typer.Option(min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a torch.distributed.checkpoint folder to a checkpoint, optimizer state included.

    No code of the folder is executed: its metadata may hold only classes of torch's own format.

    Options:
        folder: Folder written by torch.distributed.checkpoint.
        out: Output folder or s3://bucket/prefix.
        job: Job file with the model that the folder must hold.
        rename: Rename a weight of the folder; may be repeated.
        ignore: Skip the entries that match; may be repeated.
        step: Completed steps; default: as in the folder.
        samples: Consumed samples; default: as in the folder.
        tokens: Consumed tokens; default: as in the folder.

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
        print(f"skipped: {name}")


def export_dcp(
    uri: Uri,
    out: Annotated[str, typer.Option(metavar="DIR")],
    names: Annotated[
        str, typer.Option(help=f"Naming scheme of the exported tensors: {_DIALECTS}.")
    ] = "raymega",
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint (for a run, its newest) to a torch.distributed.checkpoint folder.

    Options:
        out: Output folder, which is created.

    Example: raymega convert dcp-export ~/.raymega/runs/verify --out verify-dcp
    """
    done = dcp_export(uri, folder_at(out), names=names)
    if as_json:
        print_json(json_object(done, folder="output", key="manifest"))
        return
    print(f"{done.folder}: step {done.step}, {done.num_parameters:,} parameters")
    print("\n".join(done.files))


def import_peft(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    base: str,
    out: str,
    as_json: AsJson = False,
) -> None:
    """Convert LoRA adapters in PEFT's format to a checkpoint that a run's checkpoint.init_adapter takes.

    Options:
        folder: Folder with adapter_config.json and adapter_model.safetensors.
        base: Checkpoint of the model that the adapters change.
        out: Output folder or s3://bucket/prefix.

    Example: raymega convert peft-import my-adapter/ --base llama-1b --out llama-1b-adapter
    """
    done = peft_import(folder, base, out, created=datetime.now(UTC).isoformat(timespec="seconds"))
    if as_json:
        print_json(json_object(done, uri="output", key="manifest"))
        return
    print(f"# adapters of {counted(done.num_adapters, 'layer')} in {done.dtype}; in a job file:")
    print(model_yaml(done.model), end="")
    print("checkpoint:")
    print(f"  init_from: {json.dumps(done.base)}\n  init_adapter: {json.dumps(done.uri)}")


def export_peft(
    uri: Uri,
    out: Annotated[str, typer.Option(metavar="DIR")],
    base: Annotated[str, typer.Option(metavar="MODEL")] = "",
    as_json: AsJson = False,
) -> None:
    """Convert the LoRA adapters of a checkpoint (for a run, its newest) to a folder that PEFT loads.

    Options:
        out: Output folder, which is created.
        base: Folder or hub name of the model that PEFT loads as the base.

    Example: raymega convert peft-export ~/.raymega/runs/tuned --out tuned-adapter --base Llama-3.2-1B/
    """
    done = peft_export(uri, folder_at(out), base=base)
    if as_json:
        print_json(json_object(done, folder="output", key="manifest"))
        return
    print(
        f"{done.folder}: step {done.step}, adapters of {counted(done.num_adapters, 'layer')}, "
        f"{done.num_parameters:,} parameters"
    )
    print("\n".join(done.files))


add_command(convert_app, import_, "hf-import")
add_command(convert_app, export, "hf-export")
add_command(convert_app, import_dcp, "dcp-import")
add_command(convert_app, export_dcp, "dcp-export")
add_command(convert_app, import_peft, "peft-import")
add_command(convert_app, export_peft, "peft-export")
