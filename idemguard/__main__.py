"""Starts the command, or says which extra it needs.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import sys

EXTRA = frozenset({"click", "rich"})


def main() -> int:
    """The `idemguard` command.

    Returns:
        The exit code: 0 fine, 2 an error, 130 interrupted.

    """
    try:
        from idemguard import cli  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print(  # noqa: T201 - there is nothing yet to print with
            "idemguard: the command needs click and rich: pip install 'idemguard[cli]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
