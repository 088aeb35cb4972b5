"""Installs that are broken on purpose."""

from e2e.conftest import cloud

__all__ = ["cloud"]
