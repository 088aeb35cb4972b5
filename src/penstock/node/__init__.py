"""Code that runs on a GPU host: the link, the task journal, and the sandboxed units. It knows no domain."""
