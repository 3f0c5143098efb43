"""Memory that can be explained: what holds it, how full it is over time, why it ran out."""
