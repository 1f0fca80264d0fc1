"""Who may not make namespaces is told so in one line; all else is in tests/e2e/test_lab_parts.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from kura_shaper.errors import RefusedError
from kura_shaper.lab.isolation import inside

_WITHOUT_CAPABILITIES = """
import ctypes, struct, sys
from kura_shaper.lab.isolation import run_isolated
ctypes.CDLL(None).capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
try:
    run_isolated(lambda: 0)
except Exception as error:
    print(type(error).__name__, error.exit_code, error)
"""


def test_a_process_without_capabilities_is_refused_with_the_remedy() -> None:
    argv = [sys.executable, "-c", _WITHOUT_CAPABILITIES]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.startswith("RefusedError 3 the lab may not make namespaces: CAP_SYS_ADMIN and CAP_NET_ADMIN")
    assert "sudo" in result.stdout
    assert result.stdout.count("\n") == 1


def test_a_namespace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no network namespace"), inside(tmp_path / "ks-gone"):
        pass
