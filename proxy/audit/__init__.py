"""The audit chain: records, MACs, files, verification (docs/audit.md)."""
