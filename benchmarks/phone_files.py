#!/usr/bin/env python3
"""Twenty kinds of files that phones, messengers and cameras write: prepared, trained on, and heard as from WAV.

python3 benchmarks/phone_files.py --folder /tmp/phone_files

A tiny model learns made-up speech (a chord a letter) from a folder that holds eight utterances of each kind, and then
hears one it does not know from each kind and from a WAV of the same samples.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "training_scripts"), str(ROOT)]

import bootstrap

bootstrap.rerun_under_venv()

import argparse

import numpy as np
import soundfile

from konkanivani.evaluation.metrics import error_rates
from tests.conftest import TINY_MODEL, TRAINER, WORDS, run_folders, run_script, speak
from tests.media_files import KINDS, write_media

RATE, PER_KIND, STEPS = 16_000, 8, 400
TRAINING = (
    *("--tokenizer_type", "char", "--ctc_weight", "0.9", "--max_steps", str(STEPS), "--batch_size", "8"),
    *("--gradient_accumulation_steps", "1", "--num_workers", "2", "--learning_rate", "0.005", "--warmup_steps", "20"),
    *("--epochs", "50", "--speed_perturbation", "1.0", "--frequency_masks", "0", "--time_masks", "0", "--dropout", "0"),
    *("--save_minutes", "0"),
)


def spoken(words: list[str], generator: np.random.Generator) -> np.ndarray:
    """The words and a little noise."""
    audio = speak(words)
    return audio + 0.005 * generator.standard_normal(len(audio)).astype(np.float32)


def write_folder(folder: Path, generator: np.random.Generator) -> None:
    """A folder of utterances with their transcripts, as many of each kind."""
    for number in range(PER_KIND * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        words = [WORDS[i] for i in generator.integers(len(WORDS), size=1 + number % 6)]
        path = write_media(folder / f"{number:03d}_{kind.name}{kind.suffix}", spoken(words, generator), RATE, kind)
        path.with_suffix(".txt").write_text(" ".join(words), encoding="utf-8")


def run(script: str, *arguments: str) -> None:
    """Runs the script; ends this one where it fails."""
    done = run_script(script, *arguments)
    if done.returncode:
        sys.exit(f"{script} ended with {done.returncode}: {done.stderr}")


def compare(folder: Path, checkpoint: Path, generator: np.random.Generator) -> int:
    """Prints a row for each kind; how many of them are heard otherwise than from WAV."""
    from konkanivani import load_recognizer

    recognizer, others = load_recognizer(checkpoint, device="cpu"), 0
    print("| file | from it | wrong characters | from WAV | wrong characters | the same |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        words = [WORDS[i] for i in generator.integers(len(WORDS), size=5)]
        audio = spoken(words, generator)
        soundfile.write(folder / "heard.wav", audio, RATE)
        path = write_media(folder / f"heard{kind.suffix}", audio, RATE, kind)
        from_wav = recognizer.transcribe(folder / "heard.wav").text
        heard = recognizer.transcribe(path).text
        rates = [error_rates([" ".join(words)], [text]).cer for text in (heard, from_wav)]
        others += heard != from_wav
        cells = (heard, f"{rates[0]:.1%}", from_wav, f"{rates[1]:.1%}", "yes" if heard == from_wav else "**no**")
        print(f"| {kind.name}{kind.suffix} | " + " | ".join(cells) + " |")
        path.unlink()
    return others


def main() -> None:
    """Prepares, trains and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty or new folder")
    folder, generator = parser.parse_args().folder, np.random.default_rng(0)
    (folder / "corpus").mkdir(parents=True)
    write_folder(folder / "corpus", generator)
    corpus, out = str(folder / "corpus"), folder / "data"
    run("training_scripts/prepare_data.py", "--format", "folder", "--source", corpus, "--output", str(out))
    manifests = ("--train_manifest", str(out / "train.jsonl"), "--valid_manifest", str(out / "valid.jsonl"))
    roots = ("--audio_roots", corpus)
    run(TRAINER, *TINY_MODEL, *manifests, *roots, *run_folders(folder), *TRAINING)
    others = compare(folder, folder / "checkpoints" / "checkpoint_best.pt", generator)
    print(f"\n{others} of {len(KINDS)} kinds are heard otherwise than from WAV.")


if __name__ == "__main__":
    main()
