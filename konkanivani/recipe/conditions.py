"""Evaluation of a model under simulated recording conditions."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from konkanivani.config import DecodingConfig
from konkanivani.console import parse_share, say
from konkanivani.data.audio.conditions import CONDITIONS, FASTEST, LONGEST_SILENCE, SLOWEST, Condition
from konkanivani.data.filtering import evaluation_limits
from konkanivani.data.manifest import Manifest, Rejections
from konkanivani.decoding.decode import Decode, build_decode
from konkanivani.recipe.evaluation_model import EvaluationModel, texts_in_order
from konkanivani.recipe.run_data import set_within
from konkanivani.scoring.score import ConditionTexts, TextPairs
from konkanivani.training.validation import Evaluation


@dataclass(frozen=True)
class UnderCondition:
    """Evaluation of a manifest under one recording condition."""

    condition: Condition
    evaluation: Evaluation


def evaluate_under_conditions(trained: EvaluationModel, manifest: Manifest, decode: Decode) -> Iterator[UnderCondition]:
    """Evaluate a manifest's waveforms, changed in memory, under each of `CONDITIONS`.

    All conditions are measured on the same utterances: those that fit the model under every condition. Error rates are
    printed on stderr.
    """
    config = trained.config
    architecture = trained.architecture
    rejections = Rejections(None, parse_share(config.data.max_rejected, "--max_rejected"))
    rejections.begin(manifest)
    limits = dataclasses.replace(evaluation_limits(config, architecture.framing), fastest_speed=FASTEST)
    limits = limits.within(architecture.longest_seconds - LONGEST_SILENCE, architecture.most_tokens, SLOWEST)
    usual = set_within(limits, manifest, config, trained.tokenizer, trained.forward.device, rejections)
    usual = dataclasses.replace(usual, topology=trained.topology)
    for condition in CONDITIONS:
        speech = dataclasses.replace(usual.speech, condition=condition.name)
        evaluation = dataclasses.replace(usual, speech=speech).evaluate(trained.forward, decode)
        if trained.topology.is_first:
            rates = evaluation.rates
            # On stderr: the report, or one line of JSON, is on stdout.
            say(f"{condition.description}: WER {rates.wer:.1%}, CER {rates.cer:.1%}", sys.stderr)
        yield UnderCondition(condition, evaluation)


def recognize_under_conditions(
    trained: EvaluationModel, unchanged: TextPairs, manifest: Manifest, decoding: DecodingConfig
) -> tuple[ConditionTexts, ...]:
    """Return references and hypotheses of a manifest under each of `CONDITIONS`."""
    decode = build_decode(decoding, trained.architecture, trained.tokenizer, trained.forward.device)
    found = []
    for under in evaluate_under_conditions(trained, manifest, decode):
        pairs = TextPairs(texts_in_order(manifest, under.evaluation), unchanged.source, unchanged.normalizer)
        found.append(ConditionTexts(under.condition.name, under.condition.description, pairs))
    return tuple(found)
