"""The corpus: models as data.

`spellings.CASES` must be rewritten, `refusals.CASES` must be refused, `either.CASES` may be left alone; `real.CASES`
are models that people run.
"""
