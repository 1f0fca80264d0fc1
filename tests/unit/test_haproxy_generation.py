"""A generation is its files: their names can't lead elsewhere, and a difference can be read."""

from __future__ import annotations

import pytest

from kura_shaper.errors import UsageError
from kura_shaper.haproxy.generation import EMPTY, GatewayConfig, diff_text


def test_a_difference_is_shown_as_text() -> None:
    old = GatewayConfig.with_manifest({"haproxy.cfg": b"limit 1\n", "sni.map": b""}, version="3.0")
    new = GatewayConfig.with_manifest({"haproxy.cfg": b"limit 2\n", "sni.map": b"a b\n"}, version="3.0")
    assert diff_text(old, new) == (
        "--- a/haproxy.cfg\n+++ b/haproxy.cfg\n@@ -1 +1 @@\n-limit 1\n+limit 2\n"
        "--- a/sni.map\n+++ b/sni.map\n@@ -0,0 +1 @@\n+a b\n"
    )
    assert diff_text(new, new) == ""
    assert "--- /dev/null\n+++ b/sni.map\n" in diff_text(EMPTY, new)
    assert "--- a/sni.map\n+++ /dev/null\n" in diff_text(new, EMPTY)


def test_a_file_without_a_final_line_feed_is_shown_as_such() -> None:
    text = diff_text(GatewayConfig({"a": b"\xff"}), GatewayConfig({"a": b"x\n"}))
    assert "-\\xff\n\\ No newline at end of file\n+x\n" in text


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\nb", "x" * 65])
def test_a_file_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        GatewayConfig({name: b""})
