"""Non-finite numbers in a run: in one batch, in all batches from some step on, in the state; and invalid labels."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from tests.conftest import read_log
from tests.faults.faulty_runs import Fault, FinishedRun, run_with_faults
from tests.faults.resumed_runs import POISONED, STEPS, Precision, ResumeBench, Settings, last_checkpoint


@dataclass(frozen=True)
class NonFiniteBatch:
    """Utterance that makes a loss or gradient non-finite; "audio": through its loudness."""

    precision: Precision
    what: str
    value: str = "nan"

    @property
    def settings(self) -> Settings:
        """Return the settings of the run and, unless the fault is in the audio, of its undisturbed reference."""
        return Settings("poisoned" if self.what == "audio" else "files", self.precision)

    def faults(self) -> list[Fault]:
        own = [] if self.what == "audio" else [("not_finite", self.what, self.value, POISONED)]
        return [*self.settings.faults(), *own]


NON_FINITE_BATCHES = [
    *(
        NonFiniteBatch(precision, what, value)
        for precision in ("fp32", "bf16", "fp16")
        for what, value in (("loss", "nan"), ("loss", "inf"), ("gradient", "nan"), ("gradient", "-inf"))
    ),
    *(NonFiniteBatch(precision, "audio") for precision in ("fp32", "bf16", "fp16")),
]


def non_finite_batch_findings(bench: ResumeBench, case: NonFiniteBatch, directory: Path) -> list[str]:
    """Return the errors: a non-finite batch must be skipped, reported and change nothing, and the run must finish."""
    hashes = directory / "hashes.jsonl"
    flags = bench.flags(case.settings, directory, workers=0)
    faults = [*case.faults(), ("log_state_hashes", str(hashes))]
    ended = run_with_faults(flags, directory / "output.txt", faults)
    if ended.code != 0:
        return [f"it ended with {ended.code}: {ended.output[-600:]}"]
    rows = [json.loads(line) for line in hashes.read_text(encoding="utf-8").splitlines()]
    skips, steps = read_log(directory, "skip"), read_log(directory)
    named = [skip for skip in skips if POISONED in skip["utterances"]]
    skipped, made = ([row for row in rows if row["skipped"] == is_skipped] for is_skipped in (True, False))
    logs = (steps, read_log(bench.undisturbed(Settings())))
    rates, undisturbed = ([step["learning_rate"] for step in log] for log in logs)
    output = f"is skipped: its {'loss' if case.what != 'gradient' else 'gradient'}"
    checks = {
        "no global batch with the utterance was skipped": len(named) >= 2,
        "something else was skipped": case.precision == "fp16" or named == skips,
        "a skipped global batch changed a weight, a moment or the rate": all(
            len({*row["hashes"]}) == 1 for row in skipped
        ),
        "the hash does not detect a change": all(len({*row["hashes"]}) == 2 for row in made),
        "a skipped global batch was not logged once": steps_of(skipped) == steps_of(skips),
        "the steps are not each there once": steps_of(steps) == list(range(1, len(steps) + 1)),
        "the learning rate is not that of the step": rates == undisturbed[: len(steps)],
        "the skipped are not counted": last_checkpoint(directory).states["progress"]["skipped_steps"] == len(skips),
        "the counters are wrong": len(steps) == min(STEPS, len(rows) - len(skips)),
        "the console does not name it": output in ended.output and POISONED in ended.output,
        "the ids of a skip are not those of a global batch": all(len(skip["utterances"]) in (2, 4) for skip in skips),
        "a non-finite checkpoint was saved": are_checkpoints_finite(directory),
    }
    return [finding for finding, is_right in checks.items() if not is_right]


def steps_of(records: list[dict]) -> list[int]:
    return [record["step"] for record in records]


def are_checkpoints_finite(directory: Path) -> bool:
    """Return whether every tensor of every checkpoint of the run is finite."""
    return all(
        not isinstance(tensor, torch.Tensor) or bool(tensor.isfinite().all())
        for path in (directory / "checkpoints").glob("*.pt")
        for state in read_checkpoint(path).states.values()
        for tensor in state.values()
    )


@dataclass(frozen=True)
class PermanentFailure:
    """Run that fails permanently after some steps; it must exit with 5 and leave a checkpoint to resume from."""

    name: str
    settings: Settings
    fault: Fault
    more: tuple[str, ...] = ()


# Global batches of two micro-batches; a save every second step.
PERMANENT_FAILURES = [
    *(
        PermanentFailure(
            f"all {what}s {value}, {precision}", Settings(precision=precision), ("not_finite", what, value, "", 22)
        )
        for precision in ("fp32", "bf16", "fp16")
        for what, value in (("loss", "nan"), ("gradient", "inf"))
    ),
    *(
        PermanentFailure(f"{what} {value}", Settings(), ("corrupt_state", what, value, 9))
        for what in ("weight", "exp_avg", "exp_avg_sq")
        for value in ("nan", "inf")
    ),
]


def permanent_failure_findings(bench: ResumeBench, case: PermanentFailure, directory: Path) -> list[str]:
    """Return the errors: the run must exit with 5 and name a finite checkpoint, also after a restart."""
    flags = (*bench.flags(case.settings, directory, workers=0), "--epochs", "9")
    faults = case.settings.faults()
    results = []
    for start in range(2):  # the second pass restarts the run, as a supervising loop would
        again = ("--resume", "auto") if start else ()
        # The first process starts with finite micro-batches; the restarted one fails from its first global batch on.
        fault = (*case.fault[:-1], 0) if start and case.fault[0] == "not_finite" else case.fault
        ended = run_with_faults((*flags, *again), directory / f"output_{start}.txt", [*faults, fault])
        if ended.code != 5:
            return [*results, f"start {start + 1} ended with {ended.code}: {ended.output[-600:]}"]
        results += [] if are_checkpoints_finite(directory) else ["a non-finite checkpoint was saved"]
    good = named_checkpoint(ended)
    if good is None:
        return [*results, f"no checkpoint is named: {ended.output[-600:]}"]
    done = run_with_faults((*flags, "--resume", good), directory / "output_good.txt", faults)
    if done.code != 0 or not are_checkpoints_finite(directory):
        results.append(f"{good} cannot be resumed: {done.output[-600:]}")
    return results


def named_checkpoint(ended: FinishedRun) -> str | None:
    """Return the checkpoint that the last message of a run names."""
    words = ended.output.partition("Resume from it with --resume ")[2].split()
    return words[0] if words else None


BAD_LABELS = (0, -1, 30, 2**40)  # blank, padding of targets, vocabulary size, arbitrary number


def bad_label_findings(bench: ResumeBench, token: int, workers: int, directory: Path) -> list[str]:
    """Return the errors: an invalid token must be reported by utterance, with the previous steps saved."""
    flags = bench.flags(Settings(), directory, workers)
    ended = run_with_faults(flags, directory / "output.txt", [("change_label", POISONED, token)])
    output = f"The transcript of {POISONED} has the token {token}"
    checks = {
        f"it ended with {ended.code}: {ended.output[-600:]}": ended.code == 3,
        "it does not name the utterance and the token": output in ended.output and "Traceback" not in ended.output,
        "the steps before are not saved": len(read_log(directory)) == last_checkpoint(directory).step,
    }
    return [finding for finding, is_right in checks.items() if not is_right]
