"""Where things are on a host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_STATE = Path("/var/lib/memory")
DEFAULT_ETC = Path("/etc/memory")


@dataclass(frozen=True)
class Layout:
    """Directories of the bundle on one host."""

    state: Path = DEFAULT_STATE
    etc: Path = DEFAULT_ETC

    @property
    def releases(self) -> Path:
        return self.state / "releases"

    @property
    def config(self) -> Path:
        """Content-addressed configuration directories, mounted into containers."""
        return self.state / "config"

    @property
    def current(self) -> Path:
        return self.state / "current"

    @property
    def previous(self) -> Path:
        """The release that was committed before the current one."""
        return self.state / "previous"

    @property
    def armed(self) -> Path:
        """What an unfinished activation has to be brought back to; absent while none runs."""
        return self.state / "armed.json"

    @property
    def guard(self) -> Path:
        """The program that brings an unfinished activation back, copied here before anything changes."""
        return self.state / "guard"

    @property
    def evidence(self) -> Path:
        """Logs and definitions of containers, kept when an activation failed."""
        return self.state / "evidence"

    @property
    def edge_state(self) -> Path:
        """Seen by the edge: while it holds the file `closed`, every request is answered 503."""
        return self.state / "edge-state"

    @property
    def committed_secrets(self) -> Path:
        """The secrets with which the current release was committed."""
        return self.etc / "secrets-committed"

    @property
    def journal(self) -> Path:
        return self.state / "journal"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def router_keys(self) -> Path:
        return self.state / "router-keys"

    @property
    def edge_data(self) -> Path:
        return self.state / "edge-data"

    @property
    def secrets(self) -> Path:
        return self.etc / "secrets"

    @property
    def device_keys(self) -> Path:
        return self.etc / "device-keys"

    @property
    def edge(self) -> Path:
        """Public edge files: the CA that clients trust."""
        return self.etc / "edge"

    def release(self, release_id: str) -> Path:
        return self.releases / release_id
