"""Every error a user can meet. A message says what was found, what was expected and what to do."""


class GlintError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user."""


class ConfigError(GlintError):
    """A flag, a config file or a config.json says something that cannot be served."""


class CheckpointError(GlintError):
    """A weight file is missing, damaged, or does not fit the config; the message names the tensor or file."""


class KernelError(GlintError):
    """A CUDA kernel cannot be compiled or launched as asked, or the GPU cannot run it."""


class CapacityError(GlintError):
    """The queue is full for now; the same request may succeed later."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(GlintError):
    """One request is wrong; nobody else is affected.

    Attributes:
        param: dotted name of the offending field, None if the request as a whole is meant.
        code: machine-readable reason that clients branch on, such as "context_length_exceeded".
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestFailedError(GlintError):
    """The engine could not finish a request that was right (a failed step, NaN logits, a slow reader)."""


class EngineDeadError(GlintError):
    """The engine has stopped or is not ready; no request can be answered."""


class StopSignal(BaseException):
    """SIGTERM or SIGINT arrived before the engine was ready. No Exception: nothing on its way may swallow it."""
