#!/usr/bin/env python3
"""Fine-tune Whisper with offloaded weights: GPU memory compared with transformers, and a run from host memory.

    python3 benchmarks/peers/offloading.py trace --sizes medium large-v3
    python3 benchmarks/peers/offloading.py train --folder /tmp/large --size medium

trace: the GPU tensors of a step in this trainer and in transformers, without GPU or weights. Both steps run on fake
tensors without data, and the same counter adds up the bytes of live storages: a step of two micro-batches, each with
one utterance of 30 s and 448 labels, all blocks recomputed, AdamW. transformers runs in fp32 as in its Trainer
(autocast would add half-precision weights, which needs more); this trainer runs its matrix products in half precision,
with --weights card, half and host. Printed are MiB and the reduction factor.

train: fine-tunes a random Whisper of a published size, kills and resumes the run, and compares. Writes a folder of
random weights and recordings of 30 s with labels of nearly the maximum length. Trains some steps of two utterances each
with the training script, then again in another folder, where the run is killed (SIGKILL) shortly after half of the
steps and resumed from its checkpoint. Prints the plan, the peak resident memory of a process (VmHWM), the seconds of a
step, and the number of records with equal CRC in the final checkpoints of both runs. Needs disk space for four
checkpoints: 34 GiB for medium.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "training_scripts"))
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

from benchmarks.measuring.common import run_subcommand
from benchmarks.peers.whisper_toolkits import config_of
from konkanivani.command_line import read_flags
from konkanivani.errors import DataError, ResourceError


@dataclass(frozen=True)
class TraceFlags:
    """Flags of this script."""

    sizes: tuple[str, ...] = ("tiny", "base", "small", "medium", "turbo", "large-v3")
    """Names of the models."""


def transformers_peak(size: str) -> int:
    """Return the peak bytes of transformers' second step."""
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from konkanivani.models.whisper.model import PUBLISHED_SIZES
    from konkanivani.planning.tensors import LiveBytes

    # The CUDA allocator rounds each allocation up to a multiple of 512 bytes.
    live = LiveBytes(rounding=512)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model = transformers.WhisperForConditionalGeneration(config_of(PUBLISHED_SIZES[size])).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        live.count([*model.parameters(), *model.buffers()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        features = torch.zeros(1, PUBLISHED_SIZES[size].mel_bins, 3000)
        labels = torch.zeros(1, 448, dtype=torch.long)
        for _ in range(2):
            # Only the second step counts: in the first one AdamW has not allocated its moments before the backward
            # pass.
            live.restart_peak()
            for _ in range(2):
                model(input_features=features, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def our_peaks(size: str) -> list[int]:
    """Return the peak bytes of this trainer's tensors on the GPU for each location of the weights."""
    from konkanivani.config import AUTO, LossConfig, MemoryConfig, TrainConfig
    from konkanivani.flags import resolve
    from konkanivani.memory.devices import cuda_costs
    from konkanivani.memory.plan import RecomputePolicy
    from konkanivani.models.whisper.architecture import WhisperArchitecture
    from konkanivani.models.whisper.model import PUBLISHED_SIZES
    from konkanivani.planning.report import PLACES
    from konkanivani.planning.tracer import BatchShape
    from konkanivani.planning.traces import build_tracer

    memory = MemoryConfig(mixed_precision=True, gradient_checkpointing=AUTO)
    config = resolve(TrainConfig(memory=memory, loss=LossConfig(ctc_weight=0.0, label_smoothing=0.0)))
    shape, costs = PUBLISHED_SIZES[size], cuda_costs("a card", (8, 0))
    tracers = (build_tracer(config, WhisperArchitecture(shape), costs, place) for place in PLACES.values())
    peaks = [tracer.trace(BatchShape(1, 30.0, 447), RecomputePolicy("always")) for tracer in tracers]
    # Only tensors are compared: the internal workspace of an attention kernel is a tensor on neither side.
    inside = costs.attention_workspace(1, shape.source_positions, shape.d_model, is_half=True)
    return [max(peak.forward, peak.backward - inside, peak.update) for peak in peaks]


def table(flags: TraceFlags) -> str:
    """Print one line per model size."""
    print(f"{'':10}{'transformers':>14}{'card':>16}{'half':>16}{'host':>16}")
    for size in flags.sizes:
        theirs = transformers_peak(size)
        cells = [f"{peak / 2**20:,.0f} (1/{theirs / peak:.1f})" for peak in our_peaks(size)]
        print(f"{size:10}{theirs / 2**20:>14,.0f}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    return ""


TRAINER = Path(__file__).resolve().parents[2] / "training_scripts" / "train_konkanivani_asr.py"
LAYERS = {
    "tiny": (384, 6, 4, 4),
    "base": (512, 8, 6, 6),
    "small": (768, 12, 12, 12),
    "medium": (1024, 16, 24, 24),
    "large-v3": (1280, 20, 32, 32),
}


@dataclass(frozen=True)
class TrainFlags:
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


def write_speech(path: Path, flags: TrainFlags) -> Path:
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


def command(flags: TrainFlags, folder: Path, run: str) -> list[str]:
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


def train_and_compare(flags: TrainFlags) -> str:
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
            whole.said[whole.said.index("Peak memory (MiB)") :].partition("View the run")[0].rstrip(),
        ]
    )


SUBCOMMANDS = {
    "trace": lambda arguments: table(read_flags(TraceFlags, arguments, TraceFlags())),
    "train": lambda arguments: train_and_compare(read_flags(TrainFlags, arguments)),
}

if __name__ == "__main__":
    sys.exit(run_subcommand(SUBCOMMANDS, sys.argv[1:]))
