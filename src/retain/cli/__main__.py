"""`python -m retain.cli`: the same as the `retain` command, for where it is not on the path."""

from retain.cli import main

main()
