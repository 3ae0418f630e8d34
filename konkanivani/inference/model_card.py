"""Model card of an exported model: YAML metadata of the Hugging Face hub, and text, both from recorded facts only.

A fact that is not recorded is left out or called unknown. Does not import torch.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from konkanivani.config import TrainConfig
from konkanivani.console import count, duration_words, show_text
from konkanivani.errors import UsageError
from konkanivani.flags import changed_settings, words_of
from konkanivani.inference.card_scores import CardScore

CARD = "README.md"
TASK = "automatic-speech-recognition"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # OWNER/NAME
# Folder of a model in the cache of huggingface_hub: OWNER, NAME and commit.
CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?\Z", re.ASCII)
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*")  # ISO 639 code, optionally with script or region (BCP 47)
SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
# Licences that the hub knows by their SPDX identifier in lower case; it needs `other` and a name for the rest.
# https://huggingface.co/docs/hub/repositories-licenses
HUB_LICENCES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 eupl-1.2 gpl-2.0 gpl-3.0 isc lgpl-2.1 lgpl-3.0 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl ofl-1.1 osl-3.0
    postgresql unlicense wtfpl zlib
    """.split()
)
# Settings of the machine and of a single start, which do not change the trained model.
LOCAL_SETTINGS = frozenset(
    """
    device checkpoint_dir log_dir run_name save_minutes save_steps keep_checkpoints resume fresh new_corpus rank_timeout
    dry_run num_workers loader_timeout audio_roots memory_budget host_budget rehearsal shard replan
    empty_cache_interval concurrent_micro_batches cuda_graphs
    """.split()
)


@dataclass(frozen=True)
class AuthorFacts:
    """Model card, for --hub_folder."""

    license: str | None = None
    """SPDX identifier of the model's licence, such as Apache-2.0 (None: the card says that you must choose one)."""
    speech_language: str | None = None
    """ISO 639 code of the speech, such as kok (None: as an imported model says, else unknown)."""
    base_model: str | None = None
    """OWNER/NAME of the base model on the hub (None: unknown)."""
    datasets: tuple[str, ...] = ()
    """OWNER/NAME of the training data sets on the hub."""
    scores: tuple[str, ...] = ()
    """Files with the output of konkanivani evaluate --checkpoint ... --json."""


@dataclass(frozen=True)
class Corpus:
    """Name, size and duration of the training manifest."""

    manifest: str
    utterances: int
    hours: float


@dataclass(frozen=True)
class TrainingFacts:
    """Record of the training in a checkpoint; None: the checkpoint does not contain it.

    `audio_hours` is the duration of all processed audio, over all epochs; `valid_cer` the lowest validation CER.
    """

    config: TrainConfig
    steps: int
    corpus: Corpus | None
    epochs: int | None
    audio_hours: float | None
    valid_cer: float | None


@dataclass(frozen=True)
class BaseFacts:
    """Origin of the initial weights: a folder or file, its SHA-256, and statements in its own files.

    `sha256` is "" if unknown, `licence` "" if the files name none, `named` "" if they do not name the model.
    `repository` and `commit` are its place on the hub if it was downloaded from there, else "".
    """

    file: str
    sha256: str
    licence: str
    named: str
    saved_by: str
    repository: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Contents:
    """Exported files: Whisper format or a bundle.

    `prompt_language` is the language token of Whisper's prompt; `note` is advice for other programs.
    """

    weights_file: str
    parameters: int
    longest_seconds: float
    is_whisper: bool = False
    prompt_language: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class CardFacts:
    """Facts of a model card; `training` is None for a model that was imported and not trained further."""

    name: str
    author: AuthorFacts
    contents: Contents
    training: TrainingFacts | None
    base: BaseFacts | None
    language: str | None
    scores: tuple[CardScore, ...]


def check_author(author: AuthorFacts) -> None:
    """Raise UsageError if a flag of the card does not have the form that the hub requires."""
    if author.license is not None and not SPDX.fullmatch(author.license):
        raise UsageError(f"--license {author.license} is not an SPDX identifier. Give one such as Apache-2.0 or MIT.")
    if author.speech_language is not None and not LANGUAGE.fullmatch(author.speech_language):
        raise UsageError(f"--speech_language {author.speech_language} is not an ISO 639 code. Give one such as kok.")
    names_by_flag = [("--base_model", author.base_model), *(("--datasets", name) for name in author.datasets)]
    for flag, name in names_by_flag:
        if name is not None and not REPOSITORY.fullmatch(name):
            raise UsageError(f"{flag} {name} is not a name on the hub. Give OWNER/NAME, or omit the flag.")


def model_card(facts: CardFacts) -> str:
    """Return the text of the card: metadata, then Markdown."""
    sections = [
        f"# {plain(facts.name)}",
        _summary(facts),
        "## Use\n\n" + _use(facts),
        "## Results\n\n" + _results(facts.scores),
        "## Training data\n\n" + _data(facts),
        "## Training\n\n" + _training(facts),
        "## Base model\n\n" + _base(facts),
        "## Licence\n\n" + _licence(facts),
        "## Limits\n\n" + _limits(facts),
    ]
    metadata = "\n".join(_metadata(facts))
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(sections) + "\n"


# --------------------
# Metadata block, as YAML. Strings are JSON strings, which YAML accepts, so that no YAML package is needed.


def quoted(text: str) -> str:
    """Return text as a YAML string on one line, with invisible characters replaced."""
    return json.dumps(show_text(text), ensure_ascii=False)


def hub_licence(identifier: str) -> str | None:
    """Return the hub's name of a licence; None if it has none."""
    # The hub does not distinguish "only" from "or later".
    name = re.sub(r"-(only|or-later)$", "", identifier.lower())
    return name if name in HUB_LICENCES else None


def _metadata(facts: CardFacts) -> Iterator[str]:
    author = facts.author
    if facts.language is not None:
        yield f"language: {quoted(facts.language)}"
    if author.license is not None:
        hub_name = hub_licence(author.license)
        yield f"license: {quoted(hub_name or 'other')}"
        if hub_name is None:
            yield f"license_name: {quoted(author.license.lower())}"
    yield f"library_name: {quoted('transformers' if facts.contents.is_whisper else 'konkanivani')}"
    yield f"pipeline_tag: {quoted(TASK)}"
    base_model = author.base_model or (facts.base.repository if facts.base else "")
    if base_model:
        yield f"base_model: {quoted(base_model)}"
    if author.datasets:
        yield from _listed("datasets", author.datasets)
    yield from _listed("tags", _tags(facts))
    if facts.scores:
        yield from _listed("metrics", ("wer", "cer"))
        yield from _model_index(facts)


def _listed(name: str, values: Sequence[str]) -> Iterator[str]:
    yield f"{name}:"
    yield from (f"- {quoted(value)}" for value in values)


def _tags(facts: CardFacts) -> tuple[str, ...]:
    tags = [TASK, "speech-recognition", "konkanivani"]
    if facts.contents.is_whisper:
        tags.append("whisper")
    elif facts.training is not None:
        tags.append(facts.training.config.model.encoder_type)
    return tuple(tags)


def _model_index(facts: CardFacts) -> Iterator[str]:
    yield "model-index:"
    yield f"- name: {quoted(facts.name)}"
    yield "  results:"
    for score in facts.scores:
        yield f"  - task:\n      type: {TASK}\n      name: Speech recognition"
        # `type` should be a data set on the hub. A manifest is a local file.
        yield f"    dataset:\n      type: local\n      name: {quoted(score.manifest)}"
        yield "    metrics:"
        for metric, rate in (("wer", score.wer), ("cer", score.cer)):
            if math.isfinite(rate.value):
                yield f"    - type: {metric}\n      value: {100 * rate.value:.2f}"
                yield f"      name: {quoted(f'{metric.upper()} in percent, {score.decoding}')}"


# --------------------
# Text, as Markdown.


def plain(text: str) -> str:
    """Return text for Markdown, with invisible characters replaced and the characters of its syntax escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", show_text(text))


def code(text: str) -> str:
    """Return text as a code span, also inside a table."""
    shown = show_text(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    # Spaces separate a backtick at either end from the fence; Markdown removes them.
    space = " " if "`" in shown else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _summary(facts: CardFacts) -> str:
    kind = "A Whisper model" if facts.contents.is_whisper else "A speech recognition model"
    parameters = facts.contents.parameters
    size = f"{parameters / 1e6:.1f} million parameters" if parameters >= 1e6 else f"{parameters:,} parameters"
    language = f", language `{facts.language}`" if facts.language else ""
    origin = "trained"
    if facts.training is None:
        origin = "untrained, written" if facts.base is None else "converted, without further training,"
    return f"{kind} with {size}{language}, {origin} with KonkaniVani. Input: 16 kHz mono audio. Output: text."


def _use(facts: CardFacts) -> str:
    contents = facts.contents
    # A line break or backtick could end the code block. Any folder can be given to `--local-dir`.
    name = facts.name if show_text(facts.name) == facts.name and "`" not in facts.name else "model"
    folder = shlex.quote(name)
    arguments = json.dumps(name, ensure_ascii=False)
    if contents.prompt_language:
        arguments += f', language="{contents.prompt_language}"'
    model = f"--checkpoint {shlex.quote(f'{name}/{contents.weights_file}')}"
    if contents.is_whisper:
        language = f" --language {contents.prompt_language}" if contents.prompt_language else ""
        model = f"--pretrained {folder}{language}"
    text = (
        f"Download this repository to a folder {code(name)} ({code(f'hf download OWNER/NAME --local-dir {folder}')}). "
        "In Python, with KonkaniVani:\n\n"
        "```python\nfrom konkanivani import load_recognizer\n\n"
        f"recognizer = load_recognizer({arguments})\n"
        'print(recognizer.transcribe("recording.wav").text)\n```\n\n'
        "In a shell:\n\n"
        f"```sh\nkonkanivani transcribe recording.wav {model}\n```"
    )
    if contents.is_whisper:
        text += "\n\ntransformers also reads the folder: `WhisperForConditionalGeneration.from_pretrained`."
    return text


def _results(scores: Sequence[CardScore]) -> str:
    if not scores:
        return "No test results are recorded. The error rates of this model are unknown."
    lines = [
        "| test set | utterances | decoding | WER % (95 % interval) | CER % (95 % interval) |",
        "|---|---|---|---|---|",
    ]
    for score in scores:
        cells = (code(score.manifest), f"{score.utterances:,}", plain(score.decoding), str(score.wer), str(score.cer))
        lines.append(f"| {' | '.join(cells)} |")
    notes = []
    for unit in sorted({score.unit for score in scores}):
        notes.append(f"Intervals are from bootstrap resamples of {unit}.")
    for normalize in sorted({score.normalize for score in scores}):
        notes.append(f"Texts were normalised with `--normalize {normalize}` before scoring.")
    skipped = sum(score.left_out for score in scores)
    if skipped:
        notes.append(f"{count(skipped, 'row')} of the test manifests were skipped as broken or too long.")
    return "\n".join(lines) + "\n\n" + " ".join(notes)


def _data(facts: CardFacts) -> str:
    training = facts.training
    lines = []
    if training is None:
        lines.append("No training data are recorded.")
    elif training.corpus is None:
        name = os.path.basename(training.config.data.train_manifest or "")
        named = f" It was named {code(name)}." if name else ""
        lines.append(f"The size of the training manifest is not recorded in this checkpoint.{named}")
    else:
        corpus = training.corpus
        amount = f"{duration_words(corpus.hours)} of speech in {count(corpus.utterances, 'utterance')}"
        subset = training.config.data.train_subset
        share = f" ({subset:g} % of them used)" if subset < 100 else ""
        lines.append(f"{amount}{share}, from the manifest {code(corpus.manifest)}.")
    if facts.author.datasets:
        lines.append("Data sets: " + ", ".join(code(name) for name in facts.author.datasets) + ".")
    else:
        lines.append("The publisher and the licence of the data are not recorded.")
    return " ".join(lines)


def _training(facts: CardFacts) -> str:
    training = facts.training
    if training is None and facts.base is None:
        return "No training is recorded."
    if training is None:
        return "The model was imported and not trained further."
    words = [f"{count(training.steps, 'optimizer step')}"]
    if training.epochs is not None:
        words.append(count(training.epochs, "finished epoch"))
    if training.audio_hours is not None:
        words.append(f"{duration_words(training.audio_hours)} of audio processed in all epochs")
    text = f"{', '.join(words)}."
    if training.valid_cer is not None:
        text += f" Lowest CER on the validation set: {100 * training.valid_cer:.2f} %."
    command = " \\\n    ".join(_wrapped(training_command(training.config)))
    return f"{text} Command, with automatic settings resolved and local paths shortened:\n\n```sh\n{command}\n```"


def training_command(config: TrainConfig) -> list[str]:
    """Return the training command in parts, a flag with its value each; settings with default values are left out.

    Paths outside of the working folder are shortened to the file name, since they may contain the name of the user.
    """
    parts = ["konkanivani train"]
    for setting in changed_settings(config):
        if setting.name in LOCAL_SETTINGS:
            continue
        if setting.value is not True:
            values = setting.value if isinstance(setting.value, tuple) else (setting.value,)
            setting = replace(setting, value=tuple(show_text(_without_folder(item)) for item in values))
        parts.append(shlex.join(words_of(setting)))
    return parts


def _without_folder(value: object) -> str:
    text = str(value)
    if match := CACHED.search(text):
        return f"{match[1]}/{match[2]}"
    is_outside = os.path.isabs(text) or ".." in text.split("/")
    return os.path.basename(os.path.normpath(text)) if is_outside else text


def _wrapped(parts: Sequence[str], width: int = 100) -> list[str]:
    """Return the parts joined to lines of at most `width` characters, or one part."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return lines


def _base(facts: CardFacts) -> str:
    base = facts.base
    if base is None:
        init = facts.training.config.run.init_from if facts.training else None
        if init is not None:
            return f"Training started from the weights of the checkpoint {code(_without_folder(init))}."
        return "None: the weights were initialised at random."
    origin = "Whisper folder" if facts.contents.is_whisper else "file"
    sentences = [f"Initial weights: the {origin} {code(base.file)}."]
    if base.repository:
        sentences = [f"Initial weights: {code(base.repository)} on the hub, commit {code(base.commit)}."]
    if facts.author.base_model:
        sentences.insert(0, f"Base model, as stated by the author: {code(facts.author.base_model)}.")
    if base.named:
        sentences.append(f"Its own files name the model {code(base.named)}.")
    if base.saved_by:
        sentences.append(f"Saved by {plain(base.saved_by)}.")
    if base.sha256:
        sentences.append(f"SHA-256: {code(base.sha256)}.")
    sentences.append(f"Licence in its files: {plain(base.licence)}." if base.licence else "Its files name no licence.")
    return " ".join(sentences)


def _licence(facts: CardFacts) -> str:
    chosen = facts.author.license
    if chosen is None:
        text = (
            "**No licence is chosen.** The author must choose one before others may use this model: export again "
            "with `--license`, or add `license:` to the metadata."
        )
    else:
        text = f"{plain(chosen)}, as chosen by the author."
    if facts.base is not None:
        text += " The licence of the base model applies as well."
    return text


def _limits(facts: CardFacts) -> str:
    lines = []
    if facts.scores:
        lines.append(
            "Error rates are known for the test sets above only; other speakers, microphones and noise differ."
        )
    training = facts.training
    if training is not None and training.corpus is not None:
        lines.append(f"The training data are {duration_words(training.corpus.hours)} of speech.")
    lines.append(
        f"The model processes up to {facts.contents.longest_seconds:g} s at once; KonkaniVani splits longer audio at "
        "pauses."
    )
    if facts.contents.is_whisper:
        if facts.contents.prompt_language:
            lines.append(f"The prompt contains the language token `{facts.contents.prompt_language}`.")
    else:
        # Training normalises its transcripts. The transcripts of an imported model are unknown.
        if training is not None:
            lines.append("The text has no punctuation and is in lower case, if the script has case.")
        lines.append("Only KonkaniVani can load this file.")
    if facts.contents.note:
        lines.append(facts.contents.note)
    lines.append("Speaker groups (age, gender, dialect) have not been compared.")
    return "\n".join(f"- {line}" for line in lines)


def name_of(folder: Path) -> str:
    """Return the name of the model in its card: the name of its folder."""
    return folder.resolve().name or "model"
