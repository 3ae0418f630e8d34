"""Warnings about a run that does not learn, early enough to restart it with other settings."""

import math
from dataclasses import dataclass

FAILING_CER = 0.9
ONLY_BLANKS = 0.995  # fraction of the validation frames
FLAT_LOSS = 0.97  # fraction of the first epoch's loss
MOSTLY_CLIPPED = 0.9  # fraction of an epoch's steps
SHORT_RUN = 1000  # steps
CLIPPED_AT_FIRST = 1000  # steps: earlier, most gradients of a good run are clipped too (docs/experiments.md)
LOOKS = 1 / 3, 2 / 3  # fractions of a run's steps; checked at the end of the epoch that reaches each


@dataclass(frozen=True)
class EpochLearning:
    """Training and validation statistics of one epoch.

    Args:
        first_step: optimizer steps before the epoch.
        last_step: optimizer steps up to its end.
        total_steps: optimizer steps of the whole run.
        loss: mean loss over the steps of this epoch.
        first_loss: mean loss over the steps of the first epoch.
        clipped_share: fraction of the epoch's steps whose gradient norm exceeded --max_grad_norm.
        cer: character error rate of the validation; NaN without one.
        blank_share: fraction of blank frames on the CTC best paths of the validation; None without CTC.
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
        """Return whether one third or two thirds of the run's steps were reached in this epoch."""
        return any(self.first_step < share * self.total_steps <= self.last_step for share in LOOKS)

    def help(self) -> str:
        """Return the usual remedies if almost nothing is recognized correctly."""
        more = "more --epochs or a smaller effective batch, since CTC needs some hundred steps to align; "
        helps = "--tokenizer_type char with little speech, a --ctc_weight of 0.5 or more, a smaller --preset"
        if self.blank_share is None:
            helps = "another --learning_rate; for a --pretrained model, the --language closest to the transcripts"
        begun = more if self.total_steps < SHORT_RUN else ""
        return f"{begun}{helps}; inspect_data.py checks whether transcripts and audio match"


def failures(epoch: EpochLearning) -> list[str]:
    """Return one line with a remedy per sign that the run does not learn; empty while it is too early to judge."""
    if not epoch.is_time_to_look:
        return []
    done = f"after {epoch.last_step:,} of {epoch.total_steps:,} steps"
    found = []
    if epoch.blank_share is not None and epoch.blank_share >= ONLY_BLANKS:
        found.append(
            f"The model still outputs only blanks {done} ({100 * epoch.blank_share:.1f} % of the validation "
            f"frames). Try {epoch.help()}."
        )
    # NaN without validation: the comparison is False. All blanks imply a CER near 1, so only one of both is reported.
    elif epoch.cer >= FAILING_CER:
        found.append(f"The validation CER is still {100 * epoch.cer:.0f} % {done}. Try {epoch.help()}.")
    # `first_loss` is 0 until the first epoch has finished.
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
