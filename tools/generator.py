"""Whether programs of others can use docs/api/openapi.json: a validator, and a generator whose client compiles.

python tools/generator.py BIN   where the commands of requirements-contract.lock are
"""

import compileall
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "api" / "openapi.json"


def main(tools: Path) -> int:
    """Run both; a warning of the generator is a failure, since it leaves an operation out."""
    environ = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([tools / "openapi-spec-validator", DOCUMENT], check=True, stdout=subprocess.PIPE)
    with tempfile.TemporaryDirectory() as folder:
        client = Path(folder) / "client"
        command = [tools / "openapi-python-client", "generate", "--fail-on-warning", "--path", DOCUMENT]
        done = subprocess.run(
            [*command, "--output-path", client], check=False, env=environ, capture_output=True, text=True
        )
        if done.returncode != 0:
            print(done.stdout, done.stderr, file=sys.stderr)
            return 1
        return 0 if compileall.compile_dir(client, quiet=1) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
