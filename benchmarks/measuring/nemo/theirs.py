"""Run a step of NeMo's Conformer for each line of stdin; print its seconds and peak as JSON.

For the line "count", live tensor bytes are counted during the step. Runs in NeMo's environment.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
from nemo.collections.asr.losses.ctc import CTCLoss
from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor, ConformerEncoder, ConvASRDecoder

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from konkanivani.planning.tensors import LiveBytes

TOKENS = 120


def main(seconds: float, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    front = AudioToMelSpectrogramPreprocessor(sample_rate=16_000, features=80, dither=0.0)
    encoder = ConformerEncoder(
        **{"feat_in": 80, "n_layers": 17, "d_model": 512, "n_heads": 8, "ff_expansion_factor": 4},
        **{"subsampling": "striding", "subsampling_factor": 4, "subsampling_conv_channels": 512},
        **{"conv_kernel_size": 31, "self_attention_model": "rel_pos", "xscaling": True, "untie_biases": True},
    )
    head = ConvASRDecoder(feat_in=512, num_classes=256, vocabulary=[str(number) for number in range(256)])
    loss = CTCLoss(num_classes=256, zero_infinity=True)
    model = torch.nn.ModuleList([encoder, head]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    waveform, length = 0.1 * torch.randn(1, int(16_000 * seconds)), torch.tensor([int(16_000 * seconds)])
    tokens, count = torch.randint(0, 256, (1, TOKENS)), torch.tensor([TOKENS])
    live = LiveBytes()
    live.count([*model.parameters(), *model.buffers()])
    for line in sys.stdin:
        live.restart_peak()
        # Counting slows a step down, hence only some steps are counted.
        started = time.perf_counter()
        with live if line == "count\n" else contextlib.nullcontext():
            # Features need no gradients.
            with torch.no_grad():
                features, lengths = front(input_signal=waveform, length=length)
            encoded, lengths = encoder(audio_signal=features, length=lengths)
            found = loss(
                log_probs=head(encoder_output=encoded), targets=tokens, input_lengths=lengths, target_lengths=count
            )
            found.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps({"seconds": time.perf_counter() - started, "peak_mib": live.peak / 2**20}), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
