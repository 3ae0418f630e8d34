"""Source of imported weights, stored in every file that is derived from them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from konkanivani.base.errors import CheckpointError
from konkanivani.training.checkpoint.checkpoint import Checkpoint

PROVENANCE_STATE = "provenance"  # key in a checkpoint's states


@dataclass(frozen=True)
class Provenance:
    """Name and SHA-256 of the file that a model was imported from, with its licence, software and language; stateful.

    `licence` is "" if the file names none, `language` is "" if one tokenizer serves all languages.
    """

    file: str
    sha256: str
    licence: str
    saved_by: str
    language: str

    def state_dict(self) -> dict[str, object]:
        """Return the fields as strings."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raise a CheckpointError if the resumed run was started from another model."""
        if dict(state) != self.state_dict():
            raise CheckpointError("The run was started from another model. Use another checkpoint.")


def provenance_of(words: object) -> Provenance | None:
    """Return the provenance stored in a file, or None if there is none.

    Raises a ValueError if it does not have exactly the fields of `Provenance`, all strings.
    """
    if words is None:
        return None
    # The record comes from an untrusted file: require exactly the known fields.
    names = {field.name for field in fields(Provenance)}
    if not isinstance(words, dict) or set(words) != names or not all(type(word) is str for word in words.values()):
        raise ValueError("its provenance record has unknown fields")
    return Provenance(**words)


def read_provenance(checkpoint: Checkpoint | None) -> Provenance | None:
    """Return the provenance of a checkpoint's weights, or None; raise a CheckpointError if it is malformed."""
    try:
        return provenance_of(checkpoint.states.get(PROVENANCE_STATE)) if checkpoint else None
    except ValueError as error:
        raise CheckpointError(f"The checkpoint cannot be used: {error}. Use another one.") from None


def provenance_part(checkpoint: Checkpoint | None) -> dict[str, Provenance]:
    """Return the provenance as a stateful part of a run, which its checkpoints save; empty if there is none."""
    found = read_provenance(checkpoint)
    return {PROVENANCE_STATE: found} if found else {}
