"""Programs the kernel runs for the node agent, and their loader. Empty until the guard is built."""
