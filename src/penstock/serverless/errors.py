"""What can go wrong with functions, for callers."""

from penstock.kit.errors import Conflict, Invalid, Kind, NotFound, PenstockError, brief


class BadDefinition(Invalid):
    """The definition cannot be served."""

    code = "serverless.bad_definition"


class BadSchedule(Invalid):
    """The schedule cannot be read, or never comes."""

    code = "serverless.bad_schedule"


class NoFunction(NotFound):
    """No such function in the project: the same answer whether it is another project's or nobody's."""

    @classmethod
    def named(cls, project_id: str, name: str) -> "NoFunction":
        """The failure that names it."""
        return cls(f"no function {brief(name)} in project {project_id}")


class NoInvocation(NotFound):
    """No such invocation or dead letter in the project."""

    @classmethod
    def named(cls, invocation_id: str, *, kind: str = "invocation") -> "NoInvocation":
        """The failure that names it."""
        return cls(f"no {kind} {brief(invocation_id)}")


class NoVersion(NotFound):
    """No such version of the function."""

    code = "serverless.no_version"


class NotFinished(Conflict):
    """The invocation has not ended."""

    code = "serverless.not_finished"


class NoResult(Conflict):
    """The invocation ended without an answer of its handler."""

    code = "serverless.no_result"


class Replayed(Conflict):
    """The dead letter was replayed before."""

    code = "serverless.replayed"


class NotReplayable(Conflict):
    """The dead letter is not an invocation."""

    code = "serverless.not_replayable"


class OperationConflict(Conflict):
    """The operation came before with another body, or the name is taken. The code is the source's."""

    code = "operation_conflict"


class TooManyFunctions(PenstockError):
    """The project has as many functions as it may."""

    kind = Kind.EXHAUSTED
    code = "serverless.too_many_functions"


class TooManyWaiters(PenstockError):
    """All places for those who wait for invocations are taken."""

    kind = Kind.EXHAUSTED
    code = "serverless.too_many_waiters"


class TooManyUploads(PenstockError):
    """Handlers of the project put as many objects as they may at once."""

    kind = Kind.EXHAUSTED
    code = "serverless.too_many_uploads"


class QueueFull(PenstockError):
    """The project has as many invocations waiting as it may."""

    kind = Kind.EXHAUSTED
    code = "serverless.queue_full"


class IdReused(Conflict):
    """The invocation's id came before with another payload."""

    code = "serverless.id_reused"


class FunctionGone(Conflict):
    """The invocation's function was deleted."""

    code = "serverless.function_gone"
