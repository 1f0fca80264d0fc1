"""Acceptance checks: whether the ceiling is real on this node, shown by what the kernel and the wire say."""
