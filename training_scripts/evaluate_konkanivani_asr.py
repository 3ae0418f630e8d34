#!/usr/bin/env python3
"""Scores a checkpoint on a manifest: word and character error rates by greedy CTC, and every utterance's hypothesis.

python3 training_scripts/evaluate_konkanivani_asr.py --checkpoint checkpoints/checkpoint_best.pt --manifest test.jsonl
"""

import bootstrap

bootstrap.rerun_under_venv()

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from konkanivani.command_line import read_flags, run_script
from konkanivani.data.manifest import read_manifest
from konkanivani.errors import ResourceError
from konkanivani.json_lines import write_json_lines
from konkanivani.metrics import ErrorRates, error_rates

if TYPE_CHECKING:  # usage errors do not wait for torch
    from konkanivani.training.evaluation import Evaluation


@dataclass(frozen=True)
class Flags:
    """What is scored, and where the hypotheses go."""

    checkpoint: str
    """A checkpoint_*.pt file."""
    manifest: str
    """JSONL manifest to score it on."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run."""
    output: str | None = None
    """File of the hypotheses (None: CHECKPOINT.MANIFEST.hypotheses.jsonl beside the checkpoint)."""
    json: bool = False
    """Print one line of JSON instead of sentences; rates are shares."""

    @property
    def hypotheses_path(self) -> Path:
        """`output`, or the file beside the checkpoint that is named after both."""
        checkpoint = Path(self.checkpoint)
        name = f"{checkpoint.stem}.{Path(self.manifest).stem}.hypotheses.jsonl"
        return Path(self.output) if self.output else checkpoint.parent / name


def score(flags: Flags) -> str:
    """Evaluates just as training's final scoring does, writes the hypotheses, and returns what is to be printed."""
    manifest = read_manifest(flags.manifest)
    from konkanivani.decoding.ctc import greedy_ctc
    from konkanivani.preflight import choose_device
    from konkanivani.trained_model import evaluate_manifest, load_trained_model

    trained = load_trained_model(flags.checkpoint, choose_device(flags.device))
    check_output(flags.hypotheses_path)
    evaluation = evaluate_manifest(trained, flags.manifest, greedy_ctc)
    write_hypotheses(flags.hypotheses_path, evaluation)
    if flags.json:
        left_out = len(manifest) + len(manifest.broken) - len(evaluation.scored)
        return summary_json(flags, evaluation, trained.checkpoint.step, left_out)
    return summary_text(flags, evaluation)


def check_output(path: Path) -> None:
    """Raises a ResourceError where the hypotheses could not be written, before the work and not after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ResourceError(f"The hypotheses cannot be written to {path}. Give another --output in a folder of yours.")


def write_hypotheses(path: Path, evaluation: "Evaluation") -> None:
    """Writes one JSON line an utterance, in the manifest's order, beside `path` and renames it into place."""
    rows = []
    for scored in sorted(evaluation.scored, key=lambda scored: scored.utterance.row):
        reference, hypothesis = scored.utterance.text, scored.hypothesis
        row = {"audio_filepath": scored.utterance.id, "reference": reference, "hypothesis": hypothesis}
        rows.append(row | asdict(error_rates([reference], [hypothesis])))
    try:
        write_json_lines(path, rows)
    except OSError as error:
        raise ResourceError(
            f"The hypotheses could not be written to {path}: {error.strerror or error}. Give another --output."
        ) from None


def patterns_of(evaluation: "Evaluation") -> list[str]:
    """The marks that the manifest sets, sorted; none in most manifests."""
    return sorted({scored.utterance.pattern for scored in evaluation.scored} - {""})


def summary_json(flags: Flags, evaluation: "Evaluation", step: int, left_out: int) -> str:
    """One line of JSON; rates are shares, losses nats a token, null where they are not finite numbers."""
    rates = evaluation.rates
    summary = {"checkpoint": flags.checkpoint, "step": step, "manifest": flags.manifest}
    summary |= {"wer": rates.wer, "cer": rates.cer, "utterances": len(evaluation.scored), "left_out": left_out}
    summary |= asdict(rates)
    for pattern in patterns_of(evaluation):
        apart = evaluation.rates_of(pattern)
        summary |= {f"wer_{pattern}_patterns": apart.wer, f"cer_{pattern}_patterns": apart.cer}
        summary |= {f"words_{pattern}_patterns": apart.words}
    summary |= {name: getattr(evaluation, name) for name in ("loss", "ctc_loss", "attention_loss", "seconds")}
    summary |= {"hypotheses": str(flags.hypotheses_path)}
    return json.dumps({name: _rounded(value) for name, value in summary.items()}, ensure_ascii=False)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def summary_text(flags: Flags, evaluation: "Evaluation") -> str:
    """The rates in a few lines for a person."""
    count, seconds = len(evaluation.scored), evaluation.seconds
    lines = [f"{flags.manifest}: {_rates_in_words(evaluation.rates)}, {count} utterances, {seconds:.1f} s"]
    lines += [f"  {p} patterns: {_rates_in_words(evaluation.rates_of(p))}" for p in patterns_of(evaluation)]
    return "\n".join([*lines, f"Every hypothesis is in {flags.hypotheses_path}."])


def _rates_in_words(rates: ErrorRates) -> str:
    return f"WER {rates.wer:.1%}, CER {rates.cer:.1%} over {rates.words} words"


if __name__ == "__main__":
    flags = read_flags(Flags, sys.argv[1:])
    sys.exit(run_script(lambda: score(flags)))
