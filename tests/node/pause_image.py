"""The image of what holds a pod's namespaces: one program that waits."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PAUSE = "localhost/pause:1"


def write_pause_image(archive: Path, busybox: Path) -> Path:
    """Write the image as an archive that containerd can import."""
    layer = _tar({"busybox": busybox.read_bytes()})
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/busybox", "sleep", "2147483647"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [PAUSE], "Layers": ["layer.tar"]}]).encode()
    archive.write_bytes(_tar({"manifest.json": manifest, "config.json": config, "layer.tar": layer}))
    return archive


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            made.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
