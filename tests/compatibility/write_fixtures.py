"""Write the fixtures of this folder with the version that is checked out.

    python3 -m tests.compatibility.write_fixtures OUT

Commit e4e55aa wrote them, with this file copied into its tests/compatibility.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import soundfile
import torch

from konkanivani.data import index
from konkanivani.inference.recognizer import load_recognizer
from tests.conftest import write_corpus
from tests.whisper.small_model import write_model

SCRIPTS = Path(__file__).resolve().parents[2] / "training_scripts"
DATA = "--train_manifest corpus/train.jsonl --valid_manifest corpus/valid.jsonl --num_workers 0 --device cpu"
MODEL = (
    "--d_model 8 --encoder_layers 1 --decoder_layers 1 --attention_heads 2 --convolution_kernel 3 "
    "--subsampling_channels 2 --tokenizer_type char --edges zeros --deviation sample --power_guard added "
    "--smallest_power 6e-8 --micro_batches_at_once 1"
)
TRAINING = "--batch_size 1 --gradient_accumulation_steps 2 --epochs 3 --save_steps 1 --keep_checkpoints 2"
WHISPER = (
    "--pretrained whisper_folder --language mr --lora_rank 2 --batch_size 1 --gradient_accumulation_steps 2 "
    "--save_steps 1 --keep_checkpoints 2"
)


def run(out: Path, script: str, *flags: str) -> None:
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    words = [sys.executable, str(SCRIPTS / script), *" ".join(flags).split()]
    subprocess.run(words, cwd=out, env=environment, check=True, stdout=subprocess.DEVNULL)


def train_and_resume(out: Path, folder: str, flags: str, steps: int, resumed_steps: int) -> list[dict]:
    """Keep the checkpoint after `steps` in `folder`; return the logged steps of the run that resumes it."""
    script = "train_konkanivani_asr.py"
    run(out, script, DATA, flags, f"--max_steps {steps} --checkpoint_dir {folder} --log_dir runs")
    shutil.copytree(out / folder, out / "resumed")
    resume = f"--resume resumed/checkpoint_last.pt --max_steps {resumed_steps}"
    run(out, script, DATA, resume, "--checkpoint_dir resumed --log_dir resumed_runs")
    lines = (out / "resumed_runs" / "default" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    for name in ("runs", "resumed", "resumed_runs"):
        shutil.rmtree(out / name)
    for path in (out / folder).iterdir():
        if path.name != "checkpoint_last.pt":
            path.unlink()
    records = [json.loads(line) for line in lines]
    return [{key: r[key] for key in ("step", "loss", "learning_rate")} for r in records if r["kind"] == "step"]


def encode(out: Path, name: str) -> list[float]:
    """Return the first encoder frames of a recording."""
    model = load_recognizer(str(out / name)).speech_model
    samples, _ = soundfile.read(out / "corpus" / "audio" / "valid_000.flac", dtype="float32")
    encoded, _ = model.encode(torch.from_numpy(samples)[None], (len(samples),))
    return encoded[0, :3].flatten().tolist()


def main(out: Path) -> None:
    out.mkdir(parents=True)
    write_corpus(out / "corpus", {"train": 6, "valid": 2})
    write_model(out / "whisper_folder", width=8, layers=(1, 1), seconds=6)
    (out / "flags.txt").write_text("\n".join(f"{DATA} {MODEL} {TRAINING}".split()) + "\n", encoding="utf-8")
    steps = train_and_resume(out, "native", f"{MODEL} {TRAINING}", 4, 9)
    whisper_steps = train_and_resume(out, "whisper", WHISPER, 2, 4)
    run(out, "export_asr.py", "--checkpoint native/checkpoint_last.pt --bundle model.safetensors")
    encoded = {name: encode(out, name) for name in ("native/checkpoint_last.pt", "model.safetensors")}
    index.SMALL_BYTES = 0  # write an index for a small manifest too
    index.open_index(out / "corpus" / "train.jsonl")
    expected = {"steps": steps, "whisper_steps": whisper_steps, "encoded": encoded}
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
