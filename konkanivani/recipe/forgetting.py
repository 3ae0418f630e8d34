"""What a model that others have trained knew before, and what it has kept of it: one set scored before and after."""

import dataclasses
from pathlib import Path

from konkanivani.base.config import TrainConfig
from konkanivani.base.console import say
from konkanivani.base.device import choose_device
from konkanivani.base.distributed import Topology
from konkanivani.decoding.decode import greedy_decode
from konkanivani.evaluation.metrics import ErrorRates
from konkanivani.inference.pretrained import read_pretrained
from konkanivani.recipe.evaluation_model import (
    EvaluationModel,
    evaluate_manifest,
    load_evaluation_model,
    load_pretrained_evaluation,
)


@dataclasses.dataclass(frozen=True)
class Forgetting:
    """Error rates on a set that was not trained for, by the folder as it was and by the run's best checkpoint."""

    before: ErrorRates
    after: ErrorRates

    def sentence(self, manifest: str) -> str:
        """The two for a person."""
        return (
            f"On {manifest}, before and after: WER {self.before.wer:.1%} and {self.after.wer:.1%}, "
            f"CER {self.before.cer:.1%} and {self.after.cer:.1%}."
        )


def score_forgetting(config: TrainConfig, checkpoint: Path, topology: Topology) -> Forgetting | None:
    """Scores the set of --forgetting_manifest twice, greedily; None where there is none."""
    asked, device = config.pretrained, choose_device(config.run.device)
    if asked.forgetting_manifest is None:
        return None
    asked = dataclasses.replace(asked, language=asked.forgetting_language or asked.language)
    tokenizer = read_pretrained(asked.pretrained).vocabulary(asked)
    before = _score(load_pretrained_evaluation(asked, device, topology), config)
    trained = dataclasses.replace(load_evaluation_model(checkpoint, device, topology), tokenizer=tokenizer)
    found = Forgetting(before, _score(trained, config))
    say(found.sentence(asked.forgetting_manifest))
    return found


def _score(trained: EvaluationModel, config: TrainConfig) -> ErrorRates:
    decode = greedy_decode(trained.architecture, trained.tokenizer)
    return evaluate_manifest(trained, config.pretrained.forgetting_manifest, decode, config.data.audio_roots).rates
