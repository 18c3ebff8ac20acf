"""A disk of a process's own, as small as a test wants it."""

import shutil
import subprocess

UNSHARE = shutil.which("unshare")


def mounts() -> bool:
    """Whether a process may have a disk of its own here."""
    if UNSHARE is None:
        return False
    mount = [UNSHARE, "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0
