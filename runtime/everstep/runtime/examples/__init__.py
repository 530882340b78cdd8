"""Training programs to run, read and copy. Each is a module with `main()` and a `train(run)`."""
