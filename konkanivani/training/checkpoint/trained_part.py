"""Checkpoint state of a model whose frozen weights stay in a pretrained model folder."""

from collections.abc import Mapping

import torch


class TrainedPart:
    """Trainable weights of a model as a `Stateful` part of a checkpoint; the frozen ones are not saved."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trainable weights by their names in the model."""
        return {name: weight.detach() for name, weight in self._trained().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into the model; raise RuntimeError if names or shapes differ."""
        trained = self._trained()
        if trained.keys() != state.keys():
            raise RuntimeError(f"its weights do not match the trained part: {sorted(trained.keys() ^ state.keys())[0]}")
        # In-place copies keep the parameter objects that the optimizer holds.
        with torch.no_grad():
            for name, weight in trained.items():
                if weight.shape != state[name].shape:
                    raise RuntimeError(f"its {name} has a different shape")
                weight.copy_(state[name])
