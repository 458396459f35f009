"""The fifteen common corruptions (Hendrycks & Dietterich, arXiv 1903.12261), computed here or read from copies."""
