"""What a request is refused with: an HTTP status, a word for programs, a sentence for people.

Owns the body of an error, which has the form of OpenAI's. Pure.
"""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request is not carried out. What it leaves behind is said where it is raised."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        retry: bool | None = None,
    ) -> None:
        """`retry` says whether the same request may be answered otherwise later; None leaves it to
        the status."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.retry = retry

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {
            "error": {
                "message": self.message, "type": "capture", "param": None, "code": self.code
            }
        }  # fmt: skip

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, and what OpenAI's clients look at before they retry."""
        found: dict[str, str] = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.retry is not None:
            found["x-should-retry"] = "true" if self.retry else "false"
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def invalid(message: str) -> Refusal:
    """The request itself is wrong."""
    return Refusal(400, "invalid_request", message, retry=False)


def conflict(code: str, message: str) -> Refusal:
    """It does not fit what has happened to the run before."""
    return Refusal(409, code, message, retry=False)
