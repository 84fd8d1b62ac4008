"""Commands that analyse: a trained model (inspect, perplexity), and compiled kernels (kernels)."""
