"""`python -m layerscope` is `layerscope`."""

from layerscope.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
