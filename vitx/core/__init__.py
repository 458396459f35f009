"""What every stage shares: errors, files, preprocessing, run folder, bundle, certificate. Imports no torch."""
