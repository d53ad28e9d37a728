"""Entry point `python -m skipstone`."""

from skipstone import main

main()
