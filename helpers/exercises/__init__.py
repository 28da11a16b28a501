"""What the exercises of the notebooks are checked with, one module a notebook."""
