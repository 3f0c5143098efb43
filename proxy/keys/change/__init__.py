"""Commands that change a set of keys, or look at a source of them."""
