"""Training of small diffusion language models, such as the demo models."""
