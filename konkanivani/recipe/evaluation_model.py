"""Evaluation of a checkpoint or a pretrained folder on a manifest, also under simulated recording conditions."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpoint import load_states, read_checkpoint
from konkanivani.config import DecodingConfig, PretrainedConfig, TrainConfig
from konkanivani.console import parse_share, say
from konkanivani.data.audio.effects import CONDITIONS, FASTEST, LONGEST_SILENCE, SLOWEST, Condition
from konkanivani.data.filtering import evaluation_limits
from konkanivani.data.manifest import Manifest, Rejections, read_manifest
from konkanivani.data.text import Vocabulary
from konkanivani.decoding.decode import Decode, build_decode
from konkanivani.distributed import ALONE, Topology, broadcast_from_rank0
from konkanivani.errors import UsageError
from konkanivani.flags import defaults_beside, resolve
from konkanivani.inference.speech_model import (
    load_tokenizer,
    read_pretrained,
    restored_architecture,
    settings_of_weights,
    whole_weights,
)
from konkanivani.models.architecture import Architecture
from konkanivani.recipe.run_data import build_evaluation_set, fields_of, set_within
from konkanivani.scoring.score import CheckpointRun, ConditionTexts, NormalizerName, TextPairs
from konkanivani.scoring.transcripts import ScoredText
from konkanivani.training.build_step import build_forward
from konkanivani.training.step import ForwardPass
from konkanivani.training.validation import Evaluation


@dataclass(frozen=True)
class EvaluationModel:
    """A model ready for evaluation; `step` is the checkpoint's, or 0 for a pretrained folder."""

    step: int
    config: TrainConfig
    tokenizer: Vocabulary
    forward: ForwardPass
    topology: Topology = ALONE

    @property
    def architecture(self) -> Architecture:
        """The model's architecture."""
        return self.forward.architecture


def load_evaluation_model(path: str | Path, device: torch.device, topology: Topology = ALONE) -> EvaluationModel:
    """Load a checkpoint's model in fp32 onto `device`; the first rank reads the file and broadcasts it."""
    checkpoint = broadcast_from_rank0(topology, lambda: read_checkpoint(path))
    config = settings_of_weights(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    # Evaluate in fp32: `device` may lack the half-precision format of the GPU that trained the model.
    config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, mixed_precision=False))
    architecture = restored_architecture(checkpoint, config)
    forward = build_forward(config, architecture, device)
    weights = whole_weights(checkpoint, config, forward.model.state_dict())
    load_states(dataclasses.replace(checkpoint, states={"model": dict(weights)}), {"model": forward.model})
    return EvaluationModel(checkpoint.step, config, tokenizer, forward, topology)


def load_pretrained_evaluation(
    settings: PretrainedConfig, device: torch.device, topology: Topology = ALONE
) -> EvaluationModel:
    """Load the pretrained folder in `settings` unchanged; all other settings have their defaults."""
    config = resolve(dataclasses.replace(defaults_beside(TrainConfig(pretrained=settings)), pretrained=settings))
    if settings.pretrained is None:
        raise UsageError("--pretrained is missing. Give the folder of a pretrained model.")
    pretrained = read_pretrained(settings.pretrained, settings.revision)
    forward = build_forward(config, pretrained.architecture(config.tuning, settings), device)
    forward.model.load_state_dict(pretrained.weights())
    return EvaluationModel(0, config, pretrained.vocabulary(settings), forward, topology)


def evaluate_manifest(
    trained: EvaluationModel, manifest: str, decode: Decode, named_roots: tuple[str, ...] = ()
) -> Evaluation:
    """Return the model's losses and error rates on a manifest; rejected rows are printed.

    Audio is searched below `named_roots`, not below the folders that the checkpoint names.
    """
    config = trained.config
    forward = trained.forward
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, audio_roots=named_roots))
    rejections = Rejections(None, parse_share(config.data.max_rejected, "--max_rejected"))
    utterances = build_evaluation_set(
        manifest, config, trained.tokenizer, trained.architecture, forward.device, rejections
    )
    return dataclasses.replace(utterances, topology=trained.topology).evaluate(forward, decode)


def recognize_manifest(trained: EvaluationModel, path: str, manifest: Manifest, decoding: DecodingConfig) -> TextPairs:
    """Transcribe a manifest with the model at `path`; return hypotheses and references in the manifest's order.

    The result names the text normalisation of the model's training. Rows of a text-to-text model are read again, with
    its fields.
    """
    fields = fields_of(trained.architecture, trained.config)
    if fields is not None:
        manifest = read_manifest(manifest.path, fields=fields)
    decode = build_decode(decoding, trained.architecture, trained.tokenizer, trained.forward.device)
    evaluation = evaluate_manifest(trained, manifest.path, decode, manifest.named_roots)
    texts = texts_in_order(manifest, evaluation)
    run = CheckpointRun(
        checkpoint=path,
        step=trained.step,
        manifest=manifest.path,
        left_out=len(manifest) + len(manifest.broken) - len(texts),
        loss=evaluation.losses.all,
        ctc_loss=evaluation.losses.ctc,
        attention_loss=evaluation.losses.attention,
        seconds=evaluation.seconds,
        decoding=decoding,
    )
    if fields is None:
        return TextPairs(texts, run, normalizer_of(trained.config))
    # Case and punctuation may be all that the model restores.
    recognized_ids = {text.id for text in texts}
    inputs = tuple(utterance.input_text or "" for utterance in manifest if utterance.id in recognized_ids)
    return TextPairs(texts, run, "none", inputs=inputs)


def texts_in_order(manifest: Manifest, evaluation: Evaluation) -> tuple[ScoredText, ...]:
    """Return references and hypotheses in the manifest's order; evaluation batches are sorted by length."""
    hypotheses = {scored.utterance.row: scored.hypothesis for scored in evaluation.scored}
    return tuple(
        ScoredText(
            utterance.id,
            utterance.text,
            hypotheses[utterance.row],
            utterance.speaker,
            utterance.duration if utterance.input_text is None else None,
            utterance.pattern,
        )
        for utterance in manifest
        # Utterances beyond the limits have no hypothesis; `left_out` counts them.
        if utterance.row in hypotheses
    )


def normalizer_of(config: TrainConfig) -> NormalizerName:
    """Return the text normalisation of the model's training."""
    return "spell" if config.text.digits == "spell" else "konkanivani"


@dataclass(frozen=True)
class ConditionEvaluation:
    """Evaluation of a manifest under one recording condition."""

    condition: Condition
    evaluation: Evaluation


def evaluate_under_conditions(
    trained: EvaluationModel, manifest: Manifest, decode: Decode
) -> Iterator[ConditionEvaluation]:
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
        yield ConditionEvaluation(condition, evaluation)


def recognize_under_conditions(
    trained: EvaluationModel, unchanged: TextPairs, manifest: Manifest, decoding: DecodingConfig
) -> tuple[ConditionTexts, ...]:
    """Return references and hypotheses of a manifest under each of `CONDITIONS`."""
    decode = build_decode(decoding, trained.architecture, trained.tokenizer, trained.forward.device)
    results = []
    for under in evaluate_under_conditions(trained, manifest, decode):
        pairs = TextPairs(texts_in_order(manifest, under.evaluation), unchanged.source, unchanged.normalizer)
        results.append(ConditionTexts(under.condition.name, under.condition.description, pairs))
    return tuple(results)
