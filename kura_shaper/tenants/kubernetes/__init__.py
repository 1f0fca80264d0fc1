"""The cluster as a source of the tenants document: its KuraInstances, and one node's budget."""
