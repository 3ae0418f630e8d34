"""Word times of an edited transcript."""

from difflib import SequenceMatcher

from konkanivani.inference.word_times import Segment, Word


def edit_segment(text: str, words: tuple[Word, ...]) -> Segment | None:
    """Return a segment with the edited `text` of the recognised `words`; None if the text is empty.

    Unchanged words keep their times. Changed words divide the time of the words that they replace; inserted words
    divide the gap between their neighbours.
    """
    edited = text.split()
    recognised = [word.text for word in words]
    # Boundaries of the gaps: the segment's start, the words, the segment's end.
    starts = [*(word.start for word in words), words[-1].end]
    ends = [words[0].start, *(word.end for word in words)]
    result: list[Word] = []
    for kind, first, last, start, end in SequenceMatcher(None, recognised, edited, autojunk=False).get_opcodes():
        if kind == "equal":
            result += words[first:last]
        elif kind == "replace":
            result += _divide(edited[start:end], words[first].start, words[last - 1].end)
        elif kind == "insert":
            result += _divide(edited[start:end], ends[first], max(ends[first], starts[first]))
    return Segment(tuple(result)) if result else None


def _divide(texts: list[str], start: float, end: float) -> list[Word]:
    """Return words that divide the time from `start` to `end` by their numbers of characters, without confidence."""
    total = sum(map(len, texts))
    words = []
    done = 0
    for text in texts:
        word_start = start + (end - start) * done / total
        done += len(text)
        words.append(Word(text, word_start, start + (end - start) * done / total, None))
    return words
