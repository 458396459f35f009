"""`python -m vitx`."""

from vitx.cli import main

main()
