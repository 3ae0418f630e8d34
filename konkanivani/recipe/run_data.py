"""Data of a run: its tokenizer, its utterances within the limits, and the loader's settings."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from konkanivani.config import TrainConfig
from konkanivani.console import count, parse_share, say
from konkanivani.data.augmentation import RecordingAugmentation
from konkanivani.data.batching import EpochPlanner, choose_subset, plan_evaluation
from konkanivani.data.dataset import EvalDataset, NoiseReverb, TrainDataset, read_noise_reverb
from konkanivani.data.filtering import (
    Limits,
    Selection,
    check_any_usable,
    check_utterances,
    count_cut,
    evaluation_limits,
    limits_of_text,
    training_limits,
)
from konkanivani.data.index import TextFields
from konkanivani.data.loader import LoaderConfig
from konkanivani.data.manifest import (
    Fingerprint,
    Manifest,
    Rejections,
    iterate_texts,
    make_fingerprint,
    measure_corpus_size,
    no_text,
    read_manifest,
)
from konkanivani.data.text import (
    ZWJ,
    Digits,
    FormatCharacterCount,
    Vocabulary,
    normalize_text,
    reads_text,
    train_tokenizer,
)
from konkanivani.distributed import broadcast_from_rank0
from konkanivani.errors import DataError, ErrorCollector
from konkanivani.flags import config_from_text, resolved
from konkanivani.inference.speech_model import load_tokenizer
from konkanivani.lengths import SECONDS, TOKENS
from konkanivani.models.architecture import Architecture
from konkanivani.recipe.resume import check_corpus, remembered_corpus
from konkanivani.recipe.startup import Start, settle
from konkanivani.training.validation import EvaluationSet

# --------------------
# Tokenizer of a run: the checkpoint's, the pretrained model's, or one that is trained on the texts of the run.


MAX_UNKNOWN = 0.005  # share of the tokens
NAMED_CHARACTERS = 10
TOLD_BY = 20_000  # texts to check if the corpus seems unchanged: its transcripts may have been corrected


def choose_tokenizer(start: Start, manifest: Manifest) -> Vocabulary:
    """Return the tokenizer of the checkpoint or the pretrained folder, else train one on the manifest's texts."""
    if start.resumed:
        return load_tokenizer(start.resumed)
    if start.pretrained:
        return start.pretrained.vocabulary(start.config.pretrained)
    text = start.config.text
    texts = list(normalized_texts(manifest, text.digits))
    # An empty corpus is an error even if the tokenizer is a checkpoint's.
    if not texts:
        raise no_text(manifest)
    if start.initial is not None and keeps_tokens(start):
        return load_tokenizer(start.initial)
    return train_tokenizer(texts, resolved(text.tokenizer_type), text.vocab_size)


def normalized_texts(manifest: Manifest, digits: Digits) -> Iterator[str]:
    """Yield the normalised transcripts of the manifest that are not empty."""
    return filter(None, (normalize_text(text, digits) for text in iterate_texts(manifest)))


def keeps_tokens(start: Start) -> bool:
    """Return whether a run with --init_from keeps the checkpoint's tokenizer.

    It does unless --new_tokenizer is given, or another tokenizer type or vocabulary size.
    """
    if start.initial is None or start.config.tuning.new_tokenizer:
        return False
    text_config = start.config.text
    stored = config_from_text(start.initial.config).text
    return (text_config.tokenizer_type, text_config.vocab_size) == (stored.tokenizer_type, stored.vocab_size)


def check_spelling(start: Start, corpus: Fingerprint, tokenizer: Vocabulary, texts: Iterable[str]) -> None:
    """Raise a DataError if the checkpoint's tokenizer lacks too many tokens of the normalised `texts`.

    The limit is 0.5 % of the tokens; up to that, the unknown characters are only printed.
    """
    if not (start.resumed or start.pretrained or keeps_tokens(start)):
        return
    unknown_token = tokenizer.special.unknown
    if unknown_token is None:
        return
    remembered = remembered_corpus(start)
    characters: Counter[str] = Counter()
    tokens: Counter[int] = Counter()
    # Tokenizing a large corpus takes long: an unchanged one is only sampled.
    is_sampled = start.pretrained is not None or (remembered is not None and remembered.is_unchanged(corpus))
    for text in islice(texts, TOLD_BY if is_sampled else None):
        characters.update(text)
        tokens.update(tokenizer.encode(text))
    unknown = {c: number for c, number in characters.items() if unknown_token in tokenizer.encode(c)}
    part = tokens[unknown_token] / max(1, tokens.total())
    if not unknown:
        return
    commonest = sorted(unknown, key=unknown.__getitem__, reverse=True)
    listed = ", ".join(f"{character} {unknown[character]:,} times" for character in commonest[:NAMED_CHARACTERS])
    listed += ", …" if len(commonest) > NAMED_CHARACTERS else ""
    owner = "pretrained model" if start.pretrained else "checkpoint"
    problem = (
        f"{part:.2%} of the tokens of {corpus.manifest} are unknown to the {owner}'s tokenizer: it has no {listed}"
    )
    if part <= MAX_UNKNOWN:
        say(f"{problem}. They are trained as the unknown token.")
        return
    spelt = "--digits spell, which writes digits as words, or " if any(map(str.isdecimal, unknown)) else ""
    spelt = spelt if start.config.text.digits == "keep" and start.initial else ""
    advice = f"Use {spelt}--new_tokenizer, which trains a tokenizer on this text and a new output head."
    if start.pretrained:
        advice = "Use a model whose tokenizer has them, such as mT5 or ByT5."
    elif start.resumed:
        advice = "Start a new run with --init_from and --new_tokenizer, in another --checkpoint_dir."
    raise DataError(f"{problem}. That is more than {MAX_UNKNOWN:.1%}: the model could never output them. {advice}")


def say_removed(manifests: list[Manifest], tokenizer: Vocabulary) -> None:
    """Print one line that counts the format characters that the tokenizer drops from the transcripts, if any."""
    removed = FormatCharacterCount()
    for manifest in manifests:
        removed.add_all(manifest.index.format_characters)
    # The tokenizer is probed for whether it keeps zero-width joiners.
    sentence = removed.sentence(keeps_joiners=ZWJ in tokenizer.normalize(f"क{ZWJ}क", "keep"))
    if sentence:
        say(sentence)


# --------------------
# Data of a run: manifests checked against the limits, and their training and evaluation sets.


WARNED_OF = 0.05  # a smaller share may come from two corpora that number their files alike


@dataclasses.dataclass(frozen=True)
class RunData:
    """Training and validation sets of a run, the tokenizer, and the rejected utterances.

    `config` is the run's, with the automatic settings that depend on the amount of speech resolved. The test manifest
    is only checked here, and read after training; `tested` is the number of its utterances.
    """

    config: TrainConfig
    corpus: Fingerprint
    tokenizer: Vocabulary
    train: TrainDataset
    validation: EvaluationSet | None
    rejections: Rejections
    tested: int

    def sentence(self) -> str:
        """Return a sentence with the sizes of the sets for the user."""
        unit = TOKENS if reads_text(self.tokenizer) else SECONDS
        amount = unit.total(float(self.train.utterances.durations.sum()))
        validated = len(self.validation.speech.utterances) if self.validation else 0
        return (
            f"{count(len(self.train.utterances), 'training utterance')}, {amount}; "
            f"{validated:,} for validation; {self.tested:,} for testing; {self.rejections.count:,} skipped"
        )

    def epoch_planner(self) -> EpochPlanner:
        """Return the planner of the run's epochs."""
        is_sorted = self.config.data.first_epoch == "shortest_first"
        return EpochPlanner(
            self.train.utterances.durations, self.config.global_batch_size, self.config.run.seed, is_sorted
        )


def build_speech(start: Start, device: torch.device, rejected: Path | None) -> RunData:
    """Check the manifests and build the run's datasets and tokenizer.

    Unusable utterances are printed and, if `rejected` is a path, listed in that file. One DataError covers all
    manifests: first the errors of their rows, before a tokenizer is trained on them, then of their utterances under the
    tokenizer and the limits.
    """
    config = start.config
    problems = ErrorCollector()
    rejections = Rejections(rejected, parse_share(config.data.max_rejected, "--max_rejected"))
    noise_reverb = NoiseReverb()
    with problems.collect():
        noise_reverb = read_noise_reverb(config.augment, config.run.seed, config.data.audio_roots)
    paths = config.data.train_manifest, config.data.valid_manifest, config.data.test_manifest
    fields = fields_of(start.architecture(config.text.vocab_size), config)
    manifests = [_read(path, config.data.audio_roots, fields, problems) for path in paths]
    train, valid, test = manifests
    corpus = None if train is None else make_fingerprint(train)
    if corpus:
        check_corpus(start, corpus)  # before any file of the run is written
    for manifest in manifests:
        if manifest is not None:
            with problems.collect():
                rejections.begin(manifest)
    problems.raise_all()
    # check_paths has required --train_manifest, and an error of reading it has been raised.
    assert train is not None and corpus is not None
    warn_of_shared(corpus, valid, test)
    start = settle(start, measure_corpus_size(train))
    config = start.config
    # Trained once, by the first rank: all ranks need the same tokenizer.
    tokenizer = broadcast_from_rank0(start.topology, lambda: choose_tokenizer(start, train))
    architecture = start.architecture(tokenizer.size)
    check_spelling(start, corpus, tokenizer, normalized_texts(train, config.text.digits))
    with problems.collect():
        training = build_training_speech(config, train, tokenizer, architecture, rejections, noise_reverb)
    evaluated: list[EvaluationSet | None] = []
    settings = config, tokenizer, architecture, device, rejections
    for manifest in (valid, test):
        with problems.collect():
            evaluated.append(None if manifest is None else evaluation_set(manifest, *settings))
    problems.raise_all()
    validation, tested = evaluated
    say_removed([manifest for manifest in manifests if manifest is not None], tokenizer)
    # Each rank evaluates its share of the validation set.
    if validation is not None:
        validation = dataclasses.replace(validation, topology=start.topology)
    test_utterances = len(tested.speech.utterances) if tested else 0
    return RunData(config, corpus, tokenizer, training, validation, rejections, test_utterances)


def fields_of(architecture: Architecture, config: TrainConfig) -> TextFields | None:
    """Return the fields of a manifest's rows if the model's input is text, else None."""
    if architecture.framing.unit != TOKENS:
        return None
    return TextFields(config.pretrained.input_field, config.pretrained.target_field)


def _read(
    path: str | None, named_roots: tuple[str, ...], fields: TextFields | None, problems: ErrorCollector
) -> Manifest | None:
    """Return the manifest; None if no path is given or, with the error added to `problems`, if it cannot be read."""
    if path is not None:
        with problems.collect():
            return read_manifest(path, named_roots, fields)
    return None


def warn_of_shared(corpus: Fingerprint, *manifests: Manifest | None) -> None:
    """Warn about manifests that share utterances with the training set: their error rates are too optimistic."""
    for manifest in manifests:
        if manifest is None:
            continue
        shared = corpus.shared(make_fingerprint(manifest))
        if shared >= WARNED_OF:
            say(
                f"{shared:.0%} of the utterances of {manifest.path} are also in the training set, so its error "
                "rates are too optimistic. Run konkanivani inspect to list them."
            )


def build_training_speech(
    config: TrainConfig,
    manifest: Manifest,
    tokenizer: Vocabulary,
    architecture: Architecture,
    rejections: Rejections,
    noise_reverb: NoiseReverb,
) -> TrainDataset:
    """Return the training set; rejected utterances are added to `rejections`."""
    # The slowest speed gives the longest audio, for which the limits have to hold.
    speeds = resolved(config.augment.speed_perturbation)
    limits = training_limits(config, architecture.framing)
    most = architecture.most_tokens - more_tokens(config)
    limits = limits.within(architecture.longest_seconds, most, slowest_speed=min(speeds))
    if reads_text(tokenizer):
        limits = limits_of_text(tokenizer.limits, architecture.framing)
    utterances = choose_usable(manifest, tokenizer, limits, config.text.digits, rejections)
    # Drawn from the usable utterances, so that --train_subset is a percentage of those.
    if config.data.train_subset < 100:
        utterances = utterances.part(choose_subset(len(utterances), config.data.train_subset, config.run.seed))
    # Added silence stays within the memory plan and the model's window.
    longest = float(utterances.durations.max()) / min(speeds)
    recording = RecordingAugmentation(config.run.seed, resolved(config.augment.augmentation), longest)
    timed_share = config.pretrained.timestamp_share
    return TrainDataset(
        utterances, tokenizer, speeds, config.run.seed, manifest.path, noise_reverb, timed_share, recording, limits
    )


def more_tokens(config: TrainConfig) -> int:
    """Return the additional tokens of a label with timestamps: two timestamps replace the no-timestamps token."""
    return 1 if config.pretrained.timestamp_share else 0


def choose_usable(
    manifest: Manifest, tokenizer: Vocabulary, limits: Limits, digits: Digits, rejections: Rejections
) -> Selection:
    """Return the manifest's utterances within the limits; the others are added to `rejections`."""
    usable, left_out = check_utterances(manifest, tokenizer, limits, digits)
    rejections.add_many(left_out)
    check_any_usable(usable, left_out)
    cut = count_cut(usable)
    if cut:
        say(f"Cut to --max_input_tokens or --max_target_tokens: the texts of {count(cut, 'row')} of {manifest.path}.")
    return usable


def build_evaluation_set(
    path: str,
    config: TrainConfig,
    tokenizer: Vocabulary,
    architecture: Architecture,
    device: torch.device,
    rejections: Rejections,
) -> EvaluationSet:
    """Read a manifest and return its evaluation batches; rejected utterances are added to `rejections`."""
    manifest = read_manifest(path, config.data.audio_roots, fields_of(architecture, config))
    rejections.begin(manifest)
    return evaluation_set(manifest, config, tokenizer, architecture, device, rejections)


def evaluation_set(
    manifest: Manifest,
    config: TrainConfig,
    tokenizer: Vocabulary,
    architecture: Architecture,
    device: torch.device,
    rejections: Rejections,
) -> EvaluationSet:
    """Return the utterances of a manifest, whose broken rows are already in `rejections`, in evaluation batches."""
    limits = evaluation_limits(config, architecture.framing)
    limits = limits.within(architecture.longest_seconds, architecture.most_tokens)
    if reads_text(tokenizer):
        limits = limits_of_text(tokenizer.limits, architecture.framing)
    return set_within(limits, manifest, config, tokenizer, device, rejections)


def set_within(
    limits: Limits,
    manifest: Manifest,
    config: TrainConfig,
    tokenizer: Vocabulary,
    device: torch.device,
    rejections: Rejections,
) -> EvaluationSet:
    """Return the utterances of a manifest that are within the limits, in evaluation batches."""
    usable = choose_usable(manifest, tokenizer, limits, config.text.digits, rejections)
    plan = plan_evaluation(usable.durations, config.data.validation_batch_seconds)
    speech = EvalDataset(usable, tokenizer, manifest.path, limits=limits)
    return EvaluationSet(speech, plan, loader_config(config, device), rejections)


def loader_config(config: TrainConfig, device: torch.device) -> LoaderConfig:
    """Return the data loader settings for training and evaluation on this device."""
    return LoaderConfig(config.data.num_workers, config.data.loader_timeout, pin_memory=device.type == "cuda")
