"""Small vocabulary with Whisper's special tokens, and a model kind of the same vocabulary size."""

from pathlib import Path

from konkanivani.models.whisper.byte_pairs import read_byte_pairs
from konkanivani.models.whisper.vocabulary import ModelTokens, Prompt, PromptedVocabulary
from tests.conftest import WORDS
from tests.whisper.byte_vocabularies import added_token_ids, train_vocabulary, write_vocabulary_files
from tests.whisper.folders import Kind

POSITIONS = 40  # of the decoder; the models of tests/whisper/folders.py have more, but hypotheses are shorter


def write_vocabulary(folder: Path) -> Path:
    """Write the files of a vocabulary of 300 byte strings, three languages and all time tokens."""
    result = train_vocabulary(" ".join(WORDS), 300)
    return write_vocabulary_files(folder, *result, added_token_ids(result[0], ("en", "hi", "mr")))


def read_vocabulary(folder: Path) -> PromptedVocabulary:
    """Read the vocabulary with the prompt for transcribing Marathi."""
    pairs = read_byte_pairs(folder)
    return PromptedVocabulary(pairs, Prompt("mr", "transcribe"), ModelTokens(pairs.size, POSITIONS, False, {}))


def kind_of(vocabulary: PromptedVocabulary) -> Kind:
    """Return a model kind of this vocabulary size."""
    return Kind(vocab_size=vocabulary.size, end=vocabulary.special.end)
