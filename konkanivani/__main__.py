"""Entry point of `python -m konkanivani`."""

from konkanivani.cli.main import main

if __name__ == "__main__":
    main()
