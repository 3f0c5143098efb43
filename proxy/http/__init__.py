"""HTTP/1.1 bytes: heads, body ranges, event streams. Pure."""
