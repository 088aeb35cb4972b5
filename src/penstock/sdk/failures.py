"""What a failed connection means for the caller, in the same words for both clients."""

import os
import socket

from penstock.sdk.errors import Unreachable


def not_connected(host: str, error: OSError) -> Unreachable:
    """There was no connection: nothing was sent."""
    # Here, because most commands need no TLS, and those that do have imported it.
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        return Unreachable(f"the certificate of {host} is not valid: {error.verify_message}", sent=False, passing=False)
    if isinstance(error, ssl.SSLError):
        return Unreachable(f"no TLS connection with {host}: {_reason(error)}", sent=False, passing=False)
    if isinstance(error, socket.gaierror):
        passing = error.errno == socket.EAI_AGAIN
        return Unreachable(f"cannot find the host {host}: {error.strerror}", sent=False, passing=passing)
    return Unreachable(f"cannot connect to {host}: {_reason(error)}", sent=False)


def broken_off(host: str, error: Exception, timeout_s: float) -> Unreachable:
    """The connection failed under way: the server may have acted."""
    if isinstance(error, TimeoutError):
        return Unreachable(f"{host} did not answer within {timeout_s:g} s", sent=True)
    return Unreachable(f"{host} broke off: {_reason(error)}", sent=True)


def _reason(error: Exception) -> str:
    """The system's own words, where asyncio has put others in their place."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
