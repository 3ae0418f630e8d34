"""Hub folders: model cards state recorded facts only, and models transcribe like their checkpoint."""

import dataclasses
import errno
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from konkanivani import load_recognizer
from konkanivani.checkpoints.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from konkanivani.cli.publish import list_files
from konkanivani.command_line import SCRIPTS
from konkanivani.config import DataConfig, PretrainedConfig, RunConfig, TrainConfig
from konkanivani.console import duration_words
from konkanivani.data.manifest import read_fingerprint
from konkanivani.errors import DataError, ResourceError, UsageError
from konkanivani.flags import config_from_text, parse_args
from konkanivani.inference import hub_folder
from konkanivani.inference.card_scores import read_scores
from konkanivani.inference.hub_folder import check_hub_folder, licence_in_card, write_hub_folder
from konkanivani.inference.model_card import (
    LOCAL_SETTINGS,
    AuthorFacts,
    BaseFacts,
    CardFacts,
    Contents,
    Corpus,
    TrainingFacts,
    check_author,
    code,
    hub_licence,
    model_card,
    plain,
    training_command,
)
from konkanivani.inference.write_exports import check_signal, recognize_with
from konkanivani.models.whisper.export import read_pretrained_whisper
from konkanivani.rules import settings_of
from tests.conftest import Corpus as Manifests
from tests.conftest import checked, run_folders, run_script, run_trainer, write_corpus
from tests.fork_server import fork_server
from tests.whisper.small_model import write_model

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

EXPORT, EVALUATE = "training_scripts/export_asr.py", "training_scripts/evaluate_konkanivani_asr.py"
SHORT = "--device cpu --batch_size 2 --gradient_accumulation_steps 1 --max_steps 3 --num_workers 0".split()
CONTENTS = Contents("model.safetensors", 1_234_567, 20.0)
FACTS = CardFacts("konkani-asr", AuthorFacts(), CONTENTS, None, None, None, ())


def metadata(card: str) -> dict:
    """Return the metadata as huggingface_hub reads it."""
    return huggingface_hub.ModelCard(card).data.to_dict()


def blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", card, re.DOTALL)


@dataclass(frozen=True)
class Exported:
    """Checkpoint and the hub folder exported from it."""

    checkpoint: Path
    folder: Path
    scores: Path
    manifests: Manifests

    @property
    def card(self) -> str:
        return (self.folder / "README.md").read_text(encoding="utf-8")

    @property
    def recording(self) -> Path:
        return self.manifests.directory / "audio" / "test_001.flac"


@pytest.fixture(scope="module")
def native(base: Path, corpus: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export a checkpoint of three steps, with larger weights in the CTC head so that its transcripts are not empty."""
    folder = tmp_path_factory.mktemp("native")
    checkpoint = read_checkpoint(base)
    checkpoint.states["model"]["ctc_head.weight"] *= 20.0
    path = folder / "checkpoint_best.pt"
    write_checkpoint(path, checkpoint)
    scores = folder / "scores.json"
    lines = []
    for decode in ("greedy", "joint"):
        words = ("--checkpoint", str(path), "--manifest", corpus.manifest("test"), "--decode", decode, "--beam", "2")
        lines.append(checked(run_script(EVALUATE, *words, "--json", "--device", "cpu")).stdout)
    scores.write_text("".join(lines))
    author = ("--license", "CC-BY-4.0", "--speech_language", "kok", "--datasets", "goa/speech", "--scores", str(scores))
    checked(run_script(EXPORT, "--checkpoint", str(path), "--hub_folder", "konkani-asr", *author, cwd=folder))
    return Exported(path, folder / "konkani-asr", scores, corpus)


@pytest.fixture(scope="module")
def whisper(corpus: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Export a fine-tuned Whisper model whose base folder has its own card."""
    folder = tmp_path_factory.mktemp("whisper")
    base = write_model(folder / "whisper-base", positions=64)
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Whisper\n")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"_name_or_path": "openai/whisper-nano"}))
    manifests = write_corpus(folder / "short", {"train": 6, "valid": 2, "test": 2}, lengths=range(1, 3))
    flags = ("--pretrained", str(base), "--language", "mr", "--learning_rate", "0.02")
    checked(run_trainer(*manifests.flags(), *SHORT, *run_folders(folder), *flags))
    path = folder / "checkpoints" / "checkpoint_last.pt"
    # Three steps do not change the transcripts of a random model.
    checkpoint = read_checkpoint(path)
    generator = torch.Generator().manual_seed(0)
    for tensor in checkpoint.states["model"].values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    write_checkpoint(path, checkpoint)
    author = ("--license", "Apache-2.0", "--base_model", "openai/whisper-tiny")
    checked(run_script(EXPORT, "--checkpoint", str(path), "--hub_folder", str(folder / "konkani-whisper"), *author))
    return Exported(path, folder / "konkani-whisper", folder / "none", manifests)


class TestNative:
    def test_folder_contains_bundle_and_card_and_can_be_uploaded(self, native):
        assert sorted(path.name for path in native.folder.iterdir()) == ["README.md", "model.safetensors"]
        assert [file.name for file in list_files(native.folder)] == ["README.md", "model.safetensors"]
        assert not [path for path in native.folder.parent.iterdir() if "partial" in path.name or "new_" in path.name]

    def test_exported_folder_transcribes_like_its_checkpoint(self, native, base):
        wanted = load_recognizer(native.checkpoint, device="cpu").transcribe(native.recording)
        transcript = load_recognizer(native.folder, device="cpu").transcribe(native.recording)
        assert transcript == wanted and transcript.text
        other = load_recognizer(base, device="cpu").transcribe(native.recording)  # negative control
        assert other.text != transcript.text

    def test_metadata_equal_the_recorded_facts(self, native):
        output = metadata(native.card)
        scores = [json.loads(line) for line in native.scores.read_text().splitlines()]
        (entry,) = output.pop("model-index")
        assert output == {
            "language": "kok",
            "license": "cc-by-4.0",
            "library_name": "konkanivani",
            "pipeline_tag": "automatic-speech-recognition",
            "datasets": ["goa/speech"],
            "tags": ["automatic-speech-recognition", "speech-recognition", "konkanivani", "conformer"],
            "metrics": ["wer", "cer"],
        }
        assert entry["name"] == "konkani-asr"
        results = [metric for result in entry["results"] for metric in result["metrics"]]
        assert {result["dataset"]["name"] for result in entry["results"]} == {"test.jsonl"}
        assert [(metric["type"], metric["value"]) for metric in results] == [
            (name, round(100 * score[name], 2)) for score in scores for name in ("wer", "cer")
        ]
        assert "greedy" in results[0]["name"] and "joint, beam 2" in results[2]["name"]

    def test_card_text_has_error_rates_intervals_hours_and_steps(self, native):
        for score in map(json.loads, native.scores.read_text().splitlines()):
            for name in ("wer", "cer"):
                low, high = (100 * bound if bound is not None else None for bound in score[f"{name}_interval"])
                interval = "" if low is None else f" ({low:.1f} to {high:.1f})"
                assert f"| {100 * score[name]:.1f}{interval} |" in native.card
        corpus = read_fingerprint(read_checkpoint(native.checkpoint).states["corpus"])
        assert corpus.utterances == 26 and f"{duration_words(corpus.hours)} of speech in 26 utterances" in native.card
        assert "from the manifest `train.jsonl`. Data sets: `goa/speech`." in native.card
        assert "3 optimizer steps, " in native.card and "initialised at random" in native.card

    def test_card_contains_no_local_path(self, native, whisper):
        for exported in (native, whisper):
            assert str(exported.folder.parent) not in exported.card
            assert str(exported.manifests.directory) not in exported.card
            assert "/tmp" not in exported.card

    def test_python_example_and_command_of_the_card_transcribe(self, native, tmp_path):
        self.check_use(native, tmp_path)

    @staticmethod
    def check_use(exported: Exported, tmp_path: Path, language: str | None = None) -> None:
        shutil.copytree(exported.folder, tmp_path / exported.folder.name)
        shutil.copy(exported.recording, tmp_path / "recording.wav")  # the format is detected from the content
        text = load_recognizer(exported.folder, device="cpu", language=language).transcribe(exported.recording).text
        (program,) = blocks(exported.card, "python")
        assert len([line for line in program.splitlines() if line]) == 3
        assert checked(fork_server().run_program(program, cwd=tmp_path)).stdout.strip() == text.strip()
        command, training = blocks(exported.card, "sh")
        program, name, *words = shlex.split(command)
        assert (program, name) == ("konkanivani", "transcribe")
        done = checked(run_script(f"training_scripts/{SCRIPTS[name]}", *words, cwd=tmp_path))
        assert " ".join(done.stdout.split()) == " ".join(text.split())
        assert training.startswith("konkanivani train --train_manifest ")


class TestWhisper:
    def test_folder_has_the_base_model_format_and_both_cards(self, whisper):
        base = whisper.folder.parent / "whisper-base"
        names = {path.name for path in base.iterdir()} | {"base_model_card.md"}
        assert {path.name for path in whisper.folder.iterdir()} == names
        assert (whisper.folder / "base_model_card.md").read_bytes() == (base / "README.md").read_bytes()
        assert len(list_files(whisper.folder)) == len(names)

    def test_exported_folder_transcribes_like_its_checkpoint(self, whisper):
        wanted = load_recognizer(whisper.checkpoint, device="cpu").transcribe(whisper.recording)
        transcript = load_recognizer(whisper.folder, device="cpu", language="mr").transcribe(whisper.recording)
        assert transcript.text == wanted.text
        # A transcript of random weights is short, since repetitions are removed: compare all tokens as well.
        texts = []
        for path in (whisper.checkpoint, whisper.folder, whisper.folder.parent / "whisper-base"):
            language = None if path == whisper.checkpoint else "mr"
            recognize = recognize_with(load_recognizer(path, device="cpu", language=language).speech_model)
            texts.append(recognize(*check_signal()))
        assert texts[0] == texts[1] and max(map(len, texts[0])) > 20
        assert texts[2] != texts[0]  # negative control

    def test_card_states_origin_and_only_known_facts(self, whisper):
        result = metadata(whisper.card)
        # The prompt language mr is not the language of the speech.
        assert result == {
            "license": "apache-2.0",
            "library_name": "transformers",
            "pipeline_tag": "automatic-speech-recognition",
            "base_model": "openai/whisper-tiny",
            "tags": ["automatic-speech-recognition", "speech-recognition", "konkanivani", "whisper"],
        }
        digest = hub_folder.digest_of_file(whisper.folder.parent / "whisper-base" / "model.safetensors")
        assert "Base model, as stated by the author: `openai/whisper-tiny`." in whisper.card
        assert "the Whisper folder `whisper-base`. Its own files name the model `openai/whisper-nano`." in whisper.card
        assert f"SHA-256: `{digest}`. Licence in its files: apache-2.0." in whisper.card
        assert "The error rates of this model are unknown." in whisper.card
        assert "The publisher and the licence of the data are not recorded." in whisper.card

    def test_python_example_and_command_of_the_card_transcribe(self, whisper, tmp_path):
        TestNative.check_use(whisper, tmp_path, "mr")


def stored_config(exported: Exported) -> TrainConfig:
    return config_from_text(read_checkpoint(exported.checkpoint).config)


@pytest.mark.parametrize("kind", ["native", "whisper"])
def test_training_command_has_the_settings_of_the_checkpoint(kind, request):
    exported = request.getfixturevalue(kind)
    stored = stored_config(exported)
    _, command = blocks(exported.card, "sh")
    _, _, *words = shlex.split(command.replace("\\\n", " "))
    values = {setting.name: setting.value for setting in settings_of(parse_args(words).config)}
    for setting in settings_of(stored):
        value = setting.value
        if isinstance(value, str) and os.path.isabs(value):
            value = os.path.basename(value)
        if setting.name not in LOCAL_SETTINGS:
            assert values[setting.name] == value, setting.name
    # Negative control: a changed setting changes the command.
    other = dataclasses.replace(stored, run=dataclasses.replace(stored.run, seed=77))
    assert "--seed 77" in training_command(other) and "--seed 77" not in training_command(stored)


def test_paths_outside_the_working_folder_are_shortened():
    cached = f"/home/anna/.cache/huggingface/hub/models--openai--whisper-tiny/snapshots/{'ab' * 20}"
    pretrained = PretrainedConfig(pretrained=cached, language="mr")
    assert "--pretrained openai/whisper-tiny" in training_command(TrainConfig(pretrained=pretrained))
    data = DataConfig(train_manifest="/home/anna/data/train.jsonl", valid_manifest="../anna/valid.jsonl")
    parts = training_command(TrainConfig(data=data, run=RunConfig(init_from="checkpoints/a b.pt", device="cpu")))
    assert parts[1:] == [
        "--train_manifest train.jsonl",
        "--valid_manifest valid.jsonl",
        "--init_from 'checkpoints/a b.pt'",
    ]


class TestUnknownFacts:
    def test_unknown_facts_are_omitted_or_marked_unknown(self):
        card = model_card(FACTS)
        assert set(metadata(card)) == {"library_name", "pipeline_tag", "tags"}
        assert "**No licence is chosen.** The author must choose one" in card
        assert "No training data are recorded." in card and "No test results are recorded." in card
        assert "None" not in card.replace("None: the weights", "") and "nan" not in card

    def test_averaged_checkpoint_states_no_hours(self):
        config = TrainConfig(data=DataConfig(train_manifest="/x/y/train.jsonl"))
        training = TrainingFacts(config, 7, None, None, None, None)
        card = model_card(dataclasses.replace(FACTS, training=training))
        assert (
            "The size of the training manifest is not recorded in this checkpoint. It was named `train.jsonl`." in card
        )
        assert "7 optimizer steps. Command" in card and "CER on the validation set" not in card

    def test_score_without_validation_is_not_reported_as_cer(self):
        checkpoint = Checkpoint("", b"", 3, 5, 0, {"progress": {"best_score": -4.0, "epochs_finished": 4}})
        for manifest, score, wanted in (
            (None, -4.0, None),
            ("v", -4.0, None),
            ("v", math.inf, None),
            ("v", 0.25, 0.25),
        ):
            text = f"--valid_manifest {manifest!r}\n"
            states = {"progress": {"best_score": score, "epochs_finished": 4}}
            result = hub_folder._training_facts(dataclasses.replace(checkpoint, config=text, states=states))
            assert result is not None and result.valid_cer == wanted and result.epochs == 4


def test_imported_model_card_states_origin_and_licence_of_its_file(tmp_path):
    base = BaseFacts("indic.nemo", "ab" * 32, "", "", "NeMo 1.23")
    card = model_card(dataclasses.replace(FACTS, base=base, language="kok"))
    assert metadata(card)["language"] == "kok"
    assert "the file `indic.nemo`. Saved by NeMo 1.23. SHA-256: `abab" in card and "Its files name no licence." in card
    assert (
        "no punctuation" not in card
        and "imported and not trained further" in card
        and "The licence of the base model applies as well." in card
    )


HOSTILE = [
    'a"b\\c',
    "a\nlicense: mit\n---\n# Owned",
    "x: [y, {z: &a *b}]",
    "`code` | <script>alert(1)</script> ![x](http://x)",
    "```\n\n# Heading",
    "\u202egpj.exe\u0000\ufeff\ud800",
    "कोंकणी\u200dभाषा 😀",
    "",
    "x" * 10_000,
    "--- !!python/object/apply:os.system ['true']",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_cannot_change_metadata_or_markup(text):
    corpus = Corpus(text, 3, 2.0)
    config = TrainConfig(
        data=DataConfig(train_manifest=text, valid_manifest=text), pretrained=PretrainedConfig(task="transcribe")
    )
    facts = dataclasses.replace(
        FACTS,
        name=text,
        training=TrainingFacts(config, 3, corpus, 1, 2.0, 0.5),
        base=BaseFacts(text, text, text, text, text),
        author=AuthorFacts(base_model=text, datasets=(text,)),
    )
    card = model_card(facts)
    result = metadata(card)
    names = {"library_name", "pipeline_tag", "datasets", "tags"}
    assert set(result) == names | ({"base_model"} if text else set())
    assert result["datasets"] == [result.get("base_model", "")]
    if text in ('a"b\\c', "x: [y, {z: &a *b}]", "कोंकणी\u200dभाषा 😀"):
        assert result["base_model"] == text
    card.encode("utf-8")
    body = re.sub(r"```\w+\n.*?\n```", "", card.split("\n---\n", 1)[1], flags=re.DOTALL)
    assert "<script>" not in re.sub(r"(`+).*?\1", "", body.replace("\\<", "").replace("\\`", ""))
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert len(headings) == 8 and "Owned" not in "".join(headings[1:])


def test_code_spans_and_plain_text_are_escaped():
    assert code("a`b``c") == "``` a`b``c ```" and code("a|b") == "`a\\|b`" and code("x") == "`x`"
    assert plain("*a* _b_ [c](d) <e>") == "\\*a\\* \\_b\\_ \\[c\\](d) \\<e\\>"


@pytest.mark.parametrize(
    ("identifier", "name"),
    [("Apache-2.0", "apache-2.0"), ("GPL-3.0-or-later", "gpl-3.0"), ("MIT", "mit"), ("CDLA-Permissive-2.0", None)],
)
def test_licences_are_mapped_to_hub_names(identifier, name):
    assert hub_licence(identifier) == name
    result = metadata(model_card(dataclasses.replace(FACTS, author=AuthorFacts(license=identifier))))
    assert result["license"] == (name or "other") and (result.get("license_name") == identifier.lower()) == (
        name is None
    )


@pytest.mark.parametrize(
    "author",
    [
        AuthorFacts(license="my own"),
        AuthorFacts(license=""),
        AuthorFacts(speech_language="Konkani"),
        AuthorFacts(base_model="whisper"),
        AuthorFacts(datasets=("a/b", "/home/x")),
    ],
)
def test_invalid_author_facts_are_rejected(author):
    with pytest.raises(UsageError, match="^--(license|speech_language|base_model|datasets) "):
        check_author(author)
    check_author(AuthorFacts("MIT", "kok-Deva", "a/b", ("a/b",)))


def test_base_model_in_hub_cache_is_named_with_its_commit(tmp_path):
    commit = "0123456789" * 4
    place = tmp_path / "models--openai--whisper-nano" / "snapshots" / commit
    place.parent.mkdir(parents=True)
    base = write_model(place, positions=64)
    (tmp_path / "link").symlink_to(base)
    for path in (base, tmp_path / "link"):
        result = hub_folder._base_folder_facts(read_pretrained_whisper(path))
        assert (result.repository, result.commit) == ("openai/whisper-nano", commit)
    contents = dataclasses.replace(CONTENTS, is_whisper=True)
    card = model_card(dataclasses.replace(FACTS, base=result, contents=contents))
    assert metadata(card)["base_model"] == "openai/whisper-nano"
    assert f"Initial weights: `openai/whisper-nano` on the hub, commit `{commit}`." in card
    other = dataclasses.replace(FACTS, base=result, author=AuthorFacts(base_model="goa/whisper"))
    assert metadata(model_card(other))["base_model"] == "goa/whisper"
    # Negative control: a folder of a similar name outside of a cache.
    moved = place.rename(tmp_path / "models--openai--whisper-nano" / "copy")
    assert hub_folder._base_folder_facts(read_pretrained_whisper(moved)).repository == ""


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ('---\r\nlanguage: en\r\nlicense: "cc-by-4.0"\r\n---\r\n', "cc-by-4.0"),
        ("# no metadata\nlicense: mit\n", ""),
        ("---\nlicense:\n- a\n---\n", ""),
        ("---\na: b\n---\nlicense: mit\n", ""),
    ],
)
def test_base_model_licence_is_read_from_its_metadata(text, licence, tmp_path):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert licence_in_card(tmp_path / "README.md") == licence
    assert licence_in_card(tmp_path / "none") == ""


Change = Callable[[dict], object]
BAD_SCORES: dict[str, tuple[Change, str]] = {
    "another step": (lambda score: score.update(step=4), "it is the score of .* .step 4., not of the exported"),
    "another checkpoint": (lambda score: score.update(checkpoint="other.pt"), "it is the score of other.pt"),
    "no checkpoint": (lambda score: score.pop("checkpoint"), "names no checkpoint"),
    "a better WER": (lambda score: score.update(wer=0.01), "its wer differs from its number of errors"),
    "no WER": (lambda score: score.update(wer=None), "its wer differs"),
    "a WER of text": (lambda score: score.update(wer="0.1"), "its wer is not a number"),
    "negative": (lambda score: score.update(words=-1), "its words is missing or not a number"),
    "true": (lambda score: score.update(utterances=True), "its utterances is missing or not a number"),
    "no interval": (lambda score: score.pop("cer_interval"), "its cer_interval is missing"),
    "descending": (lambda score: score.update(wer_interval=[0.9, 0.1]), "not two numbers in ascending order"),
    "half an interval": (lambda score: score.update(wer_interval=[0.9, None]), "not two numbers in ascending order"),
    "decoding": (lambda score: score.update(decoding={"speed": 1}), "decoding has unknown settings"),
    "decoding of another type": (lambda score: score.update(decoding=[]), "decoding is missing"),
    "manifest": (lambda score: score.update(manifest=["x"]), "its manifest is missing"),
}


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_scores_of_another_model_and_damaged_scores_are_rejected(kind, native, tmp_path):
    change, message = BAD_SCORES[kind]
    score = json.loads(native.scores.read_text().splitlines()[0])
    path = tmp_path / "scores.json"
    path.write_text(json.dumps(score))
    assert len(read_scores(path, str(native.checkpoint), 3)) == 1  # negative control: accepted unchanged
    change(score)
    path.write_text(json.dumps(score))
    with pytest.raises(DataError, match=message) as raised:
        read_scores(path, str(native.checkpoint), 3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"text", b"[1]", b"\xff\xfe", b'{"wer": NaN}', b"[" * 100_000, b"0" * (2**24 + 1)]
)
def test_file_without_scores_is_rejected(data, tmp_path):
    path = tmp_path / "scores.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match="--scores .*scores.json .*Give a file with the output of"):
        read_scores(path, "checkpoint.pt", 1)
    for other in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match="cannot be read: .*Give a file"):
            read_scores(other, "checkpoint.pt", 1)


def write_weights(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "weights").write_text(text)


class TestFolder:
    def test_unchanged_folder_is_replaced_and_leaves_no_other_files(self, tmp_path):
        out = tmp_path / "model"
        out.mkdir()
        write_hub_folder(out, FACTS, write_weights("first"))
        write_hub_folder(out, FACTS, write_weights("second version"))
        assert (out / "weights").read_text() == "second version" and list(tmp_path.iterdir()) == [out]
        assert {path.name for path in out.iterdir()} == {"README.md", "weights"}

    @pytest.mark.parametrize(
        "change", ["edited card", "another file", "hidden file", "deleted file", "foreign", "file"]
    )
    def test_changed_or_foreign_folder_is_not_replaced(self, change, tmp_path):
        out = tmp_path / "model"
        write_hub_folder(out, FACTS, write_weights("first"))
        if change == "edited card":
            (out / "README.md").write_text((out / "README.md").read_text().replace("unknown", "excellent"))
        elif change == "deleted file":
            (out / "weights").unlink()
        elif change in ("another file", "hidden file"):
            (out / {"another file": "notes.txt", "hidden file": ".notes"}[change]).write_text("mine")
        else:
            shutil.rmtree(out)
        if change == "foreign":
            out.mkdir()
            (out / "README.md").write_text("# My thesis\n")
        if change == "file":
            out.write_text("mine")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UsageError, match="is not replaced. Choose a new or empty folder"):
            write_hub_folder(out, FACTS, write_weights("second"))
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    @pytest.mark.parametrize("is_new", [True, False])
    def test_full_disk_keeps_the_old_folder_or_leaves_none(self, is_new, tmp_path):
        out = tmp_path / "model"
        if not is_new:
            write_hub_folder(out, FACTS, write_weights("first"))

        def fail(folder: Path) -> None:
            (folder / "weights").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(ResourceError, match="could not be written: No space left on device"):
            write_hub_folder(out, FACTS, fail)
        assert list(tmp_path.iterdir()) == ([] if is_new else [out])
        assert is_new or (out / "weights").read_text() == "first"

    def test_failed_rename_restores_the_old_folder(self, tmp_path, monkeypatch):
        out = tmp_path / "model"
        write_hub_folder(out, FACTS, write_weights("first"))
        rename, calls = os.rename, []

        def fail_once(source: Path, target: Path) -> None:
            calls.append(source)
            if len(calls) == 2:
                raise OSError(errno.EIO, "Input/output error")
            rename(source, target)

        monkeypatch.setattr(os, "rename", fail_once)
        with pytest.raises(ResourceError, match="could not be replaced: Input/output error"):
            write_hub_folder(out, FACTS, write_weights("second"))
        assert (out / "weights").read_text() == "first" and list(tmp_path.iterdir()) == [out] and len(calls) == 3
        check_hub_folder(out)

    def test_link_to_output_folder_is_followed(self, tmp_path):
        write_hub_folder(tmp_path / "model", FACTS, write_weights("first"))
        (tmp_path / "link").symlink_to("model")
        write_hub_folder(tmp_path / "link", FACTS, write_weights("second"))
        assert (tmp_path / "link").is_symlink() and (tmp_path / "model" / "weights").read_text() == "second"


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "exit_code", "message"),
        [
            (("--bundle", "x.safetensors", "--license", "MIT"), 2, "have no effect without --hub_folder"),
            (("--hub_folder", "x", "--license", "my licence"), 2, "--license my licence is not an SPDX identifier"),
            (("--hub_folder", "x", "--scores", "none.json"), 3, "--scores none.json cannot be read"),
            (("--hub_folder", "x", "--bundle", "x/y.safetensors"), 2, "must be different files or folders"),
            (("--hub_folder", "{audio}"), 2, "was not written by --hub_folder"),
            (("--hub_folder", "{checkpoint}"), 2, "must be different files or folders"),
            (("--hub_folder", "x", "--whisper", "y"), 2, "was trained without --pretrained"),
            (("--hub_folder", "/proc/x"), 6, "could not be written"),
        ],
    )
    def test_errors_are_one_sentence_and_write_nothing(self, arguments, exit_code, message, native, tmp_path):
        known = {"{audio}": str(native.manifests.directory / "audio"), "{checkpoint}": str(native.checkpoint)}
        words = (known.get(word, word) for word in arguments)
        done = run_script(EXPORT, "--checkpoint", str(native.checkpoint), *words, cwd=tmp_path)
        assert done.returncode == exit_code and message in done.stderr and len(done.stderr.splitlines()) == 1, (
            done.stderr
        )
        assert list(tmp_path.iterdir()) == []

    def test_second_export_replaces_folder_and_compares_on_manifest(self, native, tmp_path):
        for licence in ("MIT", "Apache-2.0"):
            words = ("--hub_folder", "out", "--license", licence, "--manifest", native.manifests.manifest("test"))
            done = checked(run_script(EXPORT, "--checkpoint", str(native.checkpoint), *words, cwd=tmp_path))
            assert re.search(r"\nhub folder .* 0 of 5 ", done.stdout)
            assert metadata((tmp_path / "out" / "README.md").read_text())["license"] == licence.lower()
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
