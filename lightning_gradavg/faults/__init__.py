"""What must never pass in silence: replicas that differ, numbers that are none, ranks that are lost."""
