"""`tongguan seal` and `tongguan open`: envelopes in files and pipes (docs/files.md)."""
