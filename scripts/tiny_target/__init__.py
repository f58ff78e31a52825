"""What scripts/make_tiny_kimi.py makes its target from: an architecture, facts, conversations about them."""
