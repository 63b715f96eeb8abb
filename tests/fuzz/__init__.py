"""Seeded fuzzing of the RoPE rule: legal graphs, legal edits of them, near-misses, and what must become of each.

    python -m tests.fuzz --graphs 20000

A recipe (recipe.py) composes a legal model; legal.py edits its graph without changing what it computes; mutations.py
makes near-misses. judge.py says what is wrong with one graph, reduce.py makes a failing one small and prints it.
"""
