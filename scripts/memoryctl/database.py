"""Questions to PostgreSQL, asked with the application's own role and password over TCP inside the database container."""

from __future__ import annotations

from dataclasses import dataclass

from .engine import Compose
from .errors import Exit, Refused

SERVICE = "postgres"
ROLE = "hindsight"
DATABASE = "hindsight"
# The password is read inside the container: it appears in no argument on the host.
CONNECT = (
    f'PGPASSWORD="$(cat /run/secrets/postgres/{ROLE}-password)" '
    f"exec psql -X -q -h 127.0.0.1 -U {ROLE} -d {DATABASE} -v ON_ERROR_STOP=1 -At -F '|'"
)
STATE_QUERY = """
select current_setting('server_version_num')::int / 10000,
       coalesce((select extversion from pg_extension where extname = 'vector'), ''),
       to_regclass('public.alembic_version') is not null;
"""
HEAD_QUERY = (
    "select coalesce(string_agg(version_num, ',' order by version_num), '') from public.alembic_version;"
)
TIMEOUT = 30.0


@dataclass(frozen=True)
class State:
    """PostgreSQL major, version of the vector extension ("" when absent), migration head ("" on an empty database)."""

    major: int
    vector: str
    head: str


def query(compose: Compose, sql: str) -> str:
    """Run `sql` and return rows as lines of `|`-separated fields.

    Raises:
        Refused: the login was refused, or the query failed.
    """
    try:
        return compose.exec(
            SERVICE, ["sh", "-c", CONNECT], stdin=sql.encode(), timeout=TIMEOUT, gate="database"
        ).strip()
    except Refused as error:
        if "password authentication failed" not in error.what:
            raise
        if not _role_exists(compose):
            raise Refused(
                "database",
                f"the database has no role {ROLE}: its first start was interrupted",
                "Hindsight could not log in, and the extension for vectors may be absent too",
                "if this host has never stored a memory, take the deployment down with its data and run playbooks/site.yml "
                "again; otherwise restore a backup into a new volume",
                Exit.FAILED,
            ) from error
        raise Refused(
            "database-password",
            f"PostgreSQL refuses the password that this host holds for its role {ROLE}",
            "the database keeps the password of its first start; Hindsight could not log in",
            f"put the former value back into <etc>/secrets/store/postgres-{ROLE}-password, or change the role's password "
            "inside the database first; the data volume must stay",
            Exit.FAILED,
        ) from error


def _role_exists(compose: Compose) -> bool:
    """Asked over the local socket, which trusts the database's own superuser."""
    sql = f"select count(*) from pg_roles where rolname = '{ROLE}'"
    question = ["psql", "-X", "-U", "postgres", "-d", "postgres", "-Atc", sql]
    return compose.exec(SERVICE, question, timeout=TIMEOUT, gate="database").strip() == "1"


def state(compose: Compose) -> State:
    """What the database says of itself."""
    major, vector, migrated = query(compose, STATE_QUERY).split("|")
    return State(int(major), vector, query(compose, HEAD_QUERY) if migrated == "t" else "")
