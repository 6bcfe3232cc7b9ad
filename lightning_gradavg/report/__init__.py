"""What one optimizer step was made of."""
