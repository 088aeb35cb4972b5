"""Packages made on the spot, for tests of environments: no index and no network is needed."""

import base64
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path


def wheel(
    folder: Path,
    name: str = "tiny",
    version: str = "1.0",
    files: dict[str, str] | None = None,
    needs: tuple[str, ...] = (),
) -> str:
    """Write a wheel into the folder; its line of a lock."""
    required = "".join(f"Requires-Dist: {each}\n" for each in needs)
    info = f"{name}-{version}.dist-info"
    content = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-say = {name}:say\n",
    }
    record = "".join(f"{path},sha256={_hash(text)},{len(text.encode())}\n" for path, text in content.items())
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, text in content.items():
            archive.writestr(zipfile.ZipInfo(each), text, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), f"{record}{info}/RECORD,,\n")
    return line(path, name, version)


def sdist(folder: Path, name: str, version: str = "1.0", *, canary: Path) -> str:
    """Write a source package whose build would leave a file; its line of a lock."""
    setup = (
        f"open({str(canary)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name={name!r}, version='{version}')\n"
    )
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for each, text in {"setup.py": setup, "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\n"}.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{each}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return line(path, name, version)


def line(path: Path, name: str, version: str) -> str:
    """The line of a lock for a file."""
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
