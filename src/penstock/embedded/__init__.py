"""Postgres, NATS and Temporal from wheels, as children of one process: for laptops, small installs and tests."""
