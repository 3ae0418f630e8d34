"""--help lists common flags, --help all lists every flag, in 80 columns with unwrapped examples."""

import dataclasses
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from konkanivani.cli.main import COMMANDS
from konkanivani.command_line import SCRIPTS as COMMAND_SCRIPTS
from konkanivani.command_line import (
    WIDTH,
    HelpSection,
    flags_of,
    format_help,
    value_names,
    with_command_names,
    with_default,
    wrap_description,
)
from konkanivani.config import TRAINING_ONLY, TrainConfig
from konkanivani.console import announced, progress_bar
from konkanivani.flags import COMMON_FLAGS, config_from_text, config_to_text, contradictions, parse_args
from konkanivani.rules import settings_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path for path in (ROOT / "training_scripts").glob("*.py") if path.stem not in ("__init__", "bootstrap")
)
TRAINER = ROOT / "training_scripts/train_konkanivani_asr.py"


# Settings that only imported checkpoints change.
IMPORTED_SETTINGS = frozenset(
    "attention_positions convolution_norm subsampling scaled_input entry_norm biases fft_samples window_samples "
    "hop_samples smallest_power log_floor_mode preemphasis window frame_padding mel_scale std_ddof "
    "dynamic_range dc_removal normalization".split()
)


def run_help(script: Path, *words: str, word: str = "--help") -> str:
    """Run a script with `--help` and return its output."""
    command = [sys.executable, str(script), word, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def listed_flags(shown: str) -> list[str]:
    """Return the names of the flags in a help text, in order."""
    return [line.split()[0].removeprefix("--") for line in shown.splitlines() if line.startswith("  --")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_fits_80_columns_and_does_not_wrap_examples(script):
    shown = run_help(script)
    assert max(map(len, shown.splitlines())) <= WIDTH
    command = next(name for name, file in COMMAND_SCRIPTS.items() if file == script.name)
    description = import_module(f"konkanivani.cli.{COMMANDS[command].module}").__doc__
    examples = [
        with_command_names(line).strip() for line in description.splitlines() if f"konkanivani {command}" in line
    ]
    assert examples and all(f"\n    {line}\n" in shown for line in examples)


def test_trainer_help_lists_common_flags_and_help_all_lists_every_flag():
    names = [setting.name for setting in settings_of(TrainConfig()) if setting.name not in IMPORTED_SETTINGS]
    common = [name for section in COMMON_FLAGS for name in section.names]
    assert 25 <= len(common) <= 40 and len(set(common)) == len(common)
    shown = run_help(TRAINER)
    assert listed_flags(shown) == common
    assert [f"{section.title}:" in shown.splitlines() for section in COMMON_FLAGS] == [True] * len(COMMON_FLAGS)
    assert shown.splitlines()[-1] == f"These are the {len(common)} common flags. All {len(names)} flags: --help all"
    assert run_help(TRAINER, word="-h") == shown
    everything = run_help(TRAINER, "all")
    assert listed_flags(everything) == names and "--help all" not in everything
    assert len(shown.splitlines()) <= 110 and len(everything.splitlines()) <= 290


def test_imported_settings_are_accepted_and_stored_but_not_listed():
    assert IMPORTED_SETTINGS <= {setting.name for setting in settings_of(TrainConfig())}
    assert not IMPORTED_SETTINGS & {flag.name for flag in flags_of(TrainConfig)}
    words = ["--window", "symmetric", "--biases=False", "--fft-samples", "1024", "--scaled_input"]
    config = parse_args(words).config
    assert (config.features.window, config.model.biases) == ("symmetric", False)
    assert (config.features.fft_samples, config.model.scaled_input) == (1024, True)
    text = config_to_text(config)
    assert all(f"--{name} " in text for name in IMPORTED_SETTINGS)
    assert config_from_text(text) == config
    # With its checkpoint, an equal value is accepted and another value is rejected by name.
    assert parse_args(["--resume", "auto", *words]).merge_into_checkpoint(config).features == config.features
    other = parse_args(["--resume", "auto", "--window", "periodic"]).merge_into_checkpoint(config)
    assert contradictions(config, other) == ["--window is periodic here and symmetric in the checkpoint"]


@pytest.mark.parametrize("name", ["transcribe", "evaluate_konkanivani_asr"])
def test_other_scripts_do_not_list_training_flags(name):
    listed = listed_flags(run_help(ROOT / f"training_scripts/{name}.py"))
    assert "audio_context" in listed and not set(TRAINING_ONLY) & set(listed)
    assert set(TRAINING_ONLY) <= set(listed_flags(run_help(TRAINER, "all")))


def test_negative_control_same_field_name_in_other_config_is_listed():
    assert [flag.name for flag in flags_of(OwnWindow)] == ["window"]


@dataclass(frozen=True)
class OwnWindow:
    """Input."""

    window: int = 3
    """Flag of another script."""


@dataclass(frozen=True)
class Flags:
    """Input."""

    path: str
    """File to read."""
    rate: float | Literal["auto"] = "auto"
    """Rate (auto: 3), in a text with enough words to have to be wrapped
    over two lines, at the most."""
    sizes: tuple[int, ...] = (1, 2)
    is_fast: bool = False
    """Run fast."""


def test_help_shows_types_defaults_and_wrapped_texts():
    rows = {flag.name: flag for flag in flags_of(Flags)}
    assert [rows[name].values for name in rows] == ["STR", "FLOAT|auto", "INT ...", ""]
    assert rows["path"].text == "File to read. (required)" and rows["sizes"].text.strip() == "(default: 1 2)"
    assert rows["rate"].text.startswith("Rate (default auto: 3), in a text") and "wrapped over two" in rows["rate"].text
    assert value_names(Literal["none", "encoder"] | int) == "{none,encoder}|INT"
    assert rows["is_fast"].lines() == "  --is_fast                 Run fast."
    shown = format_help(Flags, None, "Do it.", (HelpSection("Speed", ("is_fast",)),), show_all=False)
    assert listed_flags(shown) == ["is_fast"] and "All 4 flags" in shown and "\nSpeed:\n" in shown


Kind = Literal["processes_killed", "files_not_written", "signals_in_a_write", "disks_that_are_full", "other_faults"]


@dataclass(frozen=True)
class LongChoices:
    """Flags whose choices are too long for the left column."""

    one: Kind = "other_faults"
    """Kind."""
    several: tuple[Kind, ...] = ("other_faults",)
    """Kinds."""


def test_choices_too_long_for_the_left_column_are_listed_in_the_text():
    one, several = flags_of(LongChoices)
    assert (one.values, several.values) == ("NAME", "NAME ...")
    listed = "One of: processes_killed, files_not_written, signals_in_a_write, disks_that_are_full, other_faults."
    assert one.text.endswith(listed) and several.text.endswith(listed)


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("Minutes (0: never).", 0.0, "Minutes (default 0: never)."),
        ("Minutes (0: never).", 10.0, "Minutes (0: never; default: 10)."),
        ("Search (beam).", 10.0, "Search (beam). (default: 10)"),
        ("Folder (None: here).", None, "Folder (default: here)."),
        ("Overwrite.", False, "Overwrite."),
        ("Weight (0: none; auto: 0.7).", "auto", "Weight (0: none; default auto: 0.7)."),
    ],
)
def test_default_explained_by_help_text_is_not_repeated(text, value, shown):
    assert with_default(text, value) == shown


def test_paragraphs_are_wrapped_and_examples_are_not():
    long = "word " * 30
    command = "    python3 training_scripts/x.py \\\n        --flag " + "value" * 20
    assert wrap_description(f"{long}\n\n{command}\n\n{long}").splitlines()[3:5] == command.splitlines()
    assert all(len(line) <= WIDTH for line in wrap_description(long).splitlines())
    assert (
        wrap_description("Do.\n\npython3 x.py\n") == "Do.\n\n    python3 x.py"
    )  # a formatter may have removed the indentation


def test_negative_control_config_field_without_help_text_is_found():
    assert all(flag.text for flag in flags_of(TrainConfig))
    assert not next(
        flag for flag in flags_of(Flags, dataclasses.replace(Flags("x"), sizes=())) if flag.name == "sizes"
    ).text


def test_long_operation_prints_message_and_short_one_does_not(capsys):
    with announced("Short work: about 1 s.", delay=30.0):
        pass
    with announced("Long work: about 9 s.", delay=0.01):
        time.sleep(0.3)
    assert capsys.readouterr().err == "Long work: about 9 s.\n"
    assert list(progress_bar(range(3), 3, "counting", "row")) == [0, 1, 2]
