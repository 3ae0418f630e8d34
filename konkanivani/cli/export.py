"""Export a checkpoint as safetensors bundle, ONNX, int8 ONNX, Whisper folder or LoRA adapter.

    konkanivani export \\
        --checkpoint checkpoints/checkpoint_best.pt --bundle konkani.safetensors
    konkanivani export \\
        --checkpoint checkpoints/checkpoint_best.pt --whisper whisper-konkani

Each file is read back and compared with the checkpoint before it is renamed to its final name. With --manifest, each
exported model is also evaluated.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from konkanivani.command_line import read_flags
from konkanivani.console import parse_share, say
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import UsageError
from konkanivani.files import atomic_write, check_new_file

if TYPE_CHECKING:  # usage errors do not wait for torch
    from konkanivani.checkpoints.checkpoint import Checkpoint
    from konkanivani.cli.verify_export import Exported, FormScore
    from konkanivani.inference.speech_model import SpeechModel
    from konkanivani.training.validation import EvaluationSet


@dataclass(frozen=True)
class Flags:
    """Input, formats and evaluation."""

    checkpoint: str
    """Checkpoint to export; it may be an averaged one."""
    bundle: str | None = None
    """Bundle to write, such as konkani.safetensors: weights, tokenizer and feature settings for load_recognizer."""
    onnx: str | None = None
    """ONNX file to write: waveform to CTC log probabilities, for onnxruntime."""
    int8: str | None = None
    """ONNX file to write with int8 weights; run it on one utterance at a time."""
    whisper: str | None = None
    """Folder to write in Hugging Face Whisper format, for a run with --pretrained."""
    adapter: str | None = None
    """Folder to write with only the LoRA adapter, in PEFT format."""
    pretrained: str | None = None
    """Current path of the run's --pretrained folder (None: the path used in training)."""
    manifest: str | None = None
    """JSONL manifest to evaluate the checkpoint and the exported models on."""
    audio_roots: tuple[str, ...] = ()
    """Folders, besides the manifest's own, that may contain its audio."""
    force: bool = False
    """Overwrite existing files; folders must be new."""

    @property
    def outputs(self) -> list[Path]:
        """Files to write."""
        return [Path(path) for path in (self.bundle, self.onnx, self.int8) if path is not None]

    @property
    def folders(self) -> list[Path]:
        """Folders to write."""
        return [Path(path) for path in (self.whisper, self.adapter) if path is not None]


def check_flags(flags: Flags) -> None:
    """Raise UsageError or ResourceError before any work if an output cannot be written."""
    if not flags.outputs and not flags.folders:
        raise UsageError(
            "No output is given. Give --bundle, --onnx or --int8 with the file to write, or several; for a "
            "run with --pretrained, give --whisper or --adapter with the folder to write."
        )
    if flags.outputs and flags.folders:
        raise UsageError(
            "--bundle, --onnx and --int8 are for models trained from scratch, --whisper and --adapter for "
            "--pretrained models: give only one kind."
        )
    places = [path.resolve() for path in (Path(flags.checkpoint), *flags.outputs, *flags.folders)]
    are_nested = any(folder.resolve() in place.parents for folder in flags.folders for place in places)
    if len(set(places)) < len(places) or are_nested:
        raise UsageError("Inputs and outputs must be different files or folders. Choose different names.")
    for path in flags.folders:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} already exists. Choose a new or empty folder.")
    for path in flags.outputs:
        check_new_file(path, flags.force)


def export(flags: Flags) -> str:
    """Write the requested outputs and print a line for each; return the table of scores, or a confirmation."""
    check_flags(flags)
    if flags.manifest is not None:
        # Checked before torch is imported and the checkpoint is read; `read_utterances` reads it again.
        read_manifest(flags.manifest, flags.audio_roots)
    import torch

    from konkanivani.checkpoints.checkpoint import check_finite, read_checkpoint
    from konkanivani.cli.verify_export import Exported, compare, recognize_with
    from konkanivani.inference.export import require_onnx
    from konkanivani.inference.speech_model import build_speech_model

    if flags.onnx is not None or flags.int8 is not None:
        require_onnx()
    checkpoint = read_checkpoint(flags.checkpoint)
    if flags.pretrained is not None:
        checkpoint = with_folder(checkpoint, flags.pretrained)
    check_kind(flags, checkpoint)
    speech_model = build_speech_model(checkpoint, torch.device("cpu"))
    check_finite(flags.checkpoint, speech_model.model.state_dict())
    # Before anything is written, so that an error in the manifest leaves no files.
    utterances = None
    if flags.manifest is not None:
        utterances = read_utterances(flags.manifest, flags.audio_roots, checkpoint, speech_model)
    forms = [Exported("checkpoint", Path(flags.checkpoint), recognize_with(speech_model))]
    if flags.bundle is not None:
        forms.append(export_bundle(Path(flags.bundle), speech_model))
    if flags.onnx is not None or flags.int8 is not None:
        forms += export_onnx(flags, speech_model)
    if flags.folders:
        forms += export_folders(flags, checkpoint)
    if utterances is None:
        return "Read back and verified against the checkpoint. With --manifest, the exported models are also evaluated."
    return "\n".join(table(compare(forms, utterances)))


def with_folder(checkpoint: "Checkpoint", folder: str) -> "Checkpoint":
    """Return the checkpoint with `folder` as the path of its pretrained model."""
    from konkanivani.flags import config_from_text, config_to_text

    config = config_from_text(checkpoint.config)
    config = replace(config, pretrained=replace(config.pretrained, pretrained=folder))
    return replace(checkpoint, config=config_to_text(config))


def check_kind(flags: Flags, checkpoint: "Checkpoint") -> None:
    """Raise UsageError if a format does not suit the kind of model (native or pretrained)."""
    from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE

    is_ours = PRETRAINED_STATE not in checkpoint.states
    if is_ours and (flags.folders or flags.pretrained is not None):
        named = "--pretrained is" if flags.pretrained is not None else "--whisper and --adapter are"
        raise UsageError(
            f"{flags.checkpoint} was trained without --pretrained, and {named} for --pretrained models: export "
            "it with --bundle, --onnx or --int8."
        )
    if not is_ours and flags.outputs:
        raise UsageError(
            f"The run of {flags.checkpoint} used --pretrained: export it with --whisper, or its LoRA adapter "
            "with --adapter."
        )


def export_folders(flags: Flags, checkpoint: "Checkpoint") -> list["Exported"]:
    """Write the requested folders, and read the model back for the comparison."""
    import torch

    from konkanivani.cli.verify_export import Exported, recognize_with, size_of
    from konkanivani.flags import config_from_text
    from konkanivani.inference.speech_model import build_pretrained_model, read_pretrained, tuned_whisper
    from konkanivani.models.whisper.export import export_adapter, export_whisper, read_base

    tuned = tuned_whisper(checkpoint, config_from_text(checkpoint.config))
    forms = []
    base = read_base(tuned, flags.pretrained, flags.folders)
    if flags.adapter is not None:
        export_adapter(tuned, base, Path(flags.adapter))
        say(f"{flags.adapter}: {size_in_words(size_of(Path(flags.adapter)))}")
    if tuned.note():
        say(tuned.note())
    if flags.whisper is not None:
        out = Path(flags.whisper)
        say(f"{export_whisper(tuned, base, out).sentence()}\n{out}: {size_in_words(size_of(out))}")
        # Read from disk like any other folder, not from memory.
        read = build_pretrained_model(read_pretrained(out), tuned.config.pretrained, torch.device("cpu"))
        forms.append(Exported("folder", out, recognize_with(read)))
    return forms


def export_bundle(path: Path, speech_model: "SpeechModel") -> "Exported":
    """Write the bundle, read it back and verify it."""
    from konkanivani.cli.verify_export import Exported, check_bundle, recognize_with
    from konkanivani.inference.bundle import bundle_bytes, read_bundle

    with atomic_write(path) as partial:
        partial.write_bytes(bundle_bytes(speech_model))
        # Still under its temporary name: a failed comparison leaves no file.
        read = read_bundle(partial, speech_model.device)
        check_bundle(read, speech_model, path)
    say_written(path)
    return Exported("bundle", path, recognize_with(read))


def export_onnx(flags: Flags, speech_model: "SpeechModel") -> list["Exported"]:
    """Write the requested ONNX files, read them back and verify them."""
    from konkanivani.cli.verify_export import TOLERANCE, Exported, check_onnx
    from konkanivani.inference.export import build_onnx, quantize, read_onnx

    say("Tracing the model for ONNX (up to a minute).")
    model = build_onnx(speech_model)
    forms = []
    # int8 weights change the probabilities, so only the lengths and NaN are checked.
    for name, path, tolerance in (("ONNX", flags.onnx, TOLERANCE), ("ONNX, int8", flags.int8, math.inf)):
        if path is not None:
            with atomic_write(Path(path)) as partial:
                partial.write_bytes(model if path == flags.onnx else quantize(model))
                read = read_onnx(partial)
                check_onnx(read, speech_model, Path(path), tolerance)
            say_written(Path(path))
            forms.append(Exported(name, Path(path), read.recognize))
    return forms


def read_utterances(
    manifest: str, audio_roots: tuple[str, ...], checkpoint: "Checkpoint", speech_model: "SpeechModel"
) -> "EvaluationSet":
    """Return the utterances of the manifest for the evaluation."""
    from konkanivani.data.manifest import Rejections
    from konkanivani.flags import config_from_text
    from konkanivani.recipe.run_data import build_evaluation_set

    config = config_from_text(checkpoint.config)
    config = replace(config, data=replace(config.data, audio_roots=audio_roots))
    rejections = Rejections(None, parse_share(config.data.max_rejected, "--max_rejected"))
    return build_evaluation_set(
        manifest, config, speech_model.tokenizer, speech_model.architecture, speech_model.device, rejections
    )


def table(comparisons: list["FormScore"]) -> list[str]:
    """Return a table with one line per exported model, below a header."""
    lines = [f"{'':12} {'WER':>7} {'CER':>7} {'changed texts':>14} {'size':>9}"]
    for found in comparisons:
        rates = found.rates
        others = f"{found.other_texts} of {found.utterances}"
        lines.append(f"{found.name:12} {rates.wer:7.2%} {rates.cer:7.2%} {others:>14} {size_in_words(found.size):>9}")
    return lines


def say_written(path: Path) -> None:
    """Print the name and size of a file."""
    say(f"{path}: {size_in_words(path.stat().st_size)}")


def size_in_words(size: int) -> str:
    """Return a size in megabytes (10**6 bytes) as text."""
    return f"{size / 1e6:.1f} MB"


def main(arguments: list[str]) -> str:
    """Export according to the command line; return the table of scores, or a confirmation."""
    return export(read_flags(Flags, arguments, description=__doc__))
