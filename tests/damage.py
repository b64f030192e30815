"""Damage of files."""


def flip(path, byte=None, mask=1):
    """Change bits of a byte, by default of the one in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= mask
    path.write_bytes(content)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
