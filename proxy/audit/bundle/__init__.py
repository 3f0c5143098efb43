"""The verifier that goes with an exported bundle."""
