"""Looking at a log: counts, a page, what is being written now."""
