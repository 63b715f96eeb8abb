"""The corpus: models as data. `spellings.CASES` must be rewritten, `refusals.CASES` must be refused, `real.CASES` are models
that people run."""
