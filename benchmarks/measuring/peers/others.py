"""Models of other toolkits with the dimensions of the preset `original`, trained as in their own recipes.

Conformer, 12 + 6 layers, feed-forward of four times the width, 4 heads, 1,000 tokens; CTC and attention losses, label
smoothing, AdamW. The dropout of the workload applies to residual branches and, as usual in these toolkits, also to
attention probabilities.
"""

from importlib.metadata import version

import torch
import torch.nn.functional as F

from benchmarks.measuring.fixed_step import VOCABULARY, build_speech
from benchmarks.measuring.peers.contest import CTC_SHARE, LABEL_SMOOTHING, Entry, MicroBatch, Terms, cut
from benchmarks.measuring.peers.peak import peak_bytes
from konkanivani.memory.monitor import peak_resident_mib, reset_peak_resident, resident_mib

BINS, HEADS, ENCODER_LAYERS, DECODER_LAYERS, KERNEL = 80, 4, 12, 6, 31
BLANK, START, END = 0, 1, 2


class ESPnet(torch.nn.Module):
    """ESPnet 2 model: espnet2.asr with relative positions and conv2d subsampling, as in its Conformer recipes."""

    package = "espnet"

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        from espnet2.asr.ctc import CTC
        from espnet2.asr.decoder.transformer_decoder import TransformerDecoder
        from espnet2.asr.encoder.conformer_encoder import ConformerEncoder
        from espnet2.asr.espnet_model import ESPnetASRModel

        rates = {"dropout_rate": dropout, "positional_dropout_rate": dropout}
        encoder = ConformerEncoder(
            BINS,
            output_size=width,
            attention_heads=HEADS,
            linear_units=4 * width,
            num_blocks=ENCODER_LAYERS,
            attention_dropout_rate=dropout,
            input_layer="conv2d",
            macaron_style=True,
            rel_pos_type="latest",
            pos_enc_layer_type="rel_pos",
            selfattention_layer_type="rel_selfattn",
            activation_type="swish",
            use_cnn_module=True,
            cnn_module_kernel=KERNEL,
            **rates,
        )
        decoder = TransformerDecoder(
            VOCABULARY,
            width,
            attention_heads=HEADS,
            linear_units=4 * width,
            num_blocks=DECODER_LAYERS,
            self_attention_dropout_rate=dropout,
            src_attention_dropout_rate=dropout,
            **rates,
        )
        tokens = ["<blank>", "<unk>", *(str(number) for number in range(VOCABULARY - 3)), "<sos/eos>"]
        self.model = ESPnetASRModel(
            VOCABULARY,
            tokens,
            **dict.fromkeys(("frontend", "specaug", "normalize", "preencoder", "postencoder", "joint_network")),
            encoder=encoder,
            decoder=decoder,
            ctc=CTC(VOCABULARY, width),
            ctc_weight=CTC_SHARE,
            lsm_weight=LABEL_SMOOTHING,
            report_cer=False,
            report_wer=False,
        )

    def loss(self, piece: MicroBatch) -> torch.Tensor:
        """Return ESPnet's joint loss."""
        return self.model(piece.features, piece.frames, piece.tokens, piece.token_lengths)[0]


class SpeechBrain(torch.nn.Module):
    """SpeechBrain model: convolutional front end and TransformerASR, as in its LibriSpeech recipe."""

    package = "speechbrain"

    def __init__(self, width: int, dropout: float, attention: str = "RoPEMHA") -> None:
        super().__init__()
        from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
        from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

        self.convolutions = ConvolutionFrontEnd(
            (8, 10, BINS),
            num_blocks=2,
            num_layers_per_block=1,
            out_channels=(64, 32),
            kernel_sizes=(3, 3),
            strides=(2, 2),
            residuals=(False, False),
            dropout=dropout,
        )
        self.transformer = TransformerASR(
            tgt_vocab=VOCABULARY,
            input_size=BINS // 4 * 32,  # two strides of 2, 32 channels
            d_model=width,
            nhead=HEADS,
            num_encoder_layers=ENCODER_LAYERS,
            num_decoder_layers=DECODER_LAYERS,
            d_ffn=4 * width,
            dropout=dropout,
            activation=torch.nn.GELU,
            conformer_activation=torch.nn.GELU,
            encoder_module="conformer",
            attention_type=attention,
            normalize_before=True,
            causal=False,
        )
        self.by_ctc = torch.nn.Linear(width, VOCABULARY)
        self.by_attention = torch.nn.Linear(width, VOCABULARY)

    def loss(self, piece: MicroBatch) -> torch.Tensor:
        """Return the joint loss of the recipe; SpeechBrain expects lengths as fractions of the longest."""
        from speechbrain.nnet.losses import ctc_loss, kldiv_loss

        frames = piece.frames / piece.frames.max()
        # Decoder inputs are start and tokens, targets are tokens and end.
        begun, ended = F.pad(piece.tokens, (1, 0), value=START), F.pad(piece.tokens, (0, 1), value=BLANK)
        # The end follows the last token of each utterance, before the padding.
        ended = ended.scatter(1, piece.token_lengths[:, None], END)
        encoded, predicted = self.transformer(self.convolutions(piece.features), begun, frames, pad_idx=BLANK)
        by_ctc, by_attention = self.by_ctc(encoded).log_softmax(-1), self.by_attention(predicted).log_softmax(-1)
        tokens, until_end = piece.token_lengths / piece.token_lengths.max(), piece.token_lengths + 1
        ctc = ctc_loss(by_ctc, piece.tokens, frames, tokens, blank_index=BLANK)
        attention = kldiv_loss(
            by_attention, ended, length=until_end / until_end.max(), label_smoothing=LABEL_SMOOTHING, pad_idx=BLANK
        )
        return CTC_SHARE * ctc + (1 - CTC_SHARE) * attention


class OtherToolkit:
    """One of the models above in a typical training loop; on CUDA, mixed precision is fp16 with loss scaling."""

    def __init__(self, entry: Entry, terms: Terms) -> None:
        import_toolkit(entry)
        self.resident_before = resident_mib()
        reset_peak_resident()
        model = build_model(entry, terms)
        self.version = version(model.package)
        self.model, self.terms = model.to(terms.device).train(), terms
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.dtype = torch.float16 if terms.device == "cuda" else torch.bfloat16
        # bf16 has the exponent range of fp32 and needs no loss scale.
        self.scaler = torch.amp.GradScaler(terms.device, enabled=terms.mixed_precision and self.dtype == torch.float16)
        self.pieces = cut(build_speech(terms.utterances, terms.shortest, terms.longest), entry.micro_batches)

    def step(self) -> float:
        """Run one optimizer step; return the mean of the micro-batches' losses."""
        losses = []
        for piece in self.pieces:
            with torch.autocast(self.terms.device, self.dtype, enabled=self.terms.mixed_precision):
                loss = self.model.loss(piece.to(self.terms.device)) / len(self.pieces)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        # The norm must be that of the true gradients, hence the scale is removed before clipping.
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    def resident_peak_mib(self) -> float:
        """Return VmHWM in MiB on a CPU; only the constructor resets it."""
        return peak_resident_mib()

    def peak_bytes(self) -> int:
        """Return the peak of one more step, in bytes."""
        return peak_bytes(self.model, self.optimizer, self.step, self.terms.device)


def import_toolkit(entry: Entry) -> None:
    """Import the modules of the model, so that their code does not count as memory of the training."""
    if entry.toolkit == "espnet":
        import espnet2.asr.encoder.conformer_encoder
        import espnet2.asr.espnet_model  # noqa: F401
    else:
        import speechbrain.lobes.models.convolution
        import speechbrain.lobes.models.transformer.TransformerASR
        import speechbrain.nnet.losses  # noqa: F401


def build_model(entry: Entry, terms: Terms) -> ESPnet | SpeechBrain:
    """Return the toolkit's model with its random initial weights."""
    torch.manual_seed(0)
    if entry.toolkit == "espnet":
        return ESPnet(terms.width, terms.dropout)
    return SpeechBrain(terms.width, terms.dropout, "RelPosMHAXL" if entry.setting == "relative" else "RoPEMHA")
