"""Text to numbers: characters, words and pieces of words."""
