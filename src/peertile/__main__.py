"""`python -m peertile` is the `peertile` command."""

from peertile.cli.main import main

if __name__ == "__main__":
    main()
