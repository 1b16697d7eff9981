"""New weights for a model in place. Owns the check that all of them fit before one is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentloop.engines.types import WeightsError

if TYPE_CHECKING:
    import torch

_NAMED = 5
"""How many names of a kind an error gives."""


def replace_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights into the model's own tensors; all of them, or none.

    Every parameter has to be there under one of its names; a tied one may come under each, if
    they are equal. Saved buffers may be left out. Tensors may lie anywhere, also over a read-only
    mapping.

    Raises:
        WeightsError: names, shapes or dtypes differ from the model's; nothing was copied.
    """
    import torch

    places: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    wrong = [*_misfits(places, weights), *_missing(model, places, weights)]
    wrong += _untied(places, weights)
    if wrong:
        raise WeightsError(f"weights do not fit {type(model).__name__}: {'; '.join(wrong)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            places[name].copy_(tensor)


def _misfits(places: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> list[str]:
    import torch

    unknown = [name for name in weights if name not in places]
    plain = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
    rest = [name for name in weights if name in places and name not in plain]
    shapes = [
        f"{name} {tuple(weights[name].shape)} for {tuple(places[name].shape)}"
        for name in rest
        if weights[name].shape != places[name].shape
    ]
    dtypes = [
        f"{name} {weights[name].dtype} for {places[name].dtype}"
        for name in rest
        if weights[name].dtype != places[name].dtype
    ]
    return [
        *_told("unknown", unknown),
        *_told("no tensors", plain),
        *_told("other shapes", shapes),
        *_told("other dtypes", dtypes),
    ]


def _missing(
    model: Any, places: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> list[str]:
    parameters = {id(parameter) for parameter in model.parameters()}
    given = {id(places[name]) for name in weights if name in places}
    missing: dict[int, str] = {}
    for name, place in places.items():
        if id(place) in parameters and id(place) not in given:
            missing.setdefault(id(place), name)
    return _told("missing", list(missing.values()))


def _untied(places: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of one tied parameter that come with different values."""
    import torch

    first: dict[int, str] = {}
    differing: list[str] = []
    for name, tensor in weights.items():
        if name in places and isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            known = first.setdefault(id(places[name]), name)
            if known != name and not torch.equal(weights[known], tensor):
                differing.append(f"{known} and {name}")
    return _told("tied in the model and different here", differing)


def _told(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what}: {', '.join(names[:_NAMED])}{more}"]
