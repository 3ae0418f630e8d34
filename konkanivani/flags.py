"""The settings of `config.py` as command-line flags and as text. No torch here."""

import ast
import contextlib
import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from konkanivani.command_line import HelpSection, read_flags, value_names, with_new_name
from konkanivani.config import (
    AUTO,
    DEFAULT_EFFECTIVE_BATCH_SIZE,
    DEFAULT_RATE,
    PRESETS,
    AugmentConfig,
    DataConfig,
    FeatureConfig,
    ModelConfig,
    TrainConfig,
)
from konkanivani.errors import CheckpointError, ErrorCollector, UsageError
from konkanivani.hub import is_commit
from konkanivani.rules import TEXT_FLAGS, Setting, check_config, settings_of, with_values

# --------------------
# Values of the "auto" settings, chosen from the amount of training audio. Does not import torch.


DECIDED = (
    *("tokenizer_type", "ctc_weight", "epochs", "speed_perturbation", "augmentation", "gradient_accumulation_steps"),
    *("first_epoch", "learning_rate"),
)
# With less audio, subwords are too rare to be learnt, and attention without CTC aligns too late.
LITTLE_HOURS = 10.0
TARGET_HOURS = 30.0  # audio in all epochs together, as far as the bounds on the epochs allow
MIN_EPOCHS = 20
MAX_EPOCHS = 60
# fine-tuning of a pretrained model
MIN_TUNED_EPOCHS = 3
MAX_TUNED_EPOCHS = 10
# Audio per optimizer step of a small corpus: half the audio per step means twice the steps, which learn more in the
# same number of epochs.
GLOBAL_BATCH_SECONDS = 20.0
MIN_GLOBAL_BATCH_SIZE = 2
# Faster speech is harder to recognise than slower speech, since each word has fewer frames: it is drawn more often, and
# 1.1 is within the range.
LITTLE_SPEEDS = (0.9, 1.0, 1.0, 1.1, 1.1, 1.2)
# LARGE_RATE is for models up to SMALL_WIDTH, from MANY_WORDS and MIN_HOURS on (docs/experiments.md).
LARGE_RATE = 2e-3
SMALL_WIDTH = 128
MANY_WORDS = 100
MIN_HOURS = 0.75
TUNED_GLOBAL_BATCH_SIZE = 16  # utterances, as in the published fine-tuning recipes of the pretrained models

Value = TypeVar("Value")


def resolved(value: Value | Literal["auto"]) -> Value:
    """Return the value of a setting that `resolve` has set; raise a ValueError if it is still "auto"."""
    if value == AUTO:
        raise ValueError("an automatic setting is used before it is resolved")
    return value


@dataclass(frozen=True)
class CorpusSize:
    """Amount of training data.

    `hours` of audio, number of `utterances` and of distinct `words`, and the `ranks` that share a global batch.
    """

    hours: float
    utterances: int
    ranks: int = 1
    words: int = 0

    @property
    def is_little(self) -> bool:
        """Return whether the corpus is too small for the usual defaults (under LITTLE_HOURS)."""
        return self.hours < LITTLE_HOURS

    @property
    def global_batch_size(self) -> int:
        """Utterances per optimizer step."""
        # Each rank needs at least one utterance.
        if not self.is_little:
            return max(DEFAULT_EFFECTIVE_BATCH_SIZE, self.ranks)
        seconds_each = 3600 * self.hours / max(1, self.utterances)
        target_size = round(min(DEFAULT_EFFECTIVE_BATCH_SIZE, GLOBAL_BATCH_SECONDS / max(seconds_each, 1e-9)))
        return max(MIN_GLOBAL_BATCH_SIZE, self.ranks, target_size)


UNLIMITED = CorpusSize(float("inf"), 0)


def resolve(config: TrainConfig, amount: CorpusSize = UNLIMITED) -> TrainConfig:
    """Return the configuration with the "auto" settings of DECIDED resolved for this amount of data."""
    is_tuned = config.pretrained.pretrained is not None
    utterances = max(TUNED_GLOBAL_BATCH_SIZE, amount.ranks) if is_tuned else amount.global_batch_size
    config = dataclasses.replace(config, data=_with_global_batch(config.data, utterances))
    fewest, most = (MIN_TUNED_EPOCHS, MAX_TUNED_EPOCHS) if is_tuned else (MIN_EPOCHS, MAX_EPOCHS)
    # Shortest utterances first help CTC to align early, which a model with initial weights does already.
    from_nothing = not is_tuned and config.run.init_from is None
    may_be_fast = from_nothing and config.model.d_model <= SMALL_WIDTH and MIN_HOURS <= amount.hours < LITTLE_HOURS
    chosen = {
        "learning_rate": LARGE_RATE if may_be_fast and amount.words >= MANY_WORDS else DEFAULT_RATE,
        # The tokenizer of a pretrained model comes with its folder.
        "tokenizer_type": AUTO if is_tuned else "char" if amount.is_little else "unigram",
        "ctc_weight": 1.0 if not config.model.decoder_layers else 0.7 if amount.is_little else 0.3,
        "speed_perturbation": (0.9, 1.0, 1.1) if not amount.is_little else LITTLE_SPEEDS if from_nothing else (1.0,),
        # Initial weights fit the recordings that they were trained on; --augmentation light adapts them to others.
        "augmentation": "light" if from_nothing else "none",
        "first_epoch": "shortest_first" if amount.is_little and from_nothing else "shuffled",
        "epochs": round(min(most, max(fewest, TARGET_HOURS / max(amount.hours, 1e-9)))),
    }
    return with_values(config, {name: chosen[name] for name in _undecided(config) if name in chosen})


def _with_global_batch(data: DataConfig, utterances: int) -> DataConfig:
    """Return `data` with a global batch of at least `utterances`, unless the flags set one."""
    if data.batch_size == AUTO:
        return dataclasses.replace(data, effective_batch_size=data.effective_batch_size or utterances)
    if data.gradient_accumulation_steps == AUTO:
        # Rounded up, so that the step has at least `utterances`.
        return dataclasses.replace(data, gradient_accumulation_steps=-(-utterances // max(1, data.batch_size)))
    return data


def decisions(before: TrainConfig, config: TrainConfig) -> str:
    """Return the resolved "auto" settings as flags, such as `--epochs 20`; empty if there are none."""
    pairs = zip(settings_of(before), settings_of(config), strict=True)
    return " ".join(word for old, new in pairs if old.value != new.value for word in words_of(new))


def as_stored(config: TrainConfig, stored: TrainConfig, names: tuple[str, ...] = DECIDED) -> TrainConfig:
    """Return the configuration with the "auto" settings in `names` replaced by their values in `stored`."""
    stored_values = {setting.name: setting.value for setting in settings_of(stored)}
    return with_values(config, {name: stored_values[name] for name in _undecided(config) if name in names})


def _undecided(config: TrainConfig) -> list[str]:
    return [setting.name for setting in settings_of(config) if setting.value == AUTO]


# --------------------
# The settings of `config.py` as command-line flags and as text. No torch here.


# Listed by `--help` in this order; `--help all` lists every flag.
COMMON_FLAGS = (
    HelpSection(
        "Data",
        (
            *("train_manifest", "valid_manifest", "test_manifest", "test_decode", "audio_roots", "max_duration"),
            *("speed_perturbation", "noise_manifest", "num_workers"),
        ),
    ),
    HelpSection("Model and tokenizer", ("preset", "tokenizer_type", "vocab_size")),
    HelpSection("Training", ("epochs", "early_stop_epochs", "learning_rate", "ctc_weight", "seed")),
    HelpSection(
        "Device, batch size and memory",
        (
            *("device", "batch_size", "gradient_accumulation_steps", "mixed_precision", "gradient_checkpointing"),
            "memory_budget",
        ),
    ),
    HelpSection(
        "Checkpoints", ("checkpoint_dir", "run_name", "resume", "fresh", "save_minutes", "keep_checkpoints", "dry_run")
    ),
    HelpSection("Fine-tuning", ("init_from", "new_tokenizer", "pretrained", "language", "freeze", "lora_rank")),
)
# Flags of this process only: their values in a checkpoint are ignored.
SESSION_FLAGS = ("resume", "fresh", "new_corpus", "replan", "dry_run")
# Values of settings that a checkpoint does not name, because the version that wrote it did not have them.
LEGACY_DEFAULTS = TrainConfig(
    data=DataConfig(first_epoch="shuffled"),
    augment=AugmentConfig(augmentation="none"),
    features=FeatureConfig(smallest_power=1e-10, dynamic_range=0.0, dc_removal="none", normalization="utterance"),
)
# Flags that define a model trained from scratch; the folder of a pretrained model defines them already.
NATIVE_ONLY_FLAGS = frozenset(
    ("preset", "init_from", "tokenizer_type", "vocab_size", "ctc_weight", "intermediate_ctc_weight")
    + tuple(leaf.name for group in (ModelConfig, FeatureConfig) for leaf in dataclasses.fields(group))
)
# Defaults for fine-tuning a pretrained model; the others are resolved when its folder is read.
NO_REGULARISATION = dict.fromkeys(("ctc_weight", "label_smoothing", "weight_decay"), 0.0)
PRETRAINED_DEFAULTS = NO_REGULARISATION | {"max_duration": 30.0, "max_tokens": 2**16}
# Settings in GROUPS_OF_SHAPE that --resume may still change; all others there must equal the checkpoint's.
FREE_TO_CHANGE = ("dropout", "pretrained", "revision", "forgetting_manifest", "forgetting_language")
GROUPS_OF_SHAPE = ("text", "features", "model", "pretrained", "tuning")
# Flag that has no effect without another flag, optionally with the value that the other needs.
FLAG_REQUIRES = {
    **{"rir_prob": "rir_manifest", "noise_snr": "noise_manifest", "noise_prob": "noise_manifest"},
    **dict.fromkeys(("language", "task", "audio_context", "revision"), "pretrained"),
    **dict.fromkeys(TEXT_FLAGS, "pretrained"),
    **{"lora_alpha": "lora_rank", "lora_targets": "lora_rank"},
    **dict.fromkeys(("convolution_kernel", "convolution_norm", "entry_norm"), "encoder_type conformer"),
}


def config_to_text(config: TrainConfig) -> str:
    """Return the configuration as text, one `--flag value` per line, for checkpoints and TensorBoard."""
    return "".join(f"--{s.name} {s.value!r}\n" for s in settings_of(config))


def with_shape_of_preset(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the shape of its preset, if `model` is left at its default."""
    is_default = config.model == ModelConfig() and config.pretrained.pretrained is None
    return dataclasses.replace(config, model=PRESETS[config.run.preset]) if is_default else config


def changed_settings(config: TrainConfig) -> list[Setting]:
    """Return the settings that differ from the defaults of a new run with the same preset and pretrained model.

    A preset other than the default comes first.
    """
    usual = {setting.name: setting.value for setting in settings_of(defaults_beside(config))}
    usual["preset"] = TrainConfig().run.preset
    changed = [setting for setting in settings_of(config) if setting.value != usual[setting.name]]
    if config.pretrained.pretrained is not None:
        # The folder replaces defaults such as --ctc_weight, which a configuration written in Python still has.
        plain = {setting.name: setting.value for setting in settings_of(TrainConfig())}
        changed = [setting for setting in changed if setting.value != plain[setting.name]]
    return sorted(changed, key=lambda setting: setting.name != "preset")


def words_of(setting: Setting) -> list[str]:
    """Return a setting as words of a command line; a switch that is on has no value."""
    if setting.value is True:
        return [f"--{setting.name}"]
    values = setting.value if isinstance(setting.value, tuple) else (setting.value,)
    words = [str(value) for value in values]
    # A value that begins with a hyphen would be read as a flag.
    if len(words) == 1 and words[0].startswith("-"):
        return [f"--{setting.name}={words[0]}"]
    return [f"--{setting.name}", *words]


def command_words(config: TrainConfig) -> list[str]:
    """Return a configuration written in Python as words of the trainer's command line.

    Raises UsageError for a value of the wrong type.
    """
    changed = changed_settings(with_shape_of_preset(config))
    wrong = [
        f"{setting.group}.{setting.name}={setting.value!r} must be {value_names(_declared_type(setting)) or 'a bool'}"
        for setting in changed
        if not _has_type(setting)
    ]
    if wrong:
        raise UsageError(f"Invalid settings: {'; '.join(wrong)}. Correct them.")
    return [word for setting in changed for word in words_of(setting)]


def config_from_text(text: str) -> TrainConfig:
    """Parse the text that `config_to_text` wrote.

    Raises CheckpointError for a flag that this version does not know, or a value of the wrong type.
    """
    values = {}
    setting_by_name = {s.name: s for s in settings_of(TrainConfig())}
    for line in text.splitlines():
        name, _, value = with_new_name(line).removeprefix("--").partition(" ")
        if name not in setting_by_name:
            raise CheckpointError(
                f"The checkpoint was trained with the flag --{name}, which this version does not have. Use the "
                "version that wrote it."
            )
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            # literal_eval, since a checkpoint may come from a stranger. It raises MemoryError or RecursionError for
            # nested or very long input.
            setting = dataclasses.replace(setting_by_name[name], value=ast.literal_eval(value))
            if _has_type(setting):
                values[name] = setting.value
                continue
        raise CheckpointError(
            f"The checkpoint has an invalid value for --{name}: {value[:80]!r}. Use another checkpoint."
        )
    return with_values(LEGACY_DEFAULTS, values)


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    `config` is the resulting configuration, `parsed` the configuration as typed, before settings that depend on each
    other are resolved, and `explicit` the names of the given flags.
    """

    config: TrainConfig
    parsed: TrainConfig
    explicit: frozenset[str]

    def merge_into_checkpoint(self, stored: TrainConfig) -> TrainConfig:
        """Return the settings of a checkpoint, overridden by the flags that are given.

        A changed preset replaces the whole shape. A switch that is on in the checkpoint stays on, since there are no
        negative flags. Raises UsageError if the settings contradict each other.
        """
        # The same preset again must not reset single shape flags that the checkpoint was trained with.
        is_other = "preset" in self.explicit and self.parsed.run.preset != stored.run.preset
        base = dataclasses.replace(stored, model=PRESETS[self.parsed.run.preset]) if is_other else stored
        # First drop the checkpoint's own --resume, --dry_run and so on, then apply the given flags.
        base = _override_explicit(base, TrainConfig(), SESSION_FLAGS)
        merged = _with_pinned_revision(_override_explicit(base, self.parsed, self.explicit), stored, self.explicit)
        return _check_all(as_stored(merged, stored), self.explicit, stored)

    def merge_into_init(self, stored: TrainConfig) -> TrainConfig:
        """Return the settings of a new run with the initial weights of a checkpoint.

        Unless a flag overrides them, the features are the checkpoint's, and so are the shape (without --preset) and the
        tokenizer (without --new_tokenizer). Raises UsageError if the settings contradict each other.
        """
        base = dataclasses.replace(defaults_beside(self.parsed), features=stored.features)
        if "preset" not in self.explicit:
            base = dataclasses.replace(base, model=stored.model)
            if stored.loss.ctc_weight == 0:  # no CTC head: part of the shape too
                base = dataclasses.replace(base, loss=dataclasses.replace(base.loss, ctc_weight=0.0))
        if not self.parsed.tuning.new_tokenizer:
            base = dataclasses.replace(base, text=stored.text)
        return _check_all(_override_explicit(base, self.parsed, self.explicit), self.explicit, stored=None)


def parse_args(arguments: list[str], description: str | None = None) -> CommandLine:
    """Parse the trainer's command line; an unknown or mistyped flag ends the process with exit code 2.

    A flag that is not given has the preset's value, else the default. `--help` prints the `description` (None: the
    docstring of the running script).
    """
    parsed = read_flags(TrainConfig, arguments, TrainConfig(), common=COMMON_FLAGS, description=description)
    base = defaults_beside(parsed)
    explicit = explicit_flags(arguments)
    return CommandLine(_check_all(_override_explicit(base, parsed, explicit), explicit, stored=None), parsed, explicit)


def explicit_flags(arguments: list[str]) -> frozenset[str]:
    """Return the names of the flags on a command line, such as batch_size for --batch-size=4."""
    words = (with_new_name(word).removeprefix("--").split("=")[0] for word in arguments if word.startswith("--"))
    return frozenset(word.replace("-", "_") for word in words)


def defaults_beside(parsed: TrainConfig) -> TrainConfig:
    """Return the defaults of the flags that are not given.

    The model shape is the preset's; with --pretrained, PRETRAINED_DEFAULTS apply.
    """
    base = dataclasses.replace(TrainConfig(), model=PRESETS[parsed.run.preset])
    return base if parsed.pretrained.pretrained is None else with_values(base, PRETRAINED_DEFAULTS)


def _override_explicit(base: TrainConfig, parsed: TrainConfig, explicit: Collection[str]) -> TrainConfig:
    return with_values(
        base, {setting.name: setting.value for setting in settings_of(parsed) if setting.name in explicit}
    )


def _with_pinned_revision(config: TrainConfig, stored: TrainConfig, explicit: Collection[str]) -> TrainConfig:
    """Return the settings with the stored commit of a model on the hub, since a branch may have moved on.

    Another commit stays, for `contradictions` to report; another --pretrained model has its own revision.
    """
    requested = config.pretrained
    revision = requested.revision
    if requested.pretrained == stored.pretrained.pretrained:
        if not is_commit(revision):
            revision = stored.pretrained.revision
    elif "revision" not in explicit:
        revision = None
    return dataclasses.replace(config, pretrained=dataclasses.replace(requested, revision=revision))


def _check_all(config: TrainConfig, explicit: frozenset[str], stored: TrainConfig | None) -> TrainConfig:
    """Return the configuration with its effective batch resolved; raise one UsageError that lists every problem."""
    problems = ErrorCollector()
    with problems.collect():
        config = settle_effective_batch(config, explicit, stored)
    with problems.collect():
        if stored or not config.run.resume:  # with --resume the checkpoint may set the other flag
            check_idle_flags(config, explicit)
    with problems.collect():
        check_config(config)
    problems.raise_all()
    return config


def settle_effective_batch(
    config: TrainConfig, explicit: frozenset[str], stored: TrainConfig | None = None
) -> TrainConfig:
    """Return the configuration with the utterances per step defined by one setting only.

    With --batch_size auto this is `effective_batch_size`, else batch_size x gradient_accumulation_steps. Raises
    UsageError if two settings contradict each other.
    """
    data = config.data
    effective = config.data.effective_batch_size
    names = ("batch_size", "gradient_accumulation_steps", "effective_batch_size")
    is_cut, is_accumulated, is_said = (name in explicit for name in names)
    if data.batch_size == AUTO:
        if is_accumulated:
            raise UsageError(
                "--batch_size auto chooses the micro-batches, so --gradient_accumulation_steps contradicts "
                "it: use --effective_batch_size, the utterances per optimizer step, instead."
            )
        # A resumed run keeps its global batch when only the size of the micro-batches changes.
        target_size = stored.global_batch_size if stored and not is_said else effective
        return dataclasses.replace(config, data=dataclasses.replace(data, effective_batch_size=target_size))
    target_size = effective if is_said else stored.global_batch_size if stored and is_cut else None
    if target_size and not is_accumulated:
        # check_config reports a batch size below 1 later; here it must not divide by zero.
        steps = max(1, target_size // max(1, data.batch_size))
        data = dataclasses.replace(data, gradient_accumulation_steps=steps)
    config = dataclasses.replace(config, data=dataclasses.replace(data, effective_batch_size=None))
    if is_said and effective != config.global_batch_size:
        raise UsageError(
            f"--effective_batch_size {effective} contradicts --batch_size x --gradient_accumulation_steps, "
            f"{config.global_batch_size}: omit it, or use --batch_size auto."
        )
    return config


def check_idle_flags(config: TrainConfig, explicit: frozenset[str]) -> None:
    """Raise UsageError for a given flag that has no effect with the other settings."""
    values = {setting.name: setting.value for setting in settings_of(config)}
    for name, condition in FLAG_REQUIRES.items():
        required, _, value = condition.partition(" ")
        if name in explicit and (values[required] != value if value else not values[required]):
            raise UsageError(f"--{name} has no effect without --{condition}: give both, or omit it.")
    idle = sorted(NATIVE_ONLY_FLAGS & explicit) if config.pretrained.pretrained is not None else []
    if idle:
        listed = ", ".join(f"--{name}" for name in idle)
        them = "it" if len(idle) == 1 else "them"
        raise UsageError(
            f"A --pretrained model has the shape that its folder defines, and {listed} would change it: omit {them}."
        )


def contradictions(stored: TrainConfig, current: TrainConfig) -> list[str]:
    """Return the differences that prevent resuming a run of `stored` with the settings `current`.

    They concern the groups GROUPS_OF_SHAPE, the optimizer, the CTC head, --init_from and the effective batch.
    """
    pairs = zip(settings_of(stored), settings_of(current), strict=True)
    conflicts = [
        f"--{old.name} is {new.value} here and {old.value} in the checkpoint"
        for old, new in pairs
        if old.value != new.value
        and old.name not in FREE_TO_CHANGE
        and (old.group in GROUPS_OF_SHAPE or old.name == "optimizer")
    ]
    # Another weight is fine, but 0 builds a model without the CTC head.
    weights = [config.loss.ctc_weight for config in (current, stored)]
    if 0 in weights and weights[0] != weights[1]:
        conflicts.append(
            f"--ctc_weight is {weights[0]} here and {weights[1]} in the checkpoint; 0 means a model without a CTC head"
        )
    # Compared as real paths, so that a symlink or a relative path to the same file is no contradiction.
    if len({run.init_from and os.path.realpath(run.init_from) for run in (stored.run, current.run)}) > 1:
        conflicts.append(f"--init_from is {current.run.init_from} here and {stored.run.init_from} in the checkpoint")
    commits = [config.pretrained.revision for config in (current, stored)]
    if current.pretrained.pretrained == stored.pretrained.pretrained and commits[0] != commits[1]:
        conflicts.append(f"--revision is {commits[0]} here and {commits[1]} in the checkpoint")
    if stored.global_batch_size != current.global_batch_size:
        conflicts.append(
            f"the effective batch (--batch_size x --gradient_accumulation_steps) is {current.global_batch_size} here "
            f"and {stored.global_batch_size} in the checkpoint"
        )
    return conflicts


def _declared_type(setting: Setting) -> object:
    return get_type_hints(type(getattr(TrainConfig(), setting.group)))[setting.name]


def _has_type(setting: Setting) -> bool:
    """Return whether a stored value has the type that its field declares."""
    declared = _declared_type(setting)
    kinds = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    return any(_is_instance(setting.value, kind) for kind in kinds)


def _is_instance(value: object, kind: object) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_instance(item, get_args(kind)[0]) for item in value)
    # bool is a subclass of int, so an int field would accept True.
    if isinstance(value, bool):
        return kind is bool
    return (isinstance(kind, type) and isinstance(value, kind)) or (kind is float and isinstance(value, int))
