"""Objects: bytes under keys of a project, in a local folder or a bucket."""
