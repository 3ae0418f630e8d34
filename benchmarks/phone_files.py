#!/usr/bin/env python3
"""Compare twenty kinds of files of phones, messengers and cameras with WAV: preparation, training and recognition.

python3 benchmarks/phone_files.py --folder /tmp/phone_files

A tiny model is trained on synthetic speech (one chord per letter) from a folder with eight utterances of each kind.
Then it recognizes an unseen utterance in each kind and in a WAV file of the same samples.
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
    """Return the words as synthetic speech with a little noise."""
    audio = speak(words)
    return audio + 0.005 * generator.standard_normal(len(audio)).astype(np.float32)


def write_folder(folder: Path, generator: np.random.Generator) -> None:
    """Write a folder of utterances with their transcripts, the same number for each kind."""
    for number in range(PER_KIND * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        words = [WORDS[i] for i in generator.integers(len(WORDS), size=1 + number % 6)]
        path = write_media(folder / f"{number:03d}_{kind.name}{kind.suffix}", spoken(words, generator), RATE, kind)
        path.with_suffix(".txt").write_text(" ".join(words), encoding="utf-8")


def run(script: str, *arguments: str) -> None:
    """Run the script; exit if it fails."""
    done = run_script(script, *arguments)
    if done.returncode:
        sys.exit(f"{script} ended with {done.returncode}: {done.stderr}")


def compare(folder: Path, checkpoint: Path, generator: np.random.Generator) -> int:
    """Print a row per kind; return the number of kinds that are recognized differently from WAV."""
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
    """Prepare the data, train and compare."""
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
