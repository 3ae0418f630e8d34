"""Two seconds of audio with a transcript of 3,000 characters are rejected with the reason by every command."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile

from konkanivani.data.filtering import MAX_TOKEN_RATE, SPARE_TOKENS, Limits, reason_to_reject
from konkanivani.data.index import Utterance
from tests.conftest import TINY_MODEL, WORDS, checked, read_log, run_folders, run_script, run_trainer, speak

LONG = " ".join(WORDS[number % 10] for number in range(1000))[:3000]
TINY = (*TINY_MODEL, "--tokenizer_type", "char", "--num_workers", "0", "--max_steps", "2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """Write nine recordings of speech and one of noise, whose row has the long text; return folder and rows."""
    folder = tmp_path_factory.mktemp("long")
    results = []
    for number in range(9):
        words = [WORDS[number], WORDS[number * 3 % 10]]
        samples = speak(words)
        soundfile.write(folder / f"{number}.wav", samples, 16_000)
        results.append({"audio_filepath": f"{number}.wav", "duration": len(samples) / 16_000, "text": " ".join(words)})
    noise = 0.1 * np.random.default_rng(0).standard_normal(32_000)
    soundfile.write(folder / "long.wav", noise.astype(np.float32), 16_000)
    assert len(LONG) == 3000
    return folder, [*results, {"audio_filepath": "long.wav", "duration": 2.0, "text": LONG}]


@pytest.fixture(scope="module")
def manifest(rows) -> str:
    folder, listed = rows
    path = folder / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module", params=["0.7", "0"])
def ctc_weight(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(manifest: str, ctc_weight: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run whose --max_tokens accepts the long transcript, with or without CTC."""
    folder = tmp_path_factory.mktemp("run")
    flags = ("--ctc_weight", ctc_weight, "--max_tokens", "100000")
    manifests = ("--train_manifest", manifest, "--valid_manifest", manifest)
    checked(run_trainer(*TINY, *flags, *manifests, *run_folders(folder)))
    return folder


def expected_reason(ctc_weight: str) -> str:
    return "more than speech of its length has: 2.00 s" if ctc_weight == "0" else "CTC cannot align it: 3001 tokens"


def test_training_and_validation_reject_long_transcript_with_reason(run: Path, ctc_weight: str) -> None:
    lines = (run / "runs" / "default" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    listed = [json.loads(line) for line in lines]
    assert {row["audio_filepath"] for row in listed} == {"long.wav"}
    assert all(expected_reason(ctc_weight) in row["reason"] for row in listed)
    assert [record["utterances"] for record in read_log(run, "validation")] == [9] * len(read_log(run, "validation"))
    losses = [record["loss"] for record in read_log(run)]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_evaluation_rejects_long_transcript_with_reason(
    run: Path, manifest: str, ctc_weight: str, tmp_path: Path
) -> None:
    checkpoint = str(run / "checkpoints" / "checkpoint_last.pt")
    output = tmp_path / "hypotheses.jsonl"
    files = ("--checkpoint", checkpoint, "--manifest", manifest, "--output", str(output))
    done = checked(run_script("training_scripts/evaluate_konkanivani_asr.py", *files, "--device", "cpu"))
    assert f"1 x {expected_reason(ctc_weight).partition(':')[0]}" in done.stdout
    scored = [json.loads(line)["audio_filepath"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert sorted(scored) == [f"{number}.wav" for number in range(9)]
    assert "nan" not in done.stdout


@pytest.mark.parametrize(("flags", "reason"), [((), "more than --max_tokens 400"), (("--max_tokens", "100000"), "CTC")])
def test_inspection_rejects_long_transcript_with_reason(flags: tuple[str, ...], reason: str, manifest: str) -> None:
    flags = (*flags, "--train_manifest", manifest, "--tokenizer_type", "char", "--json")
    part = json.loads(checked(run_script("training_scripts/inspect_data.py", *flags)).stdout)["health"]["parts"][0]
    assert part["usable"] == 9 and part["rejected"]["count"] == 1
    assert part["rejected"]["examples"][0]["id"] == "long.wav" and reason in part["rejected"]["examples"][0]["detail"]


def test_data_preparation_rejects_long_transcript_with_reason(rows, tmp_path: Path) -> None:
    folder, listed = rows
    with open(folder / "all.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("audio", "text"), *((row["audio_filepath"], row["text"]) for row in listed)])
    flags = ("--format", "csv", "--source", str(folder), "--table", "all.csv", "--max_rejected", "10%")
    output = tmp_path / "out"
    done = checked(run_script("training_scripts/prepare_data.py", *flags, "--output", str(output)))
    assert "skipped: 1 (long transcript)" in done.stdout
    rejected = json.loads((output / "rejected.jsonl").read_text(encoding="utf-8"))
    assert rejected["audio_filepath"].endswith("long.wav")
    assert "3000 characters, more than 2.00 s of speech have" in rejected["reason"]
    manifests = [path for path in output.glob("*.jsonl") if path.name != "rejected.jsonl"]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in manifests) == 9


def test_transcript_at_the_maximum_token_rate_is_accepted() -> None:
    """Without CTC, the bound excludes only implausible texts; CTC has its own bound."""
    limits = Limits(0.1, 20.0, 10**9, 1.0, is_aligned=False)
    for seconds in (0.2, 2.0, 20.0):
        most = int(SPARE_TOKENS + MAX_TOKEN_RATE * seconds)
        utterance = Utterance("a.wav", "a.wav", seconds, "text")
        assert reason_to_reject(utterance, [5] * most, limits) is None
        assert "more than speech of its length has" in reason_to_reject(utterance, [5] * (most + 1), limits)
        assert most > 3 * 40 * seconds
    assert limits.most_spoken_tokens(np.array([1.0, 2.0])).tolist() == [300.0, 500.0]
