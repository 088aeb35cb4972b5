"""Penstock turns a set of GPU hosts into a cloud."""
