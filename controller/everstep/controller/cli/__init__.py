"""What people type. The only room that prints; it decides nothing."""
