"""Tokens, logits, losses, gradients, steps and generated ids of random T5 models equal those of transformers."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from konkanivani.config import LossConfig
from konkanivani.data.batching import Batch, Example, collate
from konkanivani.data.text import GenerationRules, SpecialTokens, TextLimits
from konkanivani.decoding.decode import BeamDecode
from konkanivani.lengths import CHUNK_FRAMES
from konkanivani.memory.plan import RecomputePolicy
from konkanivani.models.asr import LossCounts
from konkanivani.models.conformer import WrapBlock, keep_activations
from konkanivani.models.t5 import model as blocks
from konkanivani.models.t5.architecture import T5Architecture
from konkanivani.models.t5.folder import name_in_file, read_t5_folder
from konkanivani.models.t5.model import T5
from konkanivani.training.build_step import build_step_parts
from konkanivani.training.optimizer_state import BETAS, EPSILON
from konkanivani.training.step import train_step
from tests.conftest import mark_full
from tests.invariants.parts import max_relative_difference
from tests.t5.folders import (
    KINDS,
    Kind,
    reference,
    shape_of,
    to_float64,
    to_project_model,
    transformers,
    write_reference_folder,
)
from tests.t5.parts import CPU, all_lines, global_batch, sentencepiece_model, t5_config, vocabulary

SPECIAL = SpecialTokens(None, None, 0, 1)
INPUTS, TARGETS = (50, 31, 1), (20, 7, 1)


def batch_of(kind: Kind, inputs: tuple[int, ...] = INPUTS, targets: tuple[int, ...] = TARGETS, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(2, kind.vocab_size, (length,), generator=generator)

    return collate(
        [Example("t", draw(n), draw(u).tolist(), None) for n, u in zip(inputs, targets, strict=True)], SPECIAL
    )


def transformers_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the arguments of a transformers model for a batch."""
    lengths = torch.tensor(batch.sample_lengths)
    mask = (torch.arange(batch.waveforms.shape[1]) < lengths[:, None]).long()
    labels = batch.targets.masked_fill(batch.targets < 0, -100)
    return {"input_ids": batch.waveforms, "attention_mask": mask, "labels": labels}


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    result = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, result, strict=True))


def our_loss(model: T5, batch: Batch, runner: WrapBlock = keep_activations) -> torch.Tensor:
    """Return the mean loss per target token, including end tokens."""
    objective = T5Architecture(model.shape).objective(LossConfig(label_smoothing=0.0))
    output = model(batch.waveforms, batch.sample_lengths, batch.decoder_tokens, runner)
    sums = model.loss_sums(output, batch, objective, CHUNK_FRAMES)
    return objective.total(sums, LossCounts(sum(batch.token_lengths), batch.size))


def with_file_names(tensors: dict[str, torch.Tensor], kind: Kind) -> dict[str, torch.Tensor]:
    return {name_in_file(name, kind.is_gated): tensor for name, tensor in tensors.items()}


def test_tokens_of_700_lines_equal_transformers(tmp_path):
    (tmp_path / "spiece.model").write_bytes(sentencepiece_model())
    theirs, lines = transformers.T5Tokenizer.from_pretrained(tmp_path), all_lines()
    ours = vocabulary(TextLimits(2000, 2000))
    assert len(lines) >= 700
    expected = theirs(lines)["input_ids"]
    assert [ours.encode_input(line) for line in lines] == expected
    assert max(map(len, expected)) > 30 and any(2 in ids for ids in expected)
    cut = theirs(lines, truncation=True, max_length=9)["input_ids"]
    assert [vocabulary(TextLimits(9, 9)).encode_input(line) for line in lines] == cut != expected
    texts = [theirs.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [ours.decode(ids) for ids in expected if 2 not in ids] == [
        text.strip() for text, ids in zip(texts, expected, strict=True) if 2 not in ids
    ]


def test_byte_tokens_of_700_lines_equal_transformers():
    theirs, ours, lines = transformers.ByT5Tokenizer(), vocabulary(TextLimits(2000, 2000), is_bytes=True), all_lines()
    expected = theirs(lines)["input_ids"]
    assert [ours.encode_input(line) for line in lines] == expected
    assert [ours.decode(ids) for ids in expected] == [line.strip() for line in lines]
    # A model may generate an incomplete UTF-8 character.
    assert ours.decode(expected[0][:4]) == theirs.decode(expected[0][:4])


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers(name, tmp_path):
    kind = KINDS[name]
    folder = read_t5_folder(write_reference_folder(kind, tmp_path))
    folder.check_weights()
    assert folder.shape.variant == kind.variant and (len(folder.files) > 1) == (name == "flan")
    other = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model, batch = folder.build().eval(), batch_of(kind)
    with torch.no_grad():
        expected = other(**transformers_inputs(batch)).logits
        output = model(batch.waveforms, batch.sample_lengths, batch.decoder_tokens)
        actual = model.decoder.output(output.decoded)
    is_label = batch.targets >= 0  # after the end, transformers' decoder gets other input tokens, which have no label
    actual, expected = actual[is_label], expected[is_label]
    assert float((actual - expected).abs().max()) <= 1e-6 * float(expected.abs().max()) and expected.abs().max() > 1


@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(KINDS, (torch.float64, torch.float32))))
def test_loss_and_all_gradients_equal_transformers(name, dtype):
    kind, model = KINDS[name], reference(KINDS[name])
    most = 1e-5
    if dtype == torch.float64:
        model, most = to_float64(model), 1e-13
    ours, batch = to_project_model(model, kind), batch_of(kind)
    loss = model(**transformers_inputs(batch)).loss
    expected = gradients_of(model, loss)
    for policy in ("never", "always"):
        found_loss = our_loss(ours, batch, RecomputePolicy(policy)(1.0))
        assert abs(found_loss.item() - loss.item()) <= most * loss.item()
        assert max_relative_difference(expected, with_file_names(gradients_of(ours, found_loss), kind)) <= most


CHANGES = ("exact GELU", "scaled attention", "other buckets", "layer norm", "no key mask")


@pytest.mark.parametrize("change", CHANGES)
def test_negative_control_changed_network_is_detected(change, monkeypatch):
    kind = KINDS["1.1"]
    model, batch = to_float64(reference(kind)), batch_of(KINDS["1.1"])
    ours = to_project_model(model, kind)
    if change == "exact GELU":
        gelu = F.gelu
        monkeypatch.setattr(blocks.F, "gelu", lambda x, approximate: gelu(x))
        for module in ours.modules():  # the plain module, whose activation is replaced
            if isinstance(module, blocks.FeedForward):
                module.__class__ = blocks.FeedForward
    elif change == "scaled attention":
        ours.encoder.blocks[0].self_attention.query.weight.data /= 8**0.5
    elif change == "other buckets":
        ours.encoder.positions.max_distance = 20
    elif change == "layer norm":
        monkeypatch.setattr(blocks.RMSNorm, "forward", lambda norm, x: F.layer_norm(x, x.shape[-1:], norm.weight))
        for module in ours.modules():
            if isinstance(module, blocks.RMSNorm):
                module.__class__ = blocks.RMSNorm
    else:
        batch = collate([Example("t", row, [3], None) for row in batch.waveforms], SPECIAL)
    with torch.no_grad():
        expected = (
            model(**transformers_inputs(batch_of(kind))).loss
            if change == "no key mask"
            else model(**transformers_inputs(batch)).loss
        )
        assert abs(our_loss(ours, batch) - expected) > 1e-9 * expected


def generate_with_transformers(model: torch.nn.Module, batch: Batch, most: int, beam: int) -> list[list[int]]:
    """Return the ids from generate, up to the end; the score of a hypothesis is the sum over tokens and end."""
    settings = transformers.GenerationConfig(
        max_new_tokens=most,
        num_beams=beam,
        length_penalty=0.0,
        do_sample=False,
        eos_token_id=1,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    given = transformers_inputs(batch)
    del given["labels"]
    rows = [row[1:].tolist() for row in model.generate(**given, generation_config=settings)]
    return [row[: row.index(1)] if 1 in row else row for row in rows]


@pytest.mark.parametrize(
    ("name", "beam"), [("1.0", 1), ("1.0", 3), ("mt5", 1), ("1.1", 3), *mark_full(("1.1", 1), ("flan", 1), ("flan", 3))]
)
def test_generated_ids_of_50_inputs_equal_transformers(name, beam):
    kind, most, found_rows, compared = KINDS[name], 14, [], 0
    for seed in range(5):
        model = to_float64(reference(kind, seed))
        with torch.no_grad():
            model.lm_head.weight[1] *= 5 if kind.is_tied else 2  # makes some hypotheses end
            model.lm_head.weight[0] *= 0.1
        ours = to_project_model(model, kind)
        lengths = tuple(1 + (7 * number + seed) % 30 for number in range(10))
        batch = batch_of(kind, lengths, (1,) * 10, seed)
        expected = generate_with_transformers(model, batch, most, beam)
        with torch.no_grad():
            encoded = ours.encode(batch.waveforms, batch.sample_lengths)
        rules = GenerationRules(most_tokens=most)
        actual = BeamDecode(beam, 0.0, 0.0, None, 0.0, SPECIAL, rules)(ours, *encoded)
        for one, other in zip(expected, actual, strict=True):
            # At the length limit, generate ranks hypotheses without the end; this project adds its log probability.
            if beam == 1 or max(len(one), len(other)) < most:
                assert one == other
                compared += 1
        found_rows += map(tuple, actual)
    assert len(found_rows) == 50 and compared >= (50 if beam == 1 else 10)
    assert len(set(found_rows)) > 8 and len(set(map(len, found_rows))) > 2


def test_cached_decoding_equals_uncached_after_reorder_and_select():
    kind, generator = KINDS["1.1"], torch.Generator().manual_seed(3)
    ours, places = to_project_model(reference(kind).double(), kind), torch.arange(3)
    batch, tokens = batch_of(kind), torch.zeros(3, 4, 1, dtype=torch.long)
    with torch.no_grad():
        encoded, lengths = ours.encode(batch.waveforms, batch.sample_lengths)
        cache = ours.decoder.begin(encoded, lengths, 4)
        mask = cache.encoded_mask.repeat_interleave(4, dim=0)
        for length in range(1, 45):  # beyond the cache's first capacity and the maximum distance
            cached = ours.decoder.step(tokens[:, :, -1], cache)
            rows = encoded[places].repeat_interleave(4, dim=0)
            vectors = ours.decoder.embedding(tokens.flatten(0, 1))
            uncached = ours.decoder(vectors, rows, keep_activations, mask)[:, -1].view_as(cached)
            torch.testing.assert_close(cached, uncached, rtol=1e-11, atol=1e-11)
            sources = torch.randint(4, tokens.shape[:2], generator=generator)
            new = torch.randint(2, kind.vocab_size, tokens.shape[:2], generator=generator)
            tokens = torch.cat([tokens.gather(1, sources[:, :, None].expand_as(tokens)), new[:, :, None]], dim=2)
            cache.reorder(sources)
            if length == 20:
                cache.select(torch.tensor([1, 2]))
                places, tokens, mask = places[1:], tokens[1:], mask[4:]


@pytest.mark.parametrize("name", ["1.0", "mt5"])
def test_20_training_steps_equal_manual_adamw_on_transformers(name):
    kind, model = KINDS[name], to_float64(reference(KINDS[name])).train()
    torch.set_default_dtype(torch.float64)
    try:
        parts = build_step_parts(t5_config(rate=3e-3), T5Architecture(shape_of(model, kind)), CPU, 100)
    finally:
        torch.set_default_dtype(torch.float32)
    parts.model.load_state_dict(to_project_model(model, kind).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, eps=EPSILON, weight_decay=0.0)
    losses = []
    for step in range(20):
        batch = batch_of(kind)
        report = train_step(parts, global_batch(examples_of(batch), 2), step)
        optimizer.param_groups[0]["lr"] = report.learning_rate
        optimizer.zero_grad()
        loss = model(**transformers_inputs(batch)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(report.loss)
        assert report.loss == pytest.approx(loss.item(), rel=1e-9)
        assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-9)
    trained = with_file_names(dict(parts.model.named_parameters()), kind)
    assert max_relative_difference(dict(model.named_parameters()), trained) < 1e-9 and losses[-1] < 0.9 * losses[0]


def examples_of(batch: Batch) -> list[Example]:
    """Return the pairs of a batch."""
    rows = zip(batch.waveforms, batch.sample_lengths, batch.tokens, batch.token_lengths, strict=True)
    return [
        Example(str(n), row[:size], tokens[:length].tolist(), None)
        for n, (row, size, tokens, length) in enumerate(rows)
    ]
