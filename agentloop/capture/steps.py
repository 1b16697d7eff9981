"""How far the trainer and the server are, and what is too old by that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentloop.capture.refusals import Refusal
from agentloop.capture.starting import steps_of

_RETRY_S: Final = 5.0


@dataclass(slots=True)
class Steps:
    """How far the trainer and the server are."""

    global_steps: int | None = None
    """The step that the trainer gathers for, if it was told."""
    policy_version: int | None = None
    """Of the weights that are served, as it was told; of use where the server does not say it."""
    served: int | None = None
    """The newest version that a reply has named."""

    @property
    def version(self) -> int | None:
        return self.policy_version if self.served is None else self.served

    def tell(self, body: Mapping[str, Any]) -> None:
        """Know what somebody says of them. Refusal: 400."""
        step, version = steps_of(body)
        if step is not None:
            self.global_steps = step
        if version is not None:
            self.policy_version = version

    def serves(self, version: int) -> None:
        """A reply is of this version."""
        self.served = max(version, self.served or 0)

    def check_lag(
        self, version: int | None, most: int | None, what: str, *, retry: bool | None = None
    ) -> None:
        """Nothing, if this version is at most so many steps behind, or that cannot be told.

        Weights of step m are those after it, so step m + 1 has no lag.

        Raises:
            Refusal: 429: it is too old for the step that the trainer gathers for.
        """
        step = self.global_steps
        if step is None or version is None or most is None or step - version - 1 <= most:
            return
        raise Refusal(
            429, "too_stale", f"{what} is of version {version}, {step - version - 1} steps behind "
            f"the trainer's step {step}, and {most} are allowed", retry_after_s=_RETRY_S,
            retry=retry,
        )  # fmt: skip
