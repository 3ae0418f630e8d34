"""CTC in chunks against PyTorch's kernel: loss and every gradient to 1e-9 in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from konkanivani.lengths import Lengths, ctc_frames_needed
from konkanivani.ops import chunks as ctc
from konkanivani.ops.chunks import ChunkedLosses, ctc_chunk, interleave_blanks, log_skips, long_ctc_losses
from tests.invariants.parts import relative_difference

BOUND = 1e-9
WIDTH, VOCABULARY = 6, 5  # few tokens, so that many are repeated
ONE_PIECE = 10**6


def problem(seed: int, frames: Lengths, token_lengths: Lengths) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    """Return hidden states (B, T', D), a head with steep logits, and tokens (B, U)."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator))
    encoded = torch.randn(len(frames), max(frames), WIDTH, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, VOCABULARY, (len(frames), max(token_lengths)), generator=generator)
    return encoded, head, tokens


def loss_and_gradients(
    encoded: torch.Tensor,
    head: torch.nn.Linear,
    frames: Lengths,
    tokens: torch.Tensor,
    token_lengths: Lengths,
    chunk_frames: int,
) -> list[torch.Tensor]:
    """Return the loss and its gradients for the hidden states and the head."""
    encoded = encoded.clone().requires_grad_()
    head.zero_grad()
    loss = ChunkedLosses().ctc(encoded, head, frames, tokens, token_lengths, chunk_frames)
    (3 * loss).backward()
    return [loss.detach(), encoded.grad, head.weight.grad.clone(), head.bias.grad.clone()]


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(relative_difference(mine, theirs) for mine, theirs in zip(one, other, strict=True))


CASES = {
    "one utterance": ((30,), (7,)),
    "different lengths": ((30, 21, 9, 2), (7, 5, 3, 1)),
    "empty transcript": ((12, 9), (3, 0)),
    "only empty transcripts": ((12, 1), (0, 0)),
    "one frame": ((1,), (1,)),
    "shortest first": ((5, 40), (2, 9)),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_pytorch_ctc(case):
    frames, token_lengths = CASES[case]
    utterances = problem(0, frames, token_lengths)
    encoded, head, tokens = utterances
    one_piece = loss_and_gradients(encoded, head, frames, tokens, token_lengths, ONE_PIECE)
    chunked = loss_and_gradients(encoded, head, frames, tokens, token_lengths, 0)
    assert torch.isfinite(one_piece[0]) and largest_difference(one_piece, chunked) < BOUND
    for row, length in enumerate(frames):
        assert chunked[1][row, length:].abs().sum() == 0


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 1, 1], [2, 2, 1, 1, 3], [4]])
def test_minimum_number_of_frames_gives_finite_loss(tokens):
    frames = ctc_frames_needed(tokens)
    encoded, head, _ = problem(1, (frames,), (len(tokens),))
    arguments = encoded, head, (frames,), torch.tensor([tokens]), (len(tokens),)
    chunked = loss_and_gradients(*arguments, 0)
    assert torch.isfinite(chunked[0]) and largest_difference(loss_and_gradients(*arguments, ONE_PIECE), chunked) < BOUND


def test_one_frame_too_few_gives_infinite_loss_as_in_pytorch():
    tokens = [1, 1, 2]
    encoded, head, _ = problem(2, (3,), (3,))
    for chunk_frames in (0, ONE_PIECE):
        loss = ChunkedLosses().ctc(encoded, head, (3,), torch.tensor([tokens]), (3,), chunk_frames)
        assert loss == math.inf


@st.composite
def batches(draw: st.DrawFn) -> tuple[Lengths, list[list[int]]]:
    """Draw frames and tokens of one to four utterances, each with enough frames for CTC."""
    tokens = draw(st.lists(st.lists(st.integers(1, VOCABULARY - 1), max_size=8), min_size=1, max_size=4))
    spare = st.integers(0, 20)
    return tuple(max(1, ctc_frames_needed(row) + draw(spare)) for row in tokens), tokens


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 1000))
def test_random_batch_equals_pytorch_ctc(batch, seed):
    frames, rows = batch
    token_lengths = tuple(map(len, rows))
    encoded, head, _ = problem(seed, frames, token_lengths)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    arguments = encoded, head, frames, tokens, token_lengths
    assert largest_difference(loss_and_gradients(*arguments, ONE_PIECE), loss_and_gradients(*arguments, 0)) < BOUND


def test_negative_control_skips_between_equal_tokens_change_loss(monkeypatch):
    encoded, head, _ = problem(3, (30,), (4,))
    arguments = encoded, head, (30,), torch.tensor([[1, 1, 2, 2]]), (4,)
    one_piece = loss_and_gradients(*arguments, ONE_PIECE)
    assert largest_difference(one_piece, loss_and_gradients(*arguments, 0)) < BOUND
    monkeypatch.setattr(ctc, "log_skips", lambda states: log_skips(states * torch.arange(9)))
    assert largest_difference(one_piece, loss_and_gradients(*arguments, 0)) > 1e-3


def test_negative_control_padded_lengths_change_gradient():
    frames, token_lengths = (30, 21), (7, 5)
    encoded, head, tokens = problem(4, frames, token_lengths)
    right = loss_and_gradients(encoded, head, frames, tokens, token_lengths, 0)
    wrong = loss_and_gradients(encoded, head, (30, 30), tokens, token_lengths, 0)
    assert largest_difference(right, wrong) > 1e-3


def test_float32_gradient_of_long_audio_is_more_exact_than_pytorch():
    """For 4,000 frames of float32 logits, compare the gradient with PyTorch's float64 kernel."""
    frames, token_lengths = (4000,), (500,)
    encoded, head, tokens = problem(5, frames, token_lengths)
    exact = loss_and_gradients(encoded, head, frames, tokens, token_lengths, ONE_PIECE)
    single = encoded.float(), head.float(), frames, tokens, token_lengths
    ours, theirs = loss_and_gradients(*single, 0), loss_and_gradients(*single, ONE_PIECE)
    assert ours[0].dtype == torch.float32
    assert relative_difference(exact[1], ours[1].double()) < 1e-5 < relative_difference(exact[1], theirs[1].double())


def test_autocast_runs_only_the_head_in_half_precision():
    encoded, head, tokens = problem(6, (60,), (9,))
    arguments = encoded.float(), head.float(), (60,), tokens, (9,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one_piece, chunked = loss_and_gradients(*arguments, ONE_PIECE), loss_and_gradients(*arguments, 0)
    assert chunked[0].dtype == torch.float32
    # Equal logits, so only the last bits of the forward variables and of half-precision sums differ.
    assert relative_difference(one_piece[0], chunked[0]) < 1e-5
    assert largest_difference(one_piece, chunked) < 0.01


def test_fake_tensor_shapes_equal_real_shapes():
    states = interleave_blanks(torch.randint(1, 5, (3, 4)))
    before = torch.full((3, 11), ctc.IMPOSSIBLE, dtype=torch.float64)
    log_probabilities = torch.randn(7, 3, 5).log_softmax(-1)
    inputs = log_probabilities, states, log_skips(states), before
    real = ctc_chunk(*inputs, [7, 6, 0])
    with FakeTensorMode() as mode:
        fake = ctc_chunk(*map(mode.from_tensor, inputs), [7, 6, 0])
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_whole_loss_can_be_traced_with_fake_tensors():
    encoded, head, tokens = problem(7, (40, 30), (8, 5))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        hidden = mode.from_tensor(encoded).requires_grad_()
        losses = long_ctc_losses(hidden, head, (40, 30), mode.from_tensor(tokens), (8, 5))
        losses.sum().backward()
    assert losses.shape == (2,) and hidden.grad.shape == encoded.shape


def test_operator_passes_opcheck():
    states = interleave_blanks(torch.randint(1, 5, (2, 2)))
    log_probabilities = torch.randn(6, 2, 5, dtype=torch.float64).log_softmax(-1).requires_grad_()
    before = torch.full((2, 7), ctc.IMPOSSIBLE, dtype=torch.float64).requires_grad_()
    sample = log_probabilities, states, log_skips(states), before, [6, 5]
    torch.library.opcheck(
        ctc_chunk, sample, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


def test_saved_memory_grows_with_power_three_halves_of_length():
    """Compare the bytes saved by autograd in the forward pass for different numbers of frames and tokens."""
    kept = []
    for size in (400, 1600):
        encoded, head, tokens = problem(8, (size,), (size // 2,))
        saved: dict[int, int] = {}

        def pack(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            long_ctc_losses(encoded.requires_grad_(), head, (size,), tokens, (size // 2,))
        kept.append(sum(saved.values()))
    assert kept[1] < 9 * kept[0]  # 4 times the frames: 8 = 4 ** 1.5, whereas the kernel's memory grows by 16


def test_reference_equals_pytorch_ctc_loss():
    """One piece, the reference of the comparisons above, equals PyTorch's loss."""
    encoded, head, tokens = problem(9, (30, 21), (7, 5))
    log_probabilities = F.log_softmax(head(encoded), dim=-1).transpose(0, 1)
    expected = F.ctc_loss(log_probabilities, tokens, torch.tensor((30, 21)), torch.tensor((7, 5)), reduction="sum")
    assert torch.equal(expected, ChunkedLosses().ctc(encoded, head, (30, 21), tokens, (7, 5), ONE_PIECE))
