"""Invariant 10: the commands of the README and the pages run on a tiny corpus, and their statements are true.

Commands of the pages in docs/ run with --full, and are parsed without it.
The first two commands of the README are run by `.ci/run`.
"""

import contextlib
import importlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from konkanivani.cli.main import COMMANDS
from konkanivani.command_line import SCRIPTS, read_flags
from konkanivani.config import PRESETS, TrainConfig
from konkanivani.models.architecture import architecture_of
from konkanivani.models.asr import parameter_count
from tests.conftest import ROOT, TINY_MODEL, TRAINER, checked, run_script, write_augmentation, write_corpus
from tests.corpora.test_formats import common_voice
from tests.fork_server import fork_scripts, fork_server
from tests.nemo.files import NemoParts, multilingual, write_changed
from tests.t5.parts import LINES, write_pairs
from tests.t5.parts import write_folder as write_text_model
from tests.timeouts import PROCESS_TIMEOUT
from tests.whisper.small_model import write_model

README, TRAINING, CONTRIBUTING = ROOT / "README.md", ROOT / "docs" / "training.md", ROOT / "CONTRIBUTING.md"
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "experiments.md")
MAX_WORDS = 900
PICTURES = 5
MAX_PICTURE_BYTES = 150 * 1024
SMALL_BUDGET = "--memory_budget", "520MiB"  # memory limit of the plan search, including the CUDA context
FIRST_STEPS = 2  # epochs of the first training command, which saves a checkpoint in each
SETUP = "./run_training_memory_optimized.sh"
TOP = (SETUP, "./run_tests.sh")
# Commands with tests of their own, without a corpus, or that plan the largest preset (minutes) are excluded.
COMPARISON, PLANNER = "training_scripts/compare_models.py", "training_scripts/plan_memory.py"
# The ONNX export traces every layer in about a second.
SHAPE = (*TINY_MODEL[:2], "--encoder_layers", "1", *TINY_MODEL[4:])
EXCLUDED = (
    "benchmarks/",
    "publish_model.py",
    "nvidia/parakeet-ctc-0.6b",  # tests/hub runs such commands with a loopback hub
    "openai/whisper-small",
    "--source egs/x",
    "--source FOLDER",
    "plan_memory.py --memory_budget",
    "--world 8",
)
IN_PACKAGE = ("konkanivani/config.py", "konkanivani/cli/**/*.py", "konkanivani/inference/model_card.py")
FLAG_SOURCES = (*IN_PACKAGE, "training_scripts/*.py", "benchmarks/**/*.py")
OTHER_FLAGS = "logdir host standalone nproc_per_node nnodes max_restarts rdzv_backend rdzv_id rdzv_endpoint local_addr"
OTHER_FLAGS += (
    " nodes ntasks gpus signal discount_fallback help encoder_"  # flags of other programs, and a prefix of flags
)
OTHER_FLAGS += " copy_files output_dir shm"  # CTranslate2, and --shm-size of Docker
UNLISTED = {
    "README.md",
    "LICENSE",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "Dockerfile",
}  # files that every project has


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path, prefix: str = "") -> list[str]:
    """Return the shell commands with this prefix that run here, continuation lines joined."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    results = [re.sub(r"\s+", " ", line).strip() for line in lines if line.strip()]
    return [line for line in results if line.startswith(prefix) and not any(part in line for part in EXCLUDED)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the pages assume, after the first training command of docs/training.md."""
    folder = tmp_path_factory.mktemp("readme")
    corpus = write_corpus(folder / "corpus", {"train": 8, "valid": 2, "test": 2}, lengths=range(2, 4))
    (folder / "recordings").mkdir()
    for path in sorted((corpus.directory / "audio").glob("test_*.flac"))[:2]:
        shutil.copy(path, folder / "recordings")
    (folder / "my_recordings").mkdir()
    for path in (corpus.directory / "audio").glob("*.flac"):
        shutil.copy(path, folder / "my_recordings")
        (folder / "my_recordings" / f"{path.stem}.txt").write_text("एक दोन तीन\n", encoding="utf-8")
    common_voice(folder)
    # The format is detected from the content.
    shutil.copy(next(folder.glob("cv-corpus-*/kok/clips/*.mp3")), folder / "speech.wav")
    for name in ("sentences.txt", "said.txt", "heard.txt"):
        (folder / name).write_text("एक दोन तीन\nउदक घर\n", encoding="utf-8")
    write_augmentation(folder / "noise")
    for name in ("whisper-small", "whisper-tiny"):
        write_model(
            folder / name, layers=(1, 1), positions=64
        )  # untrained: always decodes the maximum number of tokens
    write_text_model(folder / "flan-t5-small")
    for name in ("pairs.jsonl", "valid.jsonl"):
        write_pairs(folder / name, [(line.strip(), line.strip()) for line in LINES[:4]])
    write_changed(make_multilingual, folder / "indicconformer_kok.nemo")
    run(commands(TRAINING)[0], folder, FIRST_STEPS)
    return folder


def make_multilingual(parts: NemoParts) -> None:
    """Make the file multilingual, and keep one of the two encoder blocks, as in SHAPE."""
    multilingual({"hi": 40, "kok": 50, "mr": 44})(parts)
    parts.config["encoder"]["n_layers"] = 1
    parts.tensors = {name: parts.tensors[name] for name in parts.tensors if "encoder.layers.1." not in name}


def run(command: str, folder: Path, max_steps: int = 1) -> str:
    """Run the command on a CPU for a few steps and return its output."""
    script, *words = [TRAINER, *shlex.split(command)[1:]] if command.startswith(SETUP) else shlex.split(command)[1:]
    words = ["cpu" if word == "cuda" else word for word in words]
    if script in (TRAINER, COMPARISON):
        words += ["--max_steps", str(max_steps), "--num_workers", "0"]
    words += SMALL_BUDGET if script == PLANNER else ()
    if script in (TRAINER, PLANNER) and not {"--resume", "--pretrained", "--checkpoint"} & set(words):
        words += SHAPE if script == TRAINER else SHAPE[:-2]  # the planner plans for a GPU: no --device cpu
    done = fork_server().run(ROOT / script, *words, cwd=folder, before=fork_scripts)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, f"{command}\n{done}"
    if script == TRAINER:
        summary = json.loads(done.stdout.splitlines()[-1])
        assert summary["steps"] == max_steps
        kinds = [f"test_cer_{kind}_patterns{by}" for kind in ("seen", "unseen") for by in ("", "_joint")]
        ours = {*summary, *kinds}  # keys of the built-in corpus included
        assert set(json.loads(blocks(README, "json")[0])) == ours or "--pretrained" in words
    return done.stdout


def test_readme_is_short_and_starts_with_two_commands():
    assert len(README.read_text(encoding="utf-8").split()) <= MAX_WORDS
    assert tuple(commands(README)[:2]) == TOP
    assert all((ROOT / command).stat().st_mode & 0o111 for command in TOP)


def test_readme_commands_run(folder):
    """Run the README commands in order: own recordings, training, use."""
    prepare, train, transcribe, plan = [c for c in commands(README) if c not in TOP and not c.startswith(".venv/")]
    assert run(prepare, folder).splitlines()[-1].replace(f"{folder}/", "") == train
    for command in (train, transcribe, plan):
        run(command, folder)
    assert len(list((folder / "subtitles").iterdir())) == len(list((folder / "recordings").iterdir()))
    (program,) = blocks(README, "python")
    checked(fork_server().run_program(program, cwd=folder))


def flags_of_script(script: str) -> type:
    """Return the dataclass of flags of a script in training_scripts/."""
    name = next(name for name, file in SCRIPTS.items() if script == f"training_scripts/{file}")
    return importlib.import_module(f"konkanivani.cli.{COMMANDS[name].module}").Flags


def test_page_commands_are_accepted_by_their_parsers(capsys):
    """Parse the commands of all pages; they run with --full only."""
    listed = [command for page in (README, *PAGES) for command in commands(page, "python3 training_scripts/")]
    # These two rewrite their command line before they parse it.
    rewriting = (COMPARISON, f"{PLANNER} --checkpoint")
    assert len(listed) > 30
    for command in (command for command in listed if not any(part in command for part in rewriting)):
        script, *words = shlex.split(command)[1:]
        try:
            read_flags(flags_of_script(script), words, description="")
        except SystemExit:
            pytest.fail(command)
    with pytest.raises(SystemExit, match="2"):
        read_flags(flags_of_script("training_scripts/transcribe.py"), ["a.wav", "--formats", "srt"], description="")


@pytest.mark.full
@pytest.mark.parametrize("page", [page.stem for page in PAGES if commands(page, "python3 ")])
def test_page_commands_run(folder, page):
    """Run the commands of a page in order after the first training run of docs/training.md."""
    listed = commands(ROOT / "docs" / f"{page}.md", "python3 ")
    for number, command in enumerate(listed[page == "training" :], start=FIRST_STEPS + 1):
        run(command, folder, number if "--resume" in command else 1)


def test_tensorboard_serves_the_run(folder):
    (command,) = commands(README, ".venv/bin/tensorboard")
    program = Path(sys.executable).with_name("tensorboard")
    if not program.exists():
        pytest.skip("the tensorboard program is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(program), *shlex.split(command)[1:], "--port", str(port)]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PROCESS_TIMEOUT
    try:
        while not answers(f"http://127.0.0.1:{port}/data/environment"):
            assert time.monotonic() < until
            time.sleep(0.5)
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
        return answer.status == 200
    return False


def test_named_flags_exist():
    texts = [path.read_text(encoding="utf-8") for part in FLAG_SOURCES for path in ROOT.glob(part)]
    known = set(OTHER_FLAGS.split()).union(
        *(re.findall(r'(?:^    |"--)(\w+)(?:: \w+|")', text, re.M) for text in texts)
    )
    for page in (README, *PAGES):
        assert set(re.findall(r"--([a-z][a-z0-9_]+)", page.read_text(encoding="utf-8"))) <= known, page.name
    used = {word for page in PAGES for command in commands(page, "python3 ") for word in command.split()}
    assert {"--resume", "--init_from", "--compare", "--held_out", "--onnx", "--html", "--timestamps"} <= used


def named_benchmarks(text: str) -> list[tuple[str, str]]:
    """Return path and subcommand (empty if none) of each benchmark that a page names."""
    return re.findall(r"(benchmarks/[\w/]+\.\w+)(?:\s([a-z]\w*)(?=[\s`]))?", text)


def test_named_benchmarks_exist():
    named = [pair for page in (README, CONTRIBUTING, *PAGES) for pair in named_benchmarks(page.read_text("utf-8"))]
    assert len(named) > 20 and {subcommand for _, subcommand in named} >= {"speed", "compare", "word_times"}
    for path, subcommand in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert ("SUBCOMMANDS = {" in text) == bool(subcommand), (path, subcommand)
        assert not subcommand or f'"{subcommand}": lambda' in text, (path, subcommand)


def test_page_starts_with_its_purpose_and_has_valid_links():
    for page in (README, CONTRIBUTING, *PAGES):
        content = page.read_text(encoding="utf-8")
        title, first = content.split("\n\n")[:2]
        assert page == CONTRIBUTING or (title.startswith("# ") and first[0].isalpha() and first[-1] in ".:"), page.name
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", content)
        assert all("://" in link or (page.parent / link).is_file() for link in links), (page.name, links)
        assert page.parent == ROOT or f"docs/{page.name}" in README.read_text(encoding="utf-8")


def test_readme_pictures_are_small_and_up_to_date(tmp_path):
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert len(named) == PICTURES and all((ROOT / name).stat().st_size < MAX_PICTURE_BYTES for name in named)
    run_script("benchmarks/drawings.py", "--output", str(tmp_path))
    for name in ("step_comparison.svg", "flow.svg"):
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / name).read_bytes(), "python3 benchmarks/drawings.py"


def test_preset_table_matches_the_models():
    table = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `(\w+)` \| (\d+) wide, (\d+) \+ (\d+) layers \| ([\d.]+) M \|", table)
    assert {row[0] for row in rows} == set(PRESETS)
    for name, width, encoder, decoder, millions in rows:
        preset = PRESETS[name]
        shape = preset.d_model, preset.encoder_layers, preset.decoder_layers
        assert shape == (int(width), int(encoder), int(decoder))
        model = architecture_of(TrainConfig(model=preset), 1000).build_without_values()
        assert f"{parameter_count(model) / 1e6:.1f}" == millions


def test_file_tree_matches_the_repository():
    tree = blocks(CONTRIBUTING, "text")[0]
    listed, folder = set(), ""
    for line in tree.splitlines():
        names = re.match(r"( *)((?:[\w./]+ )*[\w./]+)", line)
        parent = folder if names.group(1) else ""
        for name in names.group(2).split():
            if re.search(r"[./]", name):
                assert (ROOT / parent / name).exists(), name
                listed.add((parent + name).split("/")[0])
        if not names.group(1) and names.group(2).endswith("/"):
            folder = names.group(2)
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    visible = {name.split("/")[0] for name in tracked if not name.startswith(".") and (ROOT / name).is_file()}
    assert visible - UNLISTED == listed
