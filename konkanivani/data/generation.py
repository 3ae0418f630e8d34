"""How a search goes over the tokens of a vocabulary: what it begins with, what it may not say, where it ends."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeRules:
    """The tokens of times, all that are not below `first`; `no_times` says that there are none, and is never said.

    The first token of all is a time of at most `latest_first` steps; None: of any.
    """

    no_times: int
    first: int
    latest_first: int | None = None


@dataclass(frozen=True)
class GenerationRules:
    """What a search begins with behind the start token, what it may not say, and after how many tokens it ends.

    Tokens are given by their ids: `suppressed` everywhere, `suppressed_first` in the first place behind the prompt.
    With `most_tokens` None a hypothesis has at most as many tokens as its utterance has frames.
    """

    prompt: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    times: TimeRules | None = None
    most_tokens: int | None = None

    @property
    def forbids(self) -> bool:
        """Whether there is anything that it may not say."""
        return bool(self.suppressed or self.suppressed_first or self.times)


FREE = GenerationRules()
