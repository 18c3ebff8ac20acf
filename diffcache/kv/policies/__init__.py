"""Named KV policies, one method per file, found by themselves."""
