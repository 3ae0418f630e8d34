"""A figure that several pages state is the same on each of them."""

import re
from collections.abc import Mapping

import pytest

from tests.conftest import ROOT

README, EVALUATION, EXPERIMENTS = "README.md", "docs/evaluation.md", "docs/experiments.md"
PERFORMANCE, MEMORY, SCALING = "docs/performance.md", "docs/memory.md", "docs/scaling.md"
TRAINING, WHISPER, DATA, PRETRAINED = "docs/training.md", "docs/whisper.md", "docs/data.md", "docs/pretrained.md"
# By name: the pages, each with a pattern whose groups are the figures.
SHARED: dict[str, dict[str, str]] = {
    "greedy WER and CER of three seeds": {
        README: r"test WER of (\S+ %) and a CER of (\S+ %) with greedy",
        EVALUATION: r"\| greedy \| (\S+ %) \| (\S+ %) \|",
    },
    "joint WER and CER of three seeds": {
        README: r"with greedy decoding, and (\S+ %) and (\S+ %) with joint",
        EVALUATION: r"\| joint[^|]*\| (\S+ %) \| (\S+ %) \|",
    },
    "error ratios to SpeechBrain": {
        README: r"by medians of three seeds, (0\.\d+) and (0\.\d+) by means",
        EVALUATION: r"\| mean of the nine means \| (0\.\d+), (0\.\d+)",
        EXPERIMENTS: r"mean ratios (0\.\d+), (0\.\d+)",
    },
    "median error ratios to SpeechBrain": {
        README: r"is (0\.\d+) \(WER\) and (0\.\d+) \(CER\) by medians",
        EVALUATION: r"\| mean of the nine medians \| (0\.\d+), (0\.\d+)",
    },
    "an fp16 step on the H100": {
        README: r"takes (0\.\d+ s) on the H100 \(SpeechBrain: (0\.\d+ s)\)",
        PERFORMANCE: r"\| `original`, [^|]*fp16 \| (0\.\d+ s), [^|]*\| SpeechBrain (0\.\d+ s)",
        EXPERIMENTS: r"`original`: (0\.\d+ s), \S+ MiB; SpeechBrain (0\.\d+ s)",
    },
    "its memory on the H100": {
        PERFORMANCE: r"\| `original`, [^|]*fp16 \| 0\.\d+ s, (\d+ MiB) \| SpeechBrain 0\.\d+ s, (\d+ MiB)",
        EXPERIMENTS: r"`original`: 0\.\d+ s, (\d+ MiB); SpeechBrain 0\.\d+ s, (\d+ MiB)",
    },
    "size of the built-in corpus": {
        README: r"\((\d+ minutes) of speech\)",
        DATA: r"Konkani sentences \((\d+ minutes)\)",
    },
    "state of the preset original": {
        MEMORY: r"\| `original` \|[^|]*\|[^|]*\| (\d+) MiB",
        SCALING: r"of the (\d+) MiB of the state of `original`",
    },
    "hours of speech in all epochs": {
        TRAINING: r"(\d+ hours) of audio in total",
        WHISPER: r"(\d+ hours) of speech in total",
    },
    "a Whisper tiny step": {
        WHISPER: r"takes (\d\.\d+ s) and (\d+) MiB here, (\d\.\d+ s) and (\d+) MiB in transformers",
        EXPERIMENTS: r"tiny: transformers (?=\S+ s, \d+ MiB; ours (\d\.\d+ s), (\d+))(\d\.\d+ s), (\d+) MiB",
    },
    "import of a large .nemo file": {
        PRETRAINED: r"A file of (\d+ MB) takes (\d\.\d s) and (\S+ MiB)",
        EXPERIMENTS: r"Import of (\d+ MB): (\d\.\d s), (\S+ MiB)",
    },
}


def pages() -> dict[str, str]:
    """Return the pages by path, line breaks as spaces."""
    names = {name for places in SHARED.values() for name in places}
    return {name: re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8")) for name in names}


def figures_stated(texts: Mapping[str, str], places: Mapping[str, str]) -> dict[str, tuple[str, ...] | None]:
    """Return the figures that each page states, None if it states none."""
    values = {name: re.search(pattern, texts[name]) for name, pattern in places.items()}
    return {name: match and tuple(group.rstrip(",") for group in match.groups()) for name, match in values.items()}


@pytest.mark.parametrize("figure", SHARED)
def test_pages_state_the_same_figure(figure):
    result = figures_stated(pages(), SHARED[figure])
    assert None not in result.values() and len(result) > 1 and len(set(result.values())) == 1, result


@pytest.mark.parametrize("figure", SHARED)
def test_negative_control_changed_page_is_found(figure):
    texts, (name, pattern) = pages(), next(iter(SHARED[figure].items()))
    match = re.search(pattern, texts[name])
    changed = texts[name][: match.start(1)] + "9" + texts[name][match.start(1) :]
    assert len(set(figures_stated({**texts, name: changed}, SHARED[figure]).values())) == 2
