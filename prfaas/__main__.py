"""`python -m prfaas`."""

from prfaas.cli import main

if __name__ == "__main__":
    main()
