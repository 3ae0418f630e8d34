"""Constraints of decoding: prompt, suppressed tokens, timestamp rules and maximum length."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeRules:
    """Timestamp tokens, as in Whisper: all ids from `first` on.

    `no_times` is the token for "no timestamps", which is never generated. The first generated token must be a
    timestamp between `first` and `first + latest_first` (None: no upper bound).
    """

    no_times: int
    first: int
    latest_first: int | None = None


@dataclass(frozen=True)
class GenerationRules:
    """Rules of decoding for one vocabulary; tokens are given by their ids.

    `prompt` follows the start token. `suppressed` tokens are never generated, `suppressed_first` tokens not directly
    after the prompt. A hypothesis has at most `most_tokens` tokens (None: the number of encoder frames).
    """

    prompt: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimeRules | None = None
    most_tokens: int | None = None

    @property
    def forbids(self) -> bool:
        """Return whether any token is suppressed."""
        return bool(self.suppressed or self.suppressed_first or self.times)


FREE = GenerationRules()
