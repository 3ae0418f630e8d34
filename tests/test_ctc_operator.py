"""Our CTC operator against `F.ctc_loss`, and its traced shapes against the real ones."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from konkanivani.model.losses import ctc_loss_sum

FRAMES, TOKENS = (30, 21, 9), (7, 5, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_are_those_of_torch_bit_for_bit(dtype):
    torch.manual_seed(0)
    logits = torch.randn(3, 30, 11, dtype=dtype)
    tokens = torch.randint(1, 11, (3, 7))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = ctc_loss_sum(ours, torch.nn.Identity(), FRAMES, tokens, TOKENS)
    log_probabilities = theirs.log_softmax(-1).transpose(0, 1)
    expected = F.ctc_loss(log_probabilities, tokens, torch.tensor(FRAMES), torch.tensor(TOKENS), reduction="sum")
    (3 * loss).backward()
    (3 * expected).backward()
    assert torch.equal(loss, expected)
    assert torch.equal(ours.grad, theirs.grad)
    # Nothing flows into frames beyond an utterance's end.
    assert ours.grad[2, 9:].abs().max() == 0 < ours.grad[2, :9].abs().max()


def test_traced_shapes_are_the_real_ones():
    log_probabilities = torch.randn(30, 3, 11).log_softmax(-1)
    tokens = torch.randint(1, 11, (3, 7))
    operator = torch.ops.konkanivani.ctc_loss
    real = operator(log_probabilities, tokens, FRAMES, TOKENS)
    with FakeTensorMode() as mode:
        fake = operator(mode.from_tensor(log_probabilities), mode.from_tensor(tokens), FRAMES, TOKENS)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_they_are_proper_operators():
    log_probabilities = torch.randn(6, 2, 5, dtype=torch.float64).log_softmax(-1)
    sample = log_probabilities, torch.randint(1, 5, (2, 2)), [6, 5], [2, 1]
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.konkanivani.ctc_loss.default, sample, test_utils=checks)
    made = torch.ops.konkanivani.ctc_loss(*sample)
    sample = torch.ones(2, dtype=torch.float64), *sample, *made
    torch.library.opcheck(torch.ops.konkanivani.ctc_loss_backward.default, sample, test_utils=checks)
