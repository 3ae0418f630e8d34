"""Of a model whose other weights lie in a folder that is never changed, what training changes."""

from collections.abc import Mapping

import torch


class TrainedPart:
    """A model's trained weights alone, as a part that checkpoints hold."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By their names in the model."""
        return {name: weight.detach() for name, weight in self._trained().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """A RuntimeError where the names or shapes are others."""
        trained = self._trained()
        if trained.keys() != state.keys():
            raise RuntimeError(f"its weights do not match the trained part: {sorted(trained.keys() ^ state.keys())[0]}")
        with torch.no_grad():
            for name, weight in trained.items():
                if weight.shape != state[name].shape:
                    raise RuntimeError(f"its {name} has a different shape")
                weight.copy_(state[name])
