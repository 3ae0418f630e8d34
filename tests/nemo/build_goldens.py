"""Build and save tiny random NeMo models, with their outputs for two recordings; runs in NeMo's environment.

    HF_HUB_OFFLINE=1 nemo/bin/python tests/nemo/build_goldens.py OUT OLDER_FEATURES.py

OLDER_FEATURES.py is nemo/collections/asr/parts/preprocessing/features.py of NeMo 1.23.0's wheel. Its features equal
those in all versions before 2.5, including AI4Bharat's 1.23.
"""

import gzip
import importlib.util
import io
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.torch
import sentencepiece
import torch
from nemo.collections.asr.models import EncDecCTCModelBPE, EncDecHybridRNNTCTCBPEModel
from omegaconf import OmegaConf

SAMPLES = (16_111, 10_037)  # no multiples of the hop of 160 samples; the longer one first
TEXT = "उदक घरांत आसा आनी शाळा बाजारा लागीं आसा एक दोन तीन चार पांच आवय घरा वता".split()


def waveforms() -> np.ndarray:
    """Return two recordings of chirps, int16; the second is shorter and padded with zeros."""
    found = np.zeros((2, SAMPLES[0]), dtype=np.int16)
    for row, samples in enumerate(SAMPLES):
        time = np.arange(samples) / 16_000
        phases = [2 * np.pi * (180 * k * time + (90 + 40 * row) * k * time**2 * (-1) ** k) for k in range(1, 6)]
        sound = sum(np.sin(phase) / (k + 1) for k, phase in enumerate(phases)) * (0.55 + 0.45 * np.sin(9 * time))
        sound += 0.2 * np.random.default_rng(row).standard_normal(samples)
        found[row, :samples] = np.round(6000 * sound)
    return found


def tokenizer_folder(folder: str, pieces: int) -> str:
    """Write a tokenizer as NeMo's own script does: BPE, `<unk>` first, no other special token; return the folder."""
    words = [f"{first} {second}" for first in TEXT for second in TEXT]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{"sentence_iterator": iter(words), "model_writer": model, "model_type": "bpe", "vocab_size": pieces},
        **{"unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1, "normalization_rule_name": "identity"},
        **{"character_coverage": 1.0, "num_threads": 1, "minloglevel": 2},
    )
    Path(folder, "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    listed = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    Path(folder, "vocab.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    Path(folder, "tokenizer.vocab").write_text("".join(f"{p}\t{-i}\n" for i, p in enumerate(listed)), encoding="utf-8")
    return folder


def front_end(bins: int) -> dict:
    return {
        **{"_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor", "sample_rate": 16_000},
        **{"normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann"},
        **{"features": bins, "n_fft": 512, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0},
    }


def encoder(bins: int, width: int, heads: int, **changes: object) -> dict:
    return {
        **{"_target_": "nemo.collections.asr.modules.ConformerEncoder", "feat_in": bins, "feat_out": -1},
        **{"n_layers": 2, "d_model": width, "n_heads": heads, "ff_expansion_factor": 2, "conv_kernel_size": 9},
        **{"subsampling": "striding", "subsampling_factor": 4, "subsampling_conv_channels": 8},
        **{"self_attention_model": "rel_pos", "att_context_size": [-1, -1], "xscaling": True, "untie_biases": True},
        **{"pos_emb_max_len": 500, "conv_norm_type": "batch_norm", "conv_context_size": None, "dropout": 0.1},
        **{"dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1, **changes},
    }


def head(width: int) -> dict:
    target = "nemo.collections.asr.modules.ConvASRDecoder"
    return {"_target_": target, "feat_in": width, "num_classes": -1, "vocabulary": []}


def optimizer() -> dict:
    return {"name": "adamw", "lr": 1e-3}


def hybrid(folder: str) -> EncDecHybridRNNTCTCBPEModel:
    """Return a small model with the structure of IndicConformer: subsampling x4, RNNT decoder and CTC head."""
    width, small = 32, {"pred_hidden": 16, "pred_rnn_layers": 1, "dropout": 0.0}
    rnnt = {"_target_": "nemo.collections.asr.modules.RNNTDecoder", "normalization_mode": None, "prednet": small}
    rnnt |= {"random_state_sampling": False, "blank_as_pad": True}
    joint = {"_target_": "nemo.collections.asr.modules.RNNTJoint", "log_softmax": None, "fuse_loss_wer": False}
    joint |= {"jointnet": {"joint_hidden": 16, "activation": "relu", "dropout": 0.0}}
    return EncDecHybridRNNTCTCBPEModel(
        OmegaConf.create(
            {
                **{"sample_rate": 16_000, "preprocessor": front_end(80), "encoder": encoder(80, width, 4)},
                **{"tokenizer": {"dir": folder, "type": "bpe"}, "decoder": rnnt, "joint": joint},
                **{"model_defaults": {"enc_hidden": width, "pred_hidden": 16, "joint_hidden": 16}},
                **{"aux_ctc": {"ctc_loss_weight": 0.3, "use_cer": False, "decoder": head(width)}},
                **{"decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}}},
                **{"loss": {"loss_name": "default"}, "optim": optimizer()},
            }
        )
    )


def ctc(folder: str, bins: int, **changes: object) -> EncDecCTCModelBPE:
    """Return a small model with the structure of FastConformer: separable subsampling x8."""
    changes = {"subsampling": "dw_striding", "subsampling_factor": 8, **changes}
    return EncDecCTCModelBPE(
        OmegaConf.create(
            {
                **{"sample_rate": 16_000, "preprocessor": front_end(bins), "encoder": encoder(bins, 16, 2, **changes)},
                **{"tokenizer": {"dir": folder, "type": "bpe"}, "decoder": head(16), "optim": optimizer()},
            }
        )
    )


def disturb(model: torch.nn.Module) -> None:
    """Randomise BatchNorm statistics, norm weights and biases.

    At their initial values of 0 and 1, an import that swaps or drops them would not be noticed.
    """
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(0.2 + noise.square())
            elif name.endswith("running_mean"):
                tensor.copy_(0.5 * noise)
            elif "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.3 * noise)
            elif name.endswith(("bias", "pos_bias_u", "pos_bias_v")):
                tensor.copy_(0.3 * noise)
            elif "decoder_layers" in name:
                tensor.copy_(0.15 * noise)
            elif "pre_encode" in name and name.endswith("weight"):
                tensor.mul_(3)  # so that the output depends on the audio, not only on the biases


def older_front_end(path: str) -> torch.nn.Module:
    """Return the feature extraction of NeMo 1.23 with the settings of `front_end(80)`."""
    spec = importlib.util.spec_from_file_location("older_features", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FilterbankFeatures(n_window_size=400, n_window_stride=160, n_fft=512, nfilt=80, pad_to=0).eval()


@torch.no_grad()
def heard(model: torch.nn.Module, sound: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return features (B, T, F), their lengths, and the outputs of `said`."""
    features, frames = model.preprocessor(input_signal=sound, length=lengths)
    return {"features": features.transpose(1, 2), "feature_lengths": frames} | said(model, features, frames)


@torch.no_grad()
def said(model: torch.nn.Module, features: torch.Tensor, feature_lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the encoder output (B, T', D), log probabilities (B, T', V + 1), lengths and greedy texts.

    The blank is the last token.
    """
    encoded, encoded_lengths = model.encoder(audio_signal=features, length=feature_lengths)
    is_hybrid = hasattr(model, "ctc_decoder")
    log_probabilities = (model.ctc_decoder if is_hybrid else model.decoder)(encoder_output=encoded)
    decoding = model.ctc_decoding if is_hybrid else model.decoding
    hypotheses = decoding.ctc_decoder_predictions_tensor(log_probabilities, encoded_lengths)
    texts = "\n".join(hypothesis.text for hypothesis in hypotheses)
    return {
        "encoded": encoded.transpose(1, 2),
        "encoded_lengths": encoded_lengths,
        "log_probabilities": log_probabilities,
        "texts": torch.frombuffer(bytearray(texts.encode()), dtype=torch.uint8),
    }


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(0o644)
    print(path, path.stat().st_size, bytes(tensors.get("texts", torch.zeros(0)).tolist()).decode(), flush=True)


def save(model: torch.nn.Module, path: Path, is_packed: bool) -> None:
    """Save the model with NeMo; with `is_packed`, gzipped as by its older versions."""
    model.save_to(str(path))
    if is_packed:
        # mtime=0: equal bytes in every run.
        path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def main(out: Path, older: str) -> None:
    sound, lengths = torch.from_numpy(waveforms()), torch.tensor(SAMPLES)
    signal = sound.float() / 2**15
    write(out / "sound.safetensors", {"sound": sound, "samples": lengths})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_folder(folder, 60)
        builders = {
            "striding": lambda: hybrid(folder),
            "separable": lambda: ctc(folder, 80),
            "parakeet": lambda: ctc(folder, 128, use_bias=False, xscaling=False),
        }
        for seed, (name, build) in enumerate(builders.items()):
            # Every model is reproducible on its own.
            torch.manual_seed(seed)
            model = build().eval()
            disturb(model)
            save(model, out / f"{name}.nemo", is_packed=name != "striding")
            found = heard(model, signal, lengths)
            if name == "separable":  # equal to the features of "striding"
                del found["features"]
            write(out / f"{name}.safetensors", found)
            if name == "striding":  # one utterance at a time: before 2.5, features at the edges depend on the batch
                extract = older_front_end(older)
                for row, samples in enumerate(SAMPLES):
                    features, frames = extract(signal[row : row + 1, :samples], torch.tensor([samples]))
                    found = {"features": features.transpose(1, 2), "feature_lengths": frames}
                    write(out / f"older_{row}.safetensors", found | said(model, features, frames))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
