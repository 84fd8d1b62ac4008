"""Inspection of gates: what they count, as scores, maps and coloured text."""
