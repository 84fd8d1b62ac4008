"""Commands that look at a trained model: inspect, perplexity."""
