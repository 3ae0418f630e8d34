"""Whether a run learns: what a person should be told while there is time to begin again otherwise."""

import math
from dataclasses import dataclass

FAILING_CER = 0.9
ONLY_BLANKS = 0.995  # of the validation's frames
FLAT_LOSS = 0.97  # of the first epoch's
MOSTLY_CLIPPED = 0.9  # of an epoch's steps
SHORT_RUN = 1000  # steps
CLIPPED_AT_FIRST = 1000  # steps: before, most gradients of a good run are clipped too (docs/experiments.md)
LOOKS = 1 / 3, 2 / 3  # of a run's steps: at the ends of the epochs in which these are reached


@dataclass(frozen=True)
class EpochLearning:
    """What an epoch has shown; `first_step` steps lay before it, `last_step` behind it.

    Losses are the means over the steps of this epoch and of the first one; `clipped_share` of its steps had a gradient
    above --max_grad_norm. `cer` (NaN without) and `blank_share` (of the frames of CTC's best paths; None without) are
    the validation's.
    """

    first_step: int
    last_step: int
    total_steps: int
    loss: float
    first_loss: float
    clipped_share: float
    cer: float = math.nan
    blank_share: float | None = None

    @property
    def is_time_to_look(self) -> bool:
        """Whether a third, or two thirds, of the run have passed in this epoch."""
        return any(self.first_step < share * self.total_steps <= self.last_step for share in LOOKS)

    def help(self) -> str:
        """What usually helps where next to nothing is recognised right."""
        more = "more --epochs or a smaller effective batch, since CTC needs some hundred steps to align; "
        helps = "--tokenizer_type char with little speech, a --ctc_weight of 0.5 or more, a smaller --preset"
        if self.blank_share is None:
            helps = "another --learning_rate; for a --pretrained model, the --language closest to the transcripts"
        begun = more if self.total_steps < SHORT_RUN else ""
        return f"{begun}{helps}; inspect_data.py checks whether transcripts and audio match"


def failures(epoch: EpochLearning) -> list[str]:
    """One line for each sign that the run does not learn, with what usually helps; none while it is too early."""
    if not epoch.is_time_to_look:
        return []
    done = f"after {epoch.last_step:,} of {epoch.total_steps:,} steps"
    found = []
    if epoch.blank_share is not None and epoch.blank_share >= ONLY_BLANKS:
        found.append(
            f"The model still outputs only blanks {done} ({100 * epoch.blank_share:.1f} % of the validation "
            f"frames). Try {epoch.help()}."
        )
    elif epoch.cer >= FAILING_CER:
        found.append(f"The validation CER is still {100 * epoch.cer:.0f} % {done}. Try {epoch.help()}.")
    if epoch.loss >= FLAT_LOSS * epoch.first_loss > 0:
        found.append(
            f"The training loss does not decrease {done}: {epoch.loss:.3f} per token, {epoch.first_loss:.3f} "
            "in the first epoch. Try a third of the --learning_rate and more --warmup_steps; inspect_data.py "
            "checks whether transcripts and audio match."
        )
    if epoch.clipped_share > MOSTLY_CLIPPED and epoch.last_step >= CLIPPED_AT_FIRST:
        found.append(
            f"{100 * epoch.clipped_share:.0f} % of the epoch's gradients were clipped {done}. Use a higher "
            "--max_grad_norm, or a lower --learning_rate if the loss is unstable."
        )
    return found
