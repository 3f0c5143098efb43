"""Classes, admission, pools: who goes first and where. Pure."""
