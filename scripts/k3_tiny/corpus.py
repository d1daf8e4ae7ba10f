"""The text of k3-tiny: the King James Bible, one verse a line (Debian packages bible-kjv and bible-kjv-text).

    python scripts/k3_tiny/corpus.py OUTDIR

writes train.txt and heldout.txt (the last 220,000 bytes) and prints what a general compressor makes of the held-out
text after reading the training text, in bits a byte: the bar for the model.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import re
import subprocess
from pathlib import Path

HELDOUT = 220_000  # bytes
REFERENCE = re.compile(rb"^\w+:\d+ ", re.MULTILINE)  # "Ge1:1 "


def corpus() -> bytes:
    """All 31,102 verses, without their references, each ended by a newline."""
    text = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True).stdout
    text, references = REFERENCE.subn(b"", text)
    assert references == text.count(b"\n") == 31_102, "one reference a line"
    assert text.isascii(), "so that the cut falls between characters"
    return text


def split(text: bytes) -> tuple[bytes, bytes]:
    """(training, held-out) bytes."""
    return text[:-HELDOUT], text[-HELDOUT:]


def xz_bits_per_byte(train: bytes, heldout: bytes) -> float:
    """Bits a held-out byte that `xz -9e` adds when the held-out text follows the training text."""

    def size(text: bytes) -> int:
        return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))

    return 8 * (size(train + heldout) - size(train)) / len(heldout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outdir", type=Path)
    outdir = parser.parse_args().outdir
    outdir.mkdir(parents=True, exist_ok=True)
    train, heldout = split(corpus())
    for name, text in (("train.txt", train), ("heldout.txt", heldout)):
        (outdir / name).write_bytes(text)
        print(f"{name}: {len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}")
    print(f"xz -9e: {xz_bits_per_byte(train, heldout):.4f} bits a held-out byte")


if __name__ == "__main__":
    main()
