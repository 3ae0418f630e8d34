"""Gradient of a global batch by captured micro-batches: each shape is captured once, then replayed.

On a GPU the host needs some 30 microseconds per kernel, a small model's kernels take less, and the GPU waits. A replay
launches all kernels of a micro-batch at once. The front end, SpecAugment and CTC stay eager, before and between graphs.

A replay adds to gradients that stay allocated, as do the static inputs, CTC's tensors between two graphs and the summed
losses. Nothing else of a graph is read after its replay, so all graphs share one memory pool.

B batch, T feature frames, F mel bins, U tokens.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from konkanivani.command_line import is_out_of_memory
from konkanivani.console import count
from konkanivani.data.batching import Batch
from konkanivani.data.shape_grid import GridShape, ShapeGrid
from konkanivani.lengths import SAMPLE_RATE, BatchLengths
from konkanivani.memory.plan import RecomputedBlocks
from konkanivani.memory.recovery import release_memory
from konkanivani.models.asr import LossCounts, LossSums, at_least_float32
from konkanivani.ops.capturable import BetweenGraphs, Capture
from konkanivani.ops.graph_backends import CaptureError, GraphBackend
from konkanivani.randomness import MaskCounters, counted_dropout, derive_seed
from konkanivani.training.gradient import drop_gradient, local_gradient
from konkanivani.training.step import ForwardPass, GradientTask, StepGradient, StepParts, forward_and_backward

NO_SHAPES = ShapeGrid(())
MEASURED_STEPS = 3
BUSY_SHARE = 0.6  # share of the time in which a kernel runs; above it, replays save little


class GraphMemoryError(Exception):
    """Memory ran out while graphs were captured or replayed."""

    # Not a RuntimeError: OomRetry would retry with smaller micro-batches.


@dataclass(frozen=True)
class GraphKey:
    """Everything that a captured micro-batch depends on, besides the trained parameters."""

    shape: GridShape
    recompute: RecomputedBlocks
    chunk_frames: int


@dataclass(frozen=True)
class StaticInputs:
    """Inputs of a captured micro-batch, at addresses that stay; satisfies `Targets`.

    Args:
        features: (B, T, F).
        feature_lengths: (B,) on the device; on the host if all utterances have the same length always.
        decoder_tokens, targets: (B, U + 1), as in `Batch`.
        row_seeds: (B,), of the dropout masks.
        divisors: (2,), the tokens and utterances of the global batch.
    """

    features: torch.Tensor
    feature_lengths: BatchLengths
    decoder_tokens: torch.Tensor
    targets: torch.Tensor
    row_seeds: torch.Tensor
    divisors: torch.Tensor
    # Targets of CTC, which runs between the graphs: not part of any graph.
    tokens: torch.Tensor
    token_lengths: tuple[int, ...] = ()

    @property
    def counts(self) -> LossCounts:
        """Divisors of the losses, on the device."""
        return LossCounts(self.divisors[0], self.divisors[1])


class CapturedMicroBatch:
    """Forward and backward pass of one shape: static inputs, graphs, and the summed losses that they write."""

    def __init__(self, parts: StepParts, key: GraphKey, backend: GraphBackend) -> None:
        self.key = key
        self.inputs = static_inputs(parts, key.shape)
        self._capture = Capture(backend)
        self._sums: LossSums = ()

    def capture(self, parts: StepParts) -> None:
        """Capture; the gradient of meaningless inputs may be added to `.grad`."""
        with self._capture.recording():
            self._sums = run_network(parts, self.inputs, self.key.recompute)

    def replay(self, parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        """Add the scaled gradient of a batch to the parameters' `.grad`; return its summed losses."""
        batch = batch.to(parts.forward.device)
        self.fill(parts, batch, counts)
        encoded_length = parts.architecture.framing.encoded_length
        encoded_lengths = tuple(encoded_length(samples) for samples in batch.sample_lengths)

        def compute(loss: BetweenGraphs) -> None:
            loss.compute(encoded_lengths, batch.tokens, batch.token_lengths)

        self._capture.replay(compute)
        parts.monitor.end_phase("forward")
        parts.monitor.end_phase("backward")
        # Cloned: the next replay of this shape overwrites them.
        return tuple(summed.clone() for summed in self._sums)

    def fill(self, parts: StepParts, batch: Batch, counts: LossCounts) -> None:
        """Copy the features and tokens of a batch to the static inputs, padded to their shape.

        Dummy utterances have silence and no targets, so that they add nothing to a loss or a gradient.
        """
        inputs = self.inputs
        front_end = parts.forward.front_end
        features, feature_lengths = front_end(batch.waveforms, batch.sample_lengths, batch.augment_seeds)
        _pad_into(inputs.features, features, 0)
        _pad_into(inputs.decoder_tokens, batch.decoder_tokens, 0)
        _pad_into(inputs.targets, batch.targets, -1)
        dummies = len(inputs.features) - batch.size
        if isinstance(inputs.feature_lengths, torch.Tensor):
            # Of full length: attention without any frame would give NaN, and 0 times NaN a gradient of NaN.
            feature_lengths = (*feature_lengths, *[inputs.features.shape[1]] * dummies)
            inputs.feature_lengths.copy_(torch.tensor(feature_lengths), non_blocking=True)
        inputs.row_seeds.copy_(torch.tensor(row_seeds(batch) + [0] * dummies), non_blocking=True)
        inputs.divisors.copy_(torch.tensor([counts.tokens, counts.utterances]), non_blocking=True)


def _pad_into(buffer: torch.Tensor, values: torch.Tensor, padding: int) -> None:
    """Copy values (B, N, …) to the start of buffer (R, M, …), and fill the rest."""
    rows, length = values.shape[:2]
    buffer[:rows, :length].copy_(values)
    buffer[:rows, length:].fill_(padding)
    buffer[rows:].fill_(padding)


def static_inputs(parts: StepParts, shape: GridShape) -> StaticInputs:
    """Return inputs of this shape, filled with silence and one token per utterance."""
    forward = parts.forward
    device = forward.device
    weight = next(forward.model.parameters())
    samples = (shape.samples,) * shape.utterances
    # The front end's dtype, and the number of frames that an utterance of this length has.
    silence = torch.zeros(shape.utterances, shape.samples, dtype=weight.dtype, device=device)
    features, feature_lengths = forward.front_end(silence, samples, None)
    framing = parts.architecture.framing
    # A window of Whisper has the same length for any speech, and needs no mask.
    is_fixed = framing.feature_length(1) == framing.feature_length(SAMPLE_RATE)
    lengths = feature_lengths if is_fixed else torch.tensor(feature_lengths, device=device)
    tokens = torch.zeros(shape.utterances, shape.positions, dtype=torch.long, device=device)
    return StaticInputs(
        features=torch.zeros_like(features),
        feature_lengths=lengths,
        decoder_tokens=tokens,
        targets=torch.zeros_like(tokens),
        row_seeds=torch.zeros(shape.utterances, dtype=torch.long, device=device),
        divisors=torch.ones(2, dtype=at_least_float32(weight), device=device),
        tokens=tokens[:, 1:],
    )


def run_network(parts: StepParts, inputs: StaticInputs, recompute: RecomputedBlocks) -> LossSums:
    """Add the scaled gradient of static inputs to the parameters' `.grad`; return their summed losses."""
    with counted_dropout(MaskCounters(inputs.row_seeds)):
        sums = _loss_sums(parts.forward, inputs, recompute)
    parts.scaler.scale(parts.forward.objective.total(sums, inputs.counts)).backward()
    return tuple(summed.detach() for summed in sums)


def _loss_sums(forward: ForwardPass, inputs: StaticInputs, recompute: RecomputedBlocks) -> LossSums:
    """Return the summed losses, as `ForwardPass` does after its front end."""
    model = forward.model
    with forward.autocast():
        output = model(inputs.features, inputs.feature_lengths, inputs.decoder_tokens, recompute, forward.chunk_frames)
        return model.loss_sums(output, inputs, forward.objective, forward.chunk_frames)


def row_seeds(batch: Batch) -> list[int]:
    """Return the seeds of the utterances' dropout masks in this step, whatever the micro-batch."""
    # `seed_step` has set the default generator to the step's seed.
    step_seed = torch.initial_seed()
    return [derive_seed(step_seed, name) for name in batch.utterance_ids]


class GraphedGradient:
    """`ComputeGradient` of a single process that replays micro-batches of the grid's shapes.

    If memory runs out or a capture fails, all graphs are dropped, and the step is repeated without graphs, with the
    same dropout masks. Later steps run without graphs until the set of trained parameters changes (--freeze_steps).
    """

    def __init__(self, backend: GraphBackend, grid: ShapeGrid = NO_SHAPES, is_measured_first: bool = False) -> None:
        """`is_measured_first`: capture only if the first steps show that the device waits for the host."""
        self.grid = grid
        self.is_active = True
        self._is_measured_first = is_measured_first
        self._shares: list[float] | None = None
        self._backend = backend
        self._captured: dict[GraphKey, CapturedMicroBatch] = {}
        self._trained: tuple[bool, ...] | None = None

    @property
    def captured_shapes(self) -> tuple[GridShape, ...]:
        """Shapes with a graph."""
        return tuple(key.shape for key in self._captured)

    def __call__(self, task: GradientTask) -> StepGradient | None:
        """Return the gradient of a global batch; see ComputeGradient."""
        parts = task.parts
        trained = tuple(parameter.requires_grad for parameter in parts.model.parameters())
        if trained != self._trained:
            # A parameter without a gradient during the capture would never be updated.
            self.drop(parts)
            self._trained = trained
            self.is_active = True
            self._shares = [] if self._is_measured_first else None  # another step, to be measured again
        eagerly = dataclasses.replace(task, forward_and_backward=self.run_eagerly)
        if not self.is_active:
            return local_gradient(eagerly)
        if self._shares is not None:
            return self._measure(eagerly, self._shares)
        try:
            if not self._captured and self.grid.shapes:
                self._capture_all(task)
            if task.is_interrupted():
                return None
            return local_gradient(dataclasses.replace(task, forward_and_backward=self.run))
        except (GraphMemoryError, CaptureError) as error:
            self.drop(parts)
            self.is_active = False
            tqdm.write(f"CUDA graphs: dropped, training continues without them, with the same result. {error}")
            drop_gradient(parts)
            return local_gradient(eagerly)

    def _measure(self, task: GradientTask, shares: list[float]) -> StepGradient | None:
        """Return the gradient without graphs; after some measured steps, decide whether to capture."""
        results = []
        share = self._backend.busy_share(lambda: results.append(local_gradient(task)))
        shares.append(share)
        if len(shares) == 1 + MEASURED_STEPS:
            # The first step selects kernels.
            mean = statistics.mean(shares[1:])
            self._shares = None
            self.is_active = mean < BUSY_SHARE
            if not self.is_active:
                tqdm.write(f"CUDA graphs: not used, since kernels run {mean:.0%} of the time without them.")
        return results[0]

    def run(self, parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        """Add the scaled gradient of a micro-batch, by its graphs if its shape was captured; see ForwardAndBackward."""
        shape = self.grid.shape_of(batch)
        captured = None if shape is None else self._captured.get(graph_key(parts, shape))
        with graph_memory():
            if captured is None:
                return self.run_eagerly(parts, batch, counts)
            return captured.replay(parts, batch, counts)

    def run_eagerly(self, parts: StepParts, batch: Batch, counts: LossCounts) -> LossSums:
        """Add the scaled gradient of a micro-batch without graphs, with the same dropout masks."""
        seeds = torch.tensor(row_seeds(batch)).to(parts.forward.device, non_blocking=True)
        with counted_dropout(MaskCounters(seeds)):
            return forward_and_backward(parts, batch, counts)

    def drop(self, parts: StepParts) -> None:
        """Drop all graphs, their memory, and the gradients that they add to."""
        # All or none: on a GPU, resetting one graph frees cuBLAS's workspace, which the others use (pytorch#193402).
        self._captured.clear()
        self._backend.drop()
        parts.optimizer.keeps_gradients = False
        parts.optimizer.zero_grad()
        release_memory()

    def _capture_all(self, task: GradientTask) -> None:
        """Capture all shapes, the largest first: the pool of the others then fits into its memory."""
        started = time.monotonic()
        parts = task.parts
        parts.model.train()
        parts.forward.refresh_weights()
        keys = [graph_key(parts, shape) for shape in self.grid.shapes]
        keys = [key for key in keys if is_capturable(parts, key)]
        keys.sort(key=lambda key: key.shape.samples * key.shape.utterances, reverse=True)
        with graph_memory(), capture_errors():
            if keys:
                self._allocate_gradients(parts, keys)
            for key in keys:
                if task.is_interrupted():
                    break
                captured = CapturedMicroBatch(parts, key, self._backend)
                addresses = gradient_addresses(parts)
                captured.capture(parts)
                if gradient_addresses(parts) != addresses:
                    raise CaptureError("a gradient is not accumulated in place: a replay would not add to it")
                self._captured[key] = captured
        parts.optimizer.zero_grad()
        seconds = time.monotonic() - started
        shapes = count(len(self._captured), "shape")
        tqdm.write(f"CUDA graphs: {shapes} captured in {seconds:.1f} s; micro-batches of other shapes run without.")

    def _allocate_gradients(self, parts: StepParts, keys: list[GraphKey]) -> None:
        """Give each parameter that gets a gradient one that stays, and warm up with the largest shape."""
        parts.optimizer.zero_grad()
        parts.scaler.scale(torch.zeros((), device=parts.forward.device))  # creates the scale, before the capture
        # By the smallest shape: which parameters get a gradient does not depend on it.
        _run_uncaptured(parts, keys[-1])
        release_memory()
        parts.optimizer.keeps_gradients = True
        self._backend.warm_up(lambda: _run_uncaptured(parts, keys[0]))
        parts.optimizer.zero_grad()


def _run_uncaptured(parts: StepParts, key: GraphKey) -> None:
    """Run the operators of a shape once, as they will be captured."""
    capture = Capture(_Uncaptured())
    with capture.recording():
        run_network(parts, static_inputs(parts, key.shape), key.recompute)


class _Uncaptured:
    """`GraphBackend` that only runs."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def begin(self) -> None:
        pass

    def end(self) -> Callable[[], None]:
        return lambda: None

    def abort(self) -> None:
        pass

    def drop(self) -> None:
        pass

    def busy_share(self, run: Callable[[], None]) -> float:
        run()
        return 1.0


def graph_key(parts: StepParts, shape: GridShape) -> GraphKey:
    """Return the key of a shape's graph under the current plan."""
    forward = parts.forward
    recompute = forward.recompute(shape.samples / SAMPLE_RATE)
    if not isinstance(recompute, RecomputedBlocks):
        raise CaptureError("only RecomputedBlocks can be captured")
    return GraphKey(shape, recompute, forward.chunk_frames)


def is_capturable(parts: StepParts, key: GraphKey) -> bool:
    """Return whether a shape is computed in one piece: CTC and cross entropy in chunks need lengths on the host."""
    frames = parts.architecture.framing.encoded_length(key.shape.samples)
    return max(frames, key.shape.positions) <= key.chunk_frames


def gradient_addresses(parts: StepParts) -> list[int | None]:
    """Return the addresses of all gradients, None for parameters without one."""
    gradients = (parameter.grad for parameter in parts.model.parameters())
    return [None if gradient is None else gradient.data_ptr() for gradient in gradients]


@contextlib.contextmanager
def graph_memory() -> Iterator[None]:
    """Turn an out-of-memory error of the block into a `GraphMemoryError`."""
    try:
        yield
        return
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error) or "the system refused to allocate more").splitlines()[0]
    # Outside of the handler: the traceback would keep the tensors of the failed pass alive.
    raise GraphMemoryError(f"Out of memory: {reason}")


@contextlib.contextmanager
def capture_errors() -> Iterator[None]:
    """Turn errors of the block into a `CaptureError`: operators that CUDA cannot capture raise a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CaptureError) or is_out_of_memory(error):
            raise
        raise CaptureError(str(error).splitlines()[0]) from error
