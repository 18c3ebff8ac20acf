"""Scorers, one per file, found by themselves: what each cached token is worth."""
