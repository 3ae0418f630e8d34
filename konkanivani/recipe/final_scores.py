"""Results of a finished run: error rates on the test manifest, peak memory per phase, and one line of JSON."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from konkanivani.checkpoints.checkpointer import BEST, LAST
from konkanivani.config import AUTO, DecodingConfig, DecodingMethod, PretrainedConfig, TrainConfig
from konkanivani.console import peak_text, say, table_lines
from konkanivani.data.manifest import read_manifest
from konkanivani.decoding.decode import build_decode, greedy_decode, ways_to_decode
from konkanivani.distributed import Topology
from konkanivani.errors import CheckpointError
from konkanivani.inference.speech_model import read_pretrained
from konkanivani.memory.monitor import PhaseMemory
from konkanivani.models.asr import frozen_count, parameter_count
from konkanivani.recipe.evaluation_model import (
    EvaluationModel,
    evaluate_manifest,
    evaluate_under_conditions,
    load_evaluation_model,
    load_pretrained_evaluation,
)
from konkanivani.scoring.metrics import ErrorRates
from konkanivani.training.run import Run
from konkanivani.training.validation import Evaluation, rates_over


def score_test(run: Run, trained: EvaluationModel | None) -> dict[str, Evaluation | None]:
    """Score the test manifest with greedy decoding and with --test_decode; each rank transcribes its share.

    Values are None if there is no test manifest.
    """
    data = run.config.data
    best = ways_to_decode(run.step.architecture)[-1]
    method = best if data.test_decode == AUTO else data.test_decode
    methods: list[DecodingMethod] = ["greedy"] if method == "greedy" else ["greedy", method]
    if trained is None or data.test_manifest is None:
        return dict.fromkeys(methods)
    device = trained.forward.device
    decoders = [
        build_decode(DecodingConfig(decoding_method), trained.architecture, trained.tokenizer, device)
        for decoding_method in methods
    ]
    evaluations = [evaluate_manifest(trained, data.test_manifest, decode, data.audio_roots) for decode in decoders]
    return dict(zip(methods, evaluations, strict=True))


def score_conditions(run: Run, trained: EvaluationModel | None) -> dict[str, ErrorRates]:
    """Return greedy error rates on the test manifest by recording condition; empty without --conditions."""
    data = run.config.data
    if trained is None or not data.conditions or data.test_manifest is None:
        return {}
    decode = greedy_decode(trained.architecture, trained.tokenizer)
    manifest = read_manifest(data.test_manifest, data.audio_roots)
    return {
        under.condition.name: under.evaluation.rates for under in evaluate_under_conditions(trained, manifest, decode)
    }


@dataclass(frozen=True)
class Forgetting:
    """Error rates on --forgetting_manifest: by the pretrained folder and by the run's best checkpoint."""

    before: ErrorRates
    after: ErrorRates

    def sentence(self, manifest: str) -> str:
        """Return a sentence with both error rates for the user."""
        return (
            f"On {manifest}, before and after training: WER {self.before.wer:.1%} and {self.after.wer:.1%}, "
            f"CER {self.before.cer:.1%} and {self.after.cer:.1%}."
        )


def score_forgetting(
    config: TrainConfig, checkpoint: Path, topology: Topology, device: torch.device
) -> Forgetting | None:
    """Score --forgetting_manifest with greedy decoding before and after training; None if it is not given."""
    settings = config.pretrained
    manifest = settings.forgetting_manifest
    # The rules of the flags reject --forgetting_manifest without --pretrained.
    if manifest is None or settings.pretrained is None:
        return None
    pretrained = read_pretrained(settings.pretrained, settings.revision)
    # The pretrained model is scored at its own audio context, not at the context of this run.
    settings = dataclasses.replace(
        settings, language=settings.forgetting_language or settings.language, audio_context=None
    )
    tokenizer = pretrained.vocabulary(settings)
    roots = config.data.audio_roots
    before = _old_language_rates(load_pretrained_evaluation(settings, device, topology), manifest, roots)
    # Both models get the language and task tokens of --forgetting_language, not of the training.
    trained = dataclasses.replace(load_evaluation_model(checkpoint, device, topology), tokenizer=tokenizer)
    forgetting = Forgetting(before, _old_language_rates(trained, manifest, roots))
    say(forgetting.sentence(manifest))
    return forgetting


@dataclass(frozen=True)
class Results:
    """Scores of a finished run.

    Args:
        test: by decoding method; values are None without a test manifest.
        conditions: by recording condition; empty without --conditions.
    """

    test: dict[str, Evaluation | None]
    conditions: dict[str, ErrorRates]
    forgetting: Forgetting | None


def evaluation_device(run: Run) -> torch.device:
    """Return the device that evaluates the whole model: the CPU if its weights were offloaded and do not fit."""
    step = run.step
    weights = 4 * (parameter_count(step.model) + frozen_count(step.model))  # bytes in fp32
    if run.plan is None or run.plan.fits_whole_model(weights):
        return step.forward.device
    say(f"Scoring on the CPU: {peak_text(weights)} of weights do not fit on the GPU. On a larger one, use evaluate.")
    return torch.device("cpu")


def _score_test_manifest(
    run: Run, checkpoint: Path, device: torch.device
) -> tuple[dict[str, Evaluation | None], dict[str, ErrorRates]]:
    trained = None
    if run.config.data.test_manifest is not None:
        trained = load_evaluation_model(checkpoint, device, run.topology)
    return score_test(run, trained), score_conditions(run, trained)


def score_run(run: Run, checkpoint: Path) -> Results:
    """Score the run's best checkpoint on the manifests for it."""
    config = run.config
    if config.data.test_manifest is None and config.pretrained.forgetting_manifest is None:
        return Results(score_test(run, None), {}, None)
    device = evaluation_device(run)
    # Its model is freed before `score_forgetting` loads two more.
    test, conditions = _score_test_manifest(run, checkpoint, device)
    return Results(test, conditions, score_forgetting(config, checkpoint, run.topology, device))


def _old_language_rates(trained: EvaluationModel, manifest: str, named_roots: tuple[str, ...]) -> ErrorRates:
    decode = greedy_decode(trained.architecture, trained.tokenizer)
    return evaluate_manifest(trained, manifest, decode, named_roots).rates


def best_checkpoint(directory: str | Path) -> Path:
    """Return the folder's best checkpoint by validation, or the last one if nothing was validated."""
    best = Path(directory) / BEST
    return best if best.is_file() else Path(directory) / LAST


def choose_checkpoint(checkpoint: str | None, pretrained: PretrainedConfig) -> Path:
    """Return the given checkpoint, else the best one in checkpoints/, which need not exist with a pretrained model."""
    if checkpoint:
        return Path(checkpoint)
    best = best_checkpoint("checkpoints")
    if pretrained.pretrained is None and not best.is_file():
        raise CheckpointError(
            "There is no checkpoint in checkpoints/. Give one with --checkpoint, or train a model first."
        )
    return best


def memory_table(run: Run) -> str:
    """Return a table of peak memory, planned peak and time per phase, with the number of out-of-memory retries."""
    monitor = run.monitor
    phases = monitor.report_run()
    clearing = monitor.report_clearing_of_run()
    seconds = [monitor.seconds_of(phase.phase) for phase in phases]
    rows = list(zip(*_columns(phases, seconds), strict=True))
    lines = ["Peak memory (MiB) and time per phase:", *(f"  {line}" for line in table_lines(rows))]
    if not run.topology.is_single_process:
        peaks = ", ".join(f"{peak:.0f}" for peak in run.rank_peaks_mib())
        lines.append(f"The phases are those of rank 0; peaks of all ranks: {peaks}.")
    lines.append(f"Steps retried with smaller micro-batches after running out of memory: {run.state.splits}.")
    if clearing is not None and clearing.count:
        lines.append(f"Cache releases: {clearing.count}, in {clearing.seconds:.2f} s.")
    return "\n".join(lines)


def _columns(phases: tuple[PhaseMemory, ...], seconds: list[float]) -> Iterator[list[str]]:
    """Yield the table's columns, title first; columns without values on this device are omitted."""
    yield ["phase", *(phase.phase for phase in phases)]
    columns: dict[str, Sequence[float | None]] = {
        "planned": [phase.planned_mib for phase in phases],
        "peak": [phase.peak_mib for phase in phases],
        "fragmentation": [phase.fragmentation_mib for phase in phases],
        "allocator retries": [phase.allocator_retries for phase in phases],
    }
    for title, values in columns.items():
        if any(value is not None for value in values):
            yield [title, *("-" if value is None else f"{value:.0f}" for value in values)]
    yield ["seconds", *(f"{value:.1f}" for value in seconds)]
    yield ["share", *(f"{value / sum(seconds):.1%}" for value in seconds)]


def summary_line(run: Run, results: Results, checkpoint: str, tensorboard: str) -> str:
    """Return the results as one line of JSON; error rates are shares, null if there was no test or validation."""
    rates: dict[str, float | None] = {}
    for decode, test in results.test.items():
        by = "" if decode == "greedy" else f"_{decode}"
        rates[f"test_wer{by}"] = test.rates.wer if test else None
        rates[f"test_cer{by}"] = test.rates.cer if test else None
        if test is None:
            continue
        patterns = {scored_text.utterance.pattern for scored_text in test.scored} - {""}
        for pattern in sorted(patterns):
            scored = [scored_text for scored_text in test.scored if scored_text.utterance.pattern == pattern]
            rates[f"test_cer_{pattern}_patterns{by}"] = rates_over(scored).cer
    if results.forgetting is not None:
        for when, scores in (("before", results.forgetting.before), ("after", results.forgetting.after)):
            rates |= {f"forgetting_wer_{when}": scores.wer, f"forgetting_cer_{when}": scores.cer}
    conditions = {
        name: {"wer": json_value(scores.wer), "cer": json_value(scores.cer)}
        for name, scores in results.conditions.items()
    }
    summary = {
        **rates,
        **({"conditions": conditions} if conditions else {}),
        "parameters": parameter_count(run.step.model) + frozen_count(run.step.model),
        "trained_parameters": parameter_count(run.step.model),
        "steps": run.state.step,
        "epochs": run.state.epochs_finished,
        "best_valid_score": run.state.best_score if run.data.validation else None,
        "audio_seconds_per_second": run.logs.progress.audio_seconds_per_second(),
        "waiting_for_data_share": run.logs.progress.waiting_share(),
        "peak_memory_mib": run.monitor.overall_peak_mib(),
        "memory_splits": run.state.splits,
        "allocator_retries": allocator_retries(run.monitor.report_run()),
        "checkpoint": checkpoint,
        "tensorboard": tensorboard,
    }
    return json.dumps({name: json_value(value) for name, value in summary.items()}, ensure_ascii=False, allow_nan=False)


def allocator_retries(phases: tuple[PhaseMemory, ...]) -> int | None:
    """Return how often CUDA's allocator had to flush its cache to get memory; None on a CPU."""
    counts = [phase.allocator_retries for phase in phases if phase.allocator_retries is not None]
    return sum(counts) if counts else None


def json_value(value: object) -> object:
    """Round floats to four decimal places; map non-finite floats, which JSON does not have, to null."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
