"""What diffcache raises and warns with."""


class DiffcacheError(RuntimeError):
    """Something asked for cannot be done; the message is one line that says the remedy."""


class DiffcacheWarning(UserWarning):
    """A run went on in full computation where a saving was asked for."""
