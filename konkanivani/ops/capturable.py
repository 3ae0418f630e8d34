"""Parts of a step that can be captured once and replayed: dropout without a generator, CTC between two graphs.

A CUDA graph repeats kernels with the arguments and addresses of its capture. So nothing of the data may go through
Python: masks of dropout are a hash of tensors (`MaskCounters`), and CTC, whose kernel takes lengths from the host, runs
between two graphs. The backends of graph_backends.py capture and replay.

B batch, T frames or tokens, T' encoder frames, U tokens, D model width, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from konkanivani.lengths import CHUNK_FRAMES, BatchLengths, Lengths
from konkanivani.models.asr import Head, KonkaniVaniASR, SpeechNetwork, ctc_log_probabilities, ctc_loss_sum
from konkanivani.models.conformer import DROPOUT_LEVELS, Dropout
from konkanivani.models.twin import replace_modules
from konkanivani.ops.chunks import ChunkedLosses
from konkanivani.ops.fused import MaskedDropout, add_masked, masked
from konkanivani.ops.graph_backends import GraphBackend, Replay
from konkanivani.ops.packing import PackedEncoder
from konkanivani.randomness import mask_counters


class BetweenGraphs:
    """A CTC loss that is computed between two graphs.

    The graph before it writes `log_probabilities` (T', B, V), the one after it reads the summed loss `value` and its
    gradient by the log probabilities.
    """

    def __init__(self, log_probabilities: torch.Tensor) -> None:
        self.log_probabilities = log_probabilities
        self.value = log_probabilities.new_zeros(())
        self.gradient = torch.zeros_like(log_probabilities)

    def compute(self, encoded_lengths: Lengths, tokens: torch.Tensor, token_lengths: Lengths) -> None:
        """Compute loss and gradient against tokens (B', U); rows beyond B' are padding."""
        rows = len(encoded_lengths)
        frames = max(encoded_lengths)
        with torch.enable_grad():
            log_probabilities = self.log_probabilities[:frames, :rows].detach().requires_grad_()
            loss = ctc_loss_sum(log_probabilities, encoded_lengths, tokens, token_lengths)
            (gradient,) = torch.autograd.grad(loss, log_probabilities)
        with torch.no_grad():
            self.value.copy_(loss)
            self.gradient.zero_()
            self.gradient[:frames, :rows].copy_(gradient)


class Capture:
    """The graphs of one micro-batch, in the order in which they are replayed, and the losses between them."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self.graphs: list[Replay] = []
        self.losses: list[BetweenGraphs] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Capture the operators of the block."""
        with self.in_place():
            try:
                self._backend.begin()
                yield
                self.graphs.append(self._backend.end())
            except BaseException:
                self._backend.abort()
                raise

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give CTC losses of the block to this capture, without capturing anything."""
        token = _CAPTURE.set(self)
        try:
            yield
        finally:
            _CAPTURE.reset(token)

    def loss_between(self, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Complete a graph with these log probabilities (T', B, V), and start the next one with their loss."""
        self.graphs.append(self._backend.end())
        loss = BetweenGraphs(log_probabilities.detach())
        self.losses.append(loss)
        self._backend.begin()
        return _PrecomputedLoss.apply(log_probabilities, loss.value, loss.gradient)

    def replay(self, compute: Callable[[BetweenGraphs], None]) -> None:
        """Replay all graphs, with `compute` for the losses between them."""
        for number, replay in enumerate(self.graphs):
            replay()
            if number < len(self.losses):
                compute(self.losses[number])


_CAPTURE: ContextVar[Capture | None] = ContextVar("capture", default=None)


class _PrecomputedLoss(torch.autograd.Function):
    """Loss whose value and gradient are computed between two graphs."""

    @staticmethod
    def forward(ctx, log_probabilities: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx, grad_value: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # As PyTorch's CTC kernel does: the gradient of the sum, times the sum's gradient.
        return gradient * grad_value, None, None


class CapturableLosses(ChunkedLosses):
    """Twin of `ChunkedLosses`, whose CTC runs between two graphs while a step is captured."""

    def ctc(
        self,
        encoded: torch.Tensor,
        head: Head,
        encoded_lengths: BatchLengths,
        tokens: torch.Tensor,
        token_lengths: Lengths,
        chunk_frames: int = CHUNK_FRAMES,
    ) -> torch.Tensor:
        capture = _CAPTURE.get()
        if capture is None:
            return super().ctc(encoded, head, encoded_lengths, tokens, token_lengths, chunk_frames)
        return capture.loss_between(ctc_log_probabilities(head(encoded)))


class CountedDropout(MaskedDropout):
    """Twin of `Dropout`, whose masks are drawn by `MaskCounters` on any device, if there are any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self._mask(x)
        return super().forward(x) if mask is None else masked(x, mask, 1 / (1 - self.p))

    def add_residual(self, x: torch.Tensor, branch: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return x + weight * dropout(branch)."""
        mask = self._mask(branch)
        if mask is None:
            return super().add_residual(x, branch, weight)
        return add_masked(x, branch, mask, weight / (1 - self.p))

    def _mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return a bool mask of x (B, T, D), False with probability `p` rounded to 1 / 65,536, or None."""
        counters = mask_counters()
        if not self.training or self.p == 0 or counters is None:
            return None
        bits = counters.draw_bits(x.shape[1], x.shape[2])
        return bits >= round(self.p * DROPOUT_LEVELS) - DROPOUT_LEVELS // 2


def make_capturable(model: SpeechNetwork) -> None:
    """Replace modules of an optimized model by twins that can be captured."""
    replace_modules(model, {Dropout: CountedDropout, MaskedDropout: CountedDropout})
    if isinstance(model, KonkaniVaniASR):
        model.losses = CapturableLosses()
    # Packing launches one kernel per utterance.
    if isinstance(model.encoder, PackedEncoder):
        model.encoder.packs = False
