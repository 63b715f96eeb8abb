"""Reports for people: a page and a terminal. It all reads the dict of `RewriteReport.to_dict()`, nothing else."""
