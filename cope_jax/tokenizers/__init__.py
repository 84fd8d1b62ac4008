"""Turns text into numbers: characters, words and pieces of words."""
