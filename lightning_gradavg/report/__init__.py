"""What one optimizer step was made of: reports, the monitor, the noise scale."""
