"""The loss by vocabulary slices equals PyTorch's in value and gradients, and takes a fraction of the memory."""

import pytest
import torch
import torch.nn.functional as F

from konkanivani.ops import fused as vocabulary_loss
from konkanivani.ops.fused import SlicedTiedEmbedding, vocabulary_loss_sum
from konkanivani.planning.tensors import LiveBytes

VOCABULARY = 300


@pytest.fixture(params=[16, 100, 2**21], ids=["19 slices", "3 slices", "1 slice"])
def slice_columns(request, monkeypatch) -> int:
    monkeypatch.setattr(vocabulary_loss, "MIN_COLUMNS", request.param)
    monkeypatch.setattr(vocabulary_loss, "SLICE_NUMBERS", 1)
    return request.param


def loss_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return decoder states (2, 7, 8), a head, and targets.

    The second row ends in padding; the first and the last token of the vocabulary occur.
    """
    generator = torch.Generator().manual_seed(0)
    decoded = torch.randn(2, 7, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (2, 7), generator=generator)
    targets[0, 0], targets[0, 1], targets[1, 4:] = 0, VOCABULARY - 1, -1
    return decoded, weight, targets


def reference_loss(
    decoded: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, smoothing: float
) -> torch.Tensor:
    logits = F.linear(decoded, weight).flatten(0, 1)
    return F.cross_entropy(
        logits.float() if logits.dtype == torch.bfloat16 else logits,
        targets.flatten(),
        reduction="sum",
        ignore_index=-1,
        label_smoothing=smoothing,
    )


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sliced_loss_and_gradients_equal_pytorch(smoothing, slice_columns):
    decoded, weight, targets = loss_inputs()
    actual, expected = (loss(decoded, weight, targets, smoothing) for loss in (vocabulary_loss_sum, reference_loss))
    gradients = zip(*(torch.autograd.grad(loss / 7, (decoded, weight)) for loss in (actual, expected)), strict=True)
    assert relative_difference(actual, expected) < 1e-14 and all(
        relative_difference(ours, theirs) < 1e-13 for ours, theirs in gradients
    )
    with torch.no_grad():
        assert torch.equal(vocabulary_loss_sum(decoded, weight, targets, smoothing), actual)
        weight[VOCABULARY - 1] += 0.01  # negative control
        assert relative_difference(vocabulary_loss_sum(decoded, weight, targets, smoothing), expected) > 1e-5


def test_freezing_the_head_does_not_change_other_gradients(slice_columns):
    decoded, weight, targets = loss_inputs()
    expected, _ = torch.autograd.grad(vocabulary_loss_sum(decoded, weight, targets, 0.0), (decoded, weight))
    vocabulary_loss_sum(decoded, weight.detach(), targets, 0.0).backward()
    assert torch.equal(decoded.grad, expected)


def test_bf16_rounds_products_but_not_the_loss(slice_columns):
    decoded, weight, targets = loss_inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = (loss(decoded, weight, targets, 0.0) for loss in (vocabulary_loss_sum, reference_loss))
    exact = reference_loss(decoded, weight, targets, 0.0)
    assert (
        actual.dtype == torch.float32
        and relative_difference(actual, expected) < 1e-5 < relative_difference(actual, exact) < 0.01
    )
    for name, ours, theirs in zip(
        ("decoded", "weight"), *(torch.autograd.grad(loss, (decoded, weight)) for loss in (actual, exact)), strict=True
    ):
        assert ours.dtype == torch.float32 and 1e-4 < relative_difference(ours, theirs) < 0.02, name


def test_full_logits_are_never_in_memory():
    decoded, weight = torch.randn(1, 400, 16, requires_grad=True), torch.randn(51_865, 16, requires_grad=True)
    targets, peaks = torch.randint(51_865, (1, 400)), []
    for loss in (vocabulary_loss_sum, reference_loss):
        live = LiveBytes()
        with live:
            loss(decoded, weight, targets, 0.0).backward()
        peaks.append(live.peak - weight.nbytes)
        decoded.grad = weight.grad = None
    logits = 4 * 400 * 51_865
    assert peaks[0] < 0.4 * logits and peaks[1] > 1.9 * logits


def test_tied_embedding_gets_sum_of_both_gradients():
    generator = torch.Generator().manual_seed(0)
    embedding = SlicedTiedEmbedding(VOCABULARY, 8).double()
    tokens = torch.tensor([[5, 5, 299, 0]])  # one token occurs twice
    factors = torch.randn(1, 4, 8, generator=generator, dtype=torch.float64)
    head_factors = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    vectors, head = embedding.with_head(tokens)
    assert torch.equal(vectors, embedding(tokens)) and torch.equal(head.weight, embedding.weight)
    (actual,) = torch.autograd.grad((vectors * factors).sum() + (head.weight * head_factors).sum(), embedding.weight)
    expected = head_factors.clone()
    for token, factor in zip(tokens[0], factors[0], strict=True):
        expected[token] += factor
    assert relative_difference(actual, expected) < 1e-15
    vectors, _ = embedding.with_head(tokens)
    (alone,) = torch.autograd.grad((vectors * factors).sum(), embedding.weight)
    assert relative_difference(alone, expected - head_factors) < 1e-14


def test_gradient_of_repeated_tokens_is_deterministic():
    """With PyTorch's index_put_, not deterministic on several CPU threads, a resumed run would differ."""
    torch.manual_seed(0)
    embedding, tokens = SlicedTiedEmbedding(2000, 384), torch.randint(50, (1, 445))
    by_vectors, by_head = torch.randn(1, 445, 384), torch.randn(2000, 384)
    first = None
    for _ in range(50):
        embedding.weight.grad = None
        vectors, head = embedding.with_head(tokens)
        torch.autograd.backward((vectors, head.weight), (by_vectors, by_head.clone()))
        first = embedding.weight.grad if first is None else first
        assert torch.equal(first, embedding.weight.grad)
    expected = by_head.double().index_add(0, tokens[0], by_vectors[0].double())
    assert relative_difference(first.double(), expected) < 1e-6


def tied_loss(embedding: SlicedTiedEmbedding, number: int) -> torch.Tensor:
    """Return the loss of micro-batch `number` in float32, with 40 labels and frequent repetitions."""
    generator = torch.Generator().manual_seed(number)
    tokens, targets = (torch.randint(30, (2, 20), generator=generator) for _ in range(2))
    vectors, head = embedding.with_head(tokens)
    decoded = vectors * torch.randn(1, 20, embedding.embedding_dim, generator=generator)
    return vocabulary_loss_sum(decoded, head.weight, targets, 0.1, head.gradient_buffer)


def test_accumulated_gradient_equals_autograd_sum_without_a_copy(slice_columns):
    torch.manual_seed(0)
    embedding, peaks = SlicedTiedEmbedding(VOCABULARY, 64), []
    first, *others = (torch.autograd.grad(tied_loss(embedding, number), embedding.weight)[0] for number in range(3))
    expected = first + others[0] + others[1]
    for hook in (None, lambda gradient: gradient):  # a hook gets the gradient of each micro-batch
        embedding.weight.grad, live = None, LiveBytes()
        held = embedding.weight.register_hook(hook) if hook else None
        with live:
            for number in range(3):
                tied_loss(embedding, number).backward()
        assert torch.equal(embedding.weight.grad, expected)
        peaks.append(live.peak / embedding.weight.nbytes)
        if held:
            held.remove()
    assert not torch.equal(expected, first + (others[0] + others[1]))  # negative control: another order
    assert peaks[0] < peaks[1] - 0.8, peaks
