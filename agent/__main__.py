"""`python -m agent`: the same as `tongguan agent`."""

from __future__ import annotations

from agent.cli import agent

if __name__ == "__main__":
    agent(prog_name="python -m agent")
