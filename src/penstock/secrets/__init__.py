"""Project secrets: encrypted under keys of their own, written through the API and read only by units."""
