"""Measurements, each a ratio to a reference of the same run. `make bench NAME=relay` prints one JSON line a figure."""
