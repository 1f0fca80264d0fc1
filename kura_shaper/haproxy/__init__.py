"""The gateway: a tenants document becomes a complete HAProxy configuration, checked and switched as one.

`render` makes it, `check_with_haproxy` asks the real program about it, `diff_text` shows
what would change and `write_generation` puts it in force.
"""
