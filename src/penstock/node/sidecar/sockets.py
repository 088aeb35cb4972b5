"""The way to a framework's socket: through a descriptor of its folder, so that no path of the host is believed.

The folder is the tenant's: whatever stands in it may be a trap. A socket is used if it is one, lies in the folder
itself, has mode 0660, and the process behind it is the unit's.
"""

import os
import socket
import stat
from pathlib import PurePosixPath
from typing import Final

from penstock.kit.dialling import LoopSocket
from penstock.node.packets import peer_uid
from penstock.node.sidecar.errors import Refusal, Unready
from penstock.wire.serverless import SOCKET_FOLDER

PATH_BYTES_MAX: Final = 107
_MODE: Final = 0o660


class FrameworkSocket:
    """Connects to the socket at `path` (as the unit sees it) in `folder`, whose descriptor it owns."""

    def __init__(self, folder: int, path: str, *, uid: int) -> None:
        self._folder = folder
        self._path = path
        self._uid = uid

    def close(self) -> None:
        """Give the folder back."""
        os.close(self._folder)

    def connect(self) -> socket.socket:
        """A connection, at once: Unready when nothing answers yet, Refusal when nothing there may be believed."""
        name = self._name()
        self._check(name)
        connection = LoopSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            self._dial(connection, name)
            if (uid := peer_uid(connection)) != self._uid:
                raise Refusal("peer_uid", f"a process of uid {uid} listens on the socket, not the unit's")
        except BaseException:
            connection.close()
            raise
        return connection

    def _name(self) -> str:
        if (length := len(self._path.encode())) > PATH_BYTES_MAX:
            raise Refusal("config", f"the socket's path has {length} bytes, the most is {PATH_BYTES_MAX}")
        path = PurePosixPath(self._path)
        if str(path.parent) != SOCKET_FOLDER or path.name in {"", ".", ".."} or "\0" in self._path:
            raise Refusal("path_escape", f"the socket must lie in {SOCKET_FOLDER}")
        return path.name

    def _check(self, name: str) -> None:
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            raise Unready("socket_absent", "the framework has not made its socket") from None
        except OSError as error:
            raise Unready("socket_absent", f"the framework's folder cannot be read: {error.strerror}") from error
        if stat.S_ISLNK(found.st_mode):
            raise Refusal("path_escape", "the socket is a symbolic link")
        if not stat.S_ISSOCK(found.st_mode):
            raise Refusal("path_escape", "there is something else in the socket's place")
        # Not final: a framework makes its socket first and sets the mode after.
        if (mode := stat.S_IMODE(found.st_mode)) != _MODE:
            raise Unready("socket_mode", f"the socket's mode is {mode:04o}, it must be {_MODE:04o}")

    def _dial(self, connection: socket.socket, name: str) -> None:
        """By a name relative to the folder: any host path would be too long, or another process's to change."""
        home = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fchdir(self._folder)
            connection.connect(name)
        except BlockingIOError:
            raise Unready("socket_busy", "the framework does not accept connections now") from None
        except OSError as error:
            raise Unready("socket_silent", f"nobody listens on the framework's socket: {error.strerror}") from error
        finally:
            os.fchdir(home)
            os.close(home)
