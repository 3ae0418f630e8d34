"""Writing of exported models, and their verification against the checkpoint on a synthetic signal and a manifest.

B batch, S samples, T' encoder frames, V vocabulary.
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE, Checkpoint
from konkanivani.console import say
from konkanivani.data.loading import load_batches
from konkanivani.data.text import normalize_text
from konkanivani.decoding.decode import greedy_decode
from konkanivani.errors import NumericsError
from konkanivani.files import atomic_write
from konkanivani.flags import config_from_text
from konkanivani.inference.bundle import FOLDER_NAME, bundle_bytes, read_bundle
from konkanivani.inference.hub_folder import HubFolder, write_hub_bundle, write_hub_whisper
from konkanivani.inference.speech_model import (
    SpeechModel,
    build_pretrained_model,
    read_pretrained,
    tuned_model,
    tuned_whisper,
)
from konkanivani.lengths import SAMPLE_RATE, Lengths
from konkanivani.models.families import folder_writers
from konkanivani.scoring.metrics import ErrorRates, error_rates
from konkanivani.training.validation import EvaluationSet

Recognize = Callable[[torch.Tensor, Lengths], list[str]]  # waveforms (B, S), lengths -> texts


@dataclass(frozen=True)
class Exported:
    """Exported form of a model: display name, file and recognition function."""

    name: str
    path: Path
    recognize: Recognize


@dataclass(frozen=True)
class FormScore:
    """Error rates and size in bytes of one form; `other_texts` of its texts differ from the first form's."""

    name: str
    rates: ErrorRates
    other_texts: int
    utterances: int
    size: int


def recognize_with(speech_model: SpeechModel) -> Recognize:
    """Return a function for greedy decoding with the model."""
    decode = greedy_decode(speech_model.architecture, speech_model.tokenizer)

    def recognize(waveforms: torch.Tensor, sample_lengths: Lengths) -> list[str]:
        hypotheses = decode(speech_model.model, *speech_model.encode(waveforms, sample_lengths))
        return [speech_model.tokenizer.decode(tokens) for tokens in hypotheses]

    return recognize


def check_signal() -> tuple[torch.Tensor, Lengths]:
    """Return three fixed waveforms (3, S) of harmonic tones in noise, of 0.3, 1.7 and 3 s, and their lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = tuple(round(seconds * SAMPLE_RATE) for seconds in (0.3, 1.7, 3.0))
    time = torch.arange(max(lengths)) / SAMPLE_RATE
    waveforms = 0.02 * torch.randn(len(lengths), max(lengths), generator=generator)
    for row, length in enumerate(lengths):
        for harmonic in range(1, 20):
            pitch = 120 * (1 + row / 3) * (1 + 0.1 * torch.sin(5 * time))
            waveforms[row] += 0.2 / harmonic * torch.sin(2 * math.pi * harmonic * pitch * time)
        waveforms[row, length:] = 0.0
    return waveforms, lengths


def check_bundle(read: SpeechModel, speech_model: SpeechModel, path: Path) -> None:
    """Raise a NumericsError unless the bundle's model gives bit-identical output to the checkpoint's."""
    signal = check_signal()
    (output, output_lengths), (expected, expected_lengths) = read.encode(*signal), speech_model.encode(*signal)
    if output_lengths != expected_lengths or not torch.equal(output, expected):
        raise NumericsError(f"The bundle {path} was deleted: read back, it gives different output. Check the disk.")


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def compare(forms: list[Exported], utterances: EvaluationSet) -> list[FormScore]:
    """Return each form's error rates over the utterances, and its number of texts that differ from the first form's."""
    references: list[str] = []
    texts: list[list[str]] = [[] for _ in forms]
    # Batches of one utterance, so that padding cannot cause a difference.
    alone = utterances.within(0.0)
    with closing(load_batches(alone.speech, alone.plan, alone.loader, alone.rejections)) as batches:
        for batch, utterances_of_batch in batches:
            references += [utterance.text for utterance in utterances_of_batch]
            for form_texts, form in zip(texts, forms, strict=True):
                form_texts += form.recognize(batch.waveforms, batch.sample_lengths)
    return [
        FormScore(
            form.name,
            error_rates([normalize_text(text) for text in references], [normalize_text(text) for text in form_texts]),
            sum(text != first for text, first in zip(form_texts, texts[0], strict=True)),
            len(references),
            size_of(form.path),
        )
        for form, form_texts in zip(forms, texts, strict=True)
    ]


def export_bundle(path: Path, speech_model: SpeechModel) -> Exported:
    """Write the bundle, read it back and verify it."""
    read = write_bundle(path, speech_model)
    say_written(path)
    return Exported("bundle", path, recognize_with(read))


def write_bundle(path: Path, speech_model: SpeechModel) -> SpeechModel:
    """Write the bundle, and return the model that is read back from it and verified."""
    with atomic_write(path) as partial:
        partial.write_bytes(bundle_bytes(speech_model))
        # Still under its temporary name: a failed comparison leaves no file.
        read = read_bundle(partial, speech_model.device)
        check_bundle(read, speech_model, path)
    return read


def export_hub_folder(
    target: HubFolder, checkpoint: Checkpoint, speech_model: SpeechModel, pretrained: str | None
) -> Exported:
    """Write the folder for the hub with its model card, and read the model back for the comparison.

    Args:
        pretrained: current path of the run's pretrained folder; None: the path used in training.
    """
    out = target.path
    if PRETRAINED_STATE in checkpoint.states:
        tuned = tuned_whisper(checkpoint, config_from_text(checkpoint.config))
        say(write_hub_whisper(target, checkpoint, speech_model, tuned, pretrained).sentence())
        read = build_pretrained_model(read_pretrained(out), tuned.config.pretrained, torch.device("cpu"))
    else:
        write_hub_bundle(target, checkpoint, speech_model, lambda path: write_bundle(path, speech_model))
        read = read_bundle(out / FOLDER_NAME, speech_model.device)
    say(f"{out}: {size_in_words(size_of(out))}, with a model card")
    return Exported("hub folder", out, recognize_with(read))


def export_folders(
    checkpoint: Checkpoint, pretrained: str | None, folder: str | None, adapter: str | None
) -> list[Exported]:
    """Write the requested folders, and read the model back for the comparison."""
    tuned = tuned_model(checkpoint, config_from_text(checkpoint.config))
    outputs = [Path(path) for path in (folder, adapter) if path is not None]
    forms = []
    writers = folder_writers(tuned, pretrained, outputs)
    if adapter is not None:
        writers.adapter(Path(adapter))
        say(f"{adapter}: {size_in_words(size_of(Path(adapter)))}")
    if writers.note:
        say(writers.note)
    if folder is not None:
        out = Path(folder)
        say(f"{writers.whole(out).sentence()}\n{out}: {size_in_words(size_of(out))}")
        # Read from disk like any other folder, not from memory.
        read = build_pretrained_model(read_pretrained(out), tuned.config.pretrained, torch.device("cpu"))
        forms.append(Exported("folder", out, recognize_with(read)))
    return forms


def table(comparisons: list[FormScore]) -> list[str]:
    """Return a table with one line per exported model, below a header."""
    lines = [f"{'':12} {'WER':>7} {'CER':>7} {'changed texts':>14} {'size':>9}"]
    for score in comparisons:
        rates = score.rates
        different = f"{score.other_texts} of {score.utterances}"
        lines.append(
            f"{score.name:12} {rates.wer:7.2%} {rates.cer:7.2%} {different:>14} {size_in_words(score.size):>9}"
        )
    return lines


def say_written(path: Path) -> None:
    """Print the name and size of a file."""
    say(f"{path}: {size_in_words(path.stat().st_size)}")


def size_in_words(size: int) -> str:
    """Return a size in megabytes (10**6 bytes) as text."""
    return f"{size / 1e6:.1f} MB"
