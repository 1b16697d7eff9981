"""Where a prompt comes from: a name, or several judges with weights, as dataset rows say it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast


def source_weights(data_source: object) -> dict[str, float]:
    """The judges that a data source names, with their weights; {} if it names none.

    Example: source_weights("gsm8k") == {"gsm8k": 1.0},
    source_weights({"math": 0.7, "style": 0.3, "code": None}) == {"math": 0.7, "style": 0.3}.
    A weight that is None is not there: a parquet file has every name in every row.

    Raises:
        ValueError: it is neither text nor a map of finite weights.
    """
    if data_source is None:
        return {}
    if isinstance(data_source, str):
        return {data_source: 1.0}
    if not isinstance(data_source, Mapping):
        raise ValueError(f"a data source is a name or a map; got {type(data_source).__name__}")
    weights: dict[str, float] = {}
    for name, weight in cast(Mapping[object, object], data_source).items():
        if weight is None:
            continue
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not isinstance(name, str) or not number or not math.isfinite(cast(float, weight)):
            raise ValueError(f"the data source {name!r} has the weight {weight!r}")
        weights[name] = float(cast(float, weight))
    return weights


def source_name(data_source: object) -> str | None:
    """The name that metrics go by: of several, the one with the largest weight, the first of
    equals.

    Example: source_name({"math": 0.3, "style": 0.7}) == "style"
    """
    weights = source_weights(data_source)
    return max(weights, key=weights.__getitem__) if weights else None
