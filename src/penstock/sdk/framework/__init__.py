"""The server inside a unit: it imports the tenant's handler and answers the sidecar on a Unix socket.

Like `penstock.sdk.functions` it stands on the standard library alone and runs on Python 3.10.
"""
