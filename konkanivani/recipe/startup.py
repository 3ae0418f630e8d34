"""Start of a run: resolve its command line, read the checkpoint or pretrained model that it names, lock its folders."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from konkanivani.checkpoints.checkpoint import PRETRAINED_STATE, Checkpoint, read_checkpoint
from konkanivani.checkpoints.checkpointer import Checkpointer
from konkanivani.checkpoints.run_lock import RunLock, check_nobody_works, remove_folders_on_error
from konkanivani.config import AUTO, RunConfig, TrainConfig
from konkanivani.console import Report, count, duration_words, say, silent
from konkanivani.distributed import ALONE, Topology, broadcast_from_rank0, choose_device, choose_precision
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.flags import (
    CommandLine,
    CorpusSize,
    as_stored,
    check_idle_flags,
    config_from_text,
    contradictions,
    decisions,
    resolve,
)
from konkanivani.inference.speech_model import (
    Origin,
    Pretrained,
    check_base_is_there,
    read_pretrained,
    restored_architecture,
    settings_of_weights,
)
from konkanivani.lengths import TOKENS
from konkanivani.models.architecture import Architecture, architecture_of
from konkanivani.models.hub import locate_model
from konkanivani.recipe.preflight import check_disk, check_global_batch, check_paths, check_ranks, named_manifests
from konkanivani.recipe.run_folders import take_log_folder
from konkanivani.rules import check_input_flags, settings_of, with_text_defaults, with_values
from konkanivani.training.logbook import LOG_NAME

# Settings of a checkpoint that name files and folders. They are printed on resume: the checkpoint may be from another
# machine.
PATHS = (
    "train_manifest",
    "valid_manifest",
    "test_manifest",
    "audio_roots",
    "rir_manifest",
    "noise_manifest",
    "pretrained",
    "forgetting_manifest",
    "log_dir",
)


@dataclass(frozen=True)
class Start:
    """Resolved start of a run: settings, folder locks, and the checkpoint to resume from or to take weights from.

    `pretrained` is the folder of the model that the run fine-tunes; on resume, the folder with its frozen weights.
    `locks` is empty for a dry run, which changes no folder, and on all ranks but the first.
    """

    config: TrainConfig
    locks: tuple[RunLock, ...]
    resumed: Checkpoint | None
    resumed_path: Path | None
    initial: Checkpoint | None
    pretrained: Pretrained | None = None
    topology: Topology = ALONE

    def architecture(self, vocab_size: int) -> Architecture:
        """Return the architecture to train; `vocab_size` is used unless a pretrained model or checkpoint defines it."""
        return architecture_for(self.config, vocab_size, self.pretrained, self.resumed)


def resolve_start(command_line: CommandLine, report: Report = silent, topology: Topology = ALONE) -> Start:
    """Resolve a command line into the start of a run; read and validate the checkpoint that it names.

    Flags, then paths, then disk space are checked before any folder is created; `report` is called after each stage.
    With several ranks, the first one does the work and broadcasts the result, so that only its folders have to be
    reachable.
    """
    if topology.is_single_process:
        return _resolve(command_line, report)
    check_ranks(command_line.config, topology)
    resolved = _resolve(restarted(command_line, topology), report) if topology.is_first else None

    def without_locks() -> Start:
        # Locks are open files of rank 0 and cannot be pickled.
        assert resolved is not None  # only rank 0 calls this function
        return dataclasses.replace(resolved, locks=())

    received = broadcast_from_rank0(topology, without_locks)
    return dataclasses.replace(resolved or received, topology=topology)


def restarted(command_line: CommandLine, topology: Topology) -> CommandLine:
    """Return the command line with --resume auto if torchrun has restarted the ranks and a checkpoint exists."""
    run = command_line.config.run
    saved = Checkpointer(run.checkpoint_dir, run.keep_checkpoints).has_checkpoints()
    if not (topology.restarts and saved):
        return command_line
    config = dataclasses.replace(command_line.config, run=dataclasses.replace(run, resume="auto"))
    return dataclasses.replace(command_line, config=config)


def _resolve(command_line: CommandLine, report: Report) -> Start:
    config = command_line.config
    report("flags", "consistent")
    if config.run.resume:
        # The other settings, and so most paths, come from a checkpoint that has not been read yet.
        check_paths(config, is_complete=False)
    if config.run.resume == "auto":
        return _resume_newest(command_line, report)
    if config.run.resume:
        return _resume(command_line, Path(config.run.resume), read_checkpoint(config.run.resume), report)
    config, initial, pretrained = _check_new_run(command_line, report)
    # The lock creates the folder: only after all checks.
    lock = _take_folder(config.run)
    folder = Checkpointer(config.run.checkpoint_dir, config.run.keep_checkpoints)
    if folder.has_checkpoints() and not config.run.fresh:
        raise UsageError(
            f"{folder.directory} contains checkpoints of a run. Resume it with --resume auto, start a new run "
            "with --fresh (they are moved to a separate folder), or choose another --checkpoint_dir."
        )
    return _start_in_folders(config, lock, initial=initial, pretrained=pretrained)


def start_from_checkpoint(command_line: CommandLine, path: Path) -> tuple[CommandLine, Checkpoint]:
    """Return the command line merged into the settings of the checkpoint at `path`, and that checkpoint."""
    initial = read_checkpoint(path)
    stored = settings_of_weights(initial)
    if PRETRAINED_STATE in initial.states:
        raise UsageError(
            f"--init_from {path} is a checkpoint of a run with --pretrained. Export its model with "
            f"konkanivani export {_export_flag(initial, stored)}, and give that folder as --pretrained."
        )
    return dataclasses.replace(command_line, config=command_line.merge_into_init(stored)), initial


def _export_flag(checkpoint: Checkpoint, config: TrainConfig) -> str:
    """Return the flag of konkanivani export that writes the folder of a fine-tuned pretrained model."""
    is_text = restored_architecture(checkpoint, config).framing.unit == TOKENS
    return "--folder" if is_text else "--whisper"


def _start_in_folders(
    config: TrainConfig,
    lock: RunLock | None,
    resumed: Checkpoint | None = None,
    path: Path | None = None,
    initial: Checkpoint | None = None,
    pretrained: Pretrained | None = None,
) -> Start:
    """Choose and lock the log folder, and return the start; on failure, remove the folders that were created."""
    with remove_folders_on_error(lock):
        logs = take_log_folder(config.run, config_from_text(resumed.config).run if resumed else None)
    locks = tuple(held_lock for held_lock in (lock, logs.lock) if held_lock)
    return Start(dataclasses.replace(config, run=logs.run), locks, resumed, path, initial, pretrained)


def _check_new_run(
    command_line: CommandLine, report: Report
) -> tuple[TrainConfig, Checkpoint | None, Pretrained | None]:
    """Return the settings of a new run, and its --init_from checkpoint or --pretrained model, if any."""
    initial = None
    if command_line.config.run.init_from:
        check_paths(command_line.config)
        command_line, initial = start_from_checkpoint(command_line, Path(command_line.config.run.init_from))
    config, pretrained = start_pretrained(command_line)
    _check_paths_and_disk(config, architecture_for(config, config.text.vocab_size, pretrained), report)
    return config, initial, pretrained


def _check_paths_and_disk(config: TrainConfig, architecture: Architecture, report: Report) -> None:
    # Raises for precision flags that only torch can check.
    choose_precision(config.memory, choose_device(config.run.device))
    check_paths(config)
    manifests = count(len(named_manifests(config)), "manifest", "is/are")
    report("paths", f"{manifests} found, {config.run.checkpoint_dir} and {config.run.log_dir} are writable")
    report("disk", "; ".join(space.sentence() for space in check_disk(config, architecture)))


def _resume(
    command_line: CommandLine, path: Path, checkpoint: Checkpoint, report: Report, lock: RunLock | None = None
) -> Start:
    config = _resumed_config(command_line, checkpoint, path)
    if "checkpoint_dir" not in command_line.explicit:  # a checkpoint resumes in its own folder, wherever it was trained
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, checkpoint_dir=str(path.parent)))
    pretrained = resume_pretrained(command_line, config, checkpoint)
    check_input_flags(command_line.explicit, restored_architecture(checkpoint, config).framing.unit == TOKENS)
    _check_paths_and_disk(config, architecture_for(config, checkpoint.vocab_size, pretrained, checkpoint), report)
    lock = lock or _take_folder(config.run)
    _check_folder_is_its_own(path, Path(config.run.checkpoint_dir))
    return _start_in_folders(config, lock, checkpoint, path, pretrained=pretrained)


def _resume_newest(command_line: CommandLine, report: Report) -> Start:
    run = command_line.config.run
    folder = command_line.config.run.checkpoint_dir
    lock = _take_folder(run)
    # The lock is taken before the read: another process could otherwise save or prune checkpoints meanwhile.
    with remove_folders_on_error(lock):
        newest = Checkpointer(folder, run.keep_checkpoints).read_newest_sound(sets_aside=not run.dry_run)
        if newest is not None:
            return _resume(command_line, *newest, report, lock)
        # A new run after all: the flags of a run that starts are checked now.
        check_idle_flags(command_line.config, command_line.explicit)
        config, initial, pretrained = _check_new_run(command_line, report)
        say(f"No checkpoint in {folder}: starting a new run.")
        return _start_in_folders(config, lock, initial=initial, pretrained=pretrained)


def _take_folder(run: RunConfig) -> RunLock | None:
    if not run.dry_run:
        return RunLock(run.checkpoint_dir)
    check_nobody_works(run.checkpoint_dir)
    return None


def _resumed_config(command_line: CommandLine, checkpoint: Checkpoint, path: Path) -> TrainConfig:
    """Return the checkpoint's settings, overridden by the given flags; a CheckpointError lists the contradictions."""
    stored = settings_of_weights(checkpoint)
    config = command_line.merge_into_checkpoint(stored)
    conflicts = contradictions(stored, config)
    if conflicts:
        listed = "".join(f"\n  {difference}" for difference in conflicts)
        anew = f"--init_from {path}"
        # --init_from rejects a checkpoint of a pretrained model; its exported folder is used instead.
        if PRETRAINED_STATE in checkpoint.states:
            anew = f"--pretrained and the folder that konkanivani export {_export_flag(checkpoint, stored)} writes,"
        raise CheckpointError(
            f"The flags contradict the checkpoint {path}:{listed}\nOmit these flags to resume it, or start a "
            f"new run from its weights with {anew} and another --checkpoint_dir (or --fresh)."
        )
    say(f"Resuming from {path}: step {checkpoint.step}.")
    _print_paths(config, command_line)
    _check_log_folder(config, command_line, path)
    return config


def _print_paths(config: TrainConfig, command_line: CommandLine) -> None:
    """Print the files and folders that come from the checkpoint, which may be another user's."""
    paths = [s for s in settings_of(config) if s.name in PATHS and s.value and s.name not in command_line.explicit]
    if paths:
        say("Settings from the checkpoint:" + "".join(f" --{path.name} {path.value!r}" for path in paths))


def _check_log_folder(config: TrainConfig, command_line: CommandLine, path: Path) -> None:
    """Raise a CheckpointError if only the checkpoint, perhaps another user's, names the log folder.

    Accepted are a relative folder below the working directory, and a folder in which a run of this name has logged
    before.
    """
    folder = Path(config.run.log_dir)
    is_below = not folder.is_absolute() and ".." not in folder.parts
    if not (is_below or "log_dir" in command_line.explicit or (folder / config.run.run_name / LOG_NAME).is_file()):
        raise CheckpointError(
            f"The checkpoint {path} logs to {config.run.log_dir!r}, which has no log of a run named "
            f"{config.run.run_name!r}. Give the log folder with --log_dir."
        )


def _check_folder_is_its_own(resumed: Path, folder: Path) -> None:
    """Raise a UsageError if the checkpoint is from elsewhere and `folder` contains the checkpoints of another run."""
    if resumed.parent.resolve() != folder.resolve() and Checkpointer(folder, keep=2).has_checkpoints():
        raise UsageError(
            f"{resumed} is not in {folder}, and resuming would overwrite the checkpoints there. Move it there "
            "(and resume it there), or choose an empty --checkpoint_dir."
        )


def start_pretrained(command_line: CommandLine) -> tuple[TrainConfig, Pretrained | None]:
    """Read the folder of --pretrained, if given, and return the settings completed by it (language, learning rate).

    Errors are raised here, before any folder is created: unsupported tuning, a missing language, unusable weights.
    """
    config = command_line.config
    if config.pretrained.pretrained is None:
        return config, None
    located = locate_model(config.pretrained.pretrained, config.pretrained.revision, "whisper")
    pretrained = read_pretrained(located.path)
    # The branch may move on: checkpoints store the commit, and a resumed run reads that.
    pinned = dataclasses.replace(config.pretrained, revision=located.commit)
    config = dataclasses.replace(config, pretrained=pretrained.complete_settings(pinned))
    is_text = pretrained.architecture(config.tuning, config.pretrained).framing.unit == TOKENS
    check_input_flags(command_line.explicit, is_text)
    if is_text:
        config = with_text_defaults(config, command_line.explicit)
    # Built on the meta device and discarded: raises a UsageError if the tuning flags do not fit the model.
    pretrained.architecture(config.tuning, config.pretrained).build_without_values()
    tokenizer = pretrained.vocabulary(config.pretrained)
    if config.pretrained.timestamp_share:
        # Raises a UsageError if the tokenizer has no timestamp tokens.
        tokenizer.encode_with_times("", 0.0, None)
    if config.pretrained.forgetting_language is not None:
        forgetting = dataclasses.replace(config.pretrained, language=config.pretrained.forgetting_language)
        pretrained.vocabulary(forgetting)
    # Reads all weights once and discards them: a damaged file is reported now, not after the data is prepared.
    pretrained.check_weights()
    if config.optimizer.learning_rate == AUTO:
        config = with_values(config, {"learning_rate": pretrained.learning_rate(config.tuning)})
    return config, pretrained


def resume_pretrained(command_line: CommandLine, config: TrainConfig, checkpoint: Checkpoint) -> Pretrained | None:
    """Return the pretrained folder of a resumed run if needed: for frozen weights, or because --pretrained is given.

    Raises a CheckpointError if the folder is missing or holds another model.
    """
    if PRETRAINED_STATE not in checkpoint.states:
        return None
    if "pretrained" not in command_line.explicit:
        # Without frozen weights the checkpoint is complete, and the folder is not needed.
        if not restored_architecture(checkpoint, config).has_base:
            return None
        check_base_is_there(config, "Put it there, or give its path with --pretrained")
    pretrained = read_pretrained(config.pretrained.pretrained or "", config.pretrained.revision)
    stored = checkpoint.states[PRETRAINED_STATE]
    # Checks the parts that are known so far; frozen weights are compared later.
    Origin(pretrained.description(), str(stored["frozen"]), pretrained.path).load_state_dict(stored)
    return pretrained


def architecture_for(
    config: TrainConfig, vocab_size: int, pretrained: Pretrained | None = None, resumed: Checkpoint | None = None
) -> Architecture:
    """Return the architecture that a run trains; `vocab_size` is used only for a model trained from scratch."""
    if pretrained is not None:
        return pretrained.architecture(config.tuning, config.pretrained)
    return architecture_of(config, vocab_size) if resumed is None else restored_architecture(resumed, config)


def settle(start: Start, amount: CorpusSize) -> Start:
    """Return the start with automatic settings resolved for this amount of speech, and print them.

    Weights of --init_from keep their tokenizer type unless --new_tokenizer is given.
    """
    config = requested = start.config
    used = requested.data.train_subset / 100
    hours = amount.hours * used
    utterances = round(amount.utterances * used)
    amount = dataclasses.replace(amount, hours=hours, utterances=utterances, ranks=start.topology.world_size)
    if start.initial and not config.tuning.new_tokenizer:
        config = as_stored(config, config_from_text(start.initial.config), names=("tokenizer_type",))
    config = resolve(config, amount)
    check_global_batch(config, start.topology)
    if decided := decisions(requested, config):
        speech = f"{duration_words(amount.hours)} of speech" if amount.hours < math.inf else "a text-to-text model"
        say(f"Automatic settings for {speech}: {decided}")
    return dataclasses.replace(start, config=config)
