"""What decides. Pure: knows no clock, no dice, no Kubernetes, no files."""
