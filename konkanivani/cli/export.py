"""Export a checkpoint as safetensors bundle, ONNX, int8 ONNX, Whisper folder, LoRA adapter or folder for the hub.

    konkanivani export \\
        --checkpoint checkpoints/checkpoint_best.pt --bundle konkani.safetensors
    konkanivani export \\
        --checkpoint checkpoints/checkpoint_best.pt --whisper whisper-konkani
    konkanivani export \\
        --checkpoint checkpoints/checkpoint_best.pt --hub_folder konkani-asr

Each file is read back and compared with the checkpoint before it is renamed to its final name. With --manifest, each
exported model is also evaluated.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from konkanivani.command_line import read_flags
from konkanivani.console import parse_share
from konkanivani.data.manifest import Rejections, read_manifest
from konkanivani.errors import UsageError
from konkanivani.files import check_new_file
from konkanivani.flags import config_from_text, config_to_text
from konkanivani.inference.card_scores import CardScore, read_scores
from konkanivani.inference.model_card import AuthorFacts, check_author

if TYPE_CHECKING:  # usage errors do not wait for torch
    from konkanivani.checkpoints.checkpoint import Checkpoint
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
    folder: str | None = None
    """Folder to write in Hugging Face format, for a run with --pretrained of any kind, such as T5."""
    adapter: str | None = None
    """Folder to write with only the LoRA adapter, in PEFT format."""
    hub_folder: str | None = None
    """Folder to write for the Hugging Face hub: the model (bundle or Whisper format) and a model card, README.md."""
    pretrained: str | None = None
    """Current path, or name on the hub, of the run's --pretrained folder (None: the one used in training)."""
    revision: str | None = None
    """Branch, tag or commit of a --pretrained name on the hub (None: the run's, or main for another name)."""
    manifest: str | None = None
    """JSONL manifest to evaluate the checkpoint and the exported models on."""
    audio_roots: tuple[str, ...] = ()
    """Folders, besides the manifest's own, that may contain its audio."""
    force: bool = False
    """Overwrite existing files; folders must be new."""
    card: AuthorFacts = field(default_factory=AuthorFacts)

    @property
    def outputs(self) -> list[Path]:
        """Files to write."""
        return [Path(path) for path in (self.bundle, self.onnx, self.int8) if path is not None]

    @property
    def folders(self) -> list[Path]:
        """Folders to write."""
        return [Path(path) for path in (self.whisper, self.folder, self.adapter) if path is not None]


def check_flags(flags: Flags) -> None:
    """Raise UsageError or ResourceError before any work if an output cannot be written."""
    if not flags.outputs and not flags.folders and flags.hub_folder is None:
        raise UsageError(
            "No output is given. Give --bundle, --onnx or --int8 with the file to write, or several; for a "
            "run with --pretrained, give --whisper, --folder or --adapter with the folder to write; for the hub, give "
            "--hub_folder."
        )
    if flags.outputs and flags.folders:
        raise UsageError(
            "--bundle, --onnx and --int8 are for models trained from scratch, --whisper and --adapter for "
            "--pretrained models: give only one kind."
        )
    if None not in (flags.whisper, flags.folder):
        raise UsageError("--whisper and --folder both write the whole model: give only one of them.")
    if flags.revision is not None and flags.pretrained is None:
        raise UsageError("--revision selects a revision of a model on the hub: give --pretrained, or omit it.")
    folders = flags.folders
    if flags.hub_folder is not None:
        folders = [*folders, Path(flags.hub_folder)]
    places = [path.resolve() for path in (Path(flags.checkpoint), *flags.outputs, *folders)]
    are_nested = any(folder.resolve() in place.parents for folder in folders for place in places)
    if len(set(places)) < len(places) or are_nested:
        raise UsageError("Inputs and outputs must be different files or folders. Choose different names.")
    for path in flags.folders:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} already exists. Choose a new or empty folder.")
    for path in flags.outputs:
        check_new_file(path, flags.force)
    check_card(flags)


def check_card(flags: Flags) -> None:
    """Raise UsageError if a flag of the card is invalid or has no effect, or if the hub folder must not be replaced."""
    if flags.hub_folder is None:
        if flags.card != AuthorFacts():
            raise UsageError(
                "--license, --speech_language, --base_model, --datasets and --scores have no effect without "
                "--hub_folder: give it too, or omit them."
            )
        return
    check_author(flags.card)
    from konkanivani.inference.hub_folder import check_hub_folder

    check_hub_folder(Path(flags.hub_folder))


def export(flags: Flags) -> str:
    """Write the requested outputs and print a line for each; return the table of scores, or a confirmation."""
    check_flags(flags)
    if flags.manifest is not None:
        # Checked before torch is imported and the checkpoint is read; `read_utterances` reads it again.
        read_manifest(flags.manifest, flags.audio_roots)
    import torch

    from konkanivani.checkpoints.checkpoint import check_finite, read_checkpoint
    from konkanivani.inference.hub_folder import HubFolder
    from konkanivani.inference.onnx_graph import require_onnx
    from konkanivani.inference.speech_model import build_speech_model
    from konkanivani.inference.write_exports import (
        Exported,
        compare,
        export_bundle,
        export_folders,
        export_hub_folder,
        recognize_with,
        table,
    )

    if flags.onnx is not None or flags.int8 is not None:
        require_onnx()
    checkpoint = read_checkpoint(flags.checkpoint)
    if flags.pretrained is not None:
        checkpoint = with_folder(checkpoint, flags.pretrained, flags.revision)
    check_kind(flags, checkpoint)
    scores = card_scores(flags, checkpoint.step)
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
        from konkanivani.inference.export import export_onnx  # needs the packages of the extra `export`

        forms += export_onnx(speech_model, flags.onnx, flags.int8)
    if flags.folders:
        forms += export_folders(checkpoint, flags.pretrained, flags.whisper or flags.folder, flags.adapter)
    if flags.hub_folder is not None:
        target = HubFolder(Path(flags.hub_folder), flags.card, scores)
        forms.append(export_hub_folder(target, checkpoint, speech_model, flags.pretrained))
    if utterances is None:
        return "Read back and verified against the checkpoint. With --manifest, the exported models are also evaluated."
    return "\n".join(table(compare(forms, utterances)))


def card_scores(flags: Flags, step: int) -> tuple[CardScore, ...]:
    """Return the scores for the model card; raise a DataError if they are not of this checkpoint."""
    return tuple(score for path in flags.card.scores for score in read_scores(Path(path), flags.checkpoint, step))


def with_folder(checkpoint: "Checkpoint", folder: str, revision: str | None) -> "Checkpoint":
    """Return the checkpoint with `folder` as the path, or the name and revision, of its pretrained model."""
    config = config_from_text(checkpoint.config)
    if revision is None and folder == config.pretrained.pretrained:
        revision = config.pretrained.revision  # the commit of the run, since the branch may have moved on
    config = replace(config, pretrained=replace(config.pretrained, pretrained=folder, revision=revision))
    return replace(checkpoint, config=config_to_text(config))


def check_kind(flags: Flags, checkpoint: "Checkpoint") -> None:
    """Raise UsageError if a format does not suit the kind of model (native or pretrained)."""
    from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE

    is_ours = PRETRAINED_STATE not in checkpoint.states
    if is_ours and (flags.folders or flags.pretrained is not None):
        flag_words = "--pretrained is" if flags.pretrained is not None else "--whisper and --adapter are"
        raise UsageError(
            f"{flags.checkpoint} was trained without --pretrained, and {flag_words} for --pretrained models: export "
            "it with --bundle, --onnx or --int8."
        )
    is_text = checkpoint.states.get(PRETRAINED_STATE, {}).get("kind") == "t5"
    if is_text and (flags.whisper is not None or flags.hub_folder is not None):
        raise UsageError(f"{flags.checkpoint} is of a T5 model: export it with --folder or --adapter.")
    if not is_ours and flags.outputs:
        raise UsageError(
            f"The run of {flags.checkpoint} used --pretrained: export it with --whisper, or its LoRA adapter "
            "with --adapter."
        )


def read_utterances(
    manifest: str, audio_roots: tuple[str, ...], checkpoint: "Checkpoint", speech_model: "SpeechModel"
) -> "EvaluationSet":
    """Return the utterances of the manifest for the evaluation."""
    from konkanivani.recipe.run_data import build_evaluation_set

    config = config_from_text(checkpoint.config)
    config = replace(config, data=replace(config.data, audio_roots=audio_roots))
    rejections = Rejections(None, parse_share(config.data.max_rejected, "--max_rejected"))
    return build_evaluation_set(
        manifest, config, speech_model.tokenizer, speech_model.architecture, speech_model.device, rejections
    )


def main(arguments: list[str]) -> str:
    """Export according to the command line; return the table of scores, or a confirmation."""
    return export(read_flags(Flags, arguments, description=__doc__))
