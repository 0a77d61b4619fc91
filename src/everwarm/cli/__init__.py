"""The command line."""


def main() -> None:
    """Entry point of the `everwarm` command."""
