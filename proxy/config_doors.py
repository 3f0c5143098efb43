"""Settings of the doors: where this process listens."""

from proxy.config_address import split_address
from proxy.settings import Section, setting


class Doors(Section):
    """Listening addresses, host:port; an empty one is closed."""

    app: str = setting("127.0.0.1:14080", "plaintext door for the pod's own application")
    sealed: str = setting("0.0.0.0:14081", "SM4 envelope door for callers outside the pod")
    admin: str = setting("0.0.0.0:14090", "livez, readyz, metrics, config, drain")
    backlog: int = setting(1024, "listen backlog", ge=1, le=65535)
    connections: int = setting(1024, "connections a door", ge=1)
    admin_token_file: str = setting("", "bearer token for the admin door's guarded paths")


def doors_problems(doors: Doors) -> list[str]:
    """Return what is wrong between settings of the doors."""
    problems = []
    for name in ("app", "sealed", "admin"):
        address = getattr(doors, name)
        if address:
            try:
                split_address(address)
            except ValueError as problem:
                problems.append(f"doors.{name}: {problem}")
    return problems
