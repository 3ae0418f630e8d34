"""Where a model's weights come from that others have trained: what goes with them into every file made of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from konkanivani.base.errors import CheckpointError
from konkanivani.training.checkpoint.checkpoint import Checkpoint

STATE = "provenance"  # under which a checkpoint keeps one


@dataclass(frozen=True)
class Provenance:
    """The file that a model was imported from, its SHA-256, its licence where it has one, what saved it; stateful."""

    file: str
    sha256: str
    licence: str
    saved_by: str
    language: str

    def state_dict(self) -> dict[str, object]:
        """Words."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises a CheckpointError where a run that began otherwise would go on."""
        if dict(state) != self.state_dict():
            raise CheckpointError("The run was started from another model. Use another checkpoint.")


def provenance_of(words: object) -> Provenance | None:
    """What a file says of it; None where it says nothing, a ValueError where these are no words of ours."""
    if words is None:
        return None
    names = {field.name for field in fields(Provenance)}
    if not isinstance(words, dict) or set(words) != names or not all(type(word) is str for word in words.values()):
        raise ValueError("its provenance record has unknown fields")
    return Provenance(**words)


def read_provenance(checkpoint: Checkpoint | None) -> Provenance | None:
    """Where a checkpoint's weights come from, if it says so; a CheckpointError where it says so in no way of ours."""
    try:
        return provenance_of(checkpoint.states.get(STATE)) if checkpoint else None
    except ValueError as error:
        raise CheckpointError(f"The checkpoint cannot be used: {error}. Use another one.") from None


def provenance_part(checkpoint: Checkpoint | None) -> dict[str, Provenance]:
    """The same as a part of a run, which its checkpoints keep; nothing where there is none."""
    found = read_provenance(checkpoint)
    return {STATE: found} if found else {}
