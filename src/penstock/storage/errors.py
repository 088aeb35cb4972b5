"""What can go wrong with objects, for callers."""

from penstock.kit.errors import Conflict, Invalid, Kind, NotFound, PenstockError, Unavailable, brief


class BadKey(Invalid):
    """The key cannot name an object."""

    code = "storage.bad_key"


class NoObject(NotFound):
    """The project has no object of this key."""

    @classmethod
    def of(cls, key: str) -> "NoObject":
        """The failure that names it."""
        return cls(f"no object {brief(key)}")


class TooLarge(Invalid):
    """The object is larger than this install takes."""

    code = "storage.too_large"


class DigestMismatch(Invalid):
    """What arrived is not what the sender said."""

    code = "storage.digest_mismatch"


class Incomplete(Invalid):
    """Fewer bytes arrived than were announced."""

    code = "storage.incomplete"


class ObjectExists(Conflict):
    """There is an object of this key already, and only a new one was wanted."""

    code = "storage.object_exists"


class ObjectChanged(Conflict):
    """The object of this key is another one than the one that was asked for."""

    code = "storage.object_changed"


class UploadExpired(Conflict):
    """The upload was given up for taking too long."""

    code = "storage.upload_expired"


class QuotaExceeded(PenstockError):
    """The project has no room for so many bytes."""

    kind = Kind.EXHAUSTED
    code = "storage.quota_exceeded"


class Busy(PenstockError):
    """As many uploads as this process takes are under way."""

    kind = Kind.EXHAUSTED
    code = "storage.busy"


class StoreAway(Unavailable):
    """The object store cannot answer now."""

    code = "storage.store_away"
