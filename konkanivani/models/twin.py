"""Replacement of modules of a built model by twins with the same parameters and names."""

from collections.abc import Mapping
from typing import TypeVar

import torch

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)


def twin_of(module: torch.nn.Module, kind: type[AnyModule]) -> AnyModule:
    """Return a module of the class `kind` with the parameters, buffers, submodules and attributes of `module`.

    `kind` is a subclass of the module's class, or has the same attributes; its `__init__` does not run, so that no
    parameter is allocated or drawn.
    """
    twin = kind.__new__(kind)
    state = dict(module.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):
        state[registry] = dict(state[registry])
    twin.__dict__.update(state)
    return twin


def replace_modules(model: torch.nn.Module, kinds: Mapping[type[torch.nn.Module], type[torch.nn.Module]]) -> None:
    """Replace each submodule whose class is a key of `kinds` by its twin of the class that is the value."""
    for name, child in list(model.named_children()):
        replace_modules(child, kinds)
        kind = kinds.get(type(child))
        if kind is not None:
            setattr(model, name, twin_of(child, kind))
