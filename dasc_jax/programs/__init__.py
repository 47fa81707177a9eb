"""The programs behind `dasc NAME`: each a module with `main(argv) -> exit status`."""
