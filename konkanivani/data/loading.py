"""Windows and batches of utterances from any cursor onward."""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from konkanivani.data.batch import Batch, Window
from konkanivani.data.batching import Cursor, EpochPlanner, SizeLimit
from konkanivani.data.rejections import Rejections
from konkanivani.data.speech import EvaluationSpeech, TrainingSpeech
from konkanivani.data.utterance import Utterance
from konkanivani.data.workers import Fetcher, LoaderConfig, load_in_order


class WindowStream:
    """The training data from any cursor onward, epoch after epoch, each window with the cursor behind it."""

    def __init__(
        self,
        speech: TrainingSpeech,
        planner: EpochPlanner,
        limits: tuple[SizeLimit, ...],
        loader: LoaderConfig,
        rejections: Rejections,
    ) -> None:
        self.speech, self.planner, self.limits, self.loader = speech, planner, limits, loader
        self.rejections = rejections

    def from_cursor(self, cursor: Cursor, check: Callable[[], None] = lambda: None) -> Iterator[tuple[Window, Cursor]]:
        """Endless. Closing the generator ends the workers. A window of which nothing can be read is passed over.

        `check` is called before each window and while one is waited for; what it raises ends the waiting.
        """
        fetcher = Fetcher(self.speech, self.limits, self.loader.workers)
        with closing(load_in_order(fetcher, self.planned(cursor), self.loader, check)) as loaded:
            for found, behind in zip(loaded, self.planner.cursors_behind(cursor), strict=False):
                self.rejections.add(found.rejections)
                if found.value is not None:
                    yield found.value, behind

    def planned(self, cursor: Cursor) -> Iterator[list[tuple[int, int]]]:
        """The keys of each window from the cursor on; the loader runs ahead of the loop."""
        epoch, consumed = cursor.epoch, cursor.window
        while True:
            plan = self.planner.plan_epoch(epoch)
            for number in range(consumed, len(plan)):
                yield [(epoch, int(index)) for index in np.sort(plan[number])]  # as they lie in their files
            epoch, consumed = epoch + 1, 0


def load_batches(
    speech: EvaluationSpeech,
    plan: list[np.ndarray],
    loader: LoaderConfig,
    rejections: Rejections,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Batch, list[Utterance]]]:
    """The planned evaluation batches in order, each with its utterances; those that cannot be read are left out.

    `check` as for a WindowStream.
    """
    keys = ([int(number) for number in batch] for batch in plan)
    with closing(load_in_order(Fetcher(speech, None, loader.workers), keys, loader, check)) as loaded:
        for found, numbers in zip(loaded, plan, strict=True):
            rejections.add(found.rejections)
            if found.value is not None:
                left_out = {rejection.row for rejection in found.rejections}
                utterances = [speech.utterances[int(number)] for number in numbers]
                yield found.value, [utterance for utterance in utterances if utterance.row not in left_out]
