"""What a failed connection of aiohttp means for the caller."""

import aiohttp

from penstock.sdk.errors import Unreachable


def unreachable(host: str, error: Exception, timeout_s: float) -> Unreachable:
    """What a failure of the connection means for the caller."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        return Unreachable(f"the certificate of {host} is not valid: {reason}", sent=False, passing=False)
    if isinstance(error, aiohttp.ClientSSLError):
        return Unreachable(f"no TLS connection with {host}: {error}", sent=False, passing=False)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Unreachable(f"cannot find the host {host}: {error.strerror}", sent=False, passing=False)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Unreachable(f"cannot connect to {host}: {error}", sent=False)
    if isinstance(error, TimeoutError):
        return Unreachable(f"{host} did not answer within {timeout_s:g} s", sent=True)
    return Unreachable(f"{host} broke off: {error or type(error).__name__}", sent=True)
