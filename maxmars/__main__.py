"""`python -m maxmars` is the `maxmars` command."""

from maxmars.cli import main

if __name__ == "__main__":
    main()
