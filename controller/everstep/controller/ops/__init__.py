"""What every world needs beside its jobs: settings, the clock, the log."""
