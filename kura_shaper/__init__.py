"""kura-shaper: a multi-tenant node's egress promises, kept where the bytes leave it.

What is promised (`tenants`) becomes a tree (`tree`), the tree becomes kernel
state (`kernel`), the gateway marks connections with their tenant (`haproxy`),
and everything else keeps it so, shows it, or proves it.
"""

__version__ = "0.1.0"
