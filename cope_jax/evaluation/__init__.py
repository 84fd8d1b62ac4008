"""What a trained model knows: reports, perplexity of text, gates, contextual vectors."""
