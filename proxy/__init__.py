"""The sidecar: one per pod, in front of the node agent."""
