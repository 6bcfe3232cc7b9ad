"""What `gradavg plan` computes."""
