"""`python -m node` is `skipstone`."""

from node.cli.app import main

if __name__ == "__main__":
    main()
