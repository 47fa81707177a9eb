"""Refusals in the form that OpenAI clients read: {"error": {message, type, param, code}}."""

from typing import Any

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A request that gets no completion. `param` names the field at fault, where one is.

    Args:
        message: what is wrong, with the field and the numbers.
        status: the HTTP status.
        param: the field of the body.
        code: a short machine-readable word.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that clients turn into their own exception."""
        kind = INVALID if self.status < 500 else SERVER
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }
