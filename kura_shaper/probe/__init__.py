"""Asks from outside: a client that measures what a tenant's own clients get, and says why when they get nothing."""
