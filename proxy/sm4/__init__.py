"""SMX1 envelopes: seal, open, key ring, replay cache (docs/envelope.md)."""
