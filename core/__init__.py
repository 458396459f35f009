"""What every stage shares: errors, preprocessing, image sets, the run folder and the bundle. Imports no torch."""
