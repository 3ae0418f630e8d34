#!/usr/bin/env python3
"""Fine-tune a random Whisper of a published size with all weights in host memory, kill and resume it, and compare.

    python3 benchmarks/large_model.py --folder /tmp/large --size medium

Writes a folder of random weights and recordings of 30 s with labels of nearly the maximum length. Trains some steps of
two utterances each with the training script, then again in another folder, where the run is killed (SIGKILL) shortly
after half of the steps and resumed from its checkpoint. Prints the plan, the peak resident memory of a process (VmHWM),
the seconds of a step, and the number of records with equal CRC in the final checkpoints of both runs. Needs disk space
for four checkpoints: 34 GiB for medium.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "training_scripts"))
import bootstrap

bootstrap.rerun_under_venv()

import json
import re
import shutil
import signal
import subprocess
import time
import zipfile
from dataclasses import dataclass
from typing import Literal

import numpy as np
import soundfile

from konkanivani.base.command_line import read_flags, run_script
from konkanivani.base.errors import DataError, ResourceError

TRAINER = Path(__file__).resolve().parent.parent / "training_scripts" / "train_konkanivani_asr.py"
LAYERS = {
    "tiny": (384, 6, 4, 4),
    "base": (512, 8, 6, 6),
    "small": (768, 12, 12, 12),
    "medium": (1024, 16, 24, 24),
    "large-v3": (1280, 20, 32, 32),
}


@dataclass(frozen=True)
class Flags:
    """Flags of this script."""

    folder: str
    """Folder for all files; files of an earlier run are replaced."""
    size: Literal["tiny", "base", "small", "medium", "large-v3"] = "medium"
    """Shape of the model."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the training."""
    steps: int = 2
    """Steps of a run; half of them are saved before the kill."""
    weights: Literal["card", "half", "host"] = "host"
    """Location of the weights."""
    seconds: float = 29.9
    """Length of an utterance."""
    characters: int = 330
    """Characters of its text: 1.3 tokens each."""
    budget: str = "15GiB"
    """--memory_budget of the run."""
    mixed_precision: bool = False
    """Matrix products in half precision: fp16 on CUDA, bf16 on a CPU."""


@dataclass(frozen=True)
class Ended:
    """Output of a process that has ended."""

    said: str

    @property
    def resident_mib(self) -> float:
        """Resident memory of the largest phase, in MiB."""
        # From the run's table: the run resets VmHWM at each phase, so the value of the system covers only the last one.
        return json.loads(self.said.splitlines()[-1])["peak_memory_mib"]


def write_folder(path: Path, size: str) -> None:
    """Write a folder of random weights of a published size with Whisper's vocabulary."""
    from tests.whisper.byte_vocabularies import RANKS
    from tests.whisper.small_model import write_model

    if not RANKS.exists():
        raise DataError(f"Whisper's byte strings are not there: {RANKS}. Name another folder in KONKANIVANI_DATA.")
    width, heads, encoder, decoder = LAYERS[size]
    write_model(path, width=width, heads=heads, layers=(encoder, decoder), inner=4 * width, seconds=30, real=True)


def write_speech(path: Path, flags: Flags) -> Path:
    """Write noise recordings for all steps with texts of Konkani digits; return their manifest."""
    path.mkdir(parents=True)
    generator, rows = np.random.default_rng(0), []
    for number in range(2 * flags.steps):
        sound = 0.1 * generator.standard_normal(int(16_000 * flags.seconds)).astype(np.float32)
        soundfile.write(path / f"{number}.wav", sound, 16_000)
        text = "".join(generator.choice(list("एकदोनतीनचारपांच "), flags.characters))
        rows.append({"audio_filepath": f"{number}.wav", "duration": flags.seconds, "text": " ".join(text.split())})
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path / "train.jsonl"


def command(flags: Flags, folder: Path, run: str) -> list[str]:
    """Return the command line of the training script."""
    words = [sys.executable, str(TRAINER), "--pretrained", str(folder / "base"), "--language", "mr"]
    words += ["--train_manifest", str(folder / "speech" / "train.jsonl"), "--weights", flags.weights]
    words += ["--batch_size", "1", "--gradient_accumulation_steps", "2", "--epochs", "1", "--rehearsal", "never"]
    words += ["--gradient_checkpointing", "always", "--memory_budget", flags.budget, "--num_workers", "0"]
    words += ["--device", flags.device, "--save_steps", str(max(1, flags.steps // 2))]
    words += ["--keep_checkpoints", "2", "--resume", "auto"]
    words += ["--mixed_precision"] if flags.mixed_precision else []
    return [*words, "--checkpoint_dir", str(folder / run), "--log_dir", str(folder / "runs"), "--run_name", run]


def watch(words: list[str], kill_after: Path | None = None) -> Ended:
    """Run the command to its end, or kill it 3 s after the file `kill_after` appears."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if kill_after is not None:
        while process.poll() is None and not kill_after.exists():
            time.sleep(0.2)
        # The file is published by rename, so it is complete; the kill then hits the following step.
        time.sleep(3)
        process.send_signal(signal.SIGKILL)
    said = process.communicate()[0]
    code = process.returncode
    if code != (0 if kill_after is None else -signal.SIGKILL):
        raise ResourceError(f"The run ended with exit code {code}. Fix the error and start again:\n{said[-2000:]}")
    return Ended(said)


def sums_of(path: Path) -> list[tuple[str, int, int]]:
    """Return record name, size and CRC of each tensor in a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename.partition("/")[2], info.file_size, info.CRC) for info in archive.infolist()]
    # The pickle is left out: its counters are no tensors.
    return [record for record in records if record[0].startswith("data/")]


def measure(flags: Flags) -> str:
    """Train, kill and resume; return the report."""
    folder = Path(flags.folder).resolve()
    for name in ("base", "speech", "whole", "killed", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder / "base", flags.size)
    write_speech(folder / "speech", flags)
    whole = watch(command(flags, folder, "whole"))
    last = sums_of(folder / "whole" / "checkpoint_last.pt")
    size = (folder / "whole" / "checkpoint_last.pt").stat().st_size
    shutil.rmtree(folder / "whole")
    watch(command(flags, folder, "killed"), kill_after=folder / "killed" / "checkpoint_last.pt")
    gone_on = watch(command(flags, folder, "killed"))
    again = sums_of(folder / "killed" / "checkpoint_last.pt")
    # Equal checkpoints of two steps would make the comparison below meaningless.
    if len(last) < 10 or last == sums_of(folder / "killed" / "checkpoint_previous.pt"):
        raise DataError(
            "The checkpoints of the first and the last step are the same: nothing was trained. Run it by hand."
        )
    steps = [json.loads(line) for line in (folder / "runs" / "whole" / "log.jsonl").read_text().splitlines()]
    seconds = [f"{step['seconds']:.0f}" for step in steps if step["kind"] == "step"]
    planned = re.search(r"planned peak ([\d.]+ \w+)", whole.said)
    lines = [line for line in whole.said.splitlines() if "weights " in line or "M parameters" in line]
    return "\n".join(
        [
            *lines,
            f"planned for the step {planned.group(1) if planned else '?'}; resident at the most, MiB: "
            f"{whole.resident_mib:.0f} undisturbed, {gone_on.resident_mib:.0f} gone on after the kill",
            f"seconds of the steps: {', '.join(seconds)}; a checkpoint of {size / 2**20:.0f} MiB",
            f"records of the last checkpoint that are equal, bit for bit: "
            f"{sum(one == other for one, other in zip(last, again, strict=True))} of {len(last)}",
            whole.said[whole.said.index("Memory in MiB") :].partition("Look at")[0].rstrip(),
        ]
    )


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: measure(flags)))
