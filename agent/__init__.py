"""The node agent: one per node, owner of the GPU and of the built-in engine."""
