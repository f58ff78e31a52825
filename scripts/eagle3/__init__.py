"""What several of the numbered scripts need, once. The rooms, ground floor first, are listed in scripts/README.md."""
