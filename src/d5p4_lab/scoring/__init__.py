"""Measures texts with models: perplexity under a judge, sentence embeddings, and the paper's word pieces."""
