"""The only types that cross a process boundary: REST bodies, subjects, node link and tunnel frames, task parameters."""
