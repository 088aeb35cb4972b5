"""What every part stands on: ids, errors, settings, database, bus, outbox, HTTP edge, telemetry. No domain words."""
