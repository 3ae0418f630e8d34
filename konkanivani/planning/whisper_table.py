"""GPU memory of fine-tuning each published Whisper size, by weight placement; planned without loading weights."""

from dataclasses import dataclass, replace

from konkanivani.config import AUTO, TrainConfig, TuningConfig
from konkanivani.flags import resolve
from konkanivani.memory.devices import DeviceCosts
from konkanivani.memory.weights import ON_CARD, Placement
from konkanivani.models.whisper.architecture import WhisperArchitecture
from konkanivani.models.whisper.model import WhisperShape
from konkanivani.planning.plan import ALWAYS, Planner
from konkanivani.planning.tracer import BatchShape
from konkanivani.planning.traces import kept_traces
from konkanivani.planning.workers import two_processes

# Width, heads, blocks of the encoder and of the decoder, inner width, mel bands,
# tokens (Radford et al., 2022).
SIZES = {
    "tiny": WhisperShape(384, 6, 4, 4, 1536, 80, 51_865),
    "base": WhisperShape(512, 8, 6, 6, 2048, 80, 51_865),
    "small": WhisperShape(768, 12, 12, 12, 3072, 80, 51_865),
    "medium": WhisperShape(1024, 16, 24, 24, 4096, 80, 51_865),
    "turbo": WhisperShape(1280, 20, 32, 4, 5120, 128, 51_866),
    "large-v3": WhisperShape(1280, 20, 32, 32, 5120, 128, 51_866),
}
TRAINED = {
    "everything": TuningConfig(),
    "--freeze encoder": TuningConfig(freeze="encoder"),
    "--lora_rank 32": TuningConfig(lora_rank=32, lora_targets=("query", "value")),
}
PLACES = {"card": ON_CARD, "half": Placement(half_precision=True), "host": Placement(offloaded_blocks=99)}
WINDOW = BatchShape(1, 30.0, 444)  # one 30 s utterance with the longest label: text tokens after start and prompt


@dataclass(frozen=True)
class Cell:
    """Peak memory of the process in bytes: on the GPU in training and in validation, and on the host."""

    train: int
    valid: int
    host: int

    def words(self, most: int) -> str:
        """Format the peaks in MiB, with a star if both fit into `most` bytes."""
        fits = "*" if max(self.train, self.valid) <= most else " "
        return f"{self.train >> 20:,} / {self.valid >> 20:,}{fits}"


@dataclass(frozen=True)
class Question:
    """Input of one table cell: model size, trained part, weight placement."""

    size: str
    trained: str
    place: str
    config: TrainConfig
    costs: DeviceCosts


def answer_cell(question: Question) -> Cell:
    """Plan one utterance of 30 s with the longest label, every block recomputed."""
    config = question.config
    costs = question.costs
    architecture = WhisperArchitecture(SIZES[question.size], TRAINED[question.trained])
    with kept_traces(config, architecture, costs, PLACES[question.place]) as traces:
        # A budget of 1 PiB: the planner reports the peak without shrinking the batch.
        planner = Planner(traces, 2**50, WINDOW.tokens / WINDOW.seconds)
        step = planner.phases(WINDOW, ALWAYS)
        _, valid = planner.validation_seconds(WINDOW.seconds, WINDOW.tokens, WINDOW.seconds)
    return Cell(step.bytes + costs.beside, valid, step.host)


def plan_whisper(config: TrainConfig, costs: DeviceCosts, budget: int, sizes: tuple[str, ...] = tuple(SIZES)) -> str:
    """Return the table as text: one line per model size and trained part."""
    memory = replace(config.memory, mixed_precision=True, gradient_checkpointing=AUTO)
    loss = replace(config.loss, ctc_weight=0.0, label_smoothing=0.0)
    config = resolve(replace(config, memory=memory, loss=loss))
    rows = [(size, trained) for size in sizes for trained in TRAINED]
    # pool.map keeps the order of its input, row by row.
    with two_processes() as pool:
        questions = [Question(*row, place, config, costs) for row in rows for place in PLACES]
        cells = iter(list(pool.map(answer_cell, questions)))
    lines = [
        (
            f"Peak MiB on {costs.name} (budget {budget >> 20:,}) in training / validation: one utterance of 30 s "
            "with its"
        ),
        "longest label, half precision, all blocks recomputed, AdamW. *: it fits. Last column: host memory.",
        "",
        f"{'':10}{'trained':18}" + "".join(f"{f'--weights {place}':>19}" for place in PLACES) + f"{'host':>10}",
    ]
    for size, trained in rows:
        row_cells = [next(cells) for _ in PLACES]
        words = "".join(f"{cell.words(budget):>19}" for cell in row_cells)
        lines.append(f"{size:10}{trained:18}{words}{row_cells[-1].host >> 20:>10,}")
    return "\n".join(lines)
