"""What can go wrong with secrets, for callers."""

from penstock.kit.errors import Conflict, Invalid, Kind, PenstockError, Unavailable


class UnknownSecret(Invalid):
    """A request names a secret that the project does not have."""

    code = "secrets.unknown_secret"


class SecretsTooBig(Invalid):
    """The secrets of one unit are too large together."""

    code = "secrets.too_big"


class NotForEnv(Invalid):
    """The value cannot be a variable."""

    code = "secrets.not_for_env"


class TooManySecrets(PenstockError):
    """The project has as many secrets as it may."""

    kind = Kind.EXHAUSTED
    code = "secrets.too_many_secrets"


class TooManyVersions(PenstockError):
    """The secret was changed too often lately."""

    kind = Kind.EXHAUSTED
    code = "secrets.too_many_versions"


class VersionGone(Conflict):
    """The version is no longer kept."""

    code = "secrets.version_gone"


class KeyMissing(Unavailable):
    """The master key of a secret is not in the keyring of this process."""

    code = "secrets.key_missing"


class Tampered(Unavailable):
    """What is stored is not what was encrypted."""

    code = "secrets.tampered"
