"""From images on the disk to batches on the device."""
