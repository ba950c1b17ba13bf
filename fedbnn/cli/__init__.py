"""The subcommands of `fedbnn`: a file with `main(argv) -> int` each, named in `main`."""
