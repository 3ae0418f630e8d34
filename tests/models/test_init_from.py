"""--init_from: which weights are copied, truncated and initialised randomly."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from konkanivani.checkpoints.checkpoint import read_checkpoint
from konkanivani.checkpoints.checkpointer import LAST
from konkanivani.config import ModelConfig
from konkanivani.decoding.ctc import greedy_ctc
from konkanivani.errors import CheckpointError, UsageError
from konkanivani.models.asr import KonkaniVaniASR
from konkanivani.models.attention import RotaryPositions
from konkanivani.models.fine_tuning import WeightTransfer, transfer_weights
from konkanivani.recipe.build import build_run
from konkanivani.recipe.evaluation_model import evaluate_manifest, load_evaluation_model
from konkanivani.training.loop import finish_epoch, train
from tests.conftest import TINY_MODEL, Corpus, checked, read_log, run_folders, run_trainer
from tests.run_setup import begin_run

LARGE = ModelConfig(
    d_model=32, encoder_layers=4, decoder_layers=2, attention_heads=4, convolution_kernel=7, subsampling_channels=8
)
VOCABULARY = 10
ONE_EPOCH = "--epochs 1 --batch_size 13 --gradient_accumulation_steps 1 --num_workers 0".split()
HEADS_OF_THE_VOCABULARY = {"ctc_head.weight", "ctc_head.bias", "decoder.embedding.weight", "decoder.output.weight"}


def build(vocab_size: int = VOCABULARY, **changes: object) -> KonkaniVaniASR:
    torch.manual_seed(5)
    return KonkaniVaniASR(dataclasses.replace(LARGE, **changes), vocab_size, 80)


def indexed_weights() -> dict[str, torch.Tensor]:
    """Return the tensors of a large model, with each element set to its index."""
    state = build().state_dict()
    return {name: torch.arange(w.numel(), dtype=torch.float64).view(w.shape) for name, w in state.items()}


def cut(weights: dict[str, torch.Tensor], **changes: object) -> tuple[dict[str, torch.Tensor], WeightTransfer]:
    model = build(**changes).double()
    transfer = transfer_weights(model, weights, LARGE, is_same_vocabulary=True)
    return model.state_dict(), transfer


def test_equal_shape_copies_all_weights():
    source, target = build(), build(dropout=0.5)
    for weight in source.state_dict().values():
        weight.add_(1.0)
    transfer = transfer_weights(target, source.state_dict(), LARGE, is_same_vocabulary=True)
    assert set(transfer.copied) == source.state_dict().keys() and not transfer.cut and not transfer.left_out
    assert all(torch.equal(w, source.state_dict()[name]) for name, w in target.state_dict().items())


def test_other_vocabulary_skips_vocabulary_tensors_of_any_size():
    transfer = transfer_weights(build(), build().state_dict(), LARGE, is_same_vocabulary=False)
    assert set(transfer.left_out) == HEADS_OF_THE_VOCABULARY | {"decoder.output.bias"}
    larger = transfer_weights(build(vocab_size=12), build().state_dict(), LARGE, is_same_vocabulary=False)
    assert larger.left_out == transfer.left_out


def test_larger_model_skips_missing_weights_and_copies_the_rest():
    model = build(encoder_layers=5, feedforward_dim=256)
    transfer = transfer_weights(model, build().state_dict(), LARGE, is_same_vocabulary=True)
    assert {name.split(".")[2] for name in transfer.left_out if "feedforward" not in name} == {"4"}
    assert "encoder.blocks.3.attention.output.weight" in transfer.copied
    assert any("first_feedforward.expand" in name for name in transfer.left_out)
    wide = transfer_weights(build(d_model=64), build().state_dict(), LARGE, is_same_vocabulary=True)
    assert not wide.cut and not any("blocks" in name for name in wide.copied)
    assert "encoder.subsampling.first.weight" in wide.copied


def test_copied_layers_are_evenly_spaced_with_first_and_last():
    def layers(count: int, kept: int) -> list[int]:
        small = dict(d_model=8, attention_heads=2, decoder_layers=1, subsampling_channels=4)
        weights = build(encoder_layers=count, **small).state_dict()
        for layer in range(count):
            weights[f"encoder.blocks.{layer}.entry_norm.bias"].fill_(layer)
        model = build(encoder_layers=kept, **small)
        transfer_weights(model, weights, dataclasses.replace(LARGE, attention_heads=2), is_same_vocabulary=True)
        return [int(block.entry_norm.bias[0]) for block in model.encoder.blocks]

    assert layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert layers(12, 8) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert layers(4, 1) == [0]
    assert layers(4, 4) == [0, 1, 2, 3]


def test_truncation_keeps_part_of_query_key_and_value_of_each_head():
    # 4 heads of width 8, cut to 4 heads of width 4. A head's components are rotated in pairs (j, j + 4), so the kept
    # ones are 0, 2 and 4, 6: pairs stay pairs, and keep their frequencies.
    head = [0, 2, 4, 6]
    rows = [part * 32 + h * 8 + component for part in range(3) for h in range(4) for component in head]
    weights = indexed_weights()
    state, _ = cut(weights, d_model=16)
    name = "encoder.blocks.0.attention.query_key_value"
    assert state[f"{name}.bias"].tolist() == rows
    assert torch.equal(state[f"{name}.weight"], weights[f"{name}.weight"][rows][:, :16])
    columns = [h * 8 + component for h in range(4) for component in head]
    name = "encoder.blocks.0.attention.output.weight"
    assert torch.equal(state[name], weights[name][:16][:, columns])


def test_cross_attention_is_truncated_like_self_attention():
    columns = [h * 8 + component for h in range(4) for component in (0, 2, 4, 6)]
    state, _ = cut(indexed_weights(), d_model=16)
    name = "decoder.blocks.0.cross_attention"
    assert state[f"{name}.query.bias"].tolist() == columns
    assert state[f"{name}.key_value.bias"].tolist() == [part * 32 + column for part in range(2) for column in columns]


def test_fewer_heads_keep_the_first_heads_whole():
    state, _ = cut(indexed_weights(), d_model=16, attention_heads=2)
    rows = [part * 32 + h * 8 + component for part in range(3) for h in range(2) for component in range(8)]
    assert state["encoder.blocks.0.attention.query_key_value.bias"].tolist() == rows


def test_kept_components_keep_their_rotary_frequencies():
    like = torch.zeros(1, dtype=torch.float64)
    large, small = (torch.stack(RotaryPositions(width)(50, like)) for width in (8, 4))
    assert torch.allclose(small, large[:, :, [0, 2]], rtol=0, atol=1e-12)
    assert not torch.allclose(small, large[:, :, [0, 1]])  # the first two components do not


def test_gate_kernel_and_mel_bands_are_truncated_by_structure():
    state, transfer = cut(indexed_weights(), d_model=16, convolution_kernel=3, subsampling_channels=4)
    gate = state["encoder.blocks.0.convolution.gate.bias"]
    assert gate.tolist() == [*range(16), *range(32, 48)]  # the first part of each half
    kernel = state["encoder.blocks.0.convolution.depthwise.weight"]
    assert kernel[1, 0].tolist() == [7 + 2, 7 + 3, 7 + 4]  # the taps around the center frame, of 7
    bands = state["encoder.subsampling.output.weight"][0]
    assert bands.tolist() == list(range(4 * 19))  # 19 bands of each of the first 4 channels
    assert transfer.left_out == ()


def test_truncated_feedforward_equals_original_with_zeroed_units():
    """Cutting only the inner width equals the large module with the other hidden units set to zero."""
    model, source = build(feedforward_dim=16), build(feedforward_dim=32)
    transfer_weights(model, source.state_dict(), LARGE, is_same_vocabulary=True)
    ours, theirs = model.encoder.blocks[0].first_feedforward, source.encoder.blocks[0].first_feedforward
    x = torch.randn(2, 3, 32)
    expected = theirs.eval()(x)
    assert not torch.allclose(ours.eval()(x), expected, atol=1e-6)
    theirs.contract.weight.data[:, 16:] = 0
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train(build_run(begin_run(list(flags(corpus, directory)))))
    return directory


def flags(corpus: Corpus, directory: Path) -> tuple[str, ...]:
    return (*TINY_MODEL, *corpus.flags(), *run_folders(directory), *ONE_EPOCH)


def test_init_from_starts_with_validation_loss_of_checkpoint(corpus, trained, tmp_path, capsys):
    path = trained / "checkpoints" / LAST
    run = build_run(begin_run([*flags(corpus, tmp_path), "--init_from", str(path)]))
    finish_epoch(run)
    (validation,) = read_log(tmp_path, "validation")
    original = load_evaluation_model(path, torch.device("cpu"))
    expected = evaluate_manifest(original, corpus.manifest("valid"), greedy_ctc)
    assert validation["loss"] == expected.losses.all == read_log(trained, "validation")[-1]["loss"]
    assert run.state.step == 0 and run.data.tokenizer.model == original.tokenizer.model
    assert "not loaded (randomly initialised): 0 tensors" in capsys.readouterr().out


def test_negative_control_without_init_from_validation_loss_differs(corpus, trained, tmp_path):
    run = build_run(begin_run(list(flags(corpus, tmp_path))))
    finish_epoch(run)
    assert read_log(tmp_path, "validation")[0]["loss"] != read_log(trained, "validation")[-1]["loss"]


def test_script_reports_truncation_to_smaller_model(corpus, trained, tmp_path):
    path = trained / "checkpoints" / LAST
    smaller = ("--d_model", "16", "--encoder_layers", "1", "--max_steps", "1", "--init_from", str(path))
    done = checked(run_trainer(*flags(corpus, tmp_path), *smaller))
    assert "Weights from the checkpoint of step" in done.stdout
    for kind in ("loaded:", "truncated to the new shape:", "not loaded (randomly initialised): 0 tensors"):
        assert kind in done.stdout
    assert read_checkpoint(tmp_path / "checkpoints" / LAST).step == 1


def test_wider_model_without_copied_blocks_is_rejected(corpus, trained, tmp_path):
    arguments = [*flags(corpus, tmp_path), "--d_model", "64", "--init_from", str(trained / "checkpoints" / LAST)]
    with pytest.raises(UsageError, match="never larger. Omit --preset"):
        build_run(begin_run(arguments))


def test_other_tokenizer_skips_heads_and_reports_them(corpus, trained, tmp_path, capsys):
    more = ("--tokenizer_type", "unigram", "--init_from", str(trained / "checkpoints" / LAST))
    build_run(begin_run([*flags(corpus, tmp_path), *more]))
    assert "not loaded (randomly initialised): 5 tensors: ctc_head.weight" in capsys.readouterr().out


def test_damaged_init_from_checkpoint_is_rejected_and_unchanged(corpus, trained, tmp_path):
    path = tmp_path / "copy.pt"
    shutil.copy(trained / "checkpoints" / LAST, path)
    path.write_bytes(path.read_bytes()[:-50])
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="copy.pt is damaged"):
        begin_run([*flags(corpus, tmp_path), "--init_from", str(path)])
    assert path.read_bytes() == before


def test_validation_without_a_search_has_no_spectrogram(corpus, tmp_path):
    run = build_run(begin_run(list(flags(corpus, tmp_path))))
    validation = dataclasses.replace(run.data.validation, has_search=False)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, validation=validation))
    train(run)
    (logged,) = read_log(tmp_path, "validation")
    assert logged["loss"] > 0 and logged["cer"] is None and logged["hypotheses"] == []
