"""A small vocabulary with Whisper's named tokens, and the kind of model with that vocabulary size."""

from pathlib import Path

from konkanivani.models.whisper.byte_pairs import read_byte_pairs
from konkanivani.models.whisper.vocabulary import ModelTokens, Prompt, PromptedVocabulary
from tests.conftest import WORDS
from tests.whisper.byte_vocabularies import named_after, vocabulary_of_text, write_files
from tests.whisper.folders import Kind

POSITIONS = 40  # of the decoder; tests/whisper/folders.py has more, and the hypotheses are shorter


def write_vocabulary(folder: Path) -> Path:
    """Write the files of a vocabulary of 300 byte strings, three languages and all times."""
    found = vocabulary_of_text(" ".join(WORDS), 300)
    return write_files(folder, *found, named_after(found[0], ("en", "hi", "mr")))


def read_vocabulary(folder: Path) -> PromptedVocabulary:
    """Read the vocabulary with a prompt to transcribe Marathi."""
    pairs = read_byte_pairs(folder)
    return PromptedVocabulary(pairs, Prompt("mr", "transcribe"), ModelTokens(pairs.size, POSITIONS, False, {}))


def kind_of(vocabulary: PromptedVocabulary) -> Kind:
    """Return a model kind of this vocabulary size."""
    return Kind(vocab_size=vocabulary.size, end=vocabulary.special.end)
