"""A device watched live: readings become rates, rates become rows, and a screen, lines or JSON show them."""
