"""The settings of `config.py` as command-line flags and as text. No torch here."""

import ast
import contextlib
import dataclasses
import os
from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from konkanivani.base.auto_defaults import as_stored
from konkanivani.base.command_line import read_flags, with_new_name
from konkanivani.base.config import AUTO, PRESETS, DataConfig, FeatureConfig, ModelConfig, TrainConfig
from konkanivani.base.errors import CheckpointError, ErrorCollector, UsageError
from konkanivani.base.rules import Setting, check_config, settings_of, with_values

# Listed by `--help` in this order; `--help all` lists every flag.
COMMON_FLAGS = (
    *("train_manifest", "valid_manifest", "test_manifest", "audio_roots"),
    *("checkpoint_dir", "run_name", "device"),
    *("preset", "tokenizer_type", "vocab_size"),
    *("batch_size", "gradient_accumulation_steps", "max_duration", "num_workers"),
    *("memory_budget", "mixed_precision", "gradient_checkpointing"),
    *("epochs", "early_stop_epochs", "learning_rate", "seed", "ctc_weight"),
    *("speed_perturbation", "noise_manifest"),
    *("resume", "fresh", "dry_run", "save_minutes", "keep_checkpoints"),
    *("init_from", "new_tokenizer", "pretrained", "language", "freeze", "lora_rank"),
    "test_decode",
)
# These say how this one process starts; a checkpoint's values for them are never taken over.
SESSION_FLAGS = ("resume", "fresh", "new_corpus", "replan", "dry_run")
# What a run did whose checkpoint does not name a setting, which its version did not have.
LEGACY_DEFAULTS = TrainConfig(data=DataConfig(first_epoch="shuffled"))
# These say what a model of our own is like, or begins with: one that others have trained is as it is.
NATIVE_ONLY_FLAGS = frozenset(
    ("preset", "init_from", "tokenizer_type", "vocab_size", "ctc_weight", "intermediate_ctc_weight")
    + tuple(leaf.name for group in (ModelConfig, FeatureConfig) for leaf in dataclasses.fields(group))
)
# What suits a model that has learnt already, where nobody says otherwise; the rest is decided when its folder is read.
NO_REGULARISATION = dict.fromkeys(("ctc_weight", "label_smoothing", "weight_decay"), 0.0)
PRETRAINED_DEFAULTS = NO_REGULARISATION | {"max_duration": 30.0, "max_tokens": 2**16}
# What a run cannot go on with another value of.
FREE_TO_CHANGE = ("dropout", "pretrained", "forgetting_manifest", "forgetting_language")
GROUPS_OF_SHAPE = ("text", "features", "model", "pretrained", "tuning")
# What says nothing without another flag.
FLAG_REQUIRES = {
    **{"rir_prob": "rir_manifest", "noise_snr": "noise_manifest", "noise_prob": "noise_manifest"},
    **{"language": "pretrained", "task": "pretrained", "audio_context": "pretrained"},
    **{"lora_alpha": "lora_rank", "lora_targets": "lora_rank"},
    **dict.fromkeys(("convolution_kernel", "convolution_norm", "entry_norm"), "encoder_type conformer"),
}


def config_to_text(config: TrainConfig) -> str:
    """One `--flag value` a line; what a checkpoint carries and TensorBoard shows."""
    return "".join(f"--{s.name} {s.value!r}\n" for s in settings_of(config))


def config_from_text(text: str) -> TrainConfig:
    """The configuration that `config_to_text` wrote; a flag this version does not know is a CheckpointError."""
    values, known = {}, {s.name: s for s in settings_of(TrainConfig())}
    for line in text.splitlines():
        name, _, value = with_new_name(line).removeprefix("--").partition(" ")
        if name not in known:
            raise CheckpointError(
                f"The checkpoint was trained with the flag --{name}, which this version does not have. Use the "
                "version that wrote it."
            )
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            setting = dataclasses.replace(known[name], value=ast.literal_eval(value))
            if _has_type(setting):
                values[name] = setting.value
                continue
        raise CheckpointError(
            f"The checkpoint has an invalid value for --{name}: {value[:80]!r}. Use another checkpoint."
        )
    return with_values(LEGACY_DEFAULTS, values)


@dataclass(frozen=True)
class CommandLine:
    """A command line, parsed once: what it asks for by itself, and the names of the flags that it gives.

    `parsed` is the configuration as typed, before one setting has settled another.
    """

    config: TrainConfig
    parsed: TrainConfig
    explicit: frozenset[str]

    def merge_into_checkpoint(self, stored: TrainConfig) -> TrainConfig:
        """The settings of a checkpoint under the flags that are given; a UsageError where they do not go together.

        A preset that changes brings its whole shape; a switch that is on in the checkpoint stays on, since there are no
        negative flags.
        """
        is_other = "preset" in self.explicit and self.parsed.run.preset != stored.run.preset
        base = dataclasses.replace(stored, model=PRESETS[self.parsed.run.preset]) if is_other else stored
        base = _with_given(base, TrainConfig(), SESSION_FLAGS)
        return _checked(as_stored(_with_given(base, self.parsed, self.explicit), stored), self.explicit, stored)

    def merge_into_init(self, stored: TrainConfig) -> TrainConfig:
        """The settings of a run that begins with a checkpoint's weights; a UsageError where they do not go together.

        Features are the checkpoint's where no flag says otherwise, so is the shape unless a preset is given, and so are
        the tokens unless new ones are asked for.
        """
        base = dataclasses.replace(defaults_beside(self.parsed), features=stored.features)
        if "preset" not in self.explicit:
            base = dataclasses.replace(base, model=stored.model)
            if stored.loss.ctc_weight == 0:  # a part of the shape too
                base = dataclasses.replace(base, loss=dataclasses.replace(base.loss, ctc_weight=0.0))
        if not self.parsed.tuning.new_tokenizer:
            base = dataclasses.replace(base, text=stored.text)
        return _checked(_with_given(base, self.parsed, self.explicit), self.explicit, stored=None)


def parse_args(arguments: list[str]) -> CommandLine:
    """What a command line asks for; unknown or mistyped flags end the process with exit code 2.

    A flag that is not given has the preset's value, else the default.
    """
    parsed = read_flags(TrainConfig, arguments, TrainConfig(), common=COMMON_FLAGS)
    base, explicit = defaults_beside(parsed), explicit_flags(arguments)
    return CommandLine(_checked(_with_given(base, parsed, explicit), explicit, stored=None), parsed, explicit)


def explicit_flags(arguments: list[str]) -> frozenset[str]:
    """The names of the flags that a command line gives: of --batch-size=4, batch_size."""
    words = (with_new_name(word).removeprefix("--").split("=")[0] for word in arguments if word.startswith("--"))
    return frozenset(word.replace("-", "_") for word in words)


def defaults_beside(parsed: TrainConfig) -> TrainConfig:
    """What a flag has that is not given: the preset's shape, what suits a model that others have trained, or else."""
    base = dataclasses.replace(TrainConfig(), model=PRESETS[parsed.run.preset])
    return base if parsed.pretrained.pretrained is None else with_values(base, PRETRAINED_DEFAULTS)


def _with_given(base: TrainConfig, parsed: TrainConfig, explicit: Collection[str]) -> TrainConfig:
    return with_values(
        base, {setting.name: setting.value for setting in settings_of(parsed) if setting.name in explicit}
    )


def _checked(config: TrainConfig, explicit: frozenset[str], stored: TrainConfig | None) -> TrainConfig:
    """The configuration with its windows settled; one error that lists all that is wrong with it."""
    problems = ErrorCollector()
    with problems.collect():
        config = _settle_effective_batch(config, explicit, stored)
    with problems.collect():
        if stored or not config.run.resume:  # else the checkpoint may yet bring what they work on
            check_idle_flags(config, explicit)
    with problems.collect():
        check_config(config)
    problems.raise_all()
    return config


def _settle_effective_batch(config: TrainConfig, explicit: frozenset[str], stored: TrainConfig | None) -> TrainConfig:
    """The configuration with one word only on the utterances of a step; a UsageError where two contradict."""
    data, effective = config.data, config.data.effective_batch_size
    names = ("batch_size", "gradient_accumulation_steps", "effective_batch_size")
    is_cut, is_accumulated, is_said = (name in explicit for name in names)
    if data.batch_size == AUTO:
        if is_accumulated:
            raise UsageError(
                "--batch_size auto chooses the micro-batches, so --gradient_accumulation_steps contradicts "
                "it: use --effective_batch_size, the utterances per optimizer step, instead."
            )
        wanted = stored.global_batch_size if stored and not is_said else effective
        return dataclasses.replace(config, data=dataclasses.replace(data, effective_batch_size=wanted))
    wanted = effective if is_said else stored.global_batch_size if stored and is_cut else None
    if wanted and not is_accumulated:
        steps = max(1, wanted // max(1, data.batch_size))
        data = dataclasses.replace(data, gradient_accumulation_steps=steps)
    config = dataclasses.replace(config, data=dataclasses.replace(data, effective_batch_size=None))
    if is_said and effective != config.global_batch_size:
        raise UsageError(
            f"--effective_batch_size {effective} contradicts --batch_size x --gradient_accumulation_steps, "
            f"{config.global_batch_size}: omit it, or use --batch_size auto."
        )
    return config


def check_idle_flags(config: TrainConfig, explicit: frozenset[str]) -> None:
    """Raises a UsageError for a flag that is given and has nothing to work on."""
    values = {setting.name: setting.value for setting in settings_of(config)}
    for name, wanted in FLAG_REQUIRES.items():
        other, _, value = wanted.partition(" ")
        if name in explicit and (values[other] != value if value else not values[other]):
            raise UsageError(f"--{name} has no effect without --{wanted}: give both, or omit it.")
    idle = sorted(NATIVE_ONLY_FLAGS & explicit) if config.pretrained.pretrained is not None else []
    if idle:
        named, them = ", ".join(f"--{name}" for name in idle), "it" if len(idle) == 1 else "them"
        raise UsageError(
            f"A --pretrained model has the shape that its folder defines, and {named} would change it: omit {them}."
        )


def contradictions(stored: TrainConfig, asked: TrainConfig) -> list[str]:
    """What in `asked` a run of `stored` cannot go on with: its shape, tokens, optimizer, effective batch."""
    pairs = zip(settings_of(stored), settings_of(asked), strict=True)
    found = [
        f"--{old.name} is {new.value} here and {old.value} in the checkpoint"
        for old, new in pairs
        if old.value != new.value
        and old.name not in FREE_TO_CHANGE
        and (old.group in GROUPS_OF_SHAPE or old.name == "optimizer")
    ]
    weights = [config.loss.ctc_weight for config in (asked, stored)]
    if 0 in weights and weights[0] != weights[1]:
        found.append(
            f"--ctc_weight is {weights[0]} here and {weights[1]} in the checkpoint; 0 means a model without a CTC head"
        )
    if len({run.init_from and os.path.realpath(run.init_from) for run in (stored.run, asked.run)}) > 1:
        found.append(f"--init_from is {asked.run.init_from} here and {stored.run.init_from} in the checkpoint")
    if stored.global_batch_size != asked.global_batch_size:
        found.append(
            f"the effective batch (--batch_size x --gradient_accumulation_steps) is {asked.global_batch_size} here "
            f"and {stored.global_batch_size} in the checkpoint"
        )
    return found


def _has_type(setting: Setting) -> bool:
    """Whether a stored value has the kind that its field declares."""
    declared = get_type_hints(type(getattr(TrainConfig(), setting.group)))[setting.name]
    kinds = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    return any(_is_of(setting.value, kind) for kind in kinds)


def _is_of(value: object, kind: object) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (kind is float and isinstance(value, int))
