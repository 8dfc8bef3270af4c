"""The tables of tools/reproduce.py: which trainings they need, how these run, and the pages that come of them."""
