"""What comes from disk: safetensors checkpoints, MXFP4 weights, tokenizers."""
