"""``python -m fourfold`` is ``fourfold``."""

from fourfold.cli import main

if __name__ == "__main__":
    main()
