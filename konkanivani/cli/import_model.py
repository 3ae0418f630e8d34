"""Convert a NeMo Conformer or FastConformer CTC model to a KonkaniVani checkpoint.

    konkanivani import \\
        indicconformer_stt_kok_hybrid_ctc_rnnt_large.nemo konkani.pt \\
        --language kok

No code in the file is run. Evaluation, transcription, export and --init_from accept the result like any other
checkpoint (docs/pretrained.md).
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from konkanivani.command_line import command_line_of, read_flags
from konkanivani.errors import UsageError
from konkanivani.files import atomic_write, check_new_file
from konkanivani.models.hub import WEIGHTS, ModelLocation, locate_model


@dataclass(frozen=True)
class Flags:
    """Input and output."""

    model: Annotated[str | None, tyro.conf.Positional] = None
    """A .nemo file with a CTC head, a folder of transformers' ParakeetForCTC, or a name on the hub of either."""
    output: Annotated[str | None, tyro.conf.Positional] = None
    """Checkpoint to write."""
    language: str | None = None
    """Language whose tokenizer to use, if the file has several, such as kok."""
    revision: str | None = None
    """Branch, tag or commit of a name on the hub (None: main)."""
    force: bool = False
    """Overwrite an existing output file."""


def check_flags(flags: Flags) -> tuple[str, str]:
    """Check the flags before any work, and return the paths of input and output.

    Raises UsageError if input or output is missing or unsuitable, and ResourceError if the output cannot be written.
    """
    if flags.model is None or flags.output is None:
        raise UsageError("Give the .nemo file to read and the checkpoint to write, such as konkani.nemo konkani.pt.")
    from konkanivani.checkpoints.checkpointer import is_name_of_a_run

    output = Path(flags.output)
    if output.resolve() == Path(flags.model).resolve():
        raise UsageError("Input and output must be different files. Choose different names.")
    # --resume auto would take it for a checkpoint of a training run.
    if is_name_of_a_run(output):
        raise UsageError(f"{output} is reserved for checkpoints of a run, which --resume reads. Name it imported.pt.")
    check_new_file(output, flags.force)
    return flags.model, flags.output


def run_import(flags: Flags) -> str:
    """Write the checkpoint; return a summary of the imported and skipped parts, and the next commands."""
    model, output_name = check_flags(flags)
    from konkanivani.checkpoints.checkpoint import write_checkpoint
    from konkanivani.models.nemo.weights import import_nemo

    output = Path(output_name)
    located = locate_model(model, flags.revision, "nemo")
    imported = import_nemo(located.path, flags.language, output.parent, source_of(model, located))
    with atomic_write(output) as partial:
        write_checkpoint(partial, imported.checkpoint)
    name = shlex.quote(output_name)
    size = output.stat().st_size
    return "\n".join(
        [
            imported.sentences(),
            f"{output}: {size / 1e6:.1f} MB. Next steps:",
            f"  {command_line_of('evaluate')} --checkpoint {name} --manifest test.jsonl",
            f"  {command_line_of('transcribe')} recordings --checkpoint {name}",
            f"  {command_line_of('train')} --init_from {name} --train_manifest train.jsonl",
        ]
    )


def source_of(model: str, located: ModelLocation) -> str | None:
    """Return the name, commit and file of a model on the hub, for the provenance record; None for a local file."""
    if located.commit is None:
        return None
    file = located.path.name if located.path.is_file() else WEIGHTS
    return f"{model}@{located.commit}/{file}"


def main(arguments: list[str]) -> str:
    """Import the model that the command line names; return a summary."""
    return run_import(read_flags(Flags, arguments, description=__doc__))
